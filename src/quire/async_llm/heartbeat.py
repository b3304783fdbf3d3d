"""Whether a thread still moves: it beats, and when it has been silent for too long it is taken to hang."""

import time
from collections.abc import Callable

from quire.engine.pace import Pace

STALLED_AFTER_S = 8.0
"""Seconds of silence, or of one dispatch, that are never taken for a hang."""
STALLED_DISPATCHES = 4
"""A dispatch that takes so many times as long as expected is taken to hang."""


class Heartbeat:
    """When a thread last showed itself, and how long it may be silent. One thread beats, any thread may look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._is_resting = False
        self.pace: Pace | None = None
        """Measures the dispatches of the engine that the thread runs, on the same clock."""
        self.limit_s = STALLED_AFTER_S
        """Seconds after which silence is taken for a hang, and a dispatch too if that is longer than expected."""

    def beat(self) -> None:
        """Show that the thread moves."""
        self._last = self._clock()
        self._is_resting = False

    def rest(self) -> None:
        """Until the next beat, do not take silence for a hang: something runs that may take as long as it likes."""
        self._is_resting = True

    @property
    def age_s(self) -> float:
        """Seconds since the last beat; 0 at rest."""
        return 0.0 if self._is_resting else self._clock() - self._last

    @property
    def is_late(self) -> bool:
        """Whether the dispatch in flight takes far longer than expected, or without one the thread is silent."""
        if self.pace and (dispatch := self.pace.in_flight):
            return self._clock() - dispatch.began >= max(self.limit_s, STALLED_DISPATCHES * dispatch.expected_s)
        moved = max(self._last, self.pace.ended) if self.pace else self._last
        return not self._is_resting and self._clock() - moved >= self.limit_s
