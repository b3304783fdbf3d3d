"""The file of a recording: lines of JSON in gzip, each line one record (docs/recording.md has them all).

The first is the header. Written in blocks, so that a process that dies loses a second at most; read piece by piece, so
that no file, however it was made, takes more memory than one line may have.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.field_error import FieldError

FORMAT, VERSION = "quire recording", 1
BLOCK_BYTES = 1 << 18
MAX_LINE_BYTES = 1 << 24
MAX_FILE_BYTES = 1 << 32
"""A recording ends here: nobody looks at it for weeks, and the disk has other uses."""
GZIP = 31

Record = list[Any]
"""A word that says what happened, and what belongs to it."""

_log = logging.getLogger("quire")
_encode = json.JSONEncoder(separators=(",", ":")).encode


class RecordingError(ValueError):
    """A file that is no recording, or not a whole one."""


class RecordingWriter:
    """Appends records. What the disk refuses ends the recording, never the engine."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise FieldError(f"record={path!r} is there already: name another file", field="record") from None
        except OSError as error:
            raise FieldError(f"record={path!r} cannot be written: {error.strerror}", field="record") from None
        self._zip = zlib.compressobj(level=1, wbits=GZIP)
        self._lines: list[str] = []
        self._num_waiting = self._num_written = 0
        self.is_open = True

    def write(self, record: Record | dict[str, Any]) -> None:
        """Append a record; it is in the file once its block is full, or at the next `flush`."""
        line = _encode(record)
        self._lines.append(line)
        self._num_waiting += len(line) + 1
        if self._num_waiting >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what has been written to the system."""
        if self._lines and self.is_open:
            text = "\n".join(self._lines) + "\n"
            self._put(self._zip.compress(text.encode()) + self._zip.flush(zlib.Z_SYNC_FLUSH))
        self._lines, self._num_waiting = [], 0

    def close(self) -> None:
        """End the file; a second time does nothing."""
        self.flush()
        if self.is_open:
            self._put(self._zip.flush())
        if self.is_open:
            self._end()

    def _put(self, data: bytes) -> None:
        try:
            self._num_written += len(data)
            while data:
                data = data[os.write(self._file, data) :]
            if self._num_written >= MAX_FILE_BYTES:
                _log.warning(f"the recording has {self._num_written:,} bytes and ends here")
                self._end()
        except OSError as error:
            _log.warning(f"the recording ends here: {error.strerror}")
            self._end()

    def _end(self) -> None:
        self.is_open = False
        os.close(self._file)


def read_records(path: Path) -> tuple[dict[str, Any], Iterator[Record]]:
    """The header of a file, and what gives every other record. RecordingError at the end of what can be read."""
    values = _values(path)
    header = next(values, None)
    if not isinstance(header, dict):
        raise RecordingError(f"{path.name} has no header")
    return header, _records(path, values)


def _records(path: Path, values: Iterator[Any]) -> Iterator[Record]:
    for number, value in enumerate(values, 2):
        if not isinstance(value, list) or not value:
            raise RecordingError(f"{path.name}, line {number} is no record")
        yield value


def _values(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path), 1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            raise RecordingError(f"{path.name}, line {number} is not JSON: {line[:40]!r}") from None


def _lines(path: Path) -> Iterator[bytes]:
    unzip, rest = zlib.decompressobj(wbits=GZIP), b""
    try:
        with open(path, "rb") as file:
            while not unzip.eof:
                data = unzip.unconsumed_tail or file.read(BLOCK_BYTES)
                if not data:
                    raise RecordingError(
                        f"{path.name} is torn: it ends in the middle of a block. Its process was killed, or still runs"
                    )
                *lines, rest = (rest + unzip.decompress(data, BLOCK_BYTES)).split(b"\n")
                yield from lines
                if len(rest) > MAX_LINE_BYTES:
                    raise RecordingError(f"{path.name} has a line of more than {MAX_LINE_BYTES:,} bytes")
            if rest or unzip.unused_data or file.read(1):
                raise RecordingError(f"{path.name} goes on behind its end")
    except zlib.error:
        raise RecordingError(f"{path.name} is no recording, or damaged: it is not gzip all through") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
