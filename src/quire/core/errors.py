"""The errors of the host column. None of them is an `assert`: they hold under `python -O` too."""


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


class RequestError(ValueError):
    """A request that can never run, refused before it is admitted."""
