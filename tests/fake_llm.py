"""An LLM without a model, whose steps a test can hold back."""

import math
import threading

from quire import LLM
from quire.testing import fake_engine
from tests.words import toy_tokenizer

LONG_S = 600.0
"""Nothing takes so long, on the slowest machine."""


class Gate:
    """Holds an engine's steps back while it is closed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_allowed = math.inf
        self._is_held = False

    def open(self) -> None:
        self.let(math.inf)

    def close(self) -> None:
        self.let(0)

    def let(self, num_steps: float) -> None:
        """So many steps pass, and the next one is held back."""
        with self._changed:
            self._num_allowed, self._is_held = num_steps, self._is_held and not num_steps
            self._changed.notify_all()

    def wait_until_held(self) -> None:
        """Until a step stands at the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_held, LONG_S)

    def pass_through(self) -> None:
        with self._changed:
            if not self._num_allowed:
                self._is_held = True
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._num_allowed, LONG_S)
                self._is_held = False
            self._num_allowed -= 1


def fake_llm(gate: Gate | None = None, **knobs) -> LLM:
    """The real engine over a device that only checks pages, with eleven tokens; `debug`, every step is audited."""
    llm = LLM.from_engine(fake_engine(tokenizer=toy_tokenizer(), **{"debug": True} | knobs))
    return gated(llm, gate) if gate else llm


def gated(llm: LLM, gate: Gate) -> LLM:
    """The same LLM: its steps pass through the gate."""
    run = llm.engine.runner.run

    def gated_run(inputs):
        gate.pass_through()
        return run(inputs)

    llm.engine.runner.run = gated_run
    return llm
