"""What HTTP and gRPC have in common: the model, and the slow work before a request can be submitted."""

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.async_llm import AsyncLLM
from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update
from quire.core.sampling_params import SamplingParams
from quire.core.stopping import Grammar
from quire.field_error import FieldError
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.threads import FairThreads, SlowJobError
from quire.structured.form import Structured
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.server.openai.request_body import BodyReader

TIMEOUT_S = 10.0
"""For a prompt to be encoded, a template rendered or a grammar compiled."""
NUM_ENCODE_THREADS = 3
NUM_GRAMMAR_THREADS = 2
NUM_FORMAT_THREADS = 2
"""In each of the three pools a tenant may have all threads but one: the last is for the others."""
FORMAT_TIMEOUT_S = 600.0
"""For a response to be formatted, after those of the same tenant."""
MAX_NUMBERS_ON_LOOP = 1024
"""Log-probabilities of a message that is formatted on the event loop, in about 3 ms; more are formatted on a thread."""
MAX_DECODED_ON_LOOP = 1 << 16
"""Bytes of a JSON body that is decoded on the event loop; a longer one is decoded on an encoding thread."""
MAX_ENCODE_JOBS = 256
MAX_GRAMMAR_JOBS = 128
"""Running and waiting; half of them for one tenant."""
GRAMMAR_NICENESS = 5
"""Compiling lets the engine go first; on a busy machine it still has a quarter of a core."""


class Service:
    """The one model that every protocol serves."""

    def __init__(self, engine: AsyncLLM, model_name: str, started_at: int, max_priority: int = 0) -> None:
        self.engine = engine
        self.model_name = model_name
        self.started_at = started_at
        self.max_priority = max_priority
        self._encoding = _threads("encode", NUM_ENCODE_THREADS, MAX_ENCODE_JOBS)
        self._compiling = _threads("grammar", NUM_GRAMMAR_THREADS, MAX_GRAMMAR_JOBS, GRAMMAR_NICENESS)

        self._formatting = FairThreads(
            "format",
            num_threads=NUM_FORMAT_THREADS,
            max_running_each=NUM_FORMAT_THREADS - 1,
            max_jobs=sys.maxsize,  # as many as connections: what was generated is not refused
            max_jobs_each=sys.maxsize,
            timeout_s=FORMAT_TIMEOUT_S,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model; ApiError if it has none."""
        if self.engine.llm.engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: send token ids instead of text", code="no_tokenizer")
        return self.engine.llm.engine.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be chatted with."""
        tokenizer = self.engine.llm.engine.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and what is generated from it, at most."""
        return self.engine.llm.engine.max_request_len

    @property
    def default_params(self) -> SamplingParams:
        """What a request that says nothing asks for."""
        return self.engine.llm.default_params

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless a name is the model's, or not given."""
        if name is not None and name != self.model_name:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_arrival(self, model_name: str | None, caller: Caller) -> None:
        """Raise before a prompt is encoded if the model is another, the queue is full or the caller has its limit."""
        self.check_model(model_name)
        self.engine.admission.check_room(caller.tenant)

    def check_length(self, tokens: Sequence[Any], field: str) -> None:
        """Raise ApiError if a field has more tokens than the model's context."""
        if len(tokens) > self.max_model_len:
            message = f"{field}: {len(tokens):,} tokens do not fit into max_model_len={self.max_model_len}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    async def run_in_thread[T](self, caller: Caller, function: Callable[..., T], *args: Any) -> T:
        """Run something slow off the event loop, for a bounded time, with a bounded queue, and fairly by tenant."""
        return await _in_time(self._encoding, caller, function, *args)

    async def decode_body[T](
        self, caller: Caller, bodies: "BodyReader", body: bytes, kind: type[T]
    ) -> tuple[T, list[str]]:
        """Return a body as a struct, and the names of its unknown fields. The event loop decodes short bodies only."""
        if len(body) <= MAX_DECODED_ON_LOOP:
            return bodies.read(body, kind)
        context = contextvars.copy_context()  # its log lines name the request

        def read() -> tuple[T, list[str]]:
            return context.run(bodies.read, body, kind)

        return await self.run_in_thread(caller, read)

    async def format[T](self, caller: Caller, function: Callable[..., T], *args: Any) -> T:
        """Format a response off the event loop, on threads that nothing else uses, and fairly by tenant."""
        return await self._formatting.run(caller.tenant, function, *args)

    async def format_update[T](
        self,
        caller: Caller,
        stream: Stream,
        update: Update,
        function: Callable[..., T],
        *args: Any,
        with_prompt: bool = False,
    ) -> T:
        """Format what is new of a sequence: off the event loop if it has many log-probabilities.

        `with_prompt` says that those of the prompt, and of all tokens so far, may come with it.
        """
        params, num_tokens = stream.request.params, len(update.logprobs)
        if with_prompt:
            num_tokens += len(stream.prompt_logprobs or ())
            num_tokens += 0 if params.logprobs is None else stream.num_output_tokens
        if num_tokens * (1 + (params.logprobs or 0)) <= MAX_NUMBERS_ON_LOOP:
            return function(*args)
        return await self.format(caller, function, *args)

    async def encode(self, caller: Caller, text: str, add_special: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text that may be long, made off the event loop."""
        return await self.run_in_thread(caller, self.encode_sync, text, add_special, param)

    def encode_sync(self, text: str, add_special: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a prompt, made on this thread; errors name `param`."""
        with _errors_of(param):
            return self.tokenizer.encode(text, add_special, max_len=self.max_model_len)

    def encode_chat_sync(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any], param: str = "messages"
    ) -> list[int]:
        """Token ids of a conversation, made on this thread; errors name `param`."""
        with _errors_of(param):
            return self.tokenizer.encode_chat(messages, max_len=self.max_model_len, **template_kwargs)

    async def compile(self, caller: Caller, structured: Structured | None, salt: str) -> Grammar | None:
        """Compile the form that generated text must have; compiled ones are kept for requests of the same salt.

        Grammars have threads of their own, because compiling one takes as long as encoding thousands of prompts.
        """
        if structured is None:
            return None
        return await _in_time(self._compiling, caller, self.engine.llm.engine.compile_grammar, structured, salt)

    def cancel(self, streams: Sequence[Stream]) -> None:
        """End the streams that have not ended."""
        for stream in streams:
            stream.cancel()

    def abort(self, request_id: str) -> int:
        """End the requests of this id with an error, a client's or the engine's own; return how many there were."""
        streams = [one for one in self.engine.streams if request_id in (one.origin.request_id, one.request.id)]
        self.cancel(streams)
        return len(streams)

    def abort_all(self) -> int:
        """End every request with an error and go on; returns how many there were."""
        streams = self.engine.streams
        self.cancel(streams)
        return len(streams)

    def close(self) -> None:
        """End the threads."""
        self._encoding.close()
        self._compiling.close()
        self._formatting.close()


@contextlib.contextmanager
def _errors_of(param: str) -> Iterator[None]:
    """ApiError about a field of the request for what a tokenizer or a template finds wrong with it."""
    try:
        yield
    except ValueError as error:
        code = error.code if isinstance(error, FieldError) else "invalid_value"
        raise ApiError(400, f"{param}: {error}", param=param, code=code) from None


def _threads(name: str, num_threads: int, max_jobs: int, niceness: int = 0) -> FairThreads:
    return FairThreads(
        name,
        num_threads=num_threads,
        max_running_each=num_threads - 1,
        max_jobs=max_jobs,
        max_jobs_each=max_jobs // 2,
        timeout_s=TIMEOUT_S,
        niceness=niceness,
    )


async def _in_time[T](threads: FairThreads, caller: Caller, function: Callable[..., T], *args: Any) -> T:
    try:
        return await threads.run(caller.tenant, function, *args)
    except SlowJobError as error:
        raise ApiError(400, f"reading the request: {error}", code="too_slow") from None
