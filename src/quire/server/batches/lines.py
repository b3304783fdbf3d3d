"""The lines of a batch: how they are read, and what their answers are called."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 8 << 20
"""Of one request, as much as a server takes over HTTP. Of a longer line no more than this is ever in memory."""
ANSWER_PREFIX = "batch_req_"
"""Of what answers are called."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input."""

    number: int
    """Its place in the file, from 1 on; empty lines count."""
    raw: bytes | None
    """None if it is longer than `MAX_LINE_BYTES`."""
    digest: str
    """Follows from the batch, the number and the text: the same line has the same ids and seed whenever it runs."""


def read_lines(file: BinaryIO, batch: str) -> Iterator[Line]:
    """The lines of a file that are not empty; `batch` names what else their answers depend on."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if not raw.endswith(b"\n") and len(raw) > MAX_LINE_BYTES:
            hashed = _hash(batch, number, raw)
            while rest := file.readline(MAX_LINE_BYTES):
                hashed.update(rest)
                if rest.endswith(b"\n"):
                    break
            yield Line(number, None, _digest(hashed))
        elif text := raw.strip():
            yield line_of(text, number, batch)


def line_of(text: bytes, number: int, batch: str) -> Line:
    """A line, made from its text."""
    return Line(number, text, _digest(_hash(batch, number, text)))


def count_lines(file: BinaryIO) -> int:
    """How many lines `read_lines` has of a file."""
    return sum(1 for _ in read_lines(file, ""))


def answer_id(line: Line) -> str:
    """What the answer to a line is called."""
    return f"{ANSWER_PREFIX}{line.digest}"


def _hash(batch: str, number: int, text: bytes) -> "hashlib._Hash":
    hashed = hashlib.sha256(f"{batch}\0{number}\0".encode())
    hashed.update(text)
    return hashed


def _digest(hashed: "hashlib._Hash") -> str:
    return hashed.hexdigest()[:32]
