"""Routes as an ASGI application: behind the guard, with every error in OpenAI's shape."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from quire.async_llm.errors import GenerationError, OverloadError
from quire.server.access import AccessLog
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, as_api_error
from quire.server.http.guard import Guard
from quire.server.http.origins import AllowedOrigins
from quire.server.keys import Keys
from quire.server.openai.json_parts import encode


def guarded(
    routes: Sequence[Route],
    keys: Keys,
    config: ServerConfig,
    *,
    public: frozenset[str],
    keys_of: Mapping[str, Keys] | None = None,
    origins: Sequence[str] = (),
    uploads: frozenset[str] = frozenset(),
    access: AccessLog | None = None,
) -> Guard:
    """The application of one port; `public` are the paths that need no key, `origins` the web pages that may ask.

    `keys_of` has the paths that need other keys than the rest; to `uploads` files are sent instead of JSON.
    """
    # By name, because Starlette raises again what only `Exception` catches.
    kinds = (
        ApiError, OverloadError, GenerationError, ClientDisconnect, RecursionError, ValueError, Exception,
    )  # fmt: skip
    handlers: Any = dict.fromkeys(kinds, _error) | {HTTPException: _no_such_route}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Guard(app, keys, config, public, AllowedOrigins(origins), keys_of or {}, uploads, routes, access)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON; content that is bytes is JSON already."""
    body = content if isinstance(content, bytes) else encode(content)
    return Response(body, status, headers, media_type="application/json")


async def _error(request: HttpRequest, error: Exception) -> Response:
    shown = as_api_error(error)
    request.state.reason = shown.reason
    return json_response(shown.body, shown.status, shown.headers)


async def _no_such_route(request: HttpRequest, error: HTTPException) -> Response:
    messages = {404: _routes_instead(request), 405: _methods_instead(request, error)}
    message = messages.get(error.status_code, error.detail)
    return await _error(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


def _methods_instead(request: HttpRequest, error: HTTPException) -> str:
    allowed = sorted({*(error.headers or {}).get("Allow", "").split(", ")} - {"", "HEAD"})
    hint = f"; it takes {' and '.join(allowed)}" if allowed else ""
    return f"this route does not take {request.method}{hint}"


def _routes_instead(request: HttpRequest) -> str:
    """Say that there is no such route, and which there are. The guard has let the caller in: nothing is revealed."""
    paths = sorted({route.path for route in request.app.routes if isinstance(route, Route)})
    given = "/" + request.url.path.strip("/")
    versioned = f"/v1{given}"
    near = [versioned] if versioned in paths else difflib.get_close_matches(given, paths, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    if near == [versioned]:
        hint += " The base URL of a client ends in /v1"
    return f"there is no such route{hint}; there are {', '.join(paths)}"
