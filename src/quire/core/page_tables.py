"""Every movement of a page: how page tables are filled, shared, moved and emptied.

    start    a table begins with what somebody has computed already: pages found in the prefix cache, a relative's
             pages, or its own from host memory; full pages are shared, a partial one is copied
    grow     new pages for positions about to be written; the prefix cache gives up idle ones when none is free
    publish  full pages become findable, once the step that wrote them is committed; a last one when its sequence ends
    slide    pages that have left the window of their layers are given back
    release  a table is emptied; what nobody else holds is free, or idle in the prefix cache

Refuses to know: who should run.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain, zip_longest
from typing import NamedTuple

from quire.core.errors import RequestError
from quire.core.page_pool import PagePool, WindowPool
from quire.core.plan import PageOperations
from quire.core.sequence import Sequence, SequenceState, Weights, WindowTable


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
    windows: SequenceOf[tuple[list[int], int | None]] = ()
    """The same for each pool of layers that see a window: the full pages that the next token sees, and the partial."""

    @property
    def tables(self) -> list[list[int]]:
        """The full pages to share, in every pool."""
        return [self.pages, *(pages for pages, _ in self.windows)]


PageCounts = list[int]
"""A number of pages for each pool, that of the layers which see every position first."""


class PageTables:
    """Owns the pages of every group of layers, on the device, in host memory and in the prefix cache.

    A sequence that runs has a table in every pool. All of them end with the same page of the sequence; in a window the
    first pages are missing. So tables grow by the same number of pages in every pool.
    """

    def __init__(self, pool: PagePool, windows: SequenceOf[WindowPool] = ()) -> None:
        self.pool = pool
        """Of the layers that see every position."""
        self.windows = windows
        """Of the layers that see a window, one for each window."""
        self.pools: tuple[PagePool, ...] = (pool, *windows)
        """All of them, that of the layers which see every position first."""
        self.page_size = pool.page_size
        for window in windows:
            self._check_holds_one(window)
        self.weights = Weights(0, 0)
        """What computes from now on."""
        self.swapped_out: list[Sequence] = []
        """Whose pages are on their way to the host: by the plan being made, or the one in flight."""

    def _check_holds_one(self, window: WindowPool) -> None:
        """Whoever fits into the first pool must be able to run alone: nobody could give way to it."""
        needed, num_pages = min(window.pages_per_row, self.pool.allocator.num_pages), window.allocator.num_pages
        if num_pages < needed:
            raise ValueError(
                f"{num_pages} pages for layers with a window of {window.window}, and one sequence may need {needed}: "
                "give them more, or lower max_num_batched_tokens"
            )

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold this many positions."""
        return -(-num_tokens // self.page_size)

    def expected_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence holds between two steps, over all pools."""
        end = self.pages_for(sequence.num_computed)
        return end + sum(end - window.first_seen(sequence.num_computed) for window in self.windows)

    def check_fits(self, request_id: str, prompt_len: int, max_tokens: int) -> None:
        """Refuse a sequence that the first pool could not hold even alone. The windows hold any that it holds."""
        # The last token drawn never needs a place: no later token looks at it.
        needed = self.pages_for(prompt_len + max(max_tokens - 1, 0))
        num_pages = self.pool.allocator.num_pages
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
        """Pages that a table can grow by in every pool without taking them from another sequence."""
        return min([pool.num_available for pool in self.pools])

    def has_room(self, counts: Iterable[int]) -> bool:
        """Whether every pool has so many pages, without taking them from a sequence."""
        return all(count <= pool.num_available for count, pool in zip(counts, self.pools, strict=True))

    # -- start ---------------------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence, unwritten: Collection[Sequence] = ()) -> ReusedPrefix:
        """What of a waiting or swapped sequence need not be computed.

        The last token is always computed: its logits are what the sequence waits for. So is everything from the token
        before the first one whose log-probability is still wanted, and all tokens of a prompt whose hidden states are
        averaged. `unwritten` are sequences whose pages are filled by the very plan that is being made: nothing can be
        copied from them yet.
        """
        if sequence.state is SequenceState.SWAPPED:
            pages = self._match(sequence, sequence.num_computed) if sequence.kv_weights == self.weights else []
            windows = [([], None) for _ in self.windows]  # all of them come from the host
            return ReusedPrefix(pages, sequence.num_computed, num_published=len(pages), windows=windows)
        unscored = sequence.first_unscored
        most, common = (sequence.num_tokens if unscored is None else unscored) - 1, 0
        if sequence.params.pooling == "mean":
            most = 0
        relative = self._relative(sequence, unwritten)
        if relative is not None:
            common = sequence.num_inherited if relative is sequence.parent else sequence.prompt_len
            if not sequence.page_hashes:  # a family hashes its prompt once
                sequence.hash_root = relative.hash_root
                sequence.page_hashes = relative.page_hashes[: common // self.page_size]
            common = min(most, common, relative.num_computed)
        pages = self._known(sequence, most)
        if relative is not None and common > len(pages) * self.page_size:
            windows = self._seen_by(sequence, common, relative.windows)
            if windows is not None:
                num_full = common // self.page_size
                partial = relative.pages[num_full] if common % self.page_size else None
                num_published = min(num_full, relative.num_published)
                return ReusedPrefix(relative.pages[:num_full].tolist(), common, partial, num_published, windows)
        covered = len(pages) * self.page_size
        end, partial = self._known_end(sequence, covered, most)
        return ReusedPrefix(pages, end, partial, len(pages), self._seen_by(sequence, covered) or ())

    def num_new(self, sequence: Sequence, prefix: ReusedPrefix) -> PageCounts:
        """Of the available pages, how many a start with all of a sequence's tokens would take."""
        end = self.pages_for(sequence.num_tokens)
        return [
            pool.num_needed(prefix.num_tokens, end) - len(shared) + pool.num_idle(shared)
            for pool, shared in zip(self.pools, prefix.tables, strict=True)
        ]

    def num_promised(self, running: SequenceOf[Sequence]) -> PageCounts:
        """Pages that running sequences are promised together: for the tokens they have, and one each to grow into.

        Nobody is admitted into these, so that admitting somebody does not preempt somebody else in the next step.
        """
        size = self.page_size
        counts = [sum([-(-s.num_tokens // size) + 1 - len(s.pages) for s in running])]
        for i, window in enumerate(self.windows):
            needed = [window.num_needed(s.num_computed, -(-s.num_tokens // size) + 1) for s in running]
            counts.append(sum(needed) - sum([len(s.windows[i].pages) for s in running]))
        return counts

    def start(self, sequence: Sequence, prefix: ReusedPrefix) -> None:
        """Fill an empty table with what `find_prefix` has just found."""
        pool = self.pool
        pool.hold(prefix.pages)
        sequence.pages.extend(prefix.pages)
        if sequence.state is SequenceState.SWAPPED:
            sequence.pages.extend(pool.swap_in(sequence.host_pages[len(prefix.pages) :]))
            pool.release_host(sequence.host_pages)
            del sequence.host_pages[:]
            for window, table in zip(self.windows, sequence.windows, strict=True):
                table.pages.extend(window.swap_in(table.host_pages))
                window.release_host(table.host_pages)
                del table.host_pages[:]
        else:
            if prefix.copy_from is not None:
                sequence.pages.append(pool.copy(prefix.copy_from))
            sequence.windows = [WindowTable() for _ in self.windows]
            if prefix.num_tokens:
                self._start_windows(sequence, prefix)
                sequence.kv_weights = self.weights
        sequence.parent = None  # from here on it goes its own way, and its ancestors may be forgotten
        sequence.num_computed = prefix.num_tokens
        sequence.num_published = prefix.num_published

    def _start_windows(self, sequence: Sequence, prefix: ReusedPrefix) -> None:
        for window, table, (pages, partial) in zip(self.windows, sequence.windows, prefix.windows, strict=True):
            window.hold(pages)
            table.first = window.first_seen(prefix.num_tokens)
            table.pages.extend(pages)
            if partial is not None:
                table.pages.append(window.copy(partial))

    def _match(self, sequence: Sequence, most: int) -> list[int]:
        """The known pages that a sequence begins with, in the pool of layers that see every position."""
        if self.pool.prefix_cache is None:
            return []
        count = most // self.page_size
        return self.pool.prefix_cache.match(self.pool.prefix_cache.hashes(sequence, self.weights, count), count)

    def _known(self, sequence: Sequence, most: int) -> list[int]:
        """The same, as far as a token behind them also finds in every window what it sees."""
        pages = self._match(sequence, most)
        end, before = len(pages), None
        while end != before:
            before = end
            for window in self.windows:
                end = window.known_end(sequence.page_hashes, end)
        return pages[:end]

    def _known_end(self, sequence: Sequence, covered: int, most: int) -> tuple[int, int | None]:
        """How far an end that somebody has kept reaches behind full pages, and its page; `covered` and None if not."""
        cache = self.pool.prefix_cache
        if cache is not None and sequence.request.keeps_end and not self.windows:
            end = min(covered + self.page_size - 1, most)
            names = cache.end_hashes(sequence, self.weights, covered // self.page_size, end)
            for i, name in reversed(list(enumerate(names, 1))):
                page = cache.page_of(name)
                if page is not None:
                    return covered + i, page
        return covered, None

    def _seen_by(
        self, sequence: Sequence, position: int, relatives: SequenceOf[WindowTable] = ()
    ) -> list[tuple[list[int], int | None]] | None:
        """What the token at a position sees in each window; None if it does not find all of it."""
        names, found = sequence.page_hashes, []
        if self.windows and self.pool.prefix_cache is not None:
            names = self.pool.prefix_cache.hashes(sequence, self.weights, position // self.page_size)
        for window, relative in zip_longest(self.windows, relatives):
            seen = window.seen_by(position, names, relative)
            if seen is None:
                return None
            found.append(seen)
        return found

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
        num_pages = self.pages_for(end)
        missing = num_pages - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self.pool.allocate(missing))
        for window, table in zip(self.windows, sequence.windows, strict=True):
            missing = num_pages - table.first - len(table.pages)
            if missing > 0:
                table.pages.extend(window.allocate(missing))

    def reachable_end(self, sequence: Sequence, end: int) -> int:
        """How far towards `end` a sequence's pages can reach when nobody, and no cached page, gives way for it."""
        num_free = min([pool.allocator.num_free for pool in self.pools])
        num_pages = min(self.pages_for(end), len(sequence.pages) + num_free)
        return min(end, num_pages * self.page_size)

    def trim(self, sequence: Sequence) -> None:
        """Give back pages behind the last one that holds computed positions: they were reserved and not used."""
        count = self.pages_for(sequence.num_computed)
        if count < len(sequence.pages):
            self.pool.drop(sequence.pages[count:])
            del sequence.pages[count:]
        for window, table in zip(self.windows, sequence.windows, strict=True):
            window.drop(table.pages[count - table.first :])
            del table.pages[count - table.first :]

    def slide(self, sequence: Sequence) -> None:
        """Give back the pages that have left a window; what is full of them must have been published."""
        for window, table in zip(self.windows, sequence.windows, strict=True):
            window.slide(table, sequence.num_computed)

    # -- publish -------------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Make the full pages of a sequence findable; what it computed must be committed.

        Where the cache knows another page with the same tokens, the sequence takes that one and gives its own back:
        thus who holds a known page holds every known page before it. KV of two versions is never published.
        """
        cache, count = self.pool.prefix_cache, sequence.num_computed // self.page_size
        if cache is None or count <= sequence.num_published or sequence.kv_weights != self.weights:
            return
        names = cache.hashes(sequence, self.weights, count)
        for i in range(sequence.num_published, count):
            sequence.pages[i] = self.pool.publish(names[i], sequence.pages[i])
        for window, table in zip(self.windows, sequence.windows, strict=True):
            for i in range(max(sequence.num_published, table.first), count):
                table.pages[i - table.first] = window.publish(names[i], table.pages[i - table.first])
        sequence.num_published = count

    def publish_end(self, sequence: Sequence) -> None:
        """Make the last page of a sequence that ends findable, too, if it is not full: see `Request.keeps_end`.

        Nobody writes to it any more: who finds it begins with a copy.
        """
        cache, (num_full, rest) = self.pool.prefix_cache, divmod(sequence.num_computed, self.page_size)
        if cache is not None and rest and not self.windows and sequence.kv_weights == self.weights:
            *_, name = cache.end_hashes(sequence, self.weights, num_full, sequence.num_computed)
            sequence.pages[num_full] = self.pool.publish(name, sequence.pages[num_full], rest)

    def clear_prefix_cache(self) -> int:
        """Forget every known page that no sequence holds; returns how many, over all pools."""
        return sum(pool.evict(pool.num_cached) for pool in self.pools)

    # -- release -------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Empty a sequence's tables, and its host pages; its KV is gone."""
        self._empty(sequence)
        for pool, host_pages in zip(self.pools, sequence.host_tables, strict=False):  # a new one has no windows yet
            if host_pages:
                pool.lose_host(host_pages)
                del host_pages[:]
        sequence.windows = []
        sequence.num_computed = 0
        sequence.kv_weights = None

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether host memory has room for a sequence."""
        tables = zip(self.pools, sequence.tables, strict=True)
        return bool(sequence.pages) and all(pool.can_swap_out(pages) for pool, pages in tables)

    def swap_out(self, sequence: Sequence) -> None:
        """Empty a sequence's tables into host memory; there must be room."""
        for pool, pages, host_pages in zip(self.pools, sequence.tables, sequence.host_tables, strict=True):
            host_pages.extend(pool.swap_out(pages))
        self.swapped_out.append(sequence)
        self._empty(sequence)

    def _empty(self, sequence: Sequence) -> None:
        for pool, pages in zip(self.pools, sequence.tables, strict=False):
            pool.drop(pages)
            del pages[:]
        sequence.num_published = 0

    # -- operations ----------------------------------------------------------------------------------------------

    def take_operations(self) -> list[PageOperations]:
        """What the plan must do to the pages of each pool before it writes; the next plan starts with none."""
        return [pool.take_operations() for pool in self.pools]

    def dispatched(self) -> None:
        """The operations last taken have been done: pages on the host hold what they should."""
        self.swapped_out = []
