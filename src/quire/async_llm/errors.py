"""The errors of requests that are refused, or that cannot be finished. A request that is wrong is a RequestError."""

import errno
import logging
import traceback
from collections.abc import Callable
from pathlib import Path

_log = logging.getLogger("quire.async_llm")


class GenerationError(Exception):
    """A request that was taken cannot be finished. Where a step of the engine failed, `__cause__` is its error."""

    def __init__(self, message: str, reason: str = "error") -> None:
        super().__init__(message)
        self.reason = reason
        """"error", "not_finite", "cancelled", "deadline" or "unavailable"."""


class DeadlineError(GenerationError, TimeoutError):
    """The time that a request was given is over."""

    def __init__(self, message: str = "the request's time is over") -> None:
        super().__init__(message, "deadline")


class UnavailableError(GenerationError):
    """The engine takes no requests, or has given up those it had: it loads, drains, is closed or does not respond."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "unavailable")


class OverloadError(Exception):
    """Too much waits already; the request may be sent again after `retry_after_s` seconds."""

    def __init__(
        self, message: str, retry_after_s: int, code: str = "overloaded", *, reason: str | None = None
    ) -> None:
        """`reason` names the limit in logs and metrics, if `code` does not."""
        super().__init__(message)
        self.reason = reason or code
        self.retry_after_s = retry_after_s
        self.code = code
        """"overloaded", or the limit of a key: "key_requests", "key_queued_tokens" or "key_tokens_per_minute"."""


def notify(call: Callable[..., object], *args: object) -> None:
    """Call an observer and log what it raises: no request and no step depends on an observer."""
    try:
        call(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _log.error("an observer failed", extra=described(error))


def described(error: BaseException) -> dict[str, str]:
    """Return fields for a log line about an error. Its message is left out, because it may quote a request."""
    fields = {"error": type(error).__name__, "location": _location(error)}
    if isinstance(error, OSError) and error.errno is not None:
        fields["errno"] = errno.errorcode.get(error.errno, str(error.errno))
    return fields


def _location(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])
