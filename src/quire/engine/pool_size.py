"""How many pages there are, and how much memory they may take when nobody says. Plain arithmetic."""

from quire.config import EngineConfig

DEVICE_SHARE = 0.85
"""Of what an accelerator has left once the weights are on it."""
HOST_SHARE = 0.25
"""Of the memory a host has free; it is not ours alone."""
HOST_MOST = 4 << 30
"""Bytes of host memory, at most."""


def pool_pages(config: EngineConfig, max_model_len: int, *, page_bytes: int, default_budget: int) -> int:
    """As many pages as the budget holds, and no more than every row at full length could use."""
    budget = config.memory_budget or default_budget
    useful = config.max_num_seqs * -(-max_model_len // config.page_size)
    pages = min(budget // page_bytes, useful)
    # Compiled programs know the pool's size: on a coarse grid, the next start finds the same ones in the cache.
    pages -= pages % (1 << max(pages.bit_length() - 4, 0))
    if pages < 1:
        raise ValueError(
            f"memory_budget={budget:,} bytes holds no page of {page_bytes:,} bytes; raise it or lower page_size"
        )
    return pages


def host_pages(config: EngineConfig, num_pages: int, *, page_bytes: int, available_bytes: int) -> int:
    """Half as many as on the device, in at most a share of the memory the host has free; none if nobody swaps."""
    if config.preemption == "recompute":
        return 0
    if config.num_host_pages is not None:
        return config.num_host_pages
    return min(num_pages // 2, int(available_bytes * HOST_SHARE) // page_bytes)


def default_pool_bytes(available_bytes: int, *, is_host_memory: bool) -> int:
    """Bytes for the pool, of those that its devices have free."""
    if is_host_memory:
        return min(int(available_bytes * HOST_SHARE), HOST_MOST)
    return int(available_bytes * DEVICE_SHARE)
