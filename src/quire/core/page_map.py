"""Every page at a glance: who holds it, how full it is, by what name the prefix cache knows it."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np

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

    @property
    def glyph(self) -> str:
        """What it is, in one character; "a" stands for any single owner."""
        if not self.owners:
            return FREE if self.hash is None else CACHED
        return "a" if len(self.owners) == 1 else SHARED


@dataclass(frozen=True, slots=True)
class PageMap:
    """All pages of both tiers, device first, each in order. As text: a grid, one character a page."""

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
        for tier in ("device", "host"):
            pages = [page for page in self.pages if page.tier == tier]
            if not pages:
                continue
            lines.append(f"{tier}: {len(pages)} pages of {self.page_size} tokens")
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


def page_map(scheduler: Scheduler) -> PageMap:
    """Read every page's owner, refcount, fill, hash and tier."""
    tables = scheduler.tables
    cache, size = tables.prefix_cache, tables.page_size
    pages = []
    owners, fills = _owners([(s, s.pages) for s in scheduler.running], size)
    for page in range(tables.allocator.num_pages):
        name = cache.hash_of(page) if cache else None
        fill = size if name is not None else fills.get(page, 0)
        refcount = tables.allocator.refcount(page)
        pages.append(
            PageInfo(page, "device", tuple(owners.get(page, ())), refcount, fill, None if name is None else name.hex())
        )
    if tables.host:
        owners, fills = _owners([(s, s.host_pages) for s in scheduler.waiting], size)
        pages += [
            PageInfo(page, "host", tuple(owners.get(page, ())), tables.host.refcount(page), fills.get(page, 0), None)
            for page in range(tables.host.num_pages)
        ]
    return PageMap(pages, size)


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
    pages: bytes
    """32-bit page ids, of the host's pages while it is swapped."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """What a page map is made of, in the form that is quickest to take: for who draws it beside a running engine."""

    page_size: int
    refcounts: np.ndarray
    host_refcounts: np.ndarray
    idle: np.ndarray
    """Pages that only the prefix cache holds; the next to be evicted first."""
    sequences: list[SequenceSnapshot]
    """Running, swapped and waiting; of those that wait, as many as were asked for."""
    num_waiting: int


def snapshot(scheduler: Scheduler, most_waiting: int) -> PoolSnapshot:
    """Copy what a page map is made of. Linear in running and swapped sequences, a memory copy in pages."""
    tables = scheduler.tables
    cache = tables.prefix_cache
    sequences = [_sight(sequence, sequence.pages) for sequence in scheduler.running]
    listed = 0
    for sequence in chain(scheduler.waiting, *scheduler.waiting_for_prompt.values()):
        if sequence.host_pages or listed < most_waiting:
            listed += not sequence.host_pages
            sequences.append(_sight(sequence, sequence.host_pages))
    return PoolSnapshot(
        page_size=tables.page_size,
        refcounts=_refcounts(tables.allocator),
        host_refcounts=_refcounts(tables.host),
        idle=np.fromiter(cache.idle_pages if cache else (), np.int32),
        sequences=sequences,
        num_waiting=scheduler.num_waiting,
    )


def _sight(sequence: Sequence, pages: array) -> SequenceSnapshot:
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
        pages.tobytes(),
    )


def _refcounts(allocator: PageAllocator | None) -> np.ndarray:
    return allocator.refcounts.copy() if allocator else np.zeros(0, np.int32)


def _owners(tables: list, size: int) -> tuple[dict[int, list[str]], dict[int, int]]:
    owners: dict[int, list[str]] = {}
    fills: dict[int, int] = {}
    sequence: Sequence
    for sequence, table in tables:
        for i, page in enumerate(table):
            owners.setdefault(page, []).append(sequence.name)
            fills[page] = max(fills.get(page, 0), min(max(sequence.num_computed - i * size, 0), size))
    return owners, fills
