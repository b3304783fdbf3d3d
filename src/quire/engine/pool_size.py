"""How many pages there are, and how much memory they may take when nobody says."""

import os
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from quire.config import EngineConfig, ModelConfig

DEVICE_SHARE = 0.85
"""Of what an accelerator has left once the weights are on it."""
HOST_SHARE = 0.25
"""Of the memory a host has free; it is not ours alone."""
HOST_MOST = 4 << 30


def pool_pages(config: EngineConfig, model: ModelConfig, max_model_len: int, mesh: Mesh) -> int:
    """As many pages as the budget holds, and no more than every row at full length could use."""
    page_bytes = _page_bytes(config, model)
    budget = config.memory_budget or default_pool_bytes(mesh)
    useful = config.max_num_seqs * -(-max_model_len // config.page_size)
    pages = min(budget // page_bytes, useful)
    # Compiled programs know the pool's size: on a coarse grid, the next start finds the same ones in the cache.
    pages -= pages % (1 << max(pages.bit_length() - 4, 0))
    if pages < 1:
        raise ValueError(
            f"memory_budget={budget:,} bytes holds no page of {page_bytes:,} bytes; raise it or lower page_size"
        )
    return pages


def host_pages(config: EngineConfig, model: ModelConfig, num_pages: int) -> int:
    """Half as many as on the device, in at most a share of the memory the host has free; none if nobody swaps."""
    if config.preemption == "recompute":
        return 0
    if config.num_host_pages is not None:
        return config.num_host_pages
    return min(num_pages // 2, int(_available_host_bytes() * HOST_SHARE) // _page_bytes(config, model))


def default_pool_bytes(mesh: Mesh) -> int:
    """Bytes for the pool over all devices of a mesh."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * DEVICE_SHARE) * mesh.size
    return min(int(_available_host_bytes() * HOST_SHARE), HOST_MOST)


def _page_bytes(config: EngineConfig, model: ModelConfig) -> int:
    return config.page_size * model.kv_bytes_per_token(jnp.dtype(config.dtype).itemsize)


def _available_host_bytes() -> int:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux: half of what is built in
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
