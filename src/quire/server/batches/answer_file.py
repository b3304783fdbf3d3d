"""The output of a batch: a file that answers are appended to, and from which a later run goes on."""

import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.server.batches.answer import Answer
from quire.server.batches.lines import ANSWER_PREFIX, Line, answer_id

BEGINNING = f'{{"id":"{ANSWER_PREFIX}'.encode()
"""How every answer begins."""


class _Answered(msgspec.Struct):
    """What is read again of an answer."""

    id: str
    error: Any


class AnswerFile:
    """Answers in the order of their lines, each whole or, after a crash, not there. One process has it at a time."""

    def __init__(self, path: Path) -> None:
        """Open a file, or create it; ValueError if it cannot be, or somebody else writes it."""
        self.num_answered = self.num_failed = self.num_bytes = 0
        """Answers in the file, those among them that are errors, and the bytes of all."""
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ValueError(f"{path} is being written by another process; wait for it, or give another name") from None
        self._path = path

    def skip_answered(self, lines: Iterator[Line], *, is_own: bool = False) -> None:
        """Take from `lines` those that an earlier run has answered, and cut off what a crash left of the next answer.

        ValueError if an answer is not that of its line, or what would be cut off is more than that: the file was made
        from something else or by somebody else, and stays as it is. `is_own` says that nobody else can have written it;
        then what cannot be read is cut off with all that follows.
        """
        self._file.seek(0)
        for raw in self._file:
            answered = _read(raw)
            if answered is None:
                if not is_own:
                    self._check_torn(raw)
                break
            line = next(lines, None)
            if line is None or answered.id != answer_id(line):
                raise self._foreign()
            self.num_answered += 1
            self.num_failed += answered.error is not None
            self.num_bytes += len(raw)
        self._file.truncate(self.num_bytes)
        self.sync()

    def _check_torn(self, raw: bytes) -> None:
        """ValueError unless a line that is no answer, and all after it, can be what a crash left of the last ones."""
        for each in itertools.chain([raw], self._file):
            if _read(each):
                number = self.num_answered + 1
                raise ValueError(
                    f"line {number} of {self._path} is damaged, and answers follow it: remove the lines from {number} "
                    "on to have them answered again, or give another name"
                )
            if each.strip(b"\0\n") and not each.startswith(BEGINNING) and not BEGINNING.startswith(each):
                raise self._foreign()

    def _foreign(self) -> ValueError:
        return ValueError(
            f"line {self.num_answered + 1} of {self._path} is not the answer to its line of the input with "
            "this model and these flags: use the same ones to go on, or give another name"
        )

    def write(self, answer: Answer) -> None:
        """Append an answer."""
        self._file.write(answer.content)
        self._file.flush()
        self.num_answered += 1
        self.num_failed += answer.is_error
        self.num_bytes += len(answer.content)

    def sync(self) -> None:
        """Have what was written so far on the disk; any thread may call this."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others have the file."""
        self._file.close()


def _read(raw: bytes) -> _Answered | None:
    """A line of the file; None if it is not a whole answer."""
    try:
        return msgspec.json.decode(raw, type=_Answered) if raw.endswith(b"\n") else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
