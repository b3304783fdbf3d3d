"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`."""

import logging
import re
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from quire.async_llm.errors import GenerationError, OverloadError, UnavailableError, described
from quire.core.errors import RequestError
from quire.field_error import FieldError

_log = logging.getLogger("quire.server")

MAX_MESSAGE_LEN = 1000
"""Characters; a longer one quotes too much of the request."""
STATUS_OF_REASON = {"unavailable": 503, "deadline": 408, "cancelled": 499, "error": 500, "not_finite": 500}
# msgspec tells the path of a wrong value nowhere but in its message.
_PATH = re.compile(r" - at (`key` in )?`(?:key in )?\$\.?([^`]*)`$")


class ApiError(Exception):
    """An error response: its HTTP status, and what OpenAI's clients read in its body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        """`reason` is logged and counted, where the code that clients know says less."""
        super().__init__(message)
        self._reason = reason
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def reason(self) -> str:
        """What is logged and counted: without a reason of its own the code, or the type where there is none."""
        return self._reason or self.code or self.body["error"]["type"]

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message, param = _shortened(self.message), self.param and _shortened(self.param)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """The response for an error. It has no path, no prompt and nothing else of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, msgspec.ValidationError):
        return _invalid(str(error))
    if isinstance(error, msgspec.DecodeError):
        return ApiError(400, f"the body is not JSON: {error}", code="invalid_json")
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, f"the body is not UTF-8: {error.reason}", code="invalid_json")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", code="invalid_json")
    if isinstance(error, ClientDisconnect):
        return ApiError(499, "the client is gone", code="cancelled")
    if isinstance(error, OverloadError):
        headers = {"Retry-After": str(error.retry_after_s)}
        return ApiError(429, str(error), code=error.code, headers=headers, reason=error.reason)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), code="unavailable", headers={"Retry-After": "5"})
    if isinstance(error, GenerationError):
        # What was too slow once would be again: clients of OpenAI obey this and do not send it twice more.
        headers = {"x-should-retry": "false"} if error.reason in ("deadline", "not_finite") else {}
        status = STATUS_OF_REASON[error.reason]
        return ApiError(status, str(error), code=error.reason, headers=headers)
    if isinstance(error, FieldError):
        message = error.message if isinstance(error, RequestError) else str(error)  # clients know no id of ours
        return ApiError(400, message, param=error.field, code=error.code)
    if isinstance(error, ValueError):
        return ApiError(400, str(error), code="invalid_value")
    _log.error("internal error", extra=described(error))
    return ApiError(500, "internal error", code="internal")


def in_words_of(prompt_field: str, error: FieldError) -> ApiError:
    """The response for an error of the engine, whose prompt may have come in a field of another name."""
    shown = as_api_error(error)
    if shown.param == "prompt":
        shown.param = prompt_field
    return shown


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + "..."


def _invalid(message: str) -> ApiError:
    """The response for a field of the wrong type, out of its range, missing or unknown."""
    path = _PATH.search(message)
    param = path[2] if path else None
    text = _PATH.sub("", message)
    if path and path[1]:
        return ApiError(400, f"a key of {param}: {text}", param=param, code="invalid_value")
    if unknown := re.search(r"unknown field `([^`]*)`", text):
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        return ApiError(400, f"unknown field {param!r}", param=param, code="unknown_field")
    if missing := re.search(r"missing required field `([^`]*)`", text):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(400, f"field {param!r} is missing", param=param, code="missing_field")
    text = re.sub(r"^Invalid (?:enum )?value (.*)$", r"\1 is not allowed", text, flags=re.DOTALL)
    return ApiError(400, f"{param}: {text}" if param else text, param=param, code="invalid_value")
