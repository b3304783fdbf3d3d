"""What Serve's proxy calls: checks the key, finds out which pages the prompt has, and forwards to an engine.

the engine dies before any of the answer was sent     the request goes to another engine
it dies later                                         the stream ends with an error event, as a failed one of ours
"""

# pyright: reportMissingImports=false

import asyncio
import contextlib
import ipaddress
import json
import logging
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.async_llm.errors import described
from quire.config import EngineKnobs
from quire.integrations.ray.forwarded import ForwardedRequest, ResponseStart
from quire.integrations.ray.prompt_reader import PromptReader
from quire.server.access import REQUEST_ID, AccessLog
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.http.event_response import HEARTBEAT
from quire.server.http.guard import PAGES, PUBLIC, Guard
from quire.server.http.origins import AllowedOrigins
from quire.server.keys import Keys

MAX_ATTEMPTS = 5
NUM_FIRST_EVENTS = {"/v1/chat/completions": 1, "/v1/responses": 2}
"""Events of a stream before any token: while there are no others, the answer has not begun."""
GONE = "the engine that had this request is gone"

_log = logging.getLogger("quire.server")


class Ingress:
    """The deployment that HTTP requests come to; `engines` is the handle of `EngineReplica`'s."""

    def __init__(
        self,
        engines: DeploymentHandle,
        model: str,
        revision: str | None,
        model_name: str,
        config: ServerConfig,
        keys: Keys,
        knobs: EngineKnobs,
    ) -> None:
        self._engines = engines.options(method_name="handle", stream=True)
        self._prompts = PromptReader(model, revision, model_name, knobs, config.max_priority)
        self._has_keys = len(keys) > 0
        self._timeout_s = config.request_timeout_s
        public = PUBLIC if config.page else PUBLIC - PAGES
        self._guard = Guard(
            self._forward,
            keys,
            config,
            public,
            AllowedOrigins(config.allow_origin),
            {},
            frozenset(),
            access=AccessLog(config.access_log),
        )

    async def __call__(self, request: HttpRequest) -> Response:
        """A response that is an ASGI application: Serve calls it with the request's own channels."""
        if not self._has_keys and not _is_loopback(request.scope):
            message = "these engines have no API key and serve their own machine only; give build_app api_keys"
            error = ApiError(403, message, code="not_local")
            return Response(json.dumps(error.body), error.status, media_type="application/json")
        return _Application(self._guard)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        names, num_tokens = await self._prompts.read(scope["path"], body, scope["state"]["caller"])
        headers = [one for one in scope["headers"] if one[0].lower() != REQUEST_ID.encode()]
        headers.append((REQUEST_ID.encode(), scope["state"]["caller"].request_id.encode()))
        request = ForwardedRequest(
            scope["method"], scope["path"], scope["query_string"], headers, body, names, num_tokens
        )
        sending = asyncio.create_task(self._respond(request, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            gone.cancel()
            sending.cancel()

    async def _respond(self, request: ForwardedRequest, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        for _ in range(MAX_ATTEMPTS):
            answer = _Answer(request, send)
            pieces = self._engines.remote(request)
            try:
                async with asyncio.timeout_at(deadline) as waiting:
                    async for piece in pieces:
                        waiting.reschedule(None)  # an engine has it, which has a deadline of its own
                        await answer.add(piece)
                await answer.end()
                return
            except TimeoutError:
                raise ApiError(408, "no engine took the request in time", code="deadline") from None
            except (RayError, RayServeException) as error:
                _log.warning("an engine did not finish a request", extra=described(error))
                if answer.has_begun:
                    await answer.fail()
                    return
                if isinstance(error, BackPressureError):
                    break
            finally:
                with contextlib.suppress(RayServeException):
                    pieces.cancel()
        raise ApiError(503, GONE, code="unavailable", headers={"Retry-After": "1"})


class _Answer:
    """A response on its way to the client: nothing of it is sent before the first token of a stream, or all of it."""

    def __init__(self, request: ForwardedRequest, send: Send) -> None:
        self._path, self._send = request.path, send
        self._start: Message = {}
        self._is_stream = False
        self._held = b""
        self.has_begun = False

    async def add(self, piece: ResponseStart | bytes) -> None:
        """The next piece that an engine sent."""
        if isinstance(piece, ResponseStart):
            self._start = {"type": "http.response.start", "status": piece.status, "headers": piece.headers}
            self._is_stream = dict(piece.headers).get(b"content-type", b"").startswith(b"text/event-stream")
            return
        self._held += piece
        num_events = self._held.count(b"\n\n") - self._held.count(HEARTBEAT)
        if self._is_stream and (self.has_begun or num_events > NUM_FIRST_EVENTS.get(self._path, 0)):
            await self._flush(more=True)

    async def end(self) -> None:
        """There is no more."""
        await self._flush(more=False)

    async def fail(self) -> None:
        """The engine is gone in the middle of a stream."""
        body = ApiError(503, GONE, code="unavailable").body
        if self._path == "/v1/responses":
            event = {"type": "error"} | {name: body["error"][name] for name in ("code", "message", "param")}
            self._held = b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
        else:
            self._held = b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"
        await self.end()

    async def _flush(self, *, more: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        body, self._held = self._held, b""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class _Application(Response):
    """An ASGI application in the shape that Serve sends as a response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _read(receive: Receive) -> bytes:
    """A request's body; the guard bounds it."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_loopback(scope: Scope) -> bool:
    client: Any = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
