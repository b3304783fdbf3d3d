"""What is kept of each request when it has ended, over HTTP and gRPC: a line in the access log, and counts."""

import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any, Literal

from quire.server.errors import ApiError
from quire.server.keys import Caller

REQUEST_ID = "x-request-id"
"""Header and gRPC metadata with the request's id, of requests and responses."""
_ID = re.compile(r"[!-~]{1,128}")
Count = Callable[[str, str, str, str | None, str], None]
"""Called with the kind of a request ("http" or "grpc"), its route, status, the error's code and the key's label."""

_log = logging.getLogger("quire.access")


class AccessLog:
    """Logs and counts requests as they end."""

    def __init__(self, level: str = "all", count: Count | None = None) -> None:
        """`level`, "all", "errors" or "off", says which requests have a line; all are counted."""
        self._level = level
        self._count = count

    def end(
        self, kind: Literal["http", "grpc"], start: float, route: str, status: int | str, reason: str | None,
        caller: Caller, **extra: Any,
    ) -> None:  # fmt: skip
        """Log and count a request that began at `start`, on the clock of `time.perf_counter`."""
        if self._count:
            self._count(kind, route, str(status), reason, caller.name)
        if self._level == "all" or (self._level == "errors" and reason):
            fields = {"route": route, "status": status, "reason": reason}
            fields["ms"] = round((time.perf_counter() - start) * 1e3, 1)
            event = "request" if kind == "http" else "call"
            _log.info(event, extra=fields | extra | {"request_id": caller.request_id, "key": caller.name or None})


def new_request_id() -> str:
    """Return an id for a request that came without one."""
    return uuid.uuid4().hex


def is_request_id(given: str) -> bool:
    """Return True if this can be the id of a request."""
    return _ID.fullmatch(given) is not None


def checked_request_id(given: str) -> str:
    """Return the id that a client gave its request; raise ApiError if it cannot be one."""
    if not is_request_id(given):
        message = f"{REQUEST_ID} must be 1 to 128 printable ASCII characters without spaces; it has {len(given):,}"
        raise ApiError(400, message, param=REQUEST_ID, code="invalid_request_id")
    return given
