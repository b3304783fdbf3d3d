"""Checks every request before its route: its key, where it comes from, how large it is and how fast it comes.

Every route needs a key but for those listed here. A browser's question whether a page may ask (a preflight) has none.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.access import REQUEST_ID, AccessLog, checked_request_id, new_request_id
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.http.origins import PREFLIGHT, AllowedOrigins
from quire.server.http.upload import FORM_BYTES
from quire.server.keys import Caller, Keys
from quire.server.logs import log_for
from quire.server.openai.request_body import HEADER as IGNORED_FIELDS

PAGES = frozenset({"/", "/docs"})
"""Pages for people: what they show comes with a key, or is the same of every server."""
PUBLIC = frozenset({"/health", "/livez", "/readyz", "/metrics", "/openapi.json"}) | PAGES
"""Routes that need no key."""
MIN_UPLOAD_RATE = 256 << 10
"""Bytes a second that an upload has to come with, beyond `read_timeout_s`."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ONCE = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "origin",
        "transfer-encoding",
        REQUEST_ID,
    }
)
"""Headers that may be there once only: of one that is there twice, a proxy might take the other."""

ALWAYS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
"""Headers of every response that does not set them itself."""
MAX_METHOD_LEN = 16
"""Characters of a method that are logged."""


class Guard:
    """An ASGI application that lets requests with a valid key through to another one."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        config: ServerConfig,
        public: frozenset[str],
        origins: AllowedOrigins,
        keys_of: Mapping[str, Keys],
        uploads: frozenset[str],
        routes: Sequence[Route] = (),
        access: AccessLog | None = None,
    ) -> None:
        """`public` are the paths that need no key; to `uploads` files are sent, which may be large and take longer.

        `routes` name those requests in the log that are refused before they get to one.
        """
        self._routes = routes
        self._access = access or AccessLog()
        self._app = app
        self._uploads = uploads
        self._origins = origins
        self._public = public
        self._keys = keys
        self._keys_of = keys_of
        self._config = config
        self._names = LOCAL_NAMES | {config.host, *config.allow_host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        start, status, added = time.perf_counter(), 0, list(ALWAYS)
        state = scope.setdefault("state", {})
        state["caller"] = Caller(request_id=new_request_id())
        log_for(state)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = {name.lower() for name, _ in message["headers"]}
                added.append((REQUEST_ID.encode(), state["caller"].request_id.encode()))
                if ignored := state.get("ignored_fields"):
                    added.append((IGNORED_FIELDS.encode(), ", ".join(ignored).encode()))
                message["headers"] = [*message["headers"], *(one for one in added if one[0] not in named)]
            await send(message)

        try:
            headers = _headers(scope)
            if given := headers.get(REQUEST_ID):
                state["caller"] = Caller(request_id=checked_request_id(given))
            added += self._origins.headers(headers)
            if self._origins.is_preflight(scope["method"], headers):
                await watched({"type": "http.response.start", "status": 204, "headers": list(PREFLIGHT)})
                await watched({"type": "http.response.body", "body": b""})
                return
            state["caller"] = replace(self._caller_of(scope, headers), request_id=state["caller"].request_id)
            self._check_head(scope, headers)
            limit, timeout_s = self._body_limits(scope, headers)
            await self._app(scope, _Body(receive, limit, timeout_s).receive, watched)
        except ApiError as error:
            state["reason"] = error.reason
            await _refuse(error, watched)
        finally:
            reason = state.get("reason") if status else "cancelled"  # nothing was sent: the client is gone
            route, method = self._route(scope), scope["method"][:MAX_METHOD_LEN]
            self._access.end("http", start, route, status or 499, reason, state["caller"], method=method)

    def _route(self, scope: Scope) -> str:
        """The route for the log; never the path, which may carry anything."""
        routes = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        route = scope.get("route") or next(routes, None)
        return "none" if route is None else route.path

    def _caller_of(self, scope: Scope, headers: dict[str, str]) -> Caller:
        """Return the caller of a request; raise ApiError if its key is not valid."""
        path = scope["path"]
        if path in self._public:
            return self._keys.everyone
        return self._authenticate(headers, self._keys_of.get(path, self._keys))

    def _check_head(self, scope: Scope, headers: dict[str, str]) -> None:
        """Raise ApiError if the body is of another type or larger than allowed."""
        if scope["method"] == "POST":
            if headers.get("content-encoding", "identity") != "identity":
                raise ApiError(
                    415,
                    "compressed bodies are not taken: send it without content-encoding",
                    code="unsupported_encoding",
                )
            wanted = "multipart/form-data" if scope["path"] in self._uploads else "application/json"
            if headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
                raise ApiError(415, f"content-type must be {wanted}", code="unsupported_media_type")
            length, (limit, _) = headers.get("content-length", "0"), self._body_limits(scope, headers)
            if not length.isdigit() or int(length) > limit:
                raise _too_large(limit)

    def _body_limits(self, scope: Scope, headers: dict[str, str]) -> tuple[int, float]:
        """Bytes that the body of a request may have, and seconds that it may take."""
        config = self._config
        if scope["path"] not in self._uploads or config.batch_folder is None:
            return config.max_body_bytes, config.read_timeout_s
        limit, length = config.max_batch_file_bytes + FORM_BYTES, headers.get("content-length", "0")
        seconds = min(int(length), limit) / MIN_UPLOAD_RATE if length.isdigit() else 0
        return limit, config.read_timeout_s + seconds

    def _authenticate(self, headers: dict[str, str], keys: Keys) -> Caller:
        if not len(keys):
            self._check_local(headers)
            return keys.everyone
        caller = keys.find_bearer(headers.get("authorization", ""))
        if caller is None:
            raise ApiError(
                401,
                "no valid API key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller

    def _check_local(self, headers: dict[str, str]) -> None:
        """Without keys anybody on this machine may ask, but not a web page that happens to be open on it."""
        why = "this server has no key and serves its own machine only; "
        if _host_name(f"//{headers.get('host', '')}") not in self._names:
            raise ApiError(403, why + "--allow-host NAME lets it be used under another name", code="not_local")
        origin = headers.get("origin")
        if origin is not None and _host_name(origin) not in self._names and origin not in self._origins:
            raise ApiError(403, why + "--allow-origin ORIGIN lets a web page use it", code="not_local")


class _Body:
    """A request's body, with a limit on its size and on the time that it takes to arrive."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._deadline = time.monotonic() + timeout_s
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(self._deadline - time.monotonic(), 0.001))
        except TimeoutError:
            raise ApiError(408, f"the body took more than {self._timeout_s:.0f} s", code="slow_body") from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="body_too_large")


def _headers(scope: Scope) -> dict[str, str]:
    """The headers by lower-case name; ApiError if they can be read in two ways."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").lower()
        if name in headers and name in ONCE:
            raise _ambiguous(f"the header {name} is there twice")
        headers[name] = raw_value.decode("latin-1")
    if "content-length" in headers and "transfer-encoding" in headers:
        raise _ambiguous("content-length and transfer-encoding exclude each other")
    return headers


def _ambiguous(message: str) -> ApiError:
    return ApiError(400, message, code="ambiguous_request", headers={"Connection": "close"})


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
