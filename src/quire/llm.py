"""Offline use: prompts in, texts out, in the program that calls it.

An `LLM` is an engine, its tokenizer and a loop. It keeps no state of its own between calls: pages, sequences and
programs belong to the engine and live on.
"""

import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from jax.sharding import Mesh
from tqdm import tqdm

from quire.checkpoint.load import load_model
from quire.config import EngineConfig, EngineKnobs, ModelConfig, engine_config
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence as TokenSequence
from quire.core.sequence import TokenEvent
from quire.device.compile_cache import use_compile_cache
from quire.device.mesh import make_mesh
from quire.device.models.weights import place_params
from quire.engine.engine import Engine
from quire.outputs import CompletionOutput, RequestOutput, TextChunk
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate. A context manager; `close` gives its memory back."""

    def __init__(
        self,
        model: str | Path,
        *,
        mesh: Mesh | None = None,
        quiet: bool = False,
        **knobs: Unpack[EngineKnobs],
    ) -> None:
        """Load `model`: a folder, a GGUF file or `org/name@commit`.

        The knobs are the fields of `EngineConfig`, and have its defaults: dtype, quantize, page_size, num_pages,
        max_num_seqs, max_num_batched_tokens, max_model_len, max_rounds, prefix_cache, preemption, debug, and a few for
        experts. `quiet` prints nothing.
        """
        config, mesh = engine_config(**knobs), mesh or make_mesh()
        with _bar("loading", "layer", quiet) as bar:
            loaded = load_model(model, mesh=mesh, dtype=config.dtype, progress=partial(_advance, bar))
        self._start(loaded.config, loaded.params, loaded.tokenizer, config, mesh, quiet)

    @classmethod
    def from_params(
        cls,
        model_config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | None = None,
        quiet: bool = False,
        **knobs: Unpack[EngineKnobs],
    ) -> "LLM":
        """Use weights that are already in this program, laid out as docs/weights.md says; their type is the engine's.

        `quire.device.models.weights.params_from_tensors` makes them from arrays under Hugging Face names.
        """
        mesh = mesh or make_mesh()
        if "embed" not in params:
            raise ValueError(
                "params has no 'embed'; arrays under Hugging Face names go through params_from_tensors first"
            )
        knobs.setdefault("dtype", str(params["embed"].dtype))
        config = engine_config(**knobs)
        params = place_params(model_config, params, mesh=mesh, dtype=config.dtype)
        llm = cls.__new__(cls)
        llm._start(model_config, params, tokenizer, config, mesh, quiet)
        return llm

    def _start(
        self,
        model: ModelConfig,
        params: Any,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        mesh: Mesh,
        quiet: bool,
    ) -> None:
        use_compile_cache(config.compile_cache)
        with _bar("compiling", "program", quiet) as bar:
            self._engine: Engine | None = Engine(
                model,
                params,
                config,
                tokenizer=tokenizer,
                mesh=mesh,
                progress=lambda done, total, what: _advance(bar, done, total, what),
            )
        if not quiet:
            runner = self._engine.runner
            print(f"quire: {self._engine.capacity}; {runner.num_programs} programs", file=sys.stderr)
            for note in runner.notes:
                print(f"quire: {note}", file=sys.stderr)

    @property
    def engine(self) -> Engine:
        """The engine underneath."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; an error if it has none."""
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids instead of text")
        return self.engine.tokenizer

    def close(self) -> None:
        """Abort what runs and give weights and pages back."""
        if self._engine is not None:
            self._engine.reset()
            self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- use -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        A prompt is text or token ids; `params` is one for all or one for each. Every prompt is checked before the first
        one runs. Prefixes are found in the cache only under the same `cache_salt`. Ctrl-C aborts what this call started
        and is raised again.
        """
        requests = self._requests(_prompt_list(prompts), params, cache_salt)
        with self._running(requests) as groups, _bar("generating", "sequence", not progress) as bar:
            alive = sequences = [sequence for group in groups for sequence in group]
            while alive:
                if any(event.finish_reason for event in self._step()) or not self.engine.has_work:
                    alive = [sequence for sequence in alive if sequence.finish_reason is None]
                    _advance(bar, len(sequences) - len(alive), len(sequences))
        return [_request_output(group) for group in groups]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[TextChunk]:
        """Continue one prompt, handing out text as it becomes certain. Leaving the loop early aborts the request."""
        prompts = _prompt_list(prompt)
        if len(prompts) != 1:
            raise ValueError(f"stream takes one prompt, {len(prompts)} were given; generate takes many")
        (request,) = self._requests(prompts, params, cache_salt, stream=True)
        self.engine.check(request)
        return self._stream(request)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        progress: bool = False,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's own chat template."""
        return self.generate([self.chat_prompt(messages)], params, cache_salt=cache_salt, progress=progress)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins; messages cannot write control tokens."""
        return self.tokenizer.encode_chat(messages)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-probability of each token given those before it: entry i is that of `token_ids[i + 1]`.

        Computed by the same forward, pages and chunks that generate; nothing is drawn.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=True)
        (output,) = self.generate([token_ids], params, progress=False)
        return [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]

    # -- how -----------------------------------------------------------------------------------------------------

    def _requests(self, prompts: Sequence[Prompt], params: Any, cache_salt: str, stream: bool = False) -> list[Request]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise ValueError(f"params={params!r} must be SamplingParams(...), or a list with one for each prompt")
        if len(params) != len(prompts):
            raise ValueError(f"{len(params)} params for {len(prompts)} prompts: give one, or one for each")
        call = uuid.uuid4().hex[:8]
        common = {"cache_salt": cache_salt, "stream": stream}
        return [
            Request(id=f"{call}-{i}", prompt_token_ids=tuple(self._tokens(prompt)), params=one, **common)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [_plain(token) for token in _plain(prompt)]

    @contextmanager
    def _running(self, requests: list[Request]) -> Iterator[list[list[TokenSequence]]]:
        """Check every request, admit them all, and abort what is alive when the block is left, however it is left."""
        engine = self.engine
        for request in requests:
            engine.check(request)
        try:
            with _interrupts_wait():
                groups = [engine.add(request) for request in requests]
            yield groups
        finally:
            with _interrupts_wait():
                for request in requests:
                    engine.abort(request.id) if engine.is_owned_here else engine.abort_soon(request.id)

    def _stream(self, request: Request) -> Iterator[TextChunk]:
        with self._running([request]) as (sequences,):
            sent = dict.fromkeys(sequences, 0)  # tokens handed out, of those whose end has not been
            while sent:
                self._step()
                for sequence in list(sent):
                    token_ids = sequence.output_token_ids[sent[sequence] :]
                    reason = sequence.finish_reason
                    if not token_ids and not reason:
                        continue
                    sent[sequence] += len(token_ids)
                    if reason:
                        del sent[sequence]
                    yield TextChunk(sequence.index, new_text(sequence), token_ids, reason and str(reason))

    def _step(self) -> list[TokenEvent]:
        with _interrupts_wait():
            return self.engine.step()


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back until a step is whole, so that an abort finds the engine between two steps."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt or many, as lists; arrays of token ids are as good as lists."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = _plain(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"prompts={prompts!r} must be text, a list of token ids, or a list of either")
    entries = [_plain(entry) for entry in prompts]
    if entries and all(isinstance(entry, int) for entry in entries):
        return [entries]
    for i, entry in enumerate(entries):
        if not isinstance(entry, str | Sequence) or isinstance(entry, bytes):
            raise ValueError(f"prompts[{i}]={entry!r} must be text or a list of token ids")
    return entries


def _plain(value: Any) -> Any:
    """A numpy or jax array, or a number of theirs, as plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def new_text(sequence: TokenSequence) -> str:
    """Text that has become certain since the last call."""
    if not isinstance(sequence.detokenizer, Detokenizer):
        return ""
    sequence.detokenizer.advance(sequence.output_token_ids)
    return (
        sequence.detokenizer.finish(sequence.num_stop_tokens) if sequence.finish_reason else sequence.detokenizer.take()
    )


def _request_output(sequences: list[TokenSequence]) -> RequestOutput:
    first = sequences[0]
    outputs = [
        CompletionOutput(
            index=sequence.index,
            token_ids=sequence.output_token_ids,
            text=new_text(sequence),
            finish_reason=str(sequence.finish_reason),
            logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
            weight_versions=sequence.weight_versions,
        )
        for sequence in sequences
    ]
    return RequestOutput(
        prompt_token_ids=list(first.request.prompt_token_ids),
        outputs=outputs,
        prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs else None,
        num_cached_tokens=first.num_cached_tokens,
    )


def _bar(what: str, unit: str, quiet: bool) -> tqdm:
    """A progress bar on the terminal; nothing where standard error is none."""
    return tqdm(desc=what, unit=f" {unit}", disable=True if quiet else None, leave=False)


def _advance(bar: tqdm, done: int, total: int, what: str = "") -> None:
    bar.total = total
    bar.update(done - bar.n)
    if what:
        bar.set_postfix_str(what)
