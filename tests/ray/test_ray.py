"""Replicas by Ray Serve, and datasets through Ray Data, in an environment that has Ray."""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # Ray's own processes give each other little time

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache/ray/bin/python"


def run(module: str, *args: str) -> dict:
    """What a program prints last, in the environment that has Ray."""
    assert PYTHON.exists(), "run .ci/ray-env first"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [PYTHON, "-m", module, *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    return seen


def check_churn(seen: dict, num_clients: int) -> None:
    """Every request has an answer or, if its engine was killed in the middle of it, a clear error."""
    phases = [seen[name] for name in ("quiet", "killed", "upgraded", "last")]
    assert not any({"mixed", "unanswered"} & phase.keys() for phase in phases), seen["notes"]
    assert all(phase["complete"] > 0 for phase in phases)
    assert "error" not in seen["quiet"].keys() | seen["upgraded"].keys() | seen["last"].keys()
    assert seen["killed"].get("error", 0) <= num_clients


def test_no_request_is_lost_while_a_replica_is_killed_and_both_are_replaced():
    seen = run("tests.ray.serving", "8", "16")
    check_churn(seen, 16)
    assert seen["hits"] == 12, "each prompt goes to the replica that has computed it"
    assert seen["keys"] == {"right": 200, "wrong": 401, "none": 401}
    assert seen["open after its client is gone"] == 0
    assert seen["scaled"] == 2


@pytest.mark.nightly
def test_nor_in_two_minutes():
    check_churn(run("tests.ray.serving", "120", "64"), 64)


def test_rows_of_a_dataset_are_continued_by_two_workers():
    seen = run("tests.ray.data")
    assert seen["rows"] == 34
    assert seen["equal"] == seen["scored"] == 32
    assert seen["errors"].keys() == {"100", "101"}
    assert "5,000" in seen["errors"]["100"] or "5000" in seen["errors"]["100"]
    assert "seed" in seen["errors"]["101"]


def test_the_router_and_the_autoscaler_do_what_replicas_report():
    seen = run("tests.ray.policies")
    assert seen["same prefix, same replica"]
    assert seen["all are placed"] == 64
    assert seen["after a death"] == "b"
    assert seen["reported pages"] == "b"
    assert seen["replicas"] == {"nothing reported": 2, "nothing queued": 0, "three times the target": 3}
    assert seen["refused"].keys() == {"port", "batch_folder", "max_batch_bytes"}
    message = "server: batch_folder='batches' has no effect behind Ray Serve; leave it out"
    assert seen["refused"]["batch_folder"] == message
