"""How much memory the KV pool may take when nobody says."""

import os

import jax

DEVICE_SHARE = 0.85
"""Of what an accelerator has left once the weights are on it."""
HOST_SHARE = 0.25
"""Of the memory a host has free; it is not ours alone."""
HOST_MOST = 4 << 30


def default_pool_bytes() -> int:
    """Bytes for the pool on the default device."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * DEVICE_SHARE)
    return min(int(_free_host_bytes() * HOST_SHARE), HOST_MOST)


def _free_host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
