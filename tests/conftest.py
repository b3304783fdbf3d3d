"""The strict runtime every test runs in, and what tests share."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

if threading.current_thread() is threading.main_thread():
    # A shell starts what it runs in the background with Ctrl-C ignored, and all that is started from there inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # JAX writes its cache of programs without a lock: another worker could read half of one.
    os.environ["XDG_CACHE_HOME"] = str(ROOT / ".cache" / f"tests-{worker}")

import jax  # noqa: E402

from tests import thorough  # noqa: E402, F401 - a profile of Hypothesis

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model: SmolLM2-135M-Instruct, fetched once by `.ci/model`."""
    lines = subprocess.run(
        ["bash", str(ROOT / ".ci" / "model")], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    return Path(lines[-1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the server wait for processes, and some measure: they have the machine for themselves."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "server"):
            item.add_marker("alone")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=60.0, help="how long the streams of test_soak run")


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return request.config.getoption("--soak-seconds")
