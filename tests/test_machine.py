"""What the machine and its control groups allow: trees of files as kernels and container runtimes lay them out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.machine import num_processors, num_scheduled_processors, read_memory
from tests.control_groups import control_group

GIB = 1 << 30
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
UNLIMITED_V1 = 9223372036854771712


def tree(root: Path, files: dict[str, object]) -> Path:
    """A tree of files. The machine has 64 GiB of memory, 48 of them free, and 8 processors."""
    machine = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n",
        "proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n",
    }
    for name, content in (machine | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def v2(group: str, files: dict[str, object], mount: str = V2) -> dict[str, object]:
    return {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": mount + "\n"} | {
        f"sys/fs/cgroup/{name}": content for name, content in files.items()
    }


def v1(group: str, files: dict[str, object], inside: str = "/") -> dict[str, object]:
    mounts = "\n".join(
        f"{number} 31 0:{number} {inside} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"
        for number, name in ((32, "cpu,cpuacct"), (35, "memory"), (38, "name=systemd"))
    )
    groups = f"4:memory:{group}\n2:cpu,cpuacct:{group}\n1:name=systemd:/elsewhere\n0::/\n"
    return {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts} | {
        f"sys/fs/cgroup/{name}": content for name, content in files.items()
    }


def test_without_groups_it_is_the_machine(tmp_path):
    memory = read_memory(tree(tmp_path, {}))
    assert (memory.limit, memory.available, memory.limit_path) == (64 * GIB, 48 * GIB, None)
    assert num_processors(tmp_path) == num_scheduled_processors(tmp_path) == 8


def test_a_limit_of_version_2_less_what_the_group_uses(tmp_path):
    """Page cache is free: the kernel drops it. Shared memory and everything else is not."""
    files = {
        "app/memory.max": 2 * GIB,
        "app/memory.high": "max",
        "app/memory.current": GIB,
        "app/memory.stat": f"anon {GIB // 2}\nfile {GIB // 2}\nshmem {GIB // 4}\nactive_file 1024\n"
        f"inactive_file {GIB // 4}\n",
    }
    memory = read_memory(tree(tmp_path, v2("/app", files)))
    assert memory.limit == 2 * GIB
    assert memory.available == 2 * GIB - (GIB - GIB // 4 - 1024)
    assert memory.limit_path == "/sys/fs/cgroup/app/memory.max"


@pytest.mark.parametrize("lowest", ["memory.max", "a/memory.high", "a/memory.max", "a/b/memory.high", "a/b/memory.max"])
def test_the_lowest_limit_of_all_groups_counts(tmp_path, lowest):
    """A group cannot use more than those that it is inside of, and above `memory.high` it is slowed down."""
    files: dict[str, object] = {
        f"{group}memory.{name}": 8 * GIB for group in ("", "a/", "a/b/") for name in ("max", "high")
    }
    memory = read_memory(tree(tmp_path, v2("/a/b", files | {lowest: 3 * GIB})))
    assert (memory.limit, memory.limit_path) == (3 * GIB, f"/sys/fs/cgroup/{lowest}")
    assert memory.available == 3 * GIB


def test_what_others_in_an_outer_group_use_is_not_free(tmp_path):
    files = {"a/memory.max": 8 * GIB, "a/memory.current": 7 * GIB, "a/b/memory.max": 4 * GIB, "a/b/memory.current": GIB}
    memory = read_memory(tree(tmp_path, v2("/a/b", files)))
    assert (memory.limit, memory.available) == (4 * GIB, GIB)


def test_a_group_over_its_limit_has_nothing_free(tmp_path):
    files = {"memory.high": GIB, "memory.current": 2 * GIB}
    assert read_memory(tree(tmp_path, v2("/", files))).available == 0


def test_a_limit_above_the_machine_limits_nothing(tmp_path):
    memory = read_memory(tree(tmp_path, v2("/", {"memory.max": 128 * GIB, "memory.current": 0})))
    assert (memory.limit, memory.available, memory.limit_path) == (64 * GIB, 48 * GIB, None)


def test_limits_of_version_1(tmp_path):
    """Beside its own sums a group of version 1 states those of all groups inside of it."""
    files = {
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
        "memory/memory.usage_in_bytes": 10 * GIB,
        "memory/pod/memory.limit_in_bytes": 2 * GIB,
        "memory/pod/memory.usage_in_bytes": GIB,
        "memory/pod/memory.stat": f"inactive_file 0\ntotal_active_file 0\ntotal_inactive_file {GIB // 2}",
        "memory/pod/app/memory.limit_in_bytes": 16 * GIB,
        "memory/pod/app/memory.usage_in_bytes": 0,
    }
    memory = read_memory(tree(tmp_path, v1("/pod/app", files)))
    assert (memory.limit, memory.limit_path) == (2 * GIB, "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes")
    assert memory.available == 2 * GIB - GIB // 2


@pytest.mark.parametrize("group", ["/docker/abc", "/", "/../outside"])
def test_a_container_sees_its_own_part_of_the_tree(tmp_path, group):
    """Without a namespace its group is named from the real root, and its folder is what is mounted."""
    mount = V2.replace(" / ", " /docker/abc ")
    memory = read_memory(tree(tmp_path, v2(group, {"memory.max": GIB}, mount)))
    assert (memory.limit, memory.limit_path) == (GIB, "/sys/fs/cgroup/memory.max")
    memory = read_memory(tree(tmp_path / "1", v1(group, {"memory/memory.limit_in_bytes": GIB}, "/docker/abc")))
    assert memory.limit == GIB


def test_a_controller_of_version_1_beside_version_2(tmp_path):
    """The memory of a hybrid system is in version 1; the tree of version 2 is there, and has no limits."""
    files = v1("/app", {"memory/app/memory.limit_in_bytes": GIB, "unified/cgroup.procs": ""})
    files["proc/self/mountinfo"] = f"{files['proc/self/mountinfo']}\n{V2}/unified"
    assert read_memory(tree(tmp_path, files)).limit == GIB


@pytest.mark.parametrize("text", ["", "max", "garbage", "-1", "1e9"])
def test_what_cannot_be_read_limits_nothing(tmp_path, text):
    files = v2("/", {"memory.max": text, "memory.current": text, "memory.stat": text, "cpu.max": text})
    assert read_memory(tree(tmp_path, files)).limit_path is None
    assert num_processors(tmp_path) == 8


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu.max": "300000 100000", "a/cpu.max": "600000 100000"}, 3),
        ({"cpu.max": "600000 100000", "a/cpu.max": "300000 100000"}, 3),
    ],
)
def test_processors_within_a_quota_of_version_2(tmp_path, quotas, expected):
    assert num_processors(tree(tmp_path, v2("/a", quotas))) == expected
    assert num_scheduled_processors(tmp_path) == 8


@pytest.mark.parametrize(("quota", "expected"), [(-1, 8), (150_000, 3), (20_000, 1)])
def test_processors_within_a_quota_of_version_1(tmp_path, quota, expected):
    files = {"cpu,cpuacct/a/cpu.cfs_quota_us": quota, "cpu,cpuacct/a/cpu.cfs_period_us": 50_000}
    assert num_processors(tree(tmp_path, v1("/a", files))) == expected


@pytest.mark.parametrize(("allowed", "expected"), [("3", 1), ("0-3,8", 5), ("1,3,5", 3)])
def test_processors_within_the_affinity(tmp_path, allowed, expected):
    files = v2("/", {"cpu.max": "max 100000"}) | {"proc/self/status": f"Cpus_allowed_list:\t{allowed}\n"}
    assert num_processors(tree(tmp_path, files)) == expected


def test_this_machine():
    memory = read_memory()
    assert 0 < memory.available <= memory.limit <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 <= num_processors() <= num_scheduled_processors()
    if hasattr(os, "sched_getaffinity"):
        assert num_scheduled_processors() == len(os.sched_getaffinity(0))


COUNT_THREADS = """
import os
from pathlib import Path
from quire.device.mesh import make_mesh
make_mesh()
print([Path(f"/proc/self/task/{id}/comm").read_text() for id in os.listdir("/proc/self/task")].count("tf_XLAEigen\\n"))
"""


def test_xla_starts_no_more_threads_than_a_quota_allows():
    if num_scheduled_processors() < 2:
        pytest.skip("one processor: there is nothing to limit")
    with control_group("cpu", 100_000) as group:
        command = group.inside([sys.executable, "-c", COUNT_THREADS])
        env = os.environ | {"XLA_FLAGS": ""}  # of tests: four devices, which are four threads
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
