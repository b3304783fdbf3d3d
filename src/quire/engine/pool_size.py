"""How many pages there are, and how much memory they may take when nobody says. Plain arithmetic.

Layers that see every position have one pool, layers that see a window another. Memory is shared out as if all rows
(`max_num_seqs`) had the same length: the longest that fits. Up to the length of a window its pool then has as many
pages as the first one, and from there on what the rows' windows take.
"""

from bisect import bisect_right
from collections.abc import Sequence

from quire.config import EngineConfig, ModelConfig, WindowPoolSize
from quire.field_error import FieldError
from quire.memory_budget import budget_bytes

DEVICE_SHARE = 0.85
"""Of what an accelerator has left once the weights are on it."""
HOST_SHARE = 0.25
"""Of the memory a host has free; it is not ours alone."""
HOST_MOST = 4 << 30
"""Bytes of host memory, at most."""
HOST_RESERVE = 384 << 20
"""Bytes of host memory that are left beside weights and pages: for compiling, steps and requests."""
FIRST_SHARE = 1 / 16
"""Of the budget: what the first pool gets in any case, if rows can use it. Where few layers or none see every position,
its pages are small, and it is not for want of them that a long sequence should find no room."""


def pool_pages(
    config: EngineConfig, max_model_len: int, *, budget: int, page_bytes: Sequence[int], windows: Sequence[int] = ()
) -> list[int]:
    """Pages of every pool, `page_bytes` being the size of one in each: what fits into a budget.

    No more than every row at full length could use; and where there is room for that, the same once more for what the
    prefix cache keeps of windows.
    """
    useful = config.max_num_seqs * _pages_for(config, max_model_len)
    rows = [_pages_of_rows(config, window) for window in windows]
    one = [pages_of_row(config, window) for window in windows]

    def windows_of(longest: int) -> list[int]:
        return [max(_coarse(longest, most), min(longest, least)) for most, least in zip(rows, one, strict=True)]

    longest = _length_that_fits(budget, page_bytes, [useful, *rows])
    if longest < 1:
        if config.memory_budget is None:
            message = (
                f"the share of the free memory that is for pages, {budget:,} bytes, holds no page of "
                f"{sum(page_bytes):,} bytes; free memory, raise the limit of the container, or take a smaller model"
            )
        else:
            num_bytes = sum(page_bytes)
            message = (
                f"memory_budget={budget:,} bytes holds no page of {num_bytes:,} bytes; raise it or lower page_size"
            )
        raise FieldError(message, field="memory_budget")
    pages = [_coarse(longest, useful), *windows_of(longest)]
    first = _coarse(int(budget * FIRST_SHARE) // page_bytes[0], useful)
    if windows and first > pages[0]:
        longest = _length_that_fits(budget - first * page_bytes[0], page_bytes[1:], rows)
        if longest >= max(one):  # else no sequence could get so long
            pages = [first, *windows_of(longest)]
    if pages == [useful, *rows]:
        left = budget - sum(count * size for count, size in zip(pages, page_bytes, strict=True))
        cached = [_pages_for_cache(config, window) for window in windows]
        longest = _length_that_fits(left, page_bytes[1:], cached)
        pages[1:] = [count + _coarse(longest, most) for count, most in zip(rows, cached, strict=True)]
    return [min(count, pages[0]) for count in pages]


def pages_beside(config: EngineConfig, num_pages: int, windows: Sequence[int]) -> list[int]:
    """Pages of every pool where the first is to have so many: those of windows have no more, and what rows can use."""
    most = [_pages_of_rows(config, window) + _pages_for_cache(config, window) for window in windows]
    return [num_pages, *(min(num_pages, count) for count in most)]


def sequences_that_fit(num_tokens: int, *, page_size: int, num_pages: int, windows: Sequence[WindowPoolSize]) -> int:
    """Sequences of so many tokens that every pool holds at the same time, if they share nothing."""
    needed = -(-num_tokens // page_size)
    in_windows = [size.num_pages // min(needed, -(-(size.window - 1) // page_size) + 1) for size in windows]
    return min([num_pages // needed, *in_windows])


def own_windows(config: EngineConfig, model: ModelConfig, max_model_len: int) -> tuple[int, ...]:
    """The windows whose layers get pools of their own: those that a sequence can outgrow, with a step's tokens."""
    windows = dict.fromkeys(layer.window for layer in model.attention if layer.window)
    longest = _pages_for(config, max_model_len)
    return tuple(window for window in windows if pages_of_row(config, window) < longest)


def pages_of_row(config: EngineConfig, window: int) -> int:
    """Pages of a window that one sequence holds at most: what a token sees, and a step's tokens from there on."""
    ahead = max(config.max_num_batched_tokens, config.max_rounds)
    return _pages_for(config, window - 1 + ahead) + 1


def _pages_of_rows(config: EngineConfig, window: int) -> int:
    """The same of all rows together: they share the tokens of a step."""
    ahead = max(config.max_num_batched_tokens, config.max_num_seqs * config.max_rounds)
    return config.max_num_seqs * _pages_seen(config, window) + _pages_for(config, ahead)


def _pages_for_cache(config: EngineConfig, window: int) -> int:
    """What as many rows see that have ended, for the prefix cache."""
    return config.prefix_cache * config.max_num_seqs * _pages_seen(config, window)


def _pages_seen(config: EngineConfig, window: int) -> int:
    """What a token sees begins and ends inside of pages."""
    return _pages_for(config, window - 1) + 2


def _pages_for(config: EngineConfig, num_tokens: int) -> int:
    return -(-num_tokens // config.page_size)


def _length_that_fits(budget: int, page_bytes: Sequence[int], most: Sequence[int]) -> int:
    """The most pages that every pool can have, or as many of them as it can use, within a budget."""

    def needed(count: int) -> int:
        return sum(min(count, limit) * size for limit, size in zip(most, page_bytes, strict=True))

    return bisect_right(range(max(most, default=0) + 1), budget, key=needed) - 1


def _coarse(count: int, most: int) -> int:
    """At most so many pages, on a coarse grid.

    Compiled programs know the sizes of pools: thus the next start, with a little more or less of memory, finds the
    same ones in the cache.
    """
    return most if count >= most else count - count % (1 << max(count.bit_length() - 4, 0))


def host_pages(config: EngineConfig, num_pages: int, *, page_bytes: int, available_bytes: int) -> int:
    """Half as many as on the device, in at most a share of the memory the host has free; none if nobody swaps.

    `page_bytes` is what a page of the first pool takes with its share of the others.
    """
    if config.preemption == "recompute":
        return 0
    if config.num_host_pages is not None:
        return config.num_host_pages
    return min(num_pages // 2, int(available_bytes * HOST_SHARE) // page_bytes)


def check_memory(knob: str, num_pages: int, *, num_bytes: int, available_bytes: int, within: str = "") -> None:
    """Raise FieldError if the pages that a knob asks for, with those of windows, are more than the memory there is.

    `within` names the limit of that memory.
    """
    if num_bytes > available_bytes:
        page_bytes = num_bytes // num_pages
        raise FieldError(
            f"{knob}: {num_pages:,} pages of {page_bytes:,} bytes are {num_bytes / 2**30:,.1f} GiB, and "
            f"{available_bytes / 2**30:,.1f} GiB of memory are free{within}; lower {knob}: "
            f"{available_bytes // page_bytes:,} pages would take all of it",
            field=knob,
        )


def pages_for_length(
    config: EngineConfig,
    max_model_len: int,
    pages: list[int],
    *,
    budget: int,
    page_bytes: Sequence[int],
    windows: Sequence[int] = (),
) -> list[int]:
    """Return `pages` of every pool, raised to what one sequence of an explicit `max_model_len` needs.

    A default budget may be exceeded. An explicit `memory_budget` may not: FieldError if it cannot hold that sequence.
    """
    needed = _pages_for(config, max_model_len - 1)  # the last token that is drawn is never stored
    if config.max_model_len is None or pages[0] >= needed:
        return pages
    least = [needed, *(min(needed, pages_of_row(config, window)) for window in windows)]
    if config.memory_budget is None:
        return [max(pair) for pair in zip(pages, least, strict=True)]
    num_bytes = sum(count * size for count, size in zip(least, page_bytes, strict=True))
    if num_bytes > budget:
        raise FieldError(
            f"max_model_len={max_model_len:,} is more than the {pages[0] * config.page_size:,} tokens that "
            f"memory_budget={config.memory_budget!r} holds; raise memory_budget to at least {num_bytes:,} bytes, or "
            "lower max_model_len",
            field="max_model_len",
        )
    rows = [_pages_of_rows(config, window) for window in windows]
    longest = _length_that_fits(budget - needed * page_bytes[0], page_bytes[1:], rows)
    if longest < max(least[1:], default=0):
        return least
    return [needed, *(min(longest, needed, most) for most in rows)]


def pool_budget(config: EngineConfig, free_bytes: int, *, is_host_memory: bool) -> int:
    """Bytes for the pool, of those that its devices have free: what the config asks for, else a share."""
    if config.memory_budget is not None:
        return budget_bytes(config.memory_budget, free_bytes)
    return default_pool_bytes(free_bytes, is_host_memory=is_host_memory)


def default_pool_bytes(available_bytes: int, *, is_host_memory: bool) -> int:
    """Bytes for the pool, of those that its devices have free."""
    if is_host_memory:
        return min(int(available_bytes * HOST_SHARE), HOST_MOST)
    return int(available_bytes * DEVICE_SHARE)
