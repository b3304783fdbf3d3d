"""Logs on standard error: one JSON object per line, whose schema is `LogLine`.

A line never holds a prompt, a generated text, a key or the message of an error, which may quote a request.
"""

import contextlib
import io
import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.async_llm.errors import described

TIME = r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z$"
ACCESS_FIELDS = ("request_id", "key", "route", "status", "reason", "ms")
"""Fields of every line of the access log, whose event is `request` (HTTP) or `call` (gRPC)."""
Count = Annotated[int, Meta(ge=0)]


class LogLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of a line. A field is there if the event has it; the first four always are."""

    time: Annotated[str, Meta(description="when it was logged, in UTC, to the millisecond", pattern=TIME)]
    level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"], Meta(description="severity of the event")
    ]
    logger: Annotated[str, Meta(description="part of Quire, or library, that logged it")]
    event: Annotated[str, Meta(description="what happened, in words that stay the same")]
    request_id: Annotated[str, Meta(description="the request's `x-request-id`", max_length=128)] | UnsetType = UNSET
    key: Annotated[str | None, Meta(description="label of the API key; null without a valid one")] | UnsetType = UNSET
    method: Annotated[str, Meta(description="HTTP method")] | UnsetType = UNSET
    route: Annotated[str, Meta(description="route or gRPC method; `none` for a path without a route")] | UnsetType = (
        UNSET
    )
    status: Annotated[int | str, Meta(description="HTTP status, or gRPC status by name")] | UnsetType = UNSET
    reason: (
        Annotated[str | None, Meta(description="code of the error that the client got; null without one")] | UnsetType
    ) = UNSET
    ms: Annotated[float, Meta(description="milliseconds from the request's head to its end", ge=0)] | UnsetType = UNSET
    error: Annotated[str, Meta(description="type of an exception")] | UnsetType = UNSET
    location: Annotated[str, Meta(description="files and lines where the exception was raised")] | UnsetType = UNSET
    errno: Annotated[str, Meta(description="name of the system's error, such as `ENOSPC`")] | UnsetType = UNSET
    detail: (
        Annotated[str, Meta(description="the event as a sentence, in lines about the server's life")] | UnsetType
    ) = UNSET
    url: Annotated[str, Meta(description="address that the server listens on")] | UnsetType = UNSET
    grpc: Annotated[str, Meta(description="address of the gRPC port")] | UnsetType = UNSET
    model: Annotated[str, Meta(description="the served model's name")] | UnsetType = UNSET
    keys: Annotated[Count, Meta(description="number of keys")] | UnsetType = UNSET
    field: Annotated[str, Meta(description="field of a request")] | UnsetType = UNSET
    file: Annotated[str, Meta(description="name of a file, without its folder")] | UnsetType = UNSET
    engine: Annotated[Count, Meta(description="number of an engine, from 0")] | UnsetType = UNSET
    request_ids: (
        Annotated[list[str], Meta(description="ids of the first requests concerned", max_length=8)] | UnsetType
    ) = UNSET
    requests: Annotated[Count, Meta(description="number of requests concerned")] | UnsetType = UNSET
    pages: Annotated[Count, Meta(description="number of pages concerned")] | UnsetType = UNSET
    limit: Annotated[Count, Meta(description="what the system allows")] | UnsetType = UNSET
    needed: Annotated[Count, Meta(description="what the configuration needs")] | UnsetType = UNSET
    is_sound: Annotated[bool, Meta(description="result of an audit")] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.event in ("request", "call"):
            for name in ACCESS_FIELDS:
                if getattr(self, name) is UNSET:
                    raise ValueError(f"event {self.event!r} lacks the field {name!r}")


BASE = ("time", "level", "logger", "event")
_EXTRA = frozenset(LogLine.__struct_fields__) - frozenset(BASE)


_state: ContextVar[Mapping[str, Any]] = ContextVar("state", default=MappingProxyType({}))


def log_for(state: Mapping[str, Any]) -> None:
    """Have lines logged by this task, and by tasks that it starts, name the request and key of `state["caller"]`."""
    _state.set(state)


def read_line(line: str | bytes) -> LogLine:
    """Return a line as a struct; raise msgspec.ValidationError if it does not have the schema."""
    return msgspec.json.decode(line, type=LogLine)


class JsonLines(logging.Formatter):
    """Formats a record, with those of its extra fields that the schema has, as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {}
        if caller := _state.get().get("caller"):
            line = {"request_id": caller.request_id} if caller.request_id else {}
            line["key"] = caller.name or None
        line |= {name: value for name, value in vars(record).items() if name in _EXTRA}
        if record.exc_info and record.exc_info[1]:
            line |= described(record.exc_info[1])
        base = (f"{at}.{int(record.msecs):03d}Z", record.levelname.lower(), record.name, record.getMessage())
        return json.dumps(dict(zip(BASE, base, strict=True)) | line, default=str)


def set_up_logs() -> None:
    """Send all logs to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a log that cannot be written is not reported to the log
    threading.excepthook = _log_thread_error


def printed_as_log() -> contextlib.AbstractContextManager[Any]:
    """Make lines of the log of what is printed to standard error, unless that is a terminal."""
    return contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(_LoggedLines())


class _LoggedLines(io.TextIOBase):
    """A text stream that logs each line written to it."""

    def __init__(self) -> None:
        self._rest = ""

    def fileno(self) -> int:
        """For processes that inherit standard error."""
        return sys.__stderr__.fileno() if sys.__stderr__ else super().fileno()

    def write(self, text: str, /) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            logging.getLogger("quire.server").info("printed", extra={"detail": line.removeprefix("quire: ")})
        return len(text)


def announce(event: str, detail: str, **fields: Any) -> None:
    """Report an event of the server's life: as a sentence to a person at a terminal, else as a line of the log."""
    if sys.stderr.isatty():
        print(f"quire: {detail}", file=sys.stderr, flush=True)
    else:
        logging.getLogger("quire.server").info(event, extra={"detail": detail} | fields)


def _log_thread_error(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        logging.getLogger("quire.server").critical("a thread failed", extra=described(failed.exc_value))
