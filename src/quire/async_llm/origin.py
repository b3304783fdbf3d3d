"""Where a request of the engine came from, for logs, traces and metrics. The engine itself reads none of it."""

from typing import NamedTuple


class Origin(NamedTuple):
    """The client's request that an engine's request is a part of."""

    request_id: str = ""
    """Id of the client's request: one of these may be several requests of the engine. Clients may choose it."""
    key: str = ""
    """Label of the API key; empty without one."""
    traceparent: str | None = None
    """The trace that the client's request is a part of, in the format of the W3C header."""
