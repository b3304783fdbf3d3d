"""`quire plan MODEL` without a topology: this machine's free memory and its measured speed."""

import json
from pathlib import Path

import pytest

from quire.capacity import this_machine
from quire.cli import main
from quire.engine.pool_size import HOST_RESERVE
from quire.machine import Memory

CONFIG = Path(__file__).parent.parent / "bench" / "configs" / "Llama-3.1-8B.json"
LIMIT_FILE = "/sys/fs/cgroup/memory.max"


@pytest.fixture
def free_memory(monkeypatch):
    """Set the memory that is free within a limit; and measure an array of 1 MiB, which is quick."""
    monkeypatch.setattr(this_machine, "ARRAY_BYTES", 1 << 20)
    return lambda num_bytes: monkeypatch.setattr(
        this_machine, "read_memory", lambda: Memory(num_bytes + (1 << 30), num_bytes, LIMIT_FILE)
    )


def plan(capsys, *args) -> tuple[int, str, dict]:
    code = main(["plan", str(CONFIG), "--json", "-", *args])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


def test_a_machine_with_room_for_the_model(capsys, free_memory):
    free_memory(32 << 30)
    code, out, report = plan(capsys)
    assert (code, report["fits"], report["topology"]) == (0, True, "cpu:1")
    assert report["memory_bytes_per_chip"] == (32 << 30) - HOST_RESERVE
    assert report["pool_bytes_per_chip"] <= 4 << 30  # the engine's default on a host
    page_bytes = report["pool_bytes_per_chip"] // report["num_pages"]
    assert report["host_pool_bytes_per_chip"] == report["num_pages"] // 2 * page_bytes > 0
    assert report["headroom_bytes_per_chip"] < report["memory_bytes_per_chip"] - 1.5 * report["pool_bytes_per_chip"]
    assert report["decode_tokens_per_s"] > 0
    assert report["collectives"]["all_reduces_per_step"] == 0
    assert "Llama-3.1-8B.json on the CPU of this machine" in out
    assert f"32.00 GiB free of 33.00 GiB (limit in {LIMIT_FILE})" in out
    assert "measured now" in out
    assert "quire bench throughput MODEL measures the model itself" in " ".join(out.split())
    assert "data sheet" not in out


@pytest.mark.slow
def test_a_limit_that_is_too_small_is_named_with_its_file(capsys, free_memory):
    free_memory(1 << 30)
    code, out, report = plan(capsys)
    assert (code, report["fits"]) == (1, False)
    assert "it does not fit, not even its weights: free memory or raise its limit" in out
    assert f"(limit in {LIMIT_FILE})" in out
    assert "more chips" not in out


@pytest.mark.slow
def test_the_speed_of_matmuls_is_that_of_the_type(capsys, free_memory):
    free_memory(64 << 30)
    _, out, report = plan(capsys, "--dtype", "float32")
    assert "GFLOP/s in matmuls of float32" in out
    assert report["prefill_tokens_per_s"] > 0
