"""Offline use: prompts in, texts out, in the program that calls it.

An `LLM` is an engine, its tokenizer and a loop. It keeps no state of its own between calls: pages, sequences and
programs belong to the engine and live on.
"""

import itertools
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import numpy as np
from jax.sharding import Mesh

from quire.checkpoint.load import LoadedModel, find_model, load_model, read_config
from quire.checkpoint.tokenizer_files import ChatTemplateFile, read_chat_template
from quire.config import MAX_DIMENSION, EngineConfig, EngineKnobs, ModelConfig, check_whole, engine_config
from quire.core.default_params import default_params, describe
from quire.core.request import Request
from quire.core.sampling_params import DRAWS, SamplingParams
from quire.core.sequence import Sequence as TokenSequence
from quire.core.sequence import Version
from quire.device.compile_cache import use_compile_cache
from quire.device.linear import check_blocked
from quire.device.memory import return_freed_memory
from quire.device.mesh import EngineMesh, check_mesh, mesh_of
from quire.device.models.tensors import EMBEDDING, dtype_name, has_tensor_names, is_wider
from quire.device.models.weights import params_from_tensors, place_params
from quire.distributed.group import facts_of, group_mesh
from quire.distributed.leader import Leader
from quire.embedding import EmbeddingConfig, Pooling, check_dimensions
from quire.engine.draft_model import DraftModel, check_vocabulary, naming_draft
from quire.engine.engine import Engine
from quire.engine.host_memory import check_room_for_weights, describe_memory
from quire.engine.ownership import check_process
from quire.field_error import FieldError, refuse_unknown_arguments
from quire.interrupts import Interrupts
from quire.job import GenerationInterrupted, Job, ReadyPrompt, naming_prompt
from quire.machine import read_memory, resident_bytes
from quire.outputs import RequestOutput, Scores, TextChunk, embedding_of, new_text
from quire.progress import JobProgress, StartProgress
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model ready to generate. A context manager; `close` gives its memory back."""

    _embedding = EmbeddingConfig()
    """How the model embeds where nobody says otherwise; its files may know better."""
    _load: Callable[[], LoadedModel] | None = None
    """Reads the model's file; None if its weights came from this program."""

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        mesh: Mesh | EngineMesh | str | None = None,
        chat_template: str | Path | None = None,
        quiet: bool = False,
        **knobs: Unpack[EngineKnobs],
    ) -> None:
        """Load `model`: a folder, a GGUF file or a name on the hub (`org/name`, `org/name:Q4_K_M`, `org/name@commit`).

        `revision` is a commit, branch or tag on the hub, where the name has none; docs/models.md says more.

        The knobs are the fields of `EngineConfig`, and have its defaults: dtype, quantize, page_size, num_pages,
        max_num_seqs, max_num_batched_tokens, max_model_len, max_rounds, prefix_cache, preemption, debug, and a few for
        experts. `quiet` prints nothing, now and while it generates.

        `mesh` says which devices the model is split over: "model=4" for the first four, or a `jax.sharding.Mesh` of one
        axis, `model`. By default it runs on one. `chat_template` is a file with a Jinja template to use instead of the
        model's own.
        """
        template = None if chat_template is None else _read_template(chat_template)
        config = _config(mesh, knobs)
        devices = _devices(mesh) if config.num_processes == 1 else None
        path = find_model(model, revision, quiet=quiet)
        draft = _find_draft(config, read_config(path), quiet) if config.draft else None
        group = None if devices else Leader(config, facts_of(config, read_config(path), path))
        with group.inside() if group else nullcontext():
            if group:
                group.connect()
            devices = devices or group_mesh(config)
            load = partial(_load_model, path, devices, config, quiet)
            self._load, loaded = partial(group.load, load) if group else load, load()
            self._start(
                loaded.config,
                loaded.params,
                loaded.tokenizer if template is None else _with_template(loaded.tokenizer, template),
                config,
                devices,
                quiet,
                loaded.generation_config,
                group,
                draft,
            )
        self._embedding = loaded.embedding

    @classmethod
    def from_params(
        cls,
        model_config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | EngineMesh | str | None = None,
        quiet: bool = False,
        **knobs: Unpack[EngineKnobs],
    ) -> "LLM":
        """Use weights that are already in this program.

        `params` is a tree as in docs/weights.md, or maps Hugging Face names to arrays. Both are cast to `dtype`, which
        is bfloat16 by default, whatever type they have.
        """
        if not isinstance(model_config, ModelConfig):
            kind = type(model_config).__name__
            message = (
                f"model_config is of type {kind}: give a ModelConfig, as ModelConfig.from_folder(folder) reads one"
            )
            raise FieldError(message, field="model_config")
        is_named = has_tensor_names(params)
        _check_given(params, tokenizer, is_named)
        config = _config(mesh, knobs)
        if config.num_processes > 1:
            raise FieldError(
                f"num_processes={config.num_processes}: each process of a group reads its weights from a file; open it "
                "with LLM(model, ...), and give others to set_weights",
                field="num_processes",
            )
        draft = _find_draft(config, model_config, quiet) if config.draft else None
        devices = _devices(mesh)
        given = dtype_name(params.get(EMBEDDING if is_named else "embed"))
        if is_wider(given, config.dtype) and "dtype" not in knobs and not quiet:
            note = f"the weights are {given} and are rounded to {config.dtype}; dtype='float32' keeps them"
            print(f"quire: {note}", file=sys.stderr)
        place = params_from_tensors if is_named else place_params
        params = place(model_config, params, mesh=devices, dtype=config.dtype)
        llm = cls.__new__(cls)
        llm._start(model_config, params, tokenizer, config, devices, quiet, draft=draft)
        return llm

    @classmethod
    def from_engine(cls, engine: Engine, *, quiet: bool = False) -> "LLM":
        """Generate with an engine that is there already; `close` closes it."""
        if not isinstance(engine, Engine):
            raise FieldError(f"engine={engine!r} must be an Engine; LLM(model) opens a model", field="engine")
        llm = cls.__new__(cls)
        llm._engine, llm._quiet, llm._default_params = engine, quiet, SamplingParams()
        return llm

    def _start(
        self,
        model: ModelConfig,
        params: Any,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        mesh: Mesh,
        quiet: bool,
        generation_config: Mapping[str, Any] | None = None,
        group: Leader | None = None,
        draft: Path | None = None,
    ) -> None:
        use_compile_cache(config.compile_cache)
        self._default_params, notes = default_params(generation_config or {})
        self._quiet = quiet
        guessing = _load_draft(draft, mesh, config, quiet) if draft else None
        with closing(StartProgress("compiling", "program", quiet=quiet)) as progress:
            self._engine: Engine | None = Engine(
                model,
                params,
                config,
                tokenizer=tokenizer,
                mesh=mesh,
                progress=progress.update,
                group=group,
                draft=guessing,
            )
        if not quiet:
            runner = self._engine.runner
            print(f"quire: {self._engine.capacity}; {runner.num_programs} programs", file=sys.stderr)
            memory = describe_memory(self._engine.growth_bytes, read_memory(), resident_bytes())
            print(f"quire: {memory}", file=sys.stderr)
            if stated := describe(self._default_params):
                notes.append(f"this model's sampling, unless a request says otherwise: {stated}")
            for note in (*runner.notes, *notes):
                print(f"quire: {note}", file=sys.stderr)

    def __repr__(self) -> str:
        return "<LLM, closed>" if self._engine is None else f"<LLM {self._engine!r}>"

    @property
    def engine(self) -> Engine:
        """The engine underneath."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        check_process(self._engine.pid)
        return self._engine

    @property
    def default_params(self) -> SamplingParams:
        """How this model is sampled from when no params are given: what its generation_config.json states."""
        return self._default_params

    @property
    def embedding_config(self) -> EmbeddingConfig:
        """How this model embeds when a call does not say: what its sentence-transformers files state."""
        return self._embedding

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; an error if it has none."""
        if self.engine.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids instead of text")
        return self.engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The shape of the model."""
        return self.engine.model

    @property
    def params(self) -> Any:
        """The weights in the layout of docs/weights.md. Copies, made each time: keep them, change them, donate them.

        `LLM.from_params(llm.model_config, llm.params, dtype=llm.engine.config.dtype)` is the same model.
        ValueError with quantize, which does not keep what it was made from.
        """
        return self.engine.params

    def set_weights(
        self,
        params: Any,
        version: Version | None = None,
        running: Literal["keep", "recompute", "abort"] = "keep",
        *,
        copy: bool = True,
    ) -> list[TokenSequence]:
        """Compute with other weights of the same shape from now on: see `Engine.set_weights`."""
        return self.engine.set_weights(params, version, running, copy=copy)

    def sleep(self) -> None:
        """Give the memory of weights and pages back and keep the programs, until `wake`: see `Engine.sleep`."""
        self.engine.sleep()

    def wake(self, params: Any = None, version: Version | None = None, *, copy: bool = True) -> None:
        """Go on after `sleep` with these weights, as `set_weights` takes them; None for those of the model's file."""
        if params is None and self.engine.is_asleep:
            if self._load is None:
                raise ValueError("params is None, and this model came from no file: give weights")
            self.engine.wake(self._load().params, version, copy=False)
        else:
            self.engine.wake(params, version, copy=copy)
        return_freed_memory()  # what reading and packing weights took on the way

    def close(self) -> None:
        """Abort what runs, and give weights, pages and compiled programs back to the system."""
        if self._engine is None:
            return
        with Interrupts():
            self._engine.close()
            self._engine = None
        return_freed_memory()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- use -----------------------------------------------------------------------------------------------------

    @refuse_unknown_arguments
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        A prompt is text or token ids; `params` is one for all or one for each, and without any `default_params`. Every
        prompt is checked before the first one runs. Prefixes are found in the cache only under the same `cache_salt`.
        Ctrl-C aborts what this call started and raises GenerationInterrupted, a KeyboardInterrupt whose `outputs` are
        those that had finished and whose `partial` are those that had begun. An error in the middle has `outputs`
        as well.
        """
        return self._generate(prompts, params, progress=progress, cache_salt=cache_salt)

    def _generate(self, prompts: Any, params: Any, *, progress: bool, **fields: Any) -> list[RequestOutput]:
        """`generate`, by requests with these fields."""
        outputs: list[RequestOutput] = []
        job: Job | None = None
        try:
            with Interrupts() as interrupts:
                ready = interrupts.let_through(lambda: self.checked(prompts, params, **fields))
                job = Job(iter(ready), self._progress(progress, sum(one.request.params.n for one in ready)))
                for output in self._run(job, interrupts):
                    outputs.append(output)
            return _in_order(outputs)
        except KeyboardInterrupt:
            finished, partial = (job.finished, job.partial) if job else ((), ())
            raise GenerationInterrupted(_in_order([*outputs, *finished]), _in_order(partial)) from None
        except Exception as error:
            if job:
                error.outputs = _in_order(outputs)  # pyright: ignore[reportAttributeAccessIssue]
                error.add_note(f"{len(outputs)} prompts had finished: they are in the `outputs` of this error")
            raise

    @refuse_unknown_arguments
    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        progress: bool = True,
    ) -> Iterator[RequestOutput]:
        """Continue every prompt; outputs come as they end, and `index` says which prompt each of them answers.

        Prompts, and `params` if there is one for each, are read as rows come free: a generator may have more of them
        than memory holds. Nothing runs but while an output is asked for, and leaving the loop aborts what runs.
        A prompt that can never run ends the reading, as an error of the generator does: it is raised once every prompt
        before it has been handed out. Ctrl-C raises GenerationInterrupted; its `outputs` had finished and were still to
        be handed out, its `partial` had begun.
        """
        self.engine  # noqa: B018 - raises if it is closed
        given = _prompts(prompts)
        each, num_sequences = _params_of_each(self.default_params if params is None else params, given)
        ready = self._ready(given, each, cache_salt=cache_salt)
        return self._run(Job(ready, self._progress(progress, num_sequences)), Interrupts())

    @refuse_unknown_arguments
    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[TextChunk]:
        """Continue one prompt, handing out text as it becomes certain. Leaving the loop early aborts the request."""
        prompts = list(_prompts(prompt))
        if len(prompts) != 1:
            raise ValueError(f"stream takes one prompt, {len(prompts)} were given; generate takes many")
        each, _ = _params_of_each(self.default_params if params is None else params, prompts)
        (ready,) = self._ready(prompts, each, cache_salt=cache_salt, stream=True)
        self.engine.check(ready.request)
        return self._stream(ready.request)

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        progress: bool = False,
    ) -> RequestOutput: ...
    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        progress: bool = False,
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        progress: bool = False,
    ) -> Iterator[TextChunk]: ...
    @refuse_unknown_arguments
    def chat(
        self,
        messages: Sequence[Any],
        params: Any = None,
        *,
        stream: bool = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        progress: bool = False,
    ) -> Any:
        """Answer a conversation, or each of a list of them, rendered by the model's own chat template.

        One conversation is a list of messages and has one answer; a list of conversations has a list of answers.
        `stream=True` returns an iterator of TextChunk instead, for one conversation, as `stream` does. `tools` are
        function descriptions in OpenAI's format; a call is in the text as the model writes it. `chat_template_kwargs`
        are further variables of the template, such as `{"enable_thinking": False}`.
        """
        if not messages:
            raise ValueError("messages is empty: give a conversation, or a list of conversations")
        if isinstance(messages, str | Mapping):
            kind = "a string" if isinstance(messages, str) else "one message"
            raise ValueError(f'messages is {kind}: give messages, such as [{{"role": "user", "content": "Hello"}}]')
        if not isinstance(messages, Sequence):
            raise ValueError(f"messages={messages!r} must be a list of messages, or a list of such lists")
        is_one = isinstance(messages[0], Mapping)
        how = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        if stream:
            if not is_one:
                raise ValueError("stream=True takes one conversation: leave it out for a list of conversations")
            return self.stream(self.chat_prompt(messages, **how), params, cache_salt=cache_salt)
        prompts = self._chat_prompts([messages] if is_one else messages, **how)
        outputs = self.generate(prompts, params, cache_salt=cache_salt, progress=progress)
        return outputs[0] if is_one else outputs

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins; messages cannot write control tokens.

        `tools` and `chat_template_kwargs` are those of `chat`.
        """
        return self.tokenizer.encode_chat(messages, **_template_variables(tools, chat_template_kwargs))

    @overload
    def score(
        self, token_ids: Sequence[int], *, start: int = 1, cache_salt: str = "", progress: bool = False
    ) -> np.ndarray: ...
    @overload
    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        start: int | Sequence[int] = 1,
        cache_salt: str = "",
        progress: bool = False,
    ) -> list[np.ndarray]: ...
    @refuse_unknown_arguments
    def score(
        self,
        token_ids: Sequence[Any],
        *,
        start: int | Sequence[int] = 1,
        cache_salt: str = "",
        progress: bool = False,
    ) -> Any:
        """The log-probability of each token from `start` on, given all before it: entry i is of `token_ids[start + i]`.

        An array in float32; of a list of sequences a list of arrays, computed in batches, with one `start` for all or
        one for each; an empty one of a sequence that ends before it. What lies before it is read from the prefix cache
        where that has it. By the same forward, pages and chunks that generate; nothing is drawn.
        """
        raw = SamplingParams(max_tokens=0, prompt_logprobs=True)
        scores = self._score(token_ids, raw, start, cache_salt=cache_salt, progress=progress)
        return scores.logprobs if isinstance(scores, Scores) else [each.logprobs for each in scores]

    @overload
    def score_drawn(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        start: int = 1,
        cache_salt: str = "",
        progress: bool = False,
    ) -> Scores: ...
    @overload
    def score_drawn(
        self,
        token_ids: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        start: int | Sequence[int] = 1,
        cache_salt: str = "",
        progress: bool = False,
    ) -> list[Scores]: ...
    @refuse_unknown_arguments
    def score_drawn(
        self,
        token_ids: Sequence[Any],
        params: SamplingParams,
        *,
        start: int | Sequence[int] = 1,
        cache_salt: str = "",
        progress: bool = False,
    ) -> Any:
        """`score`, also under what the tokens are drawn from with `params`: temperature, top-k, top-p, min-p, sigma.

        Of a sequence the `Scores`, of a list of them a list. `params.logprobs` says how many of the tokens that could
        be drawn are named beside each.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} must be SamplingParams(...), one for all sequences")
        params.check_scores_draws()
        draws = {name: getattr(params, name) for name in (*DRAWS, "logprobs")}
        scored = SamplingParams(max_tokens=0, prompt_logprobs=True, **draws)
        return self._score(token_ids, scored, start, cache_salt=cache_salt, progress=progress, scores_draws=True)

    def _score(
        self, token_ids: Sequence[Any], params: SamplingParams, start: int | Sequence[int], **how: Any
    ) -> Scores | list[Scores]:
        if not isinstance(token_ids, Sized):
            raise ValueError(f"token_ids={token_ids!r} must be a list of token ids, or a list of such lists")
        is_one = len(token_ids) == 0 or is_one_prompt(plain(token_ids))
        prompts = [token_ids] if is_one else token_ids
        starts = plain(start)
        starts = [starts] * len(prompts) if not isinstance(starts, Sequence) else starts
        if len(starts) != len(prompts):
            raise ValueError(f"start has {len(starts)} numbers for {len(prompts)} sequences: give one for each, or one")
        for each in starts:
            check_whole("start", plain(each), 1, MAX_DIMENSION)
        outputs = self._generate(prompts, [replace(params, prompt_logprobs_start=each) for each in starts], **how)
        scores = [Scores.of(output.prompt_logprobs or (), params.logprobs or 0) for output in outputs]
        return scores[0] if is_one else scores

    @refuse_unknown_arguments
    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        cache_salt: str = "",
        progress: bool = False,
    ) -> np.ndarray:
        """The embedding of a prompt, text or token ids, in float32; of a list of prompts, one row for each.

        Pooling is "last" for the hidden state of the last token or "mean" for the mean of all; `normalize` makes it a
        vector of length 1. Without either the model's own files decide (`embedding_config`): the last token,
        normalised, where these say nothing. `dimensions` keeps the first so many numbers, before normalising. By the
        same scheduler, pages and chunks that generate; nothing is drawn.
        """
        prompts = plain(prompts)
        how = self.embedding_config.changed(pooling, normalize)
        check_dimensions(dimensions, self.model_config.hidden_size)
        params = SamplingParams(max_tokens=0, pooling=how.pooling)
        outputs = self.generate(prompts, params, cache_salt=cache_salt, progress=progress)
        rows = [embedding_of(output, normalize=how.normalize, dimensions=dimensions) for output in outputs]
        if is_one_prompt(prompts):
            return rows[0]
        return np.stack(rows) if rows else np.zeros((0, dimensions or self.model_config.hidden_size), np.float32)

    # -- how -----------------------------------------------------------------------------------------------------

    def checked(self, prompts: Any, params: Any, **fields: Any) -> list[ReadyPrompt]:
        """Requests for prompts, as `generate` takes them, each of them one that can run. Any thread may call this.

        `fields` are those of `Request` that all of them have.
        """
        given = list(_prompts(prompts))
        each, _ = _params_of_each(self.default_params if params is None else params, given)
        ready = list(self._ready(given, each, **fields))
        for prompt in ready:
            with naming_prompt(prompt.index):
                self.engine.check(prompt.request)
        return ready

    def _ready(self, prompts: Iterable[Any], each: Iterator[SamplingParams], **fields: Any) -> Iterator[ReadyPrompt]:
        """Make a request of one prompt after the other."""
        call = uuid.uuid4().hex
        for index, given in enumerate(prompts):
            prompt, params = plain(given), next(each, None)
            if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
                hint = "; messages are for LLM.chat" if isinstance(prompt, Mapping) and "role" in prompt else ""
                raise ValueError(f"prompts[{index}]={prompt!r} must be text or a list of token ids{hint}")
            if not isinstance(params, SamplingParams):
                raise ValueError(f"params[{index}]={params!r} must be SamplingParams(...), one for each prompt")
            with naming_prompt(index):
                text = prompt if isinstance(prompt, str) else None
                token_ids = tuple(self.tokenizer.encode(text) if text is not None else map(plain, prompt))
            request = Request(id=f"{call}-{index}", prompt_token_ids=token_ids, params=params, **fields)
            yield ReadyPrompt(index, request, text)

    def _chat_prompts(self, conversations: Sequence[Sequence[Message]], **how: Any) -> Iterator[list[int]]:
        for index, messages in enumerate(conversations):
            with naming_prompt(index, of="messages"):
                prompt = self.chat_prompt(messages, **how)
            yield prompt

    def _progress(self, progress: bool, num_sequences: int | None) -> JobProgress:
        return JobProgress(num_sequences, quiet=self._quiet or not progress)

    def _run(self, job: Job, interrupts: Interrupts) -> Iterator[RequestOutput]:
        """Hand out what a job finishes. However this is left, nothing of the job is left in the engine."""
        try:
            while True:
                with interrupts:
                    if not job.advance(self.engine, interrupts):
                        return
                while job.finished:
                    output = job.finished[0]
                    del job.finished[0]  # no call between taking and handing out: there Ctrl-C could lose it
                    yield output
        except KeyboardInterrupt:
            with interrupts:
                job.collect()
                job.abort(self._engine)
                raise GenerationInterrupted(_in_order(job.finished), _in_order(job.partial)) from None
        finally:
            with interrupts:
                job.abort(self._engine)

    def _stream(self, request: Request) -> Iterator[TextChunk]:
        interrupts = Interrupts()
        try:
            with interrupts:
                sequences = self.engine.add(request)
            sent = dict.fromkeys(sequences, 0)  # tokens handed out, of those whose end has not been
            while sent:
                with interrupts:
                    self.engine.step()
                for sequence in list(sent):
                    token_ids = sequence.output_token_ids[sent[sequence] :]
                    reason = sequence.finish_reason
                    if not token_ids and not reason:
                        continue
                    sent[sequence] += len(token_ids)
                    if reason:
                        del sent[sequence]
                    yield TextChunk(sequence.index, new_text(sequence), token_ids, reason and str(reason))
        finally:
            with interrupts:
                if self._engine:
                    self._engine.abort_now_or_soon(request.id)


def _config(mesh: Mesh | EngineMesh | str | None, knobs: EngineKnobs) -> EngineConfig:
    """The config of an LLM; FieldError if this is a process that follows another."""
    text = mesh.text if isinstance(mesh, EngineMesh) else mesh
    config = engine_config(mesh=None if isinstance(text, Mesh) else text, **knobs)
    if config.process_id:
        message = f"process_id={config.process_id} follows process 0: call quire.follow(...) with the same arguments"
        raise FieldError(message, field="process_id")
    if isinstance(mesh, Mesh) and config.num_processes > 1:
        message = "mesh is a Mesh, and which devices a group has is known when all processes have come: give 'model=N'"
        raise FieldError(message, field="mesh")
    return config


def _check_given(params: Mapping[str, Any], tokenizer: Any, is_named: bool) -> None:
    """Raise ValueError for weights or a tokenizer that `from_params` cannot take, with how to make them."""
    how = (
        "give a dict as in docs/weights.md, or tensors under their Hugging Face names; quire.weights converts trees of "
        "other libraries"
    )
    if hasattr(params, "to_pure_dict"):  # flax.nnx.State, whose leaves are variables
        raise ValueError(
            f"params is of type {type(params).__name__}, a state of Flax: begin with params.to_pure_dict(); {how}"
        )
    if not is_named and "embed" not in params:
        names = ", ".join(map(repr, itertools.islice(params, 8)))
        raise ValueError(
            f"params has no 'embed' and no Hugging Face names, it {f'has {names}' if names else 'is empty'}: {how}"
        )
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        message = (
            f"tokenizer={tokenizer!r} must be a quire Tokenizer: make one of a model's folder with "
            "quire.checkpoint.tokenizer_files.tokenizer_from_folder(Path(folder))"
        )
        raise FieldError(message, field="tokenizer")


def _read_template(path: Any) -> ChatTemplateFile:
    if not isinstance(path, str | PathLike):
        message = f"chat_template={path!r} must be the path of a file with a Jinja template"
        raise FieldError(message, field="chat_template")
    return read_chat_template(Path(path))


def _with_template(tokenizer: Tokenizer | None, template: ChatTemplateFile) -> Tokenizer:
    if tokenizer is None:
        raise FieldError("chat_template is given, and this model has no tokenizer", field="chat_template")
    return tokenizer.with_chat_template(template.source, template.name)


def _template_variables(
    tools: Sequence[Message] | None, chat_template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the variables of a chat template beside the messages; FieldError if they cannot be that."""
    if tools is not None and (isinstance(tools, str | Mapping) or not all(isinstance(one, Mapping) for one in tools)):
        raise FieldError(f"tools={tools!r} must be a list of function descriptions as dicts", field="tools")
    if not isinstance(chat_template_kwargs, Mapping | None):
        message = f"chat_template_kwargs={chat_template_kwargs!r} must be a dict of variables for the chat template"
        raise FieldError(message, field="chat_template_kwargs")
    kwargs = dict(chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            message = f"chat_template_kwargs: {name!r} may not be set; messages and tools are arguments of their own"
            raise FieldError(message, field="chat_template_kwargs")
    return kwargs if tools is None else kwargs | {"tools": list(tools)}


def _devices(mesh: Mesh | EngineMesh | str | None) -> Mesh:
    return check_mesh(mesh) if isinstance(mesh, Mesh) else mesh_of(mesh)


def _load_model(path: Path, mesh: Mesh, config: EngineConfig, quiet: bool) -> LoadedModel:
    if keep_blocks := config.quantize == "gguf":
        check_blocked(config.matmul, "gguf", mesh)  # before anything is read
    with closing(StartProgress("loading", "layer", quiet=quiet)) as progress:
        return load_model(
            path,
            mesh=mesh,
            dtype=config.dtype,
            progress=progress.update,
            keep_blocks=keep_blocks,
            check=lambda model: check_room_for_weights(config, model, path, mesh),
        )


def _find_draft(config: EngineConfig, model: ModelConfig, quiet: bool) -> Path:
    """Where the draft model is; FieldError if it is none for this model. Reads no weights."""
    name = str(config.draft)
    with naming_draft(name):
        path = find_model(name, quiet=quiet)
        draft = read_config(path)
    check_vocabulary(name, draft, model)
    return path


def _load_draft(path: Path, mesh: Mesh, config: EngineConfig, quiet: bool) -> DraftModel:
    name, quantized = str(config.draft), replace(config, quantize=config.quantize_of_draft)

    def load() -> LoadedModel:
        with naming_draft(name):
            return _load_model(path, mesh, quantized, quiet)

    loaded = load()
    return DraftModel(name, loaded.config, loaded.params, lambda: load().params, loaded.tokenizer)


def _prompts(prompts: Any) -> Iterable[Any]:
    """One prompt or many, as something to read prompts from; arrays of token ids are as good as lists."""
    prompts = plain(prompts)
    if is_one_prompt(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping | AbstractSet):
        raise ValueError(f"prompts={prompts!r} must be text, a list of token ids, or a list of either")
    return prompts


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a single prompt: text, or token ids."""
    if isinstance(prompts, str):
        return True
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    return is_list and len(prompts) > 0 and isinstance(plain(prompts[0]), int)


def _params_of_each(params: Any, prompts: Iterable[Any]) -> tuple[Iterator[SamplingParams], int | None]:
    """The parameters of one prompt after the other, and how many sequences that makes in all, if that is known."""
    num_prompts = len(prompts) if isinstance(prompts, Sized) else None
    if isinstance(params, SamplingParams):
        return itertools.repeat(params), None if num_prompts is None else num_prompts * params.n
    if isinstance(params, Iterator):
        return params, None
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError(f"params={params!r} must be SamplingParams(...), or a list with one for each prompt")
    if num_prompts is not None and len(params) != num_prompts:
        raise ValueError(f"{len(params)} params for {num_prompts} prompts: give one, or one for each")
    return iter(params), sum(one.n for one in params)


def plain(value: Any) -> Any:
    """A numpy or jax array, or a number of theirs, as plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _in_order(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    return sorted(outputs, key=lambda output: output.index)
