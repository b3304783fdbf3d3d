"""OpenAI's API over HTTP: its routes, and responses in one piece or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from quire import __version__
from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update, UpdateBuffer
from quire.core.request import Request
from quire.core.stopping import Grammar
from quire.field_error import FieldError
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, as_api_error, in_words_of
from quire.server.http.application import guarded, json_response
from quire.server.http.docs_page import docs_page
from quire.server.http.guard import PAGES, PUBLIC, Guard
from quire.server.http.openapi import openapi_json
from quire.server.http.pages import html_response, page_response
from quire.server.http.request_body import BodyReader
from quire.server.keys import Keys
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.embeddings import parse_embeddings
from quire.server.openai.parse import ParsedRequest, parse_chat, parse_completion
from quire.server.openai.responses import parse_response
from quire.server.service import Service


class Api:
    """The routes of the public port."""

    def __init__(self, service: Service, config: ServerConfig, metrics: Metrics) -> None:
        self.service = service
        self.config = config
        self.metrics = metrics
        self._bodies = BodyReader(strict=config.strict_fields)

    def app(self, keys: Keys) -> "Guard":
        """An ASGI application: the guard, then the routes."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/livez", self.alive),
            Route("/readyz", self.ready),
            Route("/metrics", self.read_metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
        ]
        pages = [Route("/", self.page), Route("/docs", self.docs)]
        if not self.config.page:
            return guarded(routes, keys, self.config, public=PUBLIC - PAGES, origins=self.config.allow_origin)
        return guarded([*routes, *pages], keys, self.config, public=PUBLIC, origins=self.config.allow_origin)

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
        traceparent = request.headers.get("traceparent")
        response = parsed.response(self.service, self._timeout_s(parsed.timeout_s), traceparent)
        return json_response(await _unless_gone(request, response))

    async def _read[T](self, request: HttpRequest, kind: type[T]) -> T:
        """The body of a request; the guard names what was ignored of it in the response."""
        body, request.state.ignored_fields = self._bodies.read(await request.body(), kind)
        return body

    async def _respond(self, request: HttpRequest, parsed: ParsedRequest) -> Response:
        grammar = await self.service.compile(request.state.caller, parsed.structured, parsed.requests[0].cache_salt)
        streams = self._submit(request, parsed.requests, parsed.timeout_s, parsed.prompt_field, grammar)
        if parsed.stream:
            return EventStream(parsed, streams, self.service, self.config.write_timeout_s)
        return await self._whole(request, streams, parsed.formatter.response)

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
            stream.traceparent = request.headers.get("traceparent")
        return streams

    def _timeout_s(self, given: float | None) -> float:
        """Seconds that a request may take."""
        limit = float(self.config.request_timeout_s)
        return limit if given is None else min(given, limit)

    async def _whole(
        self,
        request: HttpRequest,
        streams: list[Stream],
        response: Callable[[list[Stream], list[list[Update]]], dict[str, Any]],
    ) -> Response:
        """Wait for all streams, and respond with what `response` makes of them; end them if the client goes."""
        try:
            wholes = await _unless_gone(request, _collect(streams))
        finally:
            self.service.cancel(streams)
        # Log-probabilities of many tokens take a while to write down.
        return await asyncio.to_thread(lambda: json_response(response(streams, wholes)))

    async def tokenize(self, request: HttpRequest) -> Response:
        """`POST /tokenize`: text to token ids."""
        body = await self._read(request, schema.TokenizeRequest)
        self.service.check_model(body.model)
        add_special = body.add_special_tokens is not False
        tokens = await self.service.encode(request.state.caller, body.prompt, add_special)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.service.max_model_len})

    async def detokenize(self, request: HttpRequest) -> Response:
        """`POST /detokenize`: token ids to text."""
        body = await self._read(request, schema.DetokenizeRequest)
        self.service.check_model(body.model)
        decode, caller = self.service.tokenizer.decode, request.state.caller
        return json_response({"prompt": await self.service.run_in_thread(caller, decode, body.tokens, False)})

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
        """`GET /health`: whether the engine steps."""
        engine = self.service.engine
        why_not = "the engine does not respond" if engine.failure is None else "a process of the engine's group is lost"
        return _probe(engine.is_healthy, why_not)

    async def alive(self, request: HttpRequest) -> Response:
        """`GET /livez`: whether the process responds."""
        return _probe(True, "")

    async def ready(self, request: HttpRequest) -> Response:
        """`GET /readyz`: whether a request would be taken."""
        return _probe(self.service.engine.is_ready, "not ready")

    async def read_metrics(self, request: HttpRequest) -> Response:
        """`GET /metrics`: for Prometheus."""
        body, content_type = await self.metrics.read()
        return Response(body, media_type=content_type)

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
        return html_response(docs_page())


# -- streams ----------------------------------------------------------------------------------------------------------


class EventStream(Response):
    """A response of server-sent events. It ends when its client goes, or stops reading."""

    def __init__(self, parsed: ParsedRequest, streams: list[Stream], service: Service, write_timeout_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._parsed = parsed
        self._streams = streams
        self._service = service
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the response is complete, or its client is gone."""
        gone = asyncio.create_task(_until_gone(receive))
        sent = asyncio.create_task(self._send_all(send))
        try:
            await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
            if sent.done() and (error := sent.exception()) and not isinstance(error, OSError | TimeoutError):
                raise error
        finally:
            gone.cancel()
            sent.cancel()
            self._service.cancel(self._streams)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events():
            # Events that have a type are named by it, too.
            name = f"event: {event['type']}\n".encode() if "type" in event else b""
            await self._send(send, name + b"data: " + _encode(event) + b"\n\n", more=True)
        await self._send(send, b"data: [DONE]\n\n" if self._parsed.formatter.ends_with_done else b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await asyncio.wait_for(send(message), self._write_timeout_s)

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        formatter, streams = self._parsed.formatter, self._streams
        for event in formatter.first_events(streams):
            yield event
        try:
            async for prompt, updates in _merged(streams):
                for update in updates:
                    for event in formatter.events(prompt, streams[prompt], update):
                        yield event
        except Exception as error:
            for event in formatter.error_events(streams, as_api_error(error)):
                yield event
            return
        for event in formatter.last_events(streams):
            yield event


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
    gone = asyncio.create_task(_until_gone(request.receive))
    task = asyncio.create_task(work)
    try:
        await asyncio.wait((gone, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client is gone", code="cancelled")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- helpers ----------------------------------------------------------------------------------------------------------


_encode = msgspec.json.encode


def _probe(is_good: bool, why_not: str) -> Response:
    return PlainTextResponse("ok" if is_good else why_not, 200 if is_good else 503)
