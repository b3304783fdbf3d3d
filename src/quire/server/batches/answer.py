"""Answers one line of a batch: the request in it is parsed, run and formatted as the route that it names would."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.async_llm.errors import GenerationError, OverloadError, UnavailableError
from quire.async_llm.origin import Origin
from quire.core.request import Request
from quire.core.stopping import Grammar
from quire.field_error import FieldError
from quire.server.batches.lines import MAX_LINE_BYTES, Line, answer_id, custom_id
from quire.server.errors import ApiError, as_api_error, in_words_of
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.embeddings import parse_embeddings
from quire.server.openai.json_parts import encode
from quire.server.openai.parse import ParsedRequest, parse_chat, parse_completion
from quire.server.openai.request_body import with_fix
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.server.openai.request_body import BodyReader

OVERLOAD_WAIT_S = 0.2
"""Seconds between two tries to start a line when too much waits already."""
MAX_LIMIT_WAIT_S = 10.0
"""Maximum of these seconds for a line whose key has used its tokens per minute."""
MAX_TRIES = 3
"""Of a line that the engine gives up: a step failed, or somebody aborted the request. It draws by the same seed."""
RETRY_WAIT_S = 1.0
"""Between two of them."""
GENERATING: dict[str, tuple[type[schema.Sampling], Any, str]] = {
    "/v1/chat/completions": (schema.ChatRequest, parse_chat, "chatcmpl-"),
    "/v1/completions": (schema.CompletionRequest, parse_completion, "cmpl-"),
}
"""Of each endpoint that generates: its body, what parses it, and how the ids of its responses begin."""


class _Envelope(schema.Struct, kw_only=True):
    """One line of the input."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: schema.BatchEndpoint
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one line."""

    content: bytes
    """A line of the output, with its end."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A line that is ready to run."""

    line: Line
    custom_id: str
    max_cost: int
    """Tokens of its prompts and of what may be generated, at most; 0 if nobody counts."""
    respond: Callable[[], Awaitable[dict[str, Any]]]
    """Makes the body of the response."""


class Answerer:
    """Answers the lines of one batch. A line that is wrong has an error for an answer."""

    def __init__(
        self,
        service: Service,
        bodies: "BodyReader",
        caller: Caller,
        *,
        endpoint: str | None = None,
        priority: int | None = None,
        defaults: Mapping[str, Any] | None = None,
        counts_cost: bool = False,
    ) -> None:
        """`endpoint` is the only one that lines may name, None for any; `priority` is theirs, whatever they say.

        `defaults` are fields of bodies that do not have them, `model` among them; without any, bodies are taken as they
        are. `counts_cost` says whether anybody asks what lines may cost.
        """
        self._service = service
        self._bodies = bodies
        self._caller = caller
        self._endpoint = endpoint
        self._priority = priority
        self._counts_cost = counts_cost
        self._defaults = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in (defaults or {}).items()}

    async def parse(self, line: Line) -> ParsedLine | Answer:
        """Read a line; the answer to one that is wrong. UnavailableError if the engine takes nothing any more."""
        name = custom_id(line)
        try:
            if line.raw is None:
                message = f"the line is longer than {MAX_LINE_BYTES:,} bytes"
                raise ApiError(413, message, code="line_too_long")
            envelope = msgspec.json.decode(line.raw, type=_Envelope)
            if self._endpoint not in (None, envelope.url):
                message = f"url is {envelope.url!r}, and the batch is for {self._endpoint!r}"
                raise ApiError(400, message, param="url", code="mismatched_url")
            max_cost, respond = await self._patiently(lambda: self._parse(line, envelope))
            return ParsedLine(line, envelope.custom_id, max_cost, respond)
        except UnavailableError:
            raise
        except Exception as error:
            shown = with_fix(error) if isinstance(error, msgspec.ValidationError) else as_api_error(error)
            if name is None:  # nothing else says which line this is
                shown.message = f"line {line.number}: {shown.message}"
            return _failed(line, name, shown)

    async def answer(self, parsed: ParsedLine) -> Answer:
        """Run a line to its end. UnavailableError if the engine is gone before, or gives it up again and again."""
        line = parsed.line
        for num_before in range(MAX_TRIES):
            if num_before:
                await asyncio.sleep(RETRY_WAIT_S)
                again = await self.parse(line)  # a grammar is for one try
                if isinstance(again, Answer):
                    return again
                parsed = again
            if answer := await self._try(parsed):
                return answer
        raise UnavailableError(f"line {line.number} of the input failed inside the engine {MAX_TRIES} times")

    async def _try(self, parsed: ParsedLine) -> Answer | None:
        """Run a line; None if it did not end for a reason that is not its own."""
        line, engine = parsed.line, self._service.engine
        num_failed_before = engine.num_failed_steps
        try:
            body = await self._patiently(parsed.respond)
        except UnavailableError:
            raise
        except Exception as error:
            if isinstance(error, GenerationError):
                is_failed_step = error.reason == "error" and engine.num_failed_steps > num_failed_before
                if is_failed_step or error.reason == "cancelled":
                    return None
            return _failed(line, parsed.custom_id, as_api_error(error))
        response = {"status_code": 200, "request_id": f"req_{line.digest}", "body": body}
        usage = body["usage"]
        content = _encode(line, parsed.custom_id, response, None)
        return Answer(content, usage["prompt_tokens"], usage.get("completion_tokens", 0))

    async def _parse(self, line: Line, envelope: _Envelope) -> tuple[int, Callable[[], Awaitable[dict[str, Any]]]]:
        """What a line may cost, and what makes its response."""
        service, caller, raw = self._service, self._caller, self._with_defaults(envelope)
        if envelope.url not in GENERATING:
            body, _ = await service.decode_body(caller, self._bodies, raw, schema.EmbeddingsRequest)
            body.priority = body.priority if self._priority is None else self._priority
            origin = Origin(f"embd-{line.digest}", caller.name)
            embeddings = await parse_embeddings(service, body, replace(caller, request_id=origin.request_id))
            cost = self._max_cost(embeddings.requests, None, "input")
            return cost, lambda: embeddings.response(service, embeddings.timeout_s, origin)
        kind, parse, prefix = GENERATING[envelope.url]
        body, _ = await service.decode_body(caller, self._bodies, raw, kind)
        if body.stream:
            raise ApiError(400, "stream=true: a line has its answer in one piece; leave it out", param="stream")
        body.priority = body.priority if self._priority is None else self._priority
        body.request_id = body.request_id or f"{prefix}{line.digest}"
        if body.seed is None:  # a line that is run again draws the same tokens
            body.seed = int(line.digest[:15], 16)  # pyright: ignore[reportAttributeAccessIssue]
        parsed: ParsedRequest = await parse(service, body, caller)
        grammar = await service.compile(caller, parsed.structured, parsed.requests[0].cache_salt)
        cost = self._max_cost(parsed.requests, grammar, parsed.prompt_field)
        origin = Origin(body.request_id, caller.name)
        return cost, lambda: self._generate(parsed, grammar, origin)

    async def _generate(self, parsed: ParsedRequest, grammar: Grammar | None, origin: Origin) -> dict[str, Any]:
        service = self._service
        try:
            streams = service.engine.submit(parsed.requests, timeout_s=parsed.timeout_s, grammar=grammar)
        except FieldError as error:
            raise in_words_of(parsed.prompt_field, error) from None
        for stream in streams:
            stream.origin = origin
        try:
            wholes = [await stream.read_all() for stream in streams]
        finally:
            service.cancel(streams)
        params = parsed.requests[0].params
        if params.logprobs is None and not params.prompt_logprobs:
            return parsed.formatter.response(streams, wholes)
        return await service.format(
            self._caller, parsed.formatter.response, streams, wholes
        )  # many numbers take a while

    def _max_cost(self, requests: list[Request], grammar: Grammar | None, prompt_field: str) -> int:
        if not self._counts_cost:
            return 0
        engine = self._service.engine.llm.engine
        try:
            return sum(
                len(request.prompt_token_ids) + request.params.n * engine.check(request, grammar)
                for request in requests
            )
        except FieldError as error:
            raise in_words_of(prompt_field, error) from None

    def _with_defaults(self, envelope: _Envelope) -> bytes:
        if not self._defaults:
            return bytes(envelope.body)
        fields = msgspec.json.decode(envelope.body, type=dict[str, msgspec.Raw])
        given = {name: value for name, value in fields.items() if bytes(value) != b"null"}
        defaults = self._defaults if envelope.url in GENERATING else {"model": self._defaults["model"]}
        if "max_completion_tokens" in given:  # another name of it
            defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return msgspec.json.encode(defaults | given)

    async def _patiently[T](self, work: Callable[[], Awaitable[T]]) -> T:
        """Do something as soon as it leaves half of the queue, and half of the key's own limits, to other requests."""
        admission = self._service.engine.admission
        while True:
            half_requests, half_tokens = admission.max_requests / 2, admission.max_tokens / 2
            wait_s = OVERLOAD_WAIT_S
            is_queue_free = admission.num_waiting <= half_requests and admission.num_waiting_tokens <= half_tokens
            if is_queue_free and admission.leaves_half(self._caller.tenant):
                try:
                    return await work()
                except OverloadError as error:
                    wait_s = seconds_to_wait(error)
            await asyncio.sleep(wait_s)


def seconds_to_wait(error: OverloadError) -> float:
    """Return the seconds until a line that was refused is tried again.

    When tokens of a minute come back is known. A row or a place in the queue may be free at any time.
    """
    return min(error.retry_after_s, MAX_LIMIT_WAIT_S) if error.code == "key_tokens_per_minute" else OVERLOAD_WAIT_S


def not_run(line: Line, code: str, message: str) -> Answer:
    """The answer to a line that never ran, and will not."""
    return Answer(_encode(line, custom_id(line), None, {"code": code, "message": message}), is_error=True)


def _failed(line: Line, name: str | None, error: ApiError) -> Answer:
    response = {"status_code": error.status, "request_id": f"req_{line.digest}", "body": error.body}
    shown = error.body["error"]
    short = {"code": shown["code"] or shown["type"], "message": shown["message"]}
    return Answer(_encode(line, name, response, short), is_error=True)


def _encode(line: Line, name: str | None, response: Any, error: Any) -> bytes:
    answer = {"id": answer_id(line), "custom_id": name, "response": response, "error": error}
    return encode(answer) + b"\n"
