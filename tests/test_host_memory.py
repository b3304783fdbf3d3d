"""Estimates of the host's memory: a limit that cannot hold a model is an error, and a full machine is a warning."""

from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.device import memory
from quire.device.mesh import make_mesh
from quire.engine import host_memory
from quire.engine.host_memory import HOST_RESERVE, check_room_for_weights
from quire.field_error import FieldError
from quire.machine import Memory
from tests.tiny import tiny_config

MIB = 1 << 20
LIMIT = "/sys/fs/cgroup/memory.max"
SHAPE = tiny_config(hidden_size=512, intermediate_size=8192)
"""48 MiB of MLP weights in bfloat16, and little else."""


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free for weights, and the file that limits it."""

    def set_free(num_bytes: int, limit_path: str | None) -> None:
        host = Memory(1 << 30, num_bytes + HOST_RESERVE, limit_path)
        monkeypatch.setattr(memory, "available_host_bytes", lambda: host.available)
        monkeypatch.setattr(host_memory, "read_memory", lambda: host)

    return set_free


def check(**knobs) -> None:
    check_room_for_weights(EngineConfig(**{"dtype": "bfloat16"} | knobs), SHAPE, Path("model.gguf"), make_mesh())


def test_weights_beyond_the_limit_of_a_control_group_are_refused(free):
    free(40 * MIB, LIMIT)
    with pytest.raises(
        FieldError, match=rf"MODEL model.gguf needs .* \(limit in {LIMIT}\).*; raise that limit, or take"
    ):
        check()


def test_weights_beyond_the_free_memory_of_the_machine_are_a_warning(free, caplog):
    free(40 * MIB, None)
    check()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "MODEL model.gguf needs" in record.message
    assert "(memory of this machine)" in record.message
    assert "; free more memory, or take a smaller model" in record.message


@pytest.mark.parametrize("limit_path", [None, LIMIT])
def test_weights_that_fit_are_silent(free, caplog, limit_path):
    free(70 * MIB, limit_path)
    check()
    assert not caplog.records


def test_processes_of_a_group_share_the_weights(free):
    free(40 * MIB, LIMIT)
    check(num_processes=2, coordinator="10.0.0.1:7000")
    with pytest.raises(FieldError):
        check()
