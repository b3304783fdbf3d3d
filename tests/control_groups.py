"""Control groups of this system for tests that need a real limit: version 1 or 2, as they are mounted here."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FILES = {"memory": ("memory.max", "memory.limit_in_bytes"), "cpu": ("cpu.max", "cpu.cfs_quota_us")}
"""The file that sets a limit, by controller, in version 2 and version 1."""
PEAK_FILES = ("memory.peak", "memory.max_usage_in_bytes")


class ControlGroup:
    """A control group that processes can join."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in the group. Nothing is forked here: JAX warns of forks."""
        return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int:
        """The most memory that the group has used, page cache included."""
        return next(int((self.folder / name).read_text()) for name in PEAK_FILES if (self.folder / name).exists())

    @property
    def num_killed(self) -> int:
        """Processes that were killed because the group was out of memory."""
        lines = [
            line.split()
            for name in ("memory.events", "memory.oom_control")
            if (self.folder / name).exists()
            for line in (self.folder / name).read_text().splitlines()
        ]
        return next(int(value) for name, value in lines if name == "oom_kill")


@contextlib.contextmanager
def control_group(controller: str, limit: int) -> Iterator[ControlGroup]:
    """A new group with a limit: bytes of memory, or microseconds of processor time in each 100,000.

    The test is skipped where this process may not make one.
    """
    try:
        folder = _make(controller, limit)
    except OSError as error:
        pytest.skip(f"no control group with a limit of {controller} can be made here: {error}")
    try:
        yield ControlGroup(folder)
    finally:
        for _ in range(100):  # a group is busy until the kernel has cleared away its last process
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def _make(controller: str, limit: int) -> Path:
    problem: OSError = FileNotFoundError(f"{controller} is mounted nowhere")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, system = line.partition(" - ")
        kind, options = system.split()[0], system.split()[-1].split(",")
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and controller not in options):
            continue
        folder = Path(mount.split()[4]) / f"quire-test-{os.getpid()}-{time.time_ns()}"
        try:
            folder.mkdir()
        except OSError as error:
            problem = error
            continue
        try:
            (folder / FILES[controller][kind == "cgroup"]).write_text(str(limit))
            return folder
        except OSError as error:
            problem = error
            folder.rmdir()
    raise problem
