"""The lines of a batch: how they are read, and what their answers are called."""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta

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


class DuplicateIdError(ValueError):
    """Two lines have the same `custom_id`, so that their answers could not be told apart."""

    def __init__(self, name: str, line: int, first_line: int) -> None:
        super().__init__(
            f"line {line} repeats custom_id {name!r} of line {first_line}; give every line its own custom_id"
        )
        self.line = line
        """Number of the line that repeats the id."""


class _Named(msgspec.Struct):
    custom_id: Annotated[str, Meta(max_length=512)] | None = None


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


def custom_id(line: Line) -> str | None:
    """Return the `custom_id` of a line, or `None` if the line has none that can be read."""
    try:
        return None if line.raw is None else msgspec.json.decode(line.raw, type=_Named).custom_id
    except (msgspec.MsgspecError, RecursionError):
        return None


def check_ids(lines: Callable[[], Iterator[Line]]) -> None:
    """Raise `DuplicateIdError` if two lines have the same `custom_id`. `lines` is called once, or twice.

    The first pass keeps 8 bytes of each line, the hash of its id. The second compares the ids whose hashes repeat.
    """
    hashes = np.array(array("q", (hash(name) for line in lines() if (name := custom_id(line)))), np.int64)
    hashes.sort()
    repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    numbers: dict[str, int] = {}
    for line in lines() if repeated else ():
        if (name := custom_id(line)) and hash(name) in repeated and numbers.setdefault(name, line.number) < line.number:
            raise DuplicateIdError(name, line.number, numbers[name])


def answer_id(line: Line) -> str:
    """What the answer to a line is called."""
    return f"{ANSWER_PREFIX}{line.digest}"


def _hash(batch: str, number: int, text: bytes) -> "hashlib._Hash":
    hashed = hashlib.sha256(f"{batch}\0{number}\0".encode())
    hashed.update(text)
    return hashed


def _digest(hashed: "hashlib._Hash") -> str:
    return hashed.hexdigest()[:32]
