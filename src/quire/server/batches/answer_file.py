"""The output of a batch: a file that answers are appended to, and from which a later run goes on."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.server.batches.answer import Answer
from quire.server.batches.lines import Line, answer_id


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

    def skip_answered(self, lines: Iterator[Line]) -> None:
        """Take from `lines` those that an earlier run has answered, and cut off what a crash left of the next answer.

        ValueError if an answer is not that of its line: the file was made from something else, and stays as it is.
        """
        self._file.seek(0)
        for raw in self._file:
            try:
                answered = msgspec.json.decode(raw, type=_Answered)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
            if not raw.endswith(b"\n"):
                break
            line = next(lines, None)
            if line is None or answered.id != answer_id(line):
                raise ValueError(
                    f"line {self.num_answered + 1} of {self._path} is not the answer to its line of the input with "
                    "this model and these flags: use the same ones to go on, or give another name"
                )
            self.num_answered += 1
            self.num_failed += answered.error is not None
            self.num_bytes += len(raw)
        self._file.truncate(self.num_bytes)
        self.sync()

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
