"""The pages of one group of layers: on the device, in host memory, and those that the prefix cache knows.

Layers that keep the same positions share one pool. The first pool is of the layers that see every position. A
`WindowPool` is of layers that see a window: a sequence gives back there what has left the window, so that what it
needs is bounded, however long it gets. Any pool can run out.

Movements that touch KV are collected as the page operations of the plan being made. Refuses to know: who should run.
"""

from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import TypedDict, Unpack

from quire.core.errors import AuditError
from quire.core.pages import PageAllocator
from quire.core.plan import PageOperations
from quire.core.prefix_cache import PrefixCache
from quire.core.sequence import WindowTable


class PoolKnobs(TypedDict, total=False):
    """What pools of one engine have in common."""

    num_host_pages: int
    """0 for none."""
    prefix_cache: bool
    """True if nobody says."""
    poison_freed: bool
    """False if nobody says."""


class PagePool:
    """Pages that are held, shared, known by name, and moved to host memory and back."""

    def __init__(self, num_pages: int, page_size: int, **knobs: Unpack[PoolKnobs]) -> None:
        num_host_pages, prefix_cache = knobs.get("num_host_pages", 0), knobs.get("prefix_cache", True)
        self.allocator = PageAllocator(num_pages)
        self.page_size = page_size
        self.host = PageAllocator(num_host_pages) if num_host_pages else None
        """Pages in host memory, for swapped sequences; None for no swapping."""
        self.prefix_cache = PrefixCache(self.allocator, page_size) if prefix_cache else None
        self._host_page_of: dict[bytes, int] = {}
        self._host_hash_of: dict[int, bytes] = {}
        """Published pages that are on the host: the next one of a family to be swapped shares them there."""
        self._poison_freed = knobs.get("poison_freed", False)
        self._freed: list[int] = []
        self.operations = PageOperations()

    @property
    def num_pages(self) -> int:
        """Pages on the device."""
        return self.allocator.num_pages

    @property
    def num_host_pages(self) -> int:
        """Pages in host memory; 0 for no swapping."""
        return self.host.num_pages if self.host else 0

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking them from a sequence."""
        return self.allocator.num_free + self.num_cached

    @property
    def num_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.prefix_cache.num_idle if self.prefix_cache else 0

    def num_holders(self, page: int) -> int:
        """Sequences that hold a page."""
        cached = self.prefix_cache is not None and self.prefix_cache.hash_of(page) is not None
        return self.allocator.refcount(page) - cached

    def num_idle(self, pages: SequenceOf[int]) -> int:
        """How many of these pages only the prefix cache holds."""
        return sum(map(self.prefix_cache.is_idle, pages)) if self.prefix_cache else 0

    def num_needed(self, position: int, end: int) -> int:
        """Pages that a sequence holds at once, at most, on its way from a position to the end of `end` pages."""
        return end

    def allocate(self, count: int) -> list[int]:
        """New pages; the prefix cache gives up idle ones when too few are free."""
        short = count - self.allocator.num_free
        if short > 0:
            self.evict(short)
        return self.allocator.allocate(count)

    def hold(self, pages: SequenceOf[int]) -> None:
        """Become one more holder."""
        if self.prefix_cache is None:
            self.allocator.retain(pages)
        else:
            self.prefix_cache.acquire(pages)

    def drop(self, pages: SequenceOf[int]) -> None:
        """Be a holder no more: what nobody else holds is free, or idle in the prefix cache."""
        freed = self.allocator.release(pages)
        if self.prefix_cache is not None:
            self.prefix_cache.mark_idle(pages)
        self._note_freed(freed)

    def copy(self, source: int) -> int:
        """A new page, to be filled with what another holds."""
        if self.prefix_cache is not None:
            self.prefix_cache.touch(source)
        (page,) = self.allocate(1)
        self.operations.copies.append((source, page))
        return page

    def publish(self, name: bytes, page: int, num_tokens: int | None = None) -> int:
        """Make a page findable, full or with so many tokens. Where another has that name, it is held in its place."""
        if self.prefix_cache is None:
            return page
        known = self.prefix_cache.publish(name, page, num_tokens)
        if known != page:
            self.hold([known])
            self.drop([page])
        return known

    def evict(self, count: int) -> int:
        """Make the prefix cache forget its least recently used idle pages; returns how many it had."""
        if self.prefix_cache is None:
            return 0
        evicted = self.prefix_cache.evict(count)
        self._note_freed(evicted)
        return len(evicted)

    def _note_freed(self, pages: list[int]) -> None:
        if self._poison_freed:
            self._freed += pages

    # -- host memory ---------------------------------------------------------------------------------------------

    def can_swap_out(self, pages: SequenceOf[int]) -> bool:
        """Whether host memory has room for these."""
        return self.host is not None and sum(page is None for page in self._on_host(pages)) <= self.host.num_free

    def swap_out(self, pages: SequenceOf[int]) -> list[int]:
        """Host pages that these go to; there must be room. Published pages go there once."""
        if self.host is None:
            raise ValueError("there is no host memory to swap to")
        on_host, host_pages = self._on_host(pages), []
        shared = [page for page in on_host if page is not None]
        self.host.retain(shared)
        new = iter(self._allocate_host(len(on_host) - len(shared)))
        for page, there in zip(pages, on_host, strict=True):
            target = next(new) if there is None else there
            host_pages.append(target)
            if there is None:
                self.operations.swap_outs.append((page, target))
                name = self.prefix_cache.hash_of(page) if self.prefix_cache else None
                if name is not None:
                    self._host_page_of[name], self._host_hash_of[target] = target, name
        return host_pages

    def swap_in(self, host_pages: SequenceOf[int]) -> list[int]:
        """New pages that these come back to. They stay on the host until `release_host`."""
        pages = self.allocate(len(host_pages))
        self.operations.swap_ins += zip(host_pages, pages, strict=True)
        return pages

    def release_host(self, host_pages: SequenceOf[int]) -> list[int]:
        """Be a holder of host pages no more; returns those that are free now."""
        if self.host is None:
            return []
        freed = self.host.release(host_pages)
        for page in freed:
            name = self._host_hash_of.pop(page, None)
            if name is not None:
                del self._host_page_of[name]
        return freed

    def lose_host(self, host_pages: SequenceOf[int]) -> None:
        """The same; and what is on its way to them need not arrive."""
        freed = set(self.release_host(host_pages))
        moves = self.operations.swap_outs
        if moves:
            self.operations.swap_outs = [move for move in moves if move[1] not in freed]

    def _allocate_host(self, count: int) -> list[int]:
        """Free host pages to fill. A plan fills them before it reads any: none may be one that it has yet to read."""
        pages = self.host.allocate(count) if self.host else []
        still_read = {source for source, _ in self.operations.swap_ins}.intersection(pages)
        if still_read:
            raise AuditError(f"host page {min(still_read)} is swapped in by this plan, and would be overwritten before")
        return pages

    def _on_host(self, pages: SequenceOf[int]) -> list[int | None]:
        """For each page, the host page that has the same KV already."""
        if self.prefix_cache is None:
            return [None] * len(pages)
        names = map(self.prefix_cache.hash_of, pages)
        return [None if name is None else self._host_page_of.get(name) for name in names]

    # -- operations ----------------------------------------------------------------------------------------------

    def take_operations(self) -> PageOperations:
        """What the plan must do to pages before it writes; the next plan starts with none."""
        operations, self.operations = self.operations, PageOperations()
        filled = {page for _, page in chain(operations.copies, operations.swap_ins)}
        host_filled = {page for _, page in operations.swap_outs}
        num_fills = len(operations.copies) + len(operations.swap_ins)
        if len(filled) != num_fills or len(host_filled) != len(operations.swap_outs):
            raise AuditError(f"a plan fills a page twice: {operations}")
        operations.poisons = [page for page in dict.fromkeys(self._freed) if page not in filled]
        self._freed = []
        return operations


class WindowPool(PagePool):
    """The pages of layers whose tokens see only the last `window` positions, their own among them."""

    def __init__(
        self, window: int, num_pages: int, page_size: int, *, pages_per_row: int, **knobs: Unpack[PoolKnobs]
    ) -> None:
        super().__init__(num_pages, page_size, **knobs)
        self.window = window
        self.pages_per_row = pages_per_row
        """Pages that one sequence holds at most: those of the window, and of the tokens of a step."""

    def num_needed(self, position: int, end: int) -> int:
        """See `PagePool`. Not all of them at once: pages that have left the window are given back on the way."""
        return min(end - self.first_seen(position), self.pages_per_row)

    def first_seen(self, position: int) -> int:
        """The index of the first page that the token at a position sees, in its sequence's table."""
        return max(position - self.window + 1, 0) // self.page_size

    def known_end(self, names: SequenceOf[bytes], end: int) -> int:
        """The longest beginning, of at most `end` full pages, behind which a token finds all that it sees."""
        cache, i = self.prefix_cache, end
        while cache is not None and i > self.first_seen(end * self.page_size):
            i -= 1
            if cache.page_of(names[i]) is None:
                end = i
        return end

    def seen_by(
        self, position: int, names: SequenceOf[bytes], table: WindowTable | None = None
    ) -> tuple[list[int], int | None] | None:
        """The full pages that the token at a position sees, and the partial one; None if there are not all.

        They are those of a relative's table, as far as it still has them, and those that are known by name.
        """
        cache, pages = self.prefix_cache, []
        num_full, offset = divmod(position, self.page_size)
        for i in range(self.first_seen(position), num_full + (offset > 0)):
            if table is not None and i >= table.first:
                pages.append(table.pages[i - table.first])
            elif cache is not None and i < num_full and (page := cache.page_of(names[i])) is not None:
                pages.append(page)
            else:
                return None
        return (pages[:-1], pages[-1]) if offset else (pages, None)

    def slide(self, table: WindowTable, num_computed: int) -> None:
        """Give back the pages that no later token sees."""
        gone = self.first_seen(num_computed) - table.first
        if gone > 0:
            self.drop(table.pages[:gone][::-1])  # of those that stay known, the first is the first to be evicted
            del table.pages[:gone]
            table.first += gone
