"""Every page at a glance: who holds it, how full it is, by what name the prefix cache knows it."""

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain, cycle
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

from quire.core.page_pool import PagePool
from quire.core.pages import PageAllocator
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence

FREE, CACHED, SHARED = ".", "_", "#"
COLUMNS = 64


class PageInfo(NamedTuple):
    """One page."""

    page: int
    tier: str
    """"device" or "host"."""
    owners: tuple[str, ...]
    """Sequences that hold it, as request id/index."""
    refcount: int
    """Its holders: the owners, and the prefix cache if it knows the page."""
    fill: int
    """Positions that hold KV."""
    hash: str | None
    """Its name in the prefix cache, in hexadecimal."""
    window: int | None = None
    """The window of the layers whose KV it holds; None for those that see every position."""

    @property
    def glyph(self) -> str:
        """What it is, in one character; "a" stands for any single owner."""
        if not self.owners:
            return FREE if self.hash is None else CACHED
        return "a" if len(self.owners) == 1 else SHARED


@dataclass(frozen=True, slots=True)
class PageMap:
    """All pages of both tiers and of every pool, device first, each in order. As text: a grid, one character a page."""

    pages: list[PageInfo]
    page_size: int

    def __len__(self) -> int:
        return len(self.pages)

    def __iter__(self) -> Iterator[PageInfo]:
        return iter(self.pages)

    def __getitem__(self, index: int) -> PageInfo:
        return self.pages[index]

    def __str__(self) -> str:
        letters: dict[str, str] = {}
        supply = cycle(ascii_lowercase)
        lines = []
        for (tier, window), pages in self._by_pool().items():
            of_window = "" if window is None else f", of layers with a window of {window}"
            lines.append(f"{tier}: {len(pages)} pages of {self.page_size} tokens{of_window}")
            glyphs = []
            for page in pages:
                glyph = page.glyph
                if glyph == "a":
                    request = page.owners[0].rpartition("/")[0]
                    glyph = letters[request] if request in letters else letters.setdefault(request, next(supply))
                    glyph = glyph if page.fill < self.page_size else glyph.upper()
                glyphs.append(glyph)
            for start in range(0, len(glyphs), COLUMNS):
                row = "".join(glyphs[start : start + COLUMNS])
                if row.strip(FREE):
                    lines.append(f"{start:>8}  {row}")
                elif not lines[-1].endswith("all free"):
                    lines.append(f"{start:>8}  {FREE * 3} all free")
        lines.append(f"{FREE} free   {CACHED} cached, held by nobody   {SHARED} shared   a partly, A wholly filled")
        lines += [f"{letter} {request}" for request, letter in letters.items()]
        return "\n".join(lines)

    def _by_pool(self) -> dict[tuple[str, int | None], list[PageInfo]]:
        pools: dict[tuple[str, int | None], list[PageInfo]] = {}
        for page in self.pages:
            pools.setdefault((page.tier, page.window), []).append(page)
        return pools


def page_map(scheduler: Scheduler) -> PageMap:
    """Read every page's owner, refcount, fill, hash and tier."""
    tables = scheduler.tables
    pages = []
    for i, pool in enumerate(tables.pools):
        cache, window = pool.prefix_cache, tables.windows[i - 1].window if i else None
        owners, fills = _owners([(s, _first(s, i), s.tables[i]) for s in scheduler.running], tables.page_size)
        for page in range(pool.allocator.num_pages):
            fill, hex_name = fills.get(page, 0), None
            if cache and (name := cache.hash_of(page)):
                fill, hex_name = cache.num_tokens(page), name.hex()
            holders = pool.allocator.refcount(page)
            pages.append(PageInfo(page, "device", tuple(owners.get(page, ())), holders, fill, hex_name, window))
    for i, pool in enumerate(tables.pools):
        if pool.host:
            window = tables.windows[i - 1].window if i else None
            swapped = [s for s in scheduler.waiting if s.host_pages]
            owners, fills = _owners([(s, _first(s, i), s.host_tables[i]) for s in swapped], tables.page_size)
            for page in range(pool.host.num_pages):
                found = (tuple(owners.get(page, ())), pool.host.refcount(page), fills.get(page, 0))
                pages.append(PageInfo(page, "host", *found, None, window))
    return PageMap(pages, tables.page_size)


def _first(sequence: Sequence, pool: int) -> int:
    """How many pages have left its table in one pool."""
    return sequence.windows[pool - 1].first if pool else 0


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """A sequence as others may see it: what it is doing, and its page table; nothing of what it says."""

    request_id: str
    index: int
    state: str
    prompt_len: int
    num_output: int
    max_tokens: int
    num_computed: int
    num_cached_tokens: int
    preemptions: int
    tables: list[tuple[int, bytes]]
    """In each pool: how many pages have left the window, and 32-bit page ids; of the host's pages while it is swapped.
    Empty for one that waits."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pages of one pool."""

    window: int | None
    """What its layers see; None for every position."""
    refcounts: np.ndarray
    host_refcounts: np.ndarray
    idle: np.ndarray
    """Pages that only the prefix cache holds; the next to be evicted first."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a page map is made of, in the form that is quickest to take: for who draws it beside a running engine."""

    page_size: int
    pools: list[PoolSnapshot]
    """That of the layers which see every position first."""
    sequences: list[SequenceSnapshot]
    """Running, swapped and waiting; of those that wait, as many as were asked for."""
    num_waiting: int


def snapshot(scheduler: Scheduler, most_waiting: int) -> Snapshot:
    """Copy what a page map is made of. Linear in running and swapped sequences, a memory copy in pages."""
    tables = scheduler.tables
    sequences = [_sight(sequence, sequence.tables) for sequence in scheduler.running]
    listed = 0
    for sequence in chain(scheduler.waiting, *scheduler.waiting_for_prompt.values()):
        if sequence.host_pages:
            sequences.append(_sight(sequence, sequence.host_tables))
        elif listed < most_waiting:
            listed += 1
            sequences.append(_sight(sequence, ()))
    windows = [None, *(window.window for window in tables.windows)]
    return Snapshot(
        page_size=tables.page_size,
        pools=[_pool(pool, window) for pool, window in zip(tables.pools, windows, strict=True)],
        sequences=sequences,
        num_waiting=scheduler.num_waiting,
    )


def _pool(pool: PagePool, window: int | None) -> PoolSnapshot:
    idle = pool.prefix_cache.idle_pages if pool.prefix_cache else ()
    return PoolSnapshot(window, _refcounts(pool.allocator), _refcounts(pool.host), np.fromiter(idle, np.int32))


def _sight(sequence: Sequence, tables: Collection[array]) -> SequenceSnapshot:
    return SequenceSnapshot(
        sequence.request.id,
        sequence.index,
        str(sequence.state),
        sequence.prompt_len,
        sequence.num_output,
        sequence.max_tokens,
        sequence.num_computed,
        sequence.num_cached_tokens,
        sequence.preemptions,
        [(_first(sequence, i), pages.tobytes()) for i, pages in enumerate(tables)],
    )


def _refcounts(allocator: PageAllocator | None) -> np.ndarray:
    return allocator.refcounts.copy() if allocator else np.zeros(0, np.int32)


def _owners(tables: list, size: int) -> tuple[dict[int, list[str]], dict[int, int]]:
    owners: dict[int, list[str]] = {}
    fills: dict[int, int] = {}
    sequence: Sequence
    for sequence, first, table in tables:
        for i, page in enumerate(table, first):
            owners.setdefault(page, []).append(sequence.name)
            fills[page] = max(fills.get(page, 0), min(max(sequence.num_computed - i * size, 0), size))
    return owners, fills
