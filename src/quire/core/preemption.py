"""Who gives way when pages run out, and whether pages are swapped or computed again. Decides, and moves nothing."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import takewhile
from operator import add, le
from typing import NamedTuple

from quire.core.page_tables import PageTables, ReusedPrefix
from quire.core.sequence import Sequence
from quire.core.tenants import Tenant, Tenants

SMOOTHING = 0.1
"""How much the newest step counts in the measured cost of a token."""


QUANTUM = 128
"""Tokens that a tenant must be behind before it takes another row, if it has had one since it became active."""
PRICE = 32
"""Tokens that a tenant is charged for each row it takes: what moving the pages of the victim may cost."""
ROUNDING = 1e-9


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

    def may_be_made(self, candidates: SequenceOf[Sequence]) -> bool:
        """Whether it could be enough if all of them gave way and shared no page. Looks at no page."""
        held = [sum(map(len, tables)) for tables in zip(*(one.tables for one in candidates), strict=True)]
        most = map(add, self._tables.num_promised(candidates), held)
        return all(map(le, self._missing, most))

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


def place(sequence: Sequence) -> tuple[tuple[float, int], tuple[int, int, int]]:
    """Where a sequence comes in the running list: tenants by their clocks, then each tenant's own order."""
    return sequence.tenant.place, sequence.order


class Limits(NamedTuple):
    """What one step holds."""

    num_rows: int
    num_tokens: int


def choose_victims(
    head: Sequence, running: SequenceOf[Sequence], tables: PageTables, tenants: Tenants, limits: Limits
) -> SequenceOf[Sequence]:
    """The running sequences that must give way for the head of the queue to start; none if that is not allowed.

    First, a tenant with fewer rows than its share takes rows from tenants with more. Else lower priorities of its own
    tenant give way; and when the head comes before all that run of its tenant, all of them do: the first in order
    advances, whatever came between.
    """
    tenant, own, givers = head.tenant, running, {}
    if len(tenants.running) > 1 or not tenant.num_running:
        start = bisect_left(running, tenant.place, key=lambda one: one.tenant.place)
        own, givers = running[start : start + tenant.num_running], _givers(tenant, tenants, len(running))
    is_first = bool(own) and head.order < own[0].order
    may_take_own = is_first or (bool(own) and own[-1].priority < head.priority)
    if not may_take_own and not givers:
        return ()
    before = running[: bisect_left(running, place(head), key=place)]
    if sum(s.num_tokens - s.num_computed for s in before) >= limits.num_tokens:
        return ()  # it would still not run in this step
    prefix = tables.find_prefix(head)  # it may be a victim's: who asks again afterwards learns whether it is enough
    rows_missing = len(running) + 1 - limits.num_rows
    if givers:
        given = list(_given(tenant, givers, running, tenants))
        if victims := _enough(given, rows_missing, _Room(head, prefix, running, tables)):
            return victims
    if not may_take_own:
        return ()
    lower = list(takewhile(lambda one: is_first or one.priority < head.priority, reversed(own)))
    return _enough(lower, rows_missing, _Room(head, prefix, running, tables))


def _enough(candidates: SequenceOf[Sequence], rows_missing: int, room: _Room) -> SequenceOf[Sequence]:
    """As many of the candidates as must give way, or none if all are not enough."""
    if not candidates or len(candidates) < rows_missing or not room.may_be_made(candidates):
        return ()
    victims = []
    for victim in candidates:
        if rows_missing <= len(victims) and room.is_enough:
            return victims
        room.add(victim)
        victims.append(victim)
    return victims if rows_missing <= len(victims) and room.is_enough else ()


def _givers(taker: Tenant, tenants: Tenants, num_rows: int) -> dict[Tenant, float]:
    """The tenants that a waiting one with less than its share may take rows from, and how many rows they have beyond.

    A tenant takes its first row at once from one that was served as much. After that it must be behind by a quantum:
    so that tenants whose shares are no whole rows change places seldom.
    """
    givers = {}
    after = tenants.excess(taker, num_rows) + 1
    if after < 1:
        for tenant in tenants.running:
            excess, behind = tenants.excess(tenant, num_rows), (tenant.clock - taker.clock) * taker.weight
            is_first_row = taker.is_new and excess > after + ROUNDING
            if excess > 0 and tenant is not taker and behind >= (0 if is_first_row else QUANTUM):
                givers[tenant] = excess
    return givers


def _given(
    taker: Tenant, givers: dict[Tenant, float], running: SequenceOf[Sequence], tenants: Tenants
) -> Iterator[Sequence]:
    """The last rows of tenants that have more than their share; one that nears it only gives what is worth the loss.

    Where giving a row does not bring both nearer to their shares, they take turns. A turn is worth a quarter of the
    victim's tokens at least: computing these again, as a prompt, costs less than generating that many.
    """
    after = tenants.excess(taker, len(running)) + 1
    for victim in reversed(running):
        tenant = victim.tenant
        excess = givers.get(tenant, 0.0)
        is_turn = excess <= after + ROUNDING
        behind = (tenant.clock - taker.clock) * taker.weight
        if excess > 0 and (not is_turn or behind >= QUANTUM + victim.num_computed // 4):
            givers[tenant] -= 1
            yield victim
