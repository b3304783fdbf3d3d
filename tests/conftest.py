"""The strict runtime every test runs in, and what tests share."""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before anything imports them: else `python -O` drops their checks.
pytest.register_assert_rewrite("tests.server.attack", "tests.server.process")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

if threading.current_thread() is threading.main_thread():
    # A shell starts what it runs in the background with Ctrl-C ignored, and all that is started from there inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiled programs are kept for the next test. JAX writes them without a lock: another worker could read half of one.
# Its lock, which comes with a limit of size, reads the whole folder at every write.
os.environ["XDG_CACHE_HOME"] = str(ROOT / ".cache" / f"tests-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}")

import jax  # noqa: E402

from tests import thorough, time_limit  # noqa: E402, F401 - a profile of Hypothesis
from tests.seeds import default_seed  # noqa: E402
from tests.time_limit import pytest_runtest_protocol  # noqa: E402, F401 - a hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def patient_grammars() -> None:
    """No form fails for its time: a collection of garbage takes longer than a mask may, and counts as its time."""
    from quire.structured import matcher

    matcher._GRACE_SECONDS = math.inf


@pytest.fixture(scope="session", autouse=True)
def no_saved_programs() -> Callable[[], Path | None]:
    """Programs are traced: a test may replace a function that they are traced from. Returns what would save them."""
    from quire.device import saved_programs

    real = saved_programs._usable_folder
    saved_programs._usable_folder = lambda: None
    return real


@pytest.fixture
def saves_programs(no_saved_programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are saved and loaded, as they are for users."""
    monkeypatch.setattr("quire.device.saved_programs._usable_folder", no_saved_programs)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model: SmolLM2-135M-Instruct, fetched once by `.ci/model`."""
    lines = subprocess.run(
        ["bash", str(ROOT / ".ci" / "model")], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    return Path(lines[-1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the server, which share one server process where they can."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "server"):
            item.add_marker("server")


_has_lost_worker = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended: with an error, if it was not told to."""
    node.config.stash[_has_lost_worker] = bool(error) or node.config.stash.get(_has_lost_worker, False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where a worker has died tests were not run: that is not what running the failed ones again can mend."""
    if session.config.stash.get(_has_lost_worker, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


def pytest_addoption(parser: pytest.Parser) -> None:
    time_limit.pytest_addoption(parser)
    parser.addoption("--soak-seconds", type=float, default=20.0, help="how long the streams of test_soak run")
    parser.addoption("--seed", type=int, help="of random histories; by default a number of the commit")
    parser.addoption("--operations", type=int, default=20_000, help="of the random histories of test_histories")


@pytest.fixture
def num_operations(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--operations")


@pytest.fixture
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """A seed for random histories that differs from commit to commit; printed, so that a failure can be repeated."""
    given = request.config.getoption("--seed")
    seed = default_seed() if given is None else given
    print(f"\nrepeat this with --seed {seed}")
    return seed


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return request.config.getoption("--soak-seconds")
