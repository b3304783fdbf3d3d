"""How much memory the KV pool may take when nobody says."""

import os
from pathlib import Path

from jax.sharding import Mesh

DEVICE_SHARE = 0.85
"""Of what an accelerator has left once the weights are on it."""
HOST_SHARE = 0.25
"""Of the memory a host has free; it is not ours alone."""
HOST_MOST = 4 << 30


def default_pool_bytes(mesh: Mesh) -> int:
    """Bytes for the pool over all devices of a mesh."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * DEVICE_SHARE) * mesh.size
    return min(int(_available_host_bytes() * HOST_SHARE), HOST_MOST)


def default_host_bytes() -> int:
    """Bytes for swapped pages."""
    return int(_available_host_bytes() * HOST_SHARE)


def _available_host_bytes() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
