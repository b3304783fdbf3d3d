"""A time limit for every test, so that a scheduler that loops for ever fails a test instead of stopping CI.

The limit is far above what a test takes on a busy machine: it finds hangs, not slowness. At the limit the main thread
raises, which fails the test and lets the next one run. Code that holds the interpreter, such as a deadlock in native
code, cannot be interrupted: a minute later the process prints every thread's stack and exits.
"""

import faulthandler
import signal
from collections.abc import Iterator

import pytest

GRACE_S = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--time-limit", type=float, default=600.0, help="seconds a test may take; slow ones 5 times that")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit the time of one test, with its fixtures."""
    limit = item.config.getoption("--time-limit")
    if any(item.get_closest_marker(name) for name in ("slow", "alone", "oracle", "nightly")):
        limit *= 5

    def fail(*_: object) -> None:
        pytest.fail(f"{item.nodeid} took more than {limit:g} s", pytrace=True)

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit)
    faulthandler.dump_traceback_later(limit + GRACE_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
