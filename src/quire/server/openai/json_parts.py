"""JSON of large responses in parts. A value that several choices have is encoded once; each choice refers to its bytes.

Joined, the parts are what msgspec makes of the whole response. Only the shared values are never joined: n choices that
repeat a prompt of 100 kB need 100 kB, not n times as many.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

CHUNK_BYTES = 1 << 16
"""Size of the chunks in which a large response is sent."""
MIN_PART_BYTES = 512
"""Shorter parts are copied: a reference and an object of its own would take as much."""


class JsonParts:
    """JSON of one value as several pieces of bytes, which other values may have, too."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[bytes]) -> None:
        self.parts = tuple(parts)

    @classmethod
    def of_object(cls, members: Mapping[str, Any]) -> "JsonParts":
        """Return the JSON of an object, some of whose members are `JsonParts`; the others are encoded as a whole."""
        return cls(_parts_of_object(members))


def _joined(value: Any) -> msgspec.Raw:
    if not isinstance(value, JsonParts):
        raise NotImplementedError(f"{type(value).__name__} has no JSON")
    return msgspec.Raw(b"".join(value.parts))


encode = msgspec.json.Encoder(enc_hook=_joined).encode
"""Return a value as JSON; `JsonParts` anywhere in it are joined."""


def parts_of(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in parts. Only the value itself and the members of a dict may be `JsonParts`."""
    if isinstance(value, JsonParts):
        yield from value.parts
    elif isinstance(value, dict) and any(isinstance(member, JsonParts) for member in value.values()):
        yield from _parts_of_object(value)
    else:
        yield encode(value)


def _parts_of_object(members: Mapping[str, Any]) -> Iterator[bytes]:
    before = b"{"
    for name, member in members.items():
        yield before + encode(name) + b":"
        if isinstance(member, JsonParts):
            yield from member.parts
        else:
            yield encode(member)
        before = b","
    yield b"}" if members else b"{}"


class JsonBody:
    """The body of a response: parts that are kept as they are if they are long, and joined with others if not."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts: list[bytes] = []
        short = bytearray()
        for part in parts:
            is_long = len(part) >= MIN_PART_BYTES
            if not is_long:
                short += part
            if is_long or len(short) >= CHUNK_BYTES:
                self._parts.append(bytes(short))
                short.clear()
            if is_long:
                self._parts.append(part)
        self._parts.append(bytes(short))
        self.num_bytes = sum(map(len, self._parts))

    def chunks(self) -> Iterator[bytes]:
        """Yield the body in chunks of `CHUNK_BYTES`; the last may be shorter."""
        chunk = bytearray()
        for part in self._parts:
            start = 0
            while start < len(part):
                taken = part[start : start + CHUNK_BYTES - len(chunk)]
                start += len(taken)
                chunk += taken
                if len(chunk) == CHUNK_BYTES:
                    yield bytes(chunk)
                    chunk.clear()
        if chunk:
            yield bytes(chunk)
