"""What the engine asks of a device: the one way in which device state is read and changed.

`quire.device.runner.ModelRunner` is one, `quire.testing.FakeRunner` another for tests without a device.
"""

from typing import Any, Protocol

from quire.core.plan import StepResult
from quire.device.inputs import StepInputs


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for the step, and fetch what it produced."""
        ...


class Runner(Protocol):
    """Runs steps over one model and its KV cache. Another one, given the same inputs, comes to the same state."""

    seconds_per_move: float
    """To move up to `pages_per_move` pages to host memory or back."""
    pages_per_move: int
    notes: tuple[str, ...]
    """What a person should know at start, each in one sentence."""

    @property
    def failure(self) -> Exception | None:
        """Why nothing will ever run again; None as long as something may. Any thread may look."""
        ...

    @property
    def growth_bytes(self) -> int:
        """Bytes of this host's memory that steps can take beyond what is occupied when the runner is ready."""
        ...

    @property
    def num_compiles(self) -> int:
        """Programs compiled since the runner was ready."""
        ...

    @property
    def num_programs(self) -> int:
        """Programs that are ready."""
        ...

    def run(self, inputs: StepInputs) -> Handle:
        """Dispatch one step."""
        ...

    def recover(self) -> bool:
        """After a failed step: whether the cache survived it."""
        ...

    def set_weights(self, params: Any, *, copy: bool = True) -> None:
        """Compute with these from the next step on."""
        ...

    def get_weights(self) -> Any:
        """The weights, in the layout that `set_weights` takes."""
        ...

    def sleep(self) -> None:
        """Let go of weights and pages, and keep the programs."""
        ...

    def wake(self) -> None:
        """Have pages again; weights come by `set_weights`."""
        ...

    def zero(self) -> None:
        """Clear every page."""
        ...

    def close(self) -> None:
        """Let go of weights, pages and programs; nothing runs afterwards."""
        ...
