"""OpenAI's API over HTTP: its routes, and responses in one piece or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire import __version__
from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update, UpdateBuffer
from quire.core.request import Request
from quire.core.stopping import Grammar
from quire.field_error import FieldError
from quire.server.access import REQUEST_ID, AccessLog, is_request_id
from quire.server.batches.store import Store
from quire.server.batches.worker import Batches
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, as_api_error, in_words_of
from quire.server.http.application import guarded, json_response
from quire.server.http.batch_routes import UPLOADS, BatchRoutes
from quire.server.http.body_response import body_response
from quire.server.http.docs_page import ADDRESS, docs_page
from quire.server.http.event_response import EventResponse, until_gone
from quire.server.http.guard import PAGES, PUBLIC, Guard
from quire.server.http.kv_events import KVEvents
from quire.server.http.openapi import openapi_json
from quire.server.http.pages import html_response, page_response
from quire.server.keys import Caller, Keys
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.embeddings import parse_embeddings
from quire.server.openai.json_parts import JsonBody, encode
from quire.server.openai.parse import ParsedRequest, parse_chat, parse_completion
from quire.server.openai.request_body import BodyReader
from quire.server.openai.responses import parse_response
from quire.server.service import Service

KV_EVENTS = "/v1/kv_events"


class Api:
    """The routes of the public port."""

    def __init__(
        self,
        service: Service,
        config: ServerConfig,
        metrics: Metrics,
        store: Store | None = None,
        access: AccessLog | None = None,
    ) -> None:
        """`store` keeps files and batches; without one there are none. `access` gets each request as it ends."""
        self.service = service
        self.config = config
        self.metrics = metrics
        self._access = access
        self._operator_keys: Keys | None = None
        self._bodies = BodyReader(strict=config.strict_fields)
        self.batches = Batches(store, service, self._bodies) if store else None
        self._kv_events = KVEvents(service, config.write_timeout_s)

    def app(self, keys: Keys, operator_keys: Keys | None = None) -> "Guard":
        """An ASGI application: the guard, then the routes. What is for operators needs a key of theirs to be there."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            *BatchRoutes(self.batches, self.config, self._read).routes(),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/livez", self.alive),
            Route("/readyz", self.ready),
            Route("/metrics", self.read_metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
        ]
        self._operator_keys = operator_keys
        keys_of = {}
        if self.config.kv_events and operator_keys:
            routes.append(Route(KV_EVENTS, self.kv_events))
            keys_of[KV_EVENTS] = operator_keys
        public = PUBLIC
        openapi_json()  # built here and cached: the first request for it would hold up every stream
        if self.config.page:
            docs_page()
            routes += [Route("/", self.page), Route("/docs", self.docs)]
        else:
            public -= PAGES
        origins = self.config.allow_origin
        return guarded(
            routes,
            keys,
            self.config,
            public=public,
            keys_of=keys_of,
            origins=origins,
            uploads=UPLOADS,
            access=self._access,
        )

    # -- generating ----------------------------------------------------------------------------------------------------

    async def completions(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`: continue prompts."""
        body = await self._read(request, schema.CompletionRequest)
        return await self._respond(request, await parse_completion(self.service, body, request.state.caller))

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`: continue a conversation."""
        body = await self._read(request, schema.ChatRequest)
        return await self._respond(request, await parse_chat(self.service, body, request.state.caller))

    async def responses(self, request: HttpRequest) -> Response:
        """`POST /v1/responses`: continue a conversation, in OpenAI's newer shape."""
        body = await self._read(request, schema.ResponsesRequest)
        return await self._respond(request, await parse_response(self.service, body, request.state.caller))

    async def embeddings(self, request: HttpRequest) -> Response:
        """`POST /v1/embeddings`: embed prompts."""
        body = await self._read(request, schema.EmbeddingsRequest)
        parsed = await parse_embeddings(self.service, body, request.state.caller)
        response = parsed.response(self.service, self._timeout_s(parsed.timeout_s), _origin(request))
        return json_response(await _unless_gone(request, response))

    async def _read[T](self, request: HttpRequest, kind: type[T]) -> T:
        """The body of a request; the guard names what was ignored of it in the response."""
        raw, caller = await request.body(), request.state.caller
        body, request.state.ignored_fields = await self.service.decode_body(caller, self._bodies, raw, kind)
        given = getattr(body, "request_id", None)
        if REQUEST_ID not in request.headers and given and is_request_id(given):
            request.state.caller = replace(request.state.caller, request_id=given)
        return body

    async def _respond(self, request: HttpRequest, parsed: ParsedRequest) -> Response:
        grammar = await self.service.compile(request.state.caller, parsed.structured, parsed.requests[0].cache_salt)
        streams = self._submit(request, parsed.requests, parsed.timeout_s, parsed.prompt_field, grammar)
        if parsed.stream:
            return EventStream(parsed, streams, self.service, self.config, request.state.caller)
        return await self._whole(request, streams, parsed.formatter.parts)

    def _submit(
        self,
        request: HttpRequest,
        requests: list[Request],
        timeout_s: float | None,
        prompt_field: str,
        grammar: Grammar | None = None,
    ) -> list[Stream]:
        """Start the engine's requests; an error names the field that the prompt came in."""
        try:
            streams = self.service.engine.submit(requests, timeout_s=self._timeout_s(timeout_s), grammar=grammar)
        except FieldError as error:
            raise in_words_of(prompt_field, error) from None
        for stream in streams:
            stream.origin = _origin(request)
        return streams

    def _timeout_s(self, given: float | None) -> float:
        """Seconds that a request may take."""
        limit = float(self.config.request_timeout_s)
        return limit if given is None else min(given, limit)

    async def _whole(
        self,
        request: HttpRequest,
        streams: list[Stream],
        parts: Callable[[list[Stream], list[list[Update]]], Iterator[bytes]],
    ) -> Response:
        """Wait for all streams, and respond with the JSON that `parts` makes of them; end them if the client goes."""
        try:
            wholes = await _unless_gone(request, _collect(streams))
        finally:
            self.service.cancel(streams)
        # Log-probabilities of many tokens take a while to write down.
        body = await self.service.format(request.state.caller, lambda: JsonBody(parts(streams, wholes)))
        return body_response(body)

    async def tokenize(self, request: HttpRequest) -> Response:
        """`POST /tokenize`: text to token ids."""
        body = await self._read(request, schema.TokenizeRequest)
        self.service.check_model(body.model)
        caller, add_special = request.state.caller, body.add_special_tokens is not False
        with self.service.engine.admission.hold(caller.tenant):
            tokens = await self.service.encode(caller, body.prompt, add_special)
        self.service.check_length(tokens, "prompt")
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.service.max_model_len})

    async def detokenize(self, request: HttpRequest) -> Response:
        """`POST /detokenize`: token ids to text."""
        body = await self._read(request, schema.DetokenizeRequest)
        self.service.check_model(body.model)
        self.service.check_length(body.tokens, "tokens")
        vocab_size = self.service.engine.llm.engine.model.vocab_size
        if wrong := next((token_id for token_id in body.tokens if token_id >= vocab_size), None):
            message = f"tokens: {wrong} is no token id (0 to {vocab_size - 1})"
            raise ApiError(400, message, param="tokens", code="invalid_value")
        decode, caller = self.service.tokenizer.decode, request.state.caller
        with self.service.engine.admission.hold(caller.tenant):
            text = await self.service.run_in_thread(caller, decode, body.tokens, False)
        return json_response({"prompt": text})

    async def models(self, request: HttpRequest) -> Response:
        """`GET /v1/models`: the one model."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: HttpRequest) -> Response:
        """`GET /v1/models/NAME`: the model, if it has this name."""
        self.service.check_model(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.service.model_name,
            "object": "model",
            "created": self.service.started_at,
            "owned_by": "quire",
            "max_model_len": self.service.max_model_len,
            "vocab_size": self.service.engine.llm.engine.model.vocab_size,
            "has_chat_template": self.service.has_chat_template,
        }

    # -- health and metrics --------------------------------------------------------------------------------------------

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: whether every engine steps."""
        hang = self.service.engine.engines.describe_hang()
        lost = self.service.engine.failure is not None
        return _probe(hang is None, "a process of the engine's group is lost" if lost else hang or "")

    async def alive(self, request: HttpRequest) -> Response:
        """`GET /livez`: whether the process responds."""
        return _probe(True, "")

    async def ready(self, request: HttpRequest) -> Response:
        """`GET /readyz`: whether a request would be taken."""
        return _probe(self.service.engine.is_ready, "not ready")

    async def read_metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`: for Prometheus; with an admin key also what each key does."""
        is_admin = self._operator_keys is not None and self._operator_keys.find_bearer(
            request.headers.get("authorization", "")
        )
        body, content_type = await self.metrics.read(with_keys=bool(is_admin))
        return Response(body, media_type=content_type)

    async def kv_events(self, request: HttpRequest) -> Response:
        """`GET /v1/kv_events`: the names of cached pages as they come and go, for operators."""
        return self._kv_events.response()

    async def version(self, request: HttpRequest) -> Response:
        """`GET /version`: the version of Quire."""
        return json_response({"version": __version__})

    async def openapi(self, request: HttpRequest) -> Response:
        """`GET /openapi.json`: the OpenAPI document of these routes."""
        return json_response(openapi_json())

    # -- pages --------------------------------------------------------------------------------------------------------

    async def page(self, request: HttpRequest) -> Response:
        """`GET /`: a page to chat on. It holds no data: what it shows it asks for, with the key that is typed in."""
        return page_response("chat.html")

    async def docs(self, request: HttpRequest) -> Response:
        """`GET /docs`: the OpenAPI document for people."""
        scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
        return html_response(docs_page(), {ADDRESS: f"{scheme}://{request.url.netloc}"})


# -- streams ----------------------------------------------------------------------------------------------------------


class EventStream(EventResponse):
    """What streams generate, as server-sent events."""

    def __init__(
        self, parsed: ParsedRequest, streams: list[Stream], service: Service, config: ServerConfig, caller: Caller
    ) -> None:
        super().__init__(config.write_timeout_s, config.heartbeat_s)
        self._caller = caller
        self._begun: set[tuple[int, int]] = set()
        """Prompt and index of each sequence of which something was sent."""
        self._parsed = parsed
        self._streams = streams
        self._service = service

    def close(self) -> None:
        """End the streams that have not ended."""
        self._service.cancel(self._streams)

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the formatter, and how its API ends a stream."""
        formatter, streams = self._parsed.formatter, self._streams
        for line in _lines(formatter.first_events(streams)):
            yield line
        try:
            async for prompt, updates in _merged(streams):
                for update in updates:
                    for line in await self._format(prompt, update):
                        yield line
            last = formatter.last_events(streams)
        except Exception as error:
            shown = as_api_error(error)
            self.reason = shown.reason
            last = formatter.error_events(streams, shown)
        for line in _lines(last):
            yield line
        if formatter.ends_with_done:
            yield b"data: [DONE]\n\n"

    async def _format(self, prompt: int, update: Update) -> list[bytes]:
        """Return the events for what is new of one sequence; its first and last ones may be large."""
        stream, formatter, sequence = self._streams[prompt], self._parsed.formatter, (prompt, update.index)
        with_prompt = sequence not in self._begun or update.finish_reason is not None
        self._begun.add(sequence)

        def lines() -> list[bytes]:
            return _lines(formatter.events(prompt, stream, update))

        return await self._service.format_update(self._caller, stream, update, lines, with_prompt=with_prompt)


def _lines(events: list[dict[str, Any]]) -> list[bytes]:
    """Return events as they are sent; those that have a type are named by it, too."""
    names = (f"event: {event['type']}\n".encode() if "type" in event else b"" for event in events)
    return [name + b"data: " + encode(event) + b"\n\n" for name, event in zip(names, events, strict=True)]


async def _merged(streams: list[Stream]) -> AsyncIterator[tuple[int, list[Update]]]:
    """The updates of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async for updates in streams[0]:
            yield 0, updates
        return
    news: asyncio.Queue[tuple[int, list[Update] | BaseException | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(i: int) -> None:
        try:
            async for updates in streams[i]:
                await news.put((i, updates))
            await news.put((i, None))
        except Exception as error:
            await news.put((i, error))

    tasks = [asyncio.create_task(pump(i)) for i in range(len(streams))]
    try:
        left = len(streams)
        while left:
            i, updates = await news.get()
            if isinstance(updates, BaseException):
                raise updates
            if updates is None:
                left -= 1
            else:
                yield i, updates
    finally:
        for task in tasks:
            task.cancel()


async def _collect(streams: list[Stream]) -> list[list[Update]]:
    """Everything that each sequence of each stream generates, in order of the sequences."""
    buffers = [UpdateBuffer() for _ in streams]
    async for prompt, updates in _merged(streams):
        for update in updates:
            buffers[prompt].add(update)
    return [buffer.take() for buffer in buffers]


async def _unless_gone[T](request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """What some work comes to; it is cancelled if the client goes."""
    gone = asyncio.create_task(until_gone(request.receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client is gone", code="cancelled")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


def _origin(request: HttpRequest) -> Origin:
    caller: Caller = request.state.caller
    return Origin(caller.request_id, caller.name, request.headers.get("traceparent"))


# -- helpers ----------------------------------------------------------------------------------------------------------


def _probe(is_good: bool, why_not: str) -> Response:
    return PlainTextResponse("ok" if is_good else why_not, 200 if is_good else 503)
