"""Bounds the queue: requests are counted when they arrive, before they have cost anything.

A request waits from its arrival until its first sequence has a row. How many may wait, and how many tokens they may ask
for together, is bounded; beyond that a client gets a time to try again, when those that now wait will have begun, as
far as the pace of the last ones tells.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

LONGEST_RETRY_S = 120
"""What clients of OpenAI obey at most."""
RECENT = 64
"""Beginnings that are remembered: their rate is the service's."""
STALE_S = 60.0


class UnavailableError(Exception):
    """The server takes no requests: it starts, drains, or its engine is gone."""


class OverloadError(Exception):
    """Too much waits already; the client may try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Work(NamedTuple):
    """The work of one request of the engine."""

    request_id: str
    num_sequences: int
    num_tokens: int
    """Of the prompt and of all sequences, at most."""


class Admission:
    """Counts the requests that wait and run, and refuses those beyond the limits. For one thread."""

    def __init__(
        self, *, max_requests: int, max_tokens: int, num_rows: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_rows = num_rows
        """Sequences that run at once: as long as some are free, nobody is refused."""
        self.num_rejected = 0
        self._clock = clock
        self._waiting: dict[str, Work] = {}
        self._running: dict[str, Work] = {}
        self._num_tokens = self._num_sequences = 0
        # Only time in which somebody waits tells how fast those that wait begin.
        self._waited_s, self._waiting_since = 0.0, 0.0
        self._begun: deque[float] = deque(maxlen=RECENT)

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

    def arrive(self, works: Sequence[Work]) -> None:
        """Count the requests that a client makes at once, or raise OverloadError."""
        num_tokens = sum(work.num_tokens for work in works)
        has_free_rows = self._num_sequences + sum(work.num_sequences for work in works) <= self.num_rows
        # What is larger than the whole queue waits alone: else it would never be taken.
        if self._waiting and not has_free_rows:
            if len(self._waiting) + len(works) > self.max_requests:
                self._reject(f"{len(self._waiting)} requests wait, at most {self.max_requests} may")
            if self._num_tokens + num_tokens > self.max_tokens:
                self._reject(
                    f"{self._num_tokens:,} tokens wait and this may come to {num_tokens:,} more; at most "
                    f"{self.max_tokens:,} may wait"
                )
        if not self._waiting:
            self._waiting_since = self._clock()
        for work in works:
            self._waiting[work.request_id] = work
            self._num_sequences += work.num_sequences
        self._num_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """A request has a row."""
        work = self._end_wait(request_id)
        if work:
            self._running[request_id] = work
            self._begun.append(self._waited())

    def leave(self, request_id: str) -> None:
        """A request has ended, perhaps without ever having had a row."""
        work = self._running.pop(request_id, None) or self._end_wait(request_id)
        if work:
            self._num_sequences -= work.num_sequences

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until those that wait now will have begun, by the pace of the last ones."""
        now, begun = self._waited(), self._begun
        while begun and begun[0] < now - STALE_S:
            begun.popleft()
        if len(begun) < 2:
            seconds = self._clock() - self._waiting_since if self._waiting else 0.0  # at least as long again
        else:
            seconds = len(self._waiting) * (now - begun[0]) / len(begun)
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY_S)

    def _waited(self) -> float:
        """Seconds in which at least one request has waited."""
        return self._waited_s + (self._clock() - self._waiting_since if self._waiting else 0.0)

    def _reject(self, message: str) -> None:
        self.num_rejected += 1
        raise OverloadError(f"the server is busy: {message}", self.retry_after_s)

    def _end_wait(self, request_id: str) -> Work | None:
        work = self._waiting.get(request_id)
        if work:
            waited = self._waited()
            del self._waiting[request_id]
            self._num_tokens -= work.num_tokens
            if not self._waiting:
                self._waited_s = waited
        return work
