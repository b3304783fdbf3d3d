"""Who gives way when pages run out, and whether pages are swapped or computed again. Decides, and moves nothing."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import add

from quire.core.page_tables import PageTables, ReusedPrefix
from quire.core.sequence import Sequence

SMOOTHING = 0.1
"""How much the newest step counts in the measured cost of a token."""


@dataclass(slots=True)
class PreemptionCosts:
    """What giving up pages costs, as far as it is known."""

    seconds_per_token: float | None = None
    """To compute one position again; until it has been measured, swapping counts as cheaper."""
    seconds_per_move: float = 0.0
    """To move pages to the host or back, up to `pages_per_move` at once."""
    pages_per_move: int = 1

    def learn(self, seconds: float, num_tokens: int) -> None:
        """Take in how long a step took that computed this many tokens of prompts."""
        now = seconds / num_tokens
        before = now if self.seconds_per_token is None else self.seconds_per_token
        self.seconds_per_token = before + SMOOTHING * (now - before)


def prefers_swap(victim: Sequence, tables: PageTables, costs: PreemptionCosts) -> bool:
    """Whether moving a sequence's pages out and in again costs less than computing what would be lost."""
    if costs.seconds_per_token is None:
        return True
    num_kept = 0  # pages of its prefix that somebody else keeps alive
    for page in victim.pages:
        if tables.pool.num_holders(page) == 1:
            break
        num_kept += 1
    num_lost = victim.num_computed - num_kept * tables.page_size
    num_moves = 2 * sum(-(-len(pages) // costs.pages_per_move) for pages in victim.tables)
    return num_moves * costs.seconds_per_move < num_lost * costs.seconds_per_token


class _Room:
    """What is missing in each pool for a sequence to start, while one after the other gives way."""

    def __init__(self, head: Sequence, prefix: ReusedPrefix, running: SequenceOf[Sequence], tables: PageTables) -> None:
        self._tables = tables
        needed = map(add, tables.num_new(head, prefix), tables.num_promised(running))
        self._missing = [count - pool.num_available for count, pool in zip(needed, tables.pools, strict=True)]
        self._shared = [set(pages) for pages in prefix.tables]
        self._given: list[Counter[int]] = [Counter() for _ in tables.pools]

    @property
    def is_enough(self) -> bool:
        return max(self._missing) <= 0

    def add(self, victim: Sequence) -> None:
        """Count what a running sequence would give back, and what it was promised.

        What it shares with others than earlier victims stays held, and what the head begins with is not gained.
        """
        promised = self._tables.num_promised([victim])
        for i, (pool, pages) in enumerate(zip(self._tables.pools, victim.tables, strict=True)):
            given, shared = self._given[i], self._shared[i]
            given.update(pages)
            gained = sum(pool.num_holders(page) == given[page] for page in pages if page not in shared)
            self._missing[i] -= gained + promised[i]


def num_victims(
    head: Sequence, running: SequenceOf[Sequence], tables: PageTables, *, max_num_seqs: int, max_num_tokens: int
) -> int:
    """How many at the end of the running list must give way for the head of the queue to start; 0 if it cannot.

    Only lower priorities give way; but when the head comes before all who run, everybody does: the first in order
    always advances, whatever came between.
    """
    is_first = head.order < running[0].order
    if running[-1].priority >= head.priority and not is_first:
        return 0
    if sum(s.num_tokens - s.num_computed for s in running if s.order < head.order) >= max_num_tokens:
        return 0  # it would still not run in this step
    prefix = tables.find_prefix(head)  # it may be a victim's: who asks again afterwards learns whether it is enough
    room, rows_missing, victims = _Room(head, prefix, running, tables), len(running) + 1 - max_num_seqs, 0
    for victim in reversed(running):
        if rows_missing <= victims and room.is_enough:
            return victims
        if victim.priority >= head.priority and not is_first:
            return 0  # all who may give way are not enough
        room.add(victim)
        victims += 1
    return victims if rows_missing <= victims and room.is_enough else 0
