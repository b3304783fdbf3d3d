"""Memory and processors that this process may use: what the machine has, within the limits of its control groups.

Containers set limits by Linux control groups (cgroups), version 1 or 2. A group is inside others, and every limit up to
the mount counts. Files are read below `root`, so that a test can give a tree of its own. A file that is missing or
cannot be parsed sets no limit; on other systems there is none.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MEMORY_FILES = (
    ("memory.current", ("memory.max", "memory.high")),
    ("memory.usage_in_bytes", ("memory.limit_in_bytes",)),
)
"""Use and limits of a group, in version 2 and version 1. Above `memory.high` the kernel slows the process down."""
DROPPABLE = ("active_file", "inactive_file")
"""Page cache in `memory.stat`: it counts as used, and the kernel drops it before it kills a process."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the host that this process may use."""

    limit: int
    """Bytes of the lowest limit, or of the machine where no limit is lower."""
    available: int
    """Bytes that can still be allocated within every limit. Page cache that the kernel can drop counts as free."""
    limit_path: str | None = None
    """File that holds the limit; None if the limit is the machine itself."""

    @property
    def source(self) -> str:
        """What sets the limit, in words."""
        return f"limit in {self.limit_path}" if self.limit_path else "memory of this machine"


def read_memory(root: Path = ROOT) -> Memory:
    """Return the memory that this process may use now."""
    memory = _machine_memory(root)
    for folder in _control_groups(root, "memory"):
        for used_file, limit_files in MEMORY_FILES:
            used = max((_number(folder / used_file) or 0) - _droppable(folder), 0)
            for path in (folder / name for name in limit_files):
                limit = _number(path)
                if limit is None:
                    continue
                if limit < memory.limit:
                    memory = Memory(limit, memory.available, f"/{path.relative_to(root)}")
                memory = Memory(memory.limit, min(memory.available, max(limit - used, 0)), memory.limit_path)
    return memory


def resident_bytes(root: Path = ROOT) -> int:
    """Return the bytes of memory that this process occupies now; 0 where the system does not state it."""
    fields = " ".join(_lines(root / "proc/self/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def num_processors(root: Path = ROOT) -> int:
    """Return how many processors this process can keep busy: at most its affinity, and at most its CPU quota.

    A quota of 2.5 processors is 2: a third thread would have all three wait when the quota is used up.
    """
    quotas = [quota for folder in _control_groups(root, "cpu") for quota in _quotas(folder)]
    return max(int(min([num_scheduled_processors(root), *quotas])), 1)


def num_scheduled_processors(root: Path = ROOT) -> int:
    """Return how many processors the scheduler may put this process on, whatever its CPU quota."""
    for line in _lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list" and (count := _count_in_ranges(value.strip())):
            return count
    return os.cpu_count() or 1


def limit_threads() -> None:
    """Size XLA's thread pools by the CPU quota. Call this before jax looks for devices; later it has no effect.

    By itself XLA starts a thread for each processor of the affinity. Beyond the quota they only take turns, and all of
    them stand still once it is used up. `NPROC` is the variable by which XLA is told; a user's own stays.
    """
    if (count := num_processors()) < num_scheduled_processors():
        os.environ.setdefault("NPROC", str(count))


def _machine_memory(root: Path) -> Memory:
    fields = dict(line.split(":", 1) for line in _lines(root / "proc/meminfo") if ":" in line)
    try:
        total, available = (int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    except (KeyError, ValueError, IndexError):  # not Linux: half of what is built in
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(total, total // 2)
    return Memory(total, available)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups with a controller, each before the group that it is inside of."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups["cgroup2"] = PurePosixPath(path)
        elif controller in controllers.split(","):
            groups["cgroup"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        kind, _, options = system.partition(" ")
        if kind not in groups or (kind == "cgroup" and controller not in options.split()[-1].split(",")):
            continue
        inside, point = mount.split()[3:5]
        group = groups[kind]
        # A container may see only its own part of the tree: `inside` is the group that is mounted.
        if group.is_relative_to(inside) and ".." not in group.parts:
            below = group.relative_to(inside)
        else:
            below = PurePosixPath()
        top = root / point.lstrip("/")
        yield from (top / part for part in (below, *below.parents))


def _droppable(folder: Path) -> int:
    """Page cache of a group and those inside of it. Version 1 names these sums `total_`, version 2 has only them."""
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    prefix = "total_" if f"total_{DROPPABLE[0]}" in stat else ""
    values = [stat.get(prefix + name, "") for name in DROPPABLE]
    return sum(int(value) for value in values if value.isdigit())


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the processors' worth of time that a group may use, where it has a limit."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    words = words or [str(_number(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
        yield int(words[0]) / int(words[1])


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", for -1 (which version 1 has instead), and where there is none."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _count_in_ranges(text: str) -> int:
    """How many numbers are in a list such as "0-3,8"."""
    ends = [part.split("-") for part in text.split(",")]
    if not all(end.isdigit() for part in ends for end in part):
        return 0
    return sum(int(part[-1]) - int(part[0]) + 1 for part in ends)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
