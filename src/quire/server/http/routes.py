"""OpenAI's API over HTTP: its routes, and responses in one piece or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from quire import __version__
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, as_api_error
from quire.server.http.application import guarded, json_response
from quire.server.http.guard import PUBLIC, Guard
from quire.server.http.openapi import openapi
from quire.server.keys import Keys
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.format import usage
from quire.server.openai.parse import ParsedRequest, parse_chat, parse_completion
from quire.server.service import Service
from quire.server.stream import Stream, Update, UpdateBuffer


class Api:
    """The routes of the public port."""

    def __init__(self, service: Service, config: ServerConfig, metrics: Metrics) -> None:
        self.service = service
        self.config = config
        self.metrics = metrics

    def app(self, keys: Keys) -> "Guard":
        """An ASGI application: the guard, then the routes."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/livez", self.alive),
            Route("/readyz", self.ready),
            Route("/metrics", self.read_metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
        ]
        return guarded(routes, keys, self.config, public=PUBLIC)

    # -- generating ----------------------------------------------------------------------------------------------------

    async def completions(self, request: HttpRequest) -> Response:
        """`POST /v1/completions`: continue prompts."""
        body = _decode(await request.body(), schema.CompletionRequest)
        return await self._respond(request, await parse_completion(self.service, body, request.state.caller))

    async def chat(self, request: HttpRequest) -> Response:
        """`POST /v1/chat/completions`: continue a conversation."""
        body = _decode(await request.body(), schema.ChatRequest)
        return await self._respond(request, await parse_chat(self.service, body, request.state.caller))

    async def _respond(self, request: HttpRequest, parsed: ParsedRequest) -> Response:
        grammar = await self.service.compile(request.state.caller, parsed.structured, parsed.requests[0].cache_salt)
        limit = float(self.config.request_timeout_s)
        timeout_s = limit if parsed.timeout_s is None else min(parsed.timeout_s, limit)
        streams = self.service.engine.submit(parsed.requests, timeout_s=timeout_s, grammar=grammar)
        for stream in streams:
            stream.traceparent = request.headers.get("traceparent")
        if parsed.stream:
            return EventStream(parsed, streams, self.service, self.config.write_timeout_s)
        gone = asyncio.create_task(_until_gone(request.receive))
        whole = asyncio.create_task(_collect(streams))
        try:
            await asyncio.wait((gone, whole), return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ApiError(499, "the client is gone", code="cancelled")
            # Log-probabilities of many tokens take a while to write down.
            return await asyncio.to_thread(lambda: json_response(parsed.formatter.response(streams, whole.result())))
        finally:
            gone.cancel()
            whole.cancel()
            self.service.cancel(streams)

    async def tokenize(self, request: HttpRequest) -> Response:
        """`POST /tokenize`: text to token ids."""
        body = _decode(await request.body(), schema.TokenizeRequest)
        self.service.check_model(body.model)
        tokens = await self.service.encode(request.state.caller, body.prompt, body.add_special_tokens)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self.service.max_model_len})

    async def detokenize(self, request: HttpRequest) -> Response:
        """`POST /detokenize`: token ids to text."""
        body = _decode(await request.body(), schema.DetokenizeRequest)
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
        }

    # -- health and metrics --------------------------------------------------------------------------------------------

    async def health(self, request: HttpRequest) -> Response:
        """`GET /health`: whether the engine steps."""
        return _probe(self.service.engine.is_healthy, "the engine does not respond")

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
        return json_response(openapi())


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
        async for chunk in self._chunks():
            await self._send(send, b"data: " + chunk + b"\n\n", more=True)
        await self._send(send, b"data: [DONE]\n\n", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await asyncio.wait_for(send(message), self._write_timeout_s)

    async def _chunks(self) -> AsyncIterator[bytes]:
        formatter, streams = self._parsed.formatter, self._streams
        if choices := formatter.begin():
            yield _encode(formatter.chunk(choices))
        try:
            async for prompt, updates in _merged(streams):
                deltas = [formatter.delta(prompt, streams[prompt], update) for update in updates]
                for delta in deltas:
                    if delta is not None:
                        yield _encode(formatter.chunk([delta]))
        except Exception as error:
            yield _encode(as_api_error(error).body)
            return
        if self._parsed.include_usage:
            yield _encode(formatter.chunk([]) | {"usage": usage(streams)})


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


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- helpers ----------------------------------------------------------------------------------------------------------


def _decode[T](body: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(body, type=kind)


_encode = msgspec.json.encode


def _probe(is_good: bool, why_not: str) -> Response:
    return PlainTextResponse("ok" if is_good else why_not, 200 if is_good else 503)
