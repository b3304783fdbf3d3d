"""Every movement of a page: how page tables are filled, shared, moved and emptied.

    start    a table begins with what somebody has computed already: pages found in the prefix cache, a relative's
             pages, or its own from host memory; full pages are shared, a partial one is copied
    grow     new pages for positions about to be written; the prefix cache gives up idle ones when none is free
    publish  full pages become findable, once the step that wrote them is committed
    release  a table is emptied; what nobody else holds is free, or idle in the prefix cache

Movements that touch KV are collected as the page operations of the plan being made. Refuses to know: who should run.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import NamedTuple

from quire.core.errors import AuditError, RequestError
from quire.core.pages import PageAllocator
from quire.core.plan import PageOperations
from quire.core.prefix_cache import PrefixCache
from quire.core.sequence import Sequence, SequenceState, Weights


class ReusedPrefix(NamedTuple):
    """The positions of a sequence whose KV exists already, and where."""

    pages: list[int]
    """Full pages to share."""
    num_tokens: int
    """Positions covered: by those pages, by the page to copy, or by host pages."""
    copy_from: int | None = None
    """A partial page to copy, next in order."""
    num_published: int = 0
    """How many of the pages the prefix cache knows."""


class PageTables:
    """Owns the pool on the device, the pool in host memory and the prefix cache."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        page_size: int,
        host: PageAllocator | None = None,
        prefix_cache: bool = True,
        poison_freed: bool = False,
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.host = host
        """Pages in host memory, for swapped sequences; None for no swapping."""
        self.prefix_cache = PrefixCache(allocator, page_size) if prefix_cache else None
        self.weights = Weights(0, 0)
        """What computes from now on."""
        self.swapped_out: list[Sequence] = []
        """Whose pages are on their way to the host: by the plan being made, or the one in flight."""
        self._host_page_of: dict[bytes, int] = {}
        self._host_hash_of: dict[int, bytes] = {}
        """Published pages that are on the host: the next one of a family to be swapped shares them there."""
        self._poison_freed = poison_freed
        self._freed: list[int] = []
        self._operations = PageOperations()

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many positions."""
        return -(-num_tokens // self.page_size)

    def check_fits(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        """Refuse a sequence that the pool could not hold even alone."""
        # The last token drawn never needs a place: no later token looks at it.
        needed = self.pages_for(prompt_len + max(max_tokens - 1, 0))
        num_pages = self.allocator.num_pages
        if needed > num_pages:
            raise RequestError(
                f"it needs {needed} pages for a prompt of {prompt_len} + {max_tokens} new tokens, the pool has "
                f"{num_pages} pages of {self.page_size} tokens: lower max_tokens or raise num_pages",
                field="max_tokens",
                code="context_length_exceeded",
                request_id=request_id,
            )

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

    # -- start ---------------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence, unwritten: Collection[Sequence] = ()) -> ReusedPrefix:
        """What of a waiting or swapped sequence need not be computed.

        The last token is always computed: its logits are what the sequence waits for. Prompt log-probabilities need
        every position's logits, so who still wants them begins with nothing. `unwritten` are sequences whose pages
        are filled by the very plan that is being made: nothing can be copied from them yet.
        """
        if sequence.state is SequenceState.SWAPPED:
            pages = self._match(sequence, sequence.num_computed) if sequence.kv_weights == self.weights else []
            return ReusedPrefix(pages, sequence.num_computed, num_published=len(pages))
        if sequence.params.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.prompt_len:
            return ReusedPrefix([], 0)
        most, common = sequence.num_tokens - 1, 0
        relative = self._relative(sequence, unwritten)
        if relative is not None:
            common = sequence.num_inherited if relative is sequence.parent else sequence.prompt_len
            if not sequence.page_hashes:  # a family hashes its prompt once
                sequence.hash_root = relative.hash_root
                sequence.page_hashes = relative.page_hashes[: common // self.page_size]
            common = min(most, common, relative.num_computed)
        pages = self._match(sequence, most)
        if relative is None or common <= len(pages) * self.page_size:
            return ReusedPrefix(pages, len(pages) * self.page_size, num_published=len(pages))
        num_full = common // self.page_size
        return ReusedPrefix(
            relative.pages[:num_full].tolist(),
            common,
            relative.pages[num_full] if common % self.page_size else None,
            min(num_full, relative.num_published),
        )

    def num_new(self, sequence: Sequence, prefix: ReusedPrefix) -> int:
        """Of the available pages, how many a start with all of a sequence's tokens would take."""
        cache = self.prefix_cache
        idle = sum(map(cache.is_idle, prefix.pages)) if cache else 0
        return self.pages_for(sequence.num_tokens) - len(prefix.pages) + idle

    def start(self, sequence: Sequence, prefix: ReusedPrefix) -> None:
        """Fill an empty table with what `find_prefix` has just found."""
        self._hold(prefix.pages)
        sequence.pages.extend(prefix.pages)
        if sequence.state is SequenceState.SWAPPED:
            on_host = sequence.host_pages[len(prefix.pages) :]
            self._operations.swap_ins += zip(on_host, self._allocate(sequence, len(on_host)), strict=True)
            self._release_host(sequence.host_pages)
            del sequence.host_pages[:]
        elif prefix.num_tokens:
            if prefix.copy_from is not None:
                (page,) = self._allocate(sequence, 1)
                self._operations.copies.append((prefix.copy_from, page))
            sequence.kv_weights = self.weights
        sequence.parent = None  # from here on it goes its own way, and its ancestors may be forgotten
        sequence.num_computed = prefix.num_tokens
        sequence.num_published = prefix.num_published

    def _match(self, sequence: Sequence, most: int) -> list[int]:
        if self.prefix_cache is None:
            return []
        count = most // self.page_size
        return self.prefix_cache.match(self.prefix_cache.hashes(sequence, self.weights, count), count)

    def _relative(self, sequence: Sequence, unwritten: Collection[Sequence]) -> Sequence | None:
        """A running member of the family, its parent first, whose pages can be shared now."""
        for relative in chain((sequence.parent,), reversed(sequence.family)):
            if (
                relative is not None
                and relative is not sequence
                and relative.state is SequenceState.RUNNING
                and relative.kv_weights == self.weights
                and relative not in unwritten
            ):
                return relative
        return None

    # -- grow ----------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, end: int) -> None:
        """Give a sequence pages for all positions below `end`. They must be available."""
        missing = self.pages_for(end) - len(sequence.pages)
        if missing > 0:
            self._allocate(sequence, missing)

    def reachable_end(self, sequence: Sequence, end: int) -> int:
        """How far towards `end` a sequence's pages can reach when nobody, and no cached page, gives way for it."""
        num_pages = min(self.pages_for(end), len(sequence.pages) + self.allocator.num_free)
        return min(end, num_pages * self.page_size)

    def trim(self, sequence: Sequence) -> None:
        """Give back pages behind the last one that holds computed positions: they were reserved and not used."""
        count = self.pages_for(sequence.num_computed)
        if count < len(sequence.pages):
            self._drop(sequence.pages[count:])
            del sequence.pages[count:]

    def _allocate(self, sequence: Sequence, count: int) -> list[int]:
        short = count - self.allocator.num_free
        if short > 0:
            self.evict(short)
        pages = self.allocator.allocate(count)
        sequence.pages.extend(pages)
        return pages

    # -- publish -------------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Make the full pages of a sequence findable; what it computed must be committed.

        Where the cache knows another page with the same tokens, the sequence takes that one and gives its own back:
        thus who holds a known page holds every known page before it. KV of two versions is never published.
        """
        cache, count = self.prefix_cache, sequence.num_computed // self.page_size
        if cache is None or count <= sequence.num_published or sequence.kv_weights != self.weights:
            return
        hashes = cache.hashes(sequence, self.weights, count)
        for i in range(sequence.num_published, count):
            page = sequence.pages[i]
            known = cache.publish(hashes[i], page)
            if known != page:
                self._hold([known])
                sequence.pages[i] = known
                self._drop([page])
        sequence.num_published = count

    def evict(self, count: int) -> int:
        """Make the prefix cache forget its least recently used idle pages; returns how many it had."""
        if self.prefix_cache is None:
            return 0
        evicted = self.prefix_cache.evict(count)
        self._note_freed(evicted)
        return len(evicted)

    # -- release -------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Empty a sequence's table, and its host pages; its KV is gone."""
        self._empty(sequence)
        if sequence.host_pages:
            freed = set(self._release_host(sequence.host_pages))
            del sequence.host_pages[:]
            moves = self._operations.swap_outs
            if moves:  # a way to the host that is not worth the trip any more
                self._operations.swap_outs = [move for move in moves if move[1] not in freed]
        sequence.num_computed = 0
        sequence.kv_weights = None

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether host memory has room for a sequence."""
        if self.host is None or not sequence.pages:
            return False
        return sum(page is None for page in self._on_host(sequence)) <= self.host.num_free

    def swap_out(self, sequence: Sequence) -> None:
        """Empty a sequence's table into host memory; there must be room. Published pages go there once."""
        if self.host is None:
            raise ValueError("there is no host memory to swap to")
        on_host = self._on_host(sequence)
        shared = [page for page in on_host if page is not None]
        self.host.retain(shared)
        new = iter(self._allocate_host(len(on_host) - len(shared)))
        for page, there in zip(sequence.pages, on_host, strict=True):
            target = next(new) if there is None else there
            sequence.host_pages.append(target)
            if there is None:
                self._operations.swap_outs.append((page, target))
                name = self.prefix_cache.hash_of(page) if self.prefix_cache else None
                if name is not None:
                    self._host_page_of[name], self._host_hash_of[target] = target, name
        self.swapped_out.append(sequence)
        self._empty(sequence)

    def _allocate_host(self, count: int) -> list[int]:
        """Free host pages to fill. A plan fills them before it reads any: none may be one that it has yet to read."""
        pages = self.host.allocate(count) if self.host else []
        still_read = {source for source, _ in self._operations.swap_ins}.intersection(pages)
        if still_read:
            raise AuditError(f"host page {min(still_read)} is swapped in by this plan, and would be overwritten before")
        return pages

    def _on_host(self, sequence: Sequence) -> list[int | None]:
        """For each page of a sequence, the host page that has the same KV already."""
        if self.prefix_cache is None:
            return [None] * len(sequence.pages)
        names = map(self.prefix_cache.hash_of, sequence.pages)
        return [None if name is None else self._host_page_of.get(name) for name in names]

    def _release_host(self, host_pages: SequenceOf[int]) -> list[int]:
        if self.host is None:
            return []
        freed = self.host.release(host_pages)
        for page in freed:
            name = self._host_hash_of.pop(page, None)
            if name is not None:
                del self._host_page_of[name]
        return freed

    def _empty(self, sequence: Sequence) -> None:
        self._drop(sequence.pages)
        del sequence.pages[:]
        sequence.num_published = 0

    def _hold(self, pages: SequenceOf[int]) -> None:
        if self.prefix_cache is None:
            self.allocator.retain(pages)
        else:
            self.prefix_cache.acquire(pages)

    def _drop(self, pages: SequenceOf[int]) -> None:
        freed = self.allocator.release(pages)
        if self.prefix_cache is not None:
            self.prefix_cache.mark_idle(pages)
        self._note_freed(freed)

    def _note_freed(self, pages: list[int]) -> None:
        if self._poison_freed:
            self._freed += pages

    # -- operations ----------------------------------------------------------------------------------------------

    def take_operations(self) -> PageOperations:
        """What the plan must do to pages before it writes; the next plan starts with none."""
        operations, self._operations = self._operations, PageOperations()
        filled = {page for _, page in chain(operations.copies, operations.swap_ins)}
        host_filled = {page for _, page in operations.swap_outs}
        num_fills = len(operations.copies) + len(operations.swap_ins)
        if len(filled) != num_fills or len(host_filled) != len(operations.swap_outs):
            raise AuditError(f"a plan fills a page twice: {operations}")
        operations.poisons = [page for page in dict.fromkeys(self._freed) if page not in filled]
        self._freed = []
        return operations

    def dispatched(self) -> None:
        """The operations last taken have been done: pages on the host hold what they should."""
        self.swapped_out = []
