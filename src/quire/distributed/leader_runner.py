"""The runner of a group: what it is told, every process does, in one order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from quire.core.plan import StepResult
from quire.device.inputs import StepInputs
from quire.device.models.weights import params_shardings
from quire.device.runner import ModelRunner, StepHandle
from quire.distributed.errors import GroupError
from quire.distributed.leader import Leader
from quire.distributed.messages import CHUNK_LEN, pieces_of


class LeaderRunner:
    """A `Runner` of a group: what it is told, every process does."""

    def __init__(self, leader: Leader, runner: ModelRunner) -> None:
        """Wait until the runner of every process is ready, as this process's is."""
        leader.wait_for_acks()
        self._leader, self._runner = leader, runner
        self.seconds_per_move, self.pages_per_move = runner.seconds_per_move, runner.pages_per_move
        self.notes = runner.notes

    @property
    def failure(self) -> GroupError | None:
        return self._leader.failure

    @property
    def growth_bytes(self) -> int:
        return self._runner.growth_bytes

    @property
    def num_compiles(self) -> int:
        return self._runner.num_compiles

    @property
    def num_programs(self) -> int:
        return self._runner.num_programs

    def run(self, inputs: StepInputs) -> "LeaderHandle":
        with self._leader.inside():
            self._leader.send("run", inputs)
            return LeaderHandle(self._leader, self._runner.run(inputs))

    def recover(self) -> bool:
        """After a step that never reached the device, the cache is there; after any other the group has failed."""
        return self.failure is None

    def set_weights(self, params: Any, *, copy: bool = True) -> None:
        leader, runner = self._leader, self._runner
        if leader.take_loaded(params):
            with leader.inside():
                leader.send("set_loaded")
                runner.set_weights(params, copy=False)
                leader.wait_for_acks()
            return
        _check_whole(params)
        arrays = runner.checked_weights(params)
        shardings = params_shardings(runner.model, runner.mesh)
        shared = jax.tree.map(lambda array, placed: partial(self._share, array, placed), arrays, shardings)
        with leader.inside():
            leader.send("set_weights")
            runner.replace_weights(shared)

    def _share(self, array: Any, placed: NamedSharding) -> np.ndarray:
        """Send every follower its part of an array; returns the array, on the host and nobody else's."""
        values = np.array(array() if callable(array) else array)
        for process_id in self._leader.process_ids:
            for index in pieces_of(process_id, placed, values.shape):
                piece = np.ascontiguousarray(values[index]).reshape(-1).view(np.uint8)
                for start in range(0, len(piece), CHUNK_LEN):
                    self._leader.send_part(process_id, "bytes", piece[start : start + CHUNK_LEN])
        self._leader.wait_for_acks()
        return values

    def get_weights(self) -> Any:
        raise ValueError("params: no process of a group has all weights; read them from the model's file")

    def sleep(self) -> None:
        self._command("sleep", self._runner.sleep)

    def wake(self) -> None:
        self._command("wake", self._runner.wake)

    def zero(self) -> None:
        self._command("zero", self._runner.zero)

    def _command(self, name: str, run: Callable[[], None]) -> None:
        with self._leader.inside():
            self._leader.send(name)
            run()
            self._leader.wait_for_acks()

    def close(self) -> None:
        self._leader.close()
        self._runner.close()


class LeaderHandle:
    """A step under way in every process."""

    def __init__(self, leader: Leader, handle: StepHandle) -> None:
        self._leader, self._handle = leader, handle

    def result(self) -> StepResult:
        return self._leader.wait(self._handle.result)


def _check_whole(params: Any) -> None:
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is spread over several processes: set_weights of a group takes "
                "arrays that are whole in process 0"
            )
