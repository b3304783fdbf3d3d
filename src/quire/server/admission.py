"""Who may wait: counted when a request arrives, before it has cost anything.

A request waits from its arrival until its first sequence has a row. How many may wait, and how many tokens they may ask
for together, is bounded; beyond that a client is told to come again when those that now wait will have begun, which is
known from how fast requests have begun lately.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

LONGEST_RETRY_S = 120
"""What clients of OpenAI obey at most."""
RECENT = 64
"""Beginnings that are remembered: their rate is the service's."""
STALE_S = 60.0


class OverloadError(Exception):
    """Too much waits already."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class _Waiting:
    num_tokens: int
    since: float


class Admission:
    """The queue's bounds. For one thread."""

    def __init__(self, *, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_rejected = 0
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._num_tokens = 0
        self._begun: deque[float] = deque(maxlen=RECENT)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens they may come to, prompts and answers."""
        return self._num_tokens

    def check_room(self) -> None:
        """Raise OverloadError if not even an empty request would be taken: before a prompt is read."""
        if len(self._waiting) >= self.max_requests:
            self._reject(f"{len(self._waiting)} requests wait, at most {self.max_requests} may")

    def arrive(self, request_id: str, num_sequences: int, prompt_len: int, max_tokens: int) -> None:
        """Count a request in, or raise OverloadError."""
        self.check_room()
        num_tokens = prompt_len + num_sequences * max_tokens
        # One that is larger than the whole queue waits alone: else it would never be taken.
        if self._waiting and self._num_tokens + num_tokens > self.max_tokens:
            self._reject(
                f"{self._num_tokens:,} tokens wait and this request may come to {num_tokens:,} more; at most "
                f"{self.max_tokens:,} may wait"
            )
        self._waiting[request_id] = _Waiting(num_tokens, self._clock())
        self._num_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """It has a row."""
        if self._forget(request_id):
            self._begun.append(self._clock())

    def leave(self, request_id: str) -> None:
        """It has ended, perhaps without ever having had one."""
        self._forget(request_id)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until those that wait now will have begun, as far as can be told."""
        now, begun = self._clock(), self._begun
        while begun and begun[0] < now - STALE_S:
            begun.popleft()
        if len(begun) < 2:
            oldest = min((one.since for one in self._waiting.values()), default=now)
            seconds = now - oldest  # nobody has begun since: at least as long again
        else:
            seconds = len(self._waiting) * (now - begun[0]) / len(begun)
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY_S)

    def _reject(self, message: str) -> None:
        self.num_rejected += 1
        raise OverloadError(f"the server is busy: {message}", self.retry_after_s)

    def _forget(self, request_id: str) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting:
            self._num_tokens -= waiting.num_tokens
        return waiting is not None
