"""The errors of the host column. None of them is an `assert`: they hold under `python -O` too."""

from quire.field_error import FieldError


class PageError(RuntimeError):
    """A page was used in a way that only a bug in Quire can cause."""


class DoubleFreeError(PageError):
    """A page was released more often than it was held."""


class ForeignPageError(PageError):
    """A page id that this pool does not have."""


class OutOfPagesError(PageError):
    """The pool has fewer free pages than asked for. Device memory and kernel scratch are other errors."""


class AuditError(RuntimeError):
    """An invariant of page ownership is broken; the message names the page or sequence."""


class StateError(RuntimeError):
    """A sequence was moved between two states that have no path between them."""


class RequestError(FieldError):
    """A request that can never run, refused before it is admitted; `field` and `code` say why to a program."""

    def __init__(
        self, message: str, *, field: str | None = None, code: str = "invalid_value", request_id: str | None = None
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.message = message
        """Why the request is refused, without its id."""
        self.request_id = request_id

    def __str__(self) -> str:
        return self.message if self.request_id is None else f"request {self.request_id}: {self.message}"
