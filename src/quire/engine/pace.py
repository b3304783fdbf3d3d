"""How long a dispatch should take, by what it computes and by what earlier dispatches took."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from quire.core.plan import StepPlan

UNMEASURED_S_PER_TOKEN = 0.25
"""Seconds per token before any dispatch has been measured: a 7B model on a slow CPU takes less."""
UNMEASURED_CPU_S = 600.0
"""Seconds that a dispatch of a size that was not measured is expected to take at most on a CPU."""
UNMEASURED_S = 120.0
"""The same on an accelerator."""
REACH = 4
"""The same as a multiple of one pass of the nearest measured size, where that is longer."""
CONTEXT_TOKENS = 4096
"""A token counts once more for each so many tokens that it attends to."""
NUM_RECENT = 16
"""Remembered dispatches of one size: a slow one is forgotten after as many others."""


class Dispatch(NamedTuple):
    """A step that the device computes."""

    began: float
    """When, on the clock of its `Pace`."""
    num_tokens: int
    rounds: int
    """Passes through the model, at most."""
    weight: int
    """The tokens of one pass, weighted by what they attend to."""
    expected_s: float


class Pace:
    """Measures dispatches and predicts the one in flight. The engine's thread writes; any thread may read.

    Dispatches are told apart by the power of two of their tokens per pass. A pass over more tokens than a measured one
    is expected to take longer in proportion, which is never too little. For a size that was not measured that may be
    far too much, as one token takes nearly as long as a hundred: it is expected to take some minutes at most.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_cpu: bool = True) -> None:
        self.clock = clock
        self._unmeasured_s = UNMEASURED_CPU_S if is_cpu else UNMEASURED_S
        self.in_flight: Dispatch | None = None
        """The dispatch that the device computes now."""
        self.ended = clock()
        """When the last dispatch ended."""
        self._passes: dict[int, deque[tuple[float, int]]] = {}
        """The newest passes of each size, a bit length: their seconds and weights."""

    def begin(self, plan: StepPlan) -> None:
        """The plan is about to be dispatched."""
        weight = sum(row.num_tokens * (1 + (row.first + row.num_tokens) // CONTEXT_TOKENS) for row in plan.rows)
        rounds = max(row.max_rounds for row in plan.rows)
        expected_s = self._expected_s(weight, rounds)
        self.in_flight = Dispatch(self.clock(), plan.num_tokens, rounds, weight, expected_s)

    def end(self, rounds: int = 0) -> None:
        """The dispatch has ended after so many rounds; with 0 that is unknown, and nothing is learned from it."""
        dispatch, self.ended = self.in_flight, self.clock()
        self.in_flight = None
        if dispatch and rounds:
            recent = self._passes.setdefault(dispatch.weight.bit_length(), deque(maxlen=NUM_RECENT))
            recent.append(((self.ended - dispatch.began) / rounds, dispatch.weight))

    def _expected_s(self, weight: int, rounds: int) -> float:
        if not self._passes:
            return min(UNMEASURED_S_PER_TOKEN * weight * rounds, self._unmeasured_s)
        size = weight.bit_length()
        nearest = max((known for known in self._passes if known <= size), default=min(self._passes))
        passes = self._passes[nearest]
        expected_s = rounds * max(seconds * max(weight / measured, 1) for seconds, measured in passes)
        if nearest == size:
            return expected_s
        return min(expected_s, max(self._unmeasured_s, REACH * max(seconds for seconds, _ in passes)))
