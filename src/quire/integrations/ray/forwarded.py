"""What travels between an ingress and an engine: an HTTP request as plain bytes, and what routing needs of it.

Ray pickles it between processes of one application; nothing in it is an object that a client made.
"""

from typing import NamedTuple

NAME_BYTES = 8
"""Of a page's hash: enough to tell pages apart, and if it ever is not, a request goes to the wrong engine."""


class ForwardedRequest(NamedTuple):
    """One request of a client."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    page_names: tuple[bytes, ...] = ()
    """The first `NAME_BYTES` of the hash of each full page of its prompt; none if nobody could tell."""
    num_tokens: int = 0
    """What it may come to, prompt and generated tokens."""


class ResponseStart(NamedTuple):
    """The head of a response; its body follows in pieces."""

    status: int
    headers: list[tuple[bytes, bytes]]
