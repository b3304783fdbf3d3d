"""Who gives way when pages run out, and whether pages are swapped or computed again. Decides, and moves nothing."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from quire.core.page_tables import PageTables
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
        if tables.num_holders(page) == 1:
            break
        num_kept += 1
    num_lost = victim.num_computed - num_kept * tables.page_size
    num_moves = 2 * -(-len(victim.pages) // costs.pages_per_move)
    return num_moves * costs.seconds_per_move < num_lost * costs.seconds_per_token


def num_promised(sequence: Sequence, tables: PageTables) -> int:
    """Pages that a running sequence is promised: for the tokens it has, and one to grow into.

    Nobody is admitted into these, so that admitting somebody does not preempt somebody else in the next step.
    """
    return 1 + max(tables.pages_for(sequence.num_tokens) - len(sequence.pages), 0)


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
    prefix = tables.find_prefix(head)
    needed = tables.num_new(head, prefix) + sum(num_promised(s, tables) for s in running)
    rows_missing = len(running) + 1 - max_num_seqs
    available, seen, shared, victims = tables.num_available, Counter(), set(prefix.pages), 0
    for victim in reversed(running):
        if rows_missing <= victims and needed <= available:
            return victims
        if victim.priority >= head.priority and not is_first:
            return 0  # all who may give way are not enough
        # What it shares with others than earlier victims stays held, and what the head begins with is not gained.
        seen.update(victim.pages)
        available += sum(tables.num_holders(page) == seen[page] for page in victim.pages if page not in shared)
        needed -= num_promised(victim, tables)
        victims += 1
    return victims if rows_missing <= victims and needed <= available else 0
