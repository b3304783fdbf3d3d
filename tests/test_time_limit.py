"""A test that never ends fails, and the tests after it run, in one process and in those of pytest-xdist."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANGS = """
import threading

def test_loops():
    while True:
        pass

def test_waits():
    threading.Event().wait()

def test_ends():
    pass
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path, num_workers):
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "tests.time_limit", "--time-limit", "2", "-n", str(num_workers), "--rootdir", str(tmp_path)]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(root)}, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "test_hangs.py::test_loops took more than 2 s" in done.stdout
