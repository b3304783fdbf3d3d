"""Whether a thread still moves: it beats, and when it has not for too long it is taken to hang."""

import time
from collections import deque
from collections.abc import Callable

STALLED_AFTER_S = 8.0
"""A thread that has not begun a step for so long hangs: a step of full rows and all rounds takes about a second."""
STALLED_STEPS = 4
"""Or so many times as long as the longest of the last steps, on a slow machine."""
NUM_RECENT_STEPS = 64
"""Steps whose time is remembered: one that was slow does not hide a hang for ever."""


class Heartbeat:
    """When a thread last showed itself, and how long it may be silent. One thread beats, any thread may look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._is_resting = False
        self._recent_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self.limit_s = STALLED_AFTER_S
        """Seconds without a beat after which the thread is taken to hang."""

    def beat(self) -> None:
        """Show that the thread moves."""
        self._last = self._clock()
        self._is_resting = False

    def rest(self) -> None:
        """Until the next beat, do not take silence for a hang: something runs that may take as long as it likes."""
        self._is_resting = True

    def end_step(self, seconds: float) -> None:
        """Learn from a step how long one may take here."""
        self._recent_s.append(seconds)
        self.limit_s = max(STALLED_AFTER_S, STALLED_STEPS * max(self._recent_s))

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 at rest."""
        return 0.0 if self._is_resting else self._clock() - self._last

    @property
    def is_late(self) -> bool:
        """Whether the last beat is so long ago that the thread hangs."""
        return self.age_s >= self.limit_s
