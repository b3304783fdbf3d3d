"""Which web pages may use the server from a browser, and the headers that tell a browser so (CORS).

Never with credentials: a browser sends no cookie along, and a page that has a key sends it itself.
"""

from collections.abc import Mapping, Sequence

from quire.server.access import REQUEST_ID
from quire.server.openai.request_body import HEADER as IGNORED_FIELDS

HeaderList = list[tuple[bytes, bytes]]

EXPOSED = ("retry-after", REQUEST_ID, IGNORED_FIELDS)
"""Headers of responses that a page may read, beside those that it always may."""
PREFLIGHT: HeaderList = [
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b"authorization, content-type, *"),  # * does not stand for authorization
    (b"access-control-max-age", b"600"),
]


class AllowedOrigins:
    """The origins of `--allow-origin`."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def __contains__(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins

    def headers(self, headers: Mapping[str, str]) -> HeaderList:
        """What to add to the response of a request; nothing unless it comes from a page that may ask."""
        origin = headers.get("origin")
        if origin is None or origin not in self:
            return []
        shown = "*" if "*" in self._origins else origin
        return [
            (b"access-control-allow-origin", shown.encode("latin-1")),
            (b"access-control-expose-headers", ", ".join(EXPOSED).encode()),
            (b"vary", b"origin"),
        ]

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Whether a browser asks if a page may ask, and it may. Such a question comes without a key."""
        is_asked = method == "OPTIONS" and "access-control-request-method" in headers
        return is_asked and headers.get("origin", "") in self
