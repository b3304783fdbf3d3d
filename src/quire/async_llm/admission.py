"""Bounds the queue: requests are counted when they arrive, before they have cost anything.

A request waits from its arrival until its first sequence has a row. How many may wait, and how many tokens they may ask
for together, is bounded; beyond that a client gets a time to try again, when those that now wait will have begun, as
far as the time that the last ones kept their rows tells.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.async_llm.errors import OverloadError

LONGEST_RETRY_S = 120
"""What clients of OpenAI obey at most."""
RECENT = 64
"""Requests that have ended and are remembered: how long they ran tells how long the next ones will."""


class Work(NamedTuple):
    """The work of one request of the engine."""

    request_id: str
    num_sequences: int
    num_tokens: int
    """Of the prompt and of all sequences, at most."""


class _Counted(NamedTuple):
    work: Work
    since: float
    """When it arrived, or began to run."""


class Admission:
    """Counts the requests that wait and run, and refuses those beyond the limits. For one thread at a time."""

    def __init__(
        self,
        *,
        max_requests: float = math.inf,
        max_tokens: float = math.inf,
        num_rows: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_requests = max_requests
        """Requests that may wait."""
        self.max_tokens = max_tokens
        """Tokens that the requests which wait may come to together."""
        self.num_rows = num_rows
        """Sequences that run at once: as long as some are free, nobody is refused."""
        self.num_rejected = 0
        self._clock = clock
        self._waiting: dict[str, _Counted] = {}  # the oldest first
        self._running: dict[str, _Counted] = {}
        self._num_tokens = self._num_sequences = 0
        self._seconds_run: deque[float] = deque(maxlen=RECENT)

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting requests may come to, prompts and generated ones."""
        return self._num_tokens

    def check_room(self) -> None:
        """Raise OverloadError if not even an empty request would be taken; called before a prompt is encoded."""
        if self._num_sequences >= self.num_rows and len(self._waiting) >= self.max_requests:
            self._reject(f"{len(self._waiting)} requests wait, at most {self.max_requests} may")

    @property
    def room(self) -> float:
        """How many requests of one sequence would be taken now, if they are short."""
        return max(self.num_rows - self._num_sequences, self.max_requests - len(self._waiting), 0)

    def arrive(self, works: Sequence[Work], *, is_admitted: bool = False) -> None:
        """Count the requests that a client makes at once, or raise OverloadError.

        Those that are admitted follow earlier ones of the same client that have ended, and are not refused.
        """
        num_tokens = sum(work.num_tokens for work in works)
        has_free_rows = self._num_sequences + sum(work.num_sequences for work in works) <= self.num_rows
        # What is larger than the whole queue waits alone: else it would never be taken.
        if self._waiting and not has_free_rows and not is_admitted:
            if len(self._waiting) + len(works) > self.max_requests:
                self._reject(f"{len(self._waiting)} requests wait, at most {self.max_requests} may")
            if self._num_tokens + num_tokens > self.max_tokens:
                self._reject(
                    f"{self._num_tokens:,} tokens wait and this may come to {num_tokens:,} more; at most "
                    f"{self.max_tokens:,} may wait"
                )
        for work in works:
            self._waiting[work.request_id] = _Counted(work, self._clock())
            self._num_sequences += work.num_sequences
        self._num_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """A request has a row."""
        work = self._end_wait(request_id)
        if work:
            self._running[request_id] = _Counted(work, self._clock())

    def leave(self, request_id: str) -> None:
        """A request has ended, perhaps without ever having had a row."""
        if request_id in self._running:
            work, since = self._running.pop(request_id)
            self._seconds_run.append(self._clock() - since)
        else:
            work = self._end_wait(request_id)
        if work:
            self._num_sequences -= work.num_sequences

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until those that wait now will have begun, if they run as long as the last ones did."""
        now, seconds = self._clock(), 0.0
        if self._running:
            # Those that run now may already have run for longer than those that ended.
            runs = [self._seconds_run, [now - running.since for running in self._running.values()]]
            seconds = max(statistics.fmean(run) for run in runs if run) * len(self._waiting) / len(self._running)
        elif self._waiting:
            seconds = now - next(iter(self._waiting.values())).since  # at least as long again
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY_S)

    def _reject(self, message: str) -> None:
        self.num_rejected += 1
        raise OverloadError(f"the engine is busy: {message}", self.retry_after_s)

    def _end_wait(self, request_id: str) -> Work | None:
        if request_id not in self._waiting:
            return None
        work = self._waiting.pop(request_id).work
        self._num_tokens -= work.num_tokens
        return work
