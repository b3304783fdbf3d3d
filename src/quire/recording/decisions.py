"""What a scheduler decided for a step, as numbers that can be written down and compared.

A recording scheduler and a replaying one are both `WatchedScheduler`s: they describe a plan by the same code.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quire.core.drafts import Drafter
from quire.core.plan import PageOperations, StepPlan
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.stopping import FinishReason
from quire.recording.stand_ins import PLAIN


class Decision(NamedTuple):
    """One plan. Equal for two schedulers that are in the same state and decide the same."""

    rows: list[int] | int
    """Arrival, index, first position and number of tokens of each row, one after another. 0 for the sequences of the
    plan before, one token each: their positions follow from what was accepted."""
    rounds: list[int] | int
    """The most rounds of each row; one number if all have the same."""
    samples: int
    scores: int
    operations: list[Any] | int
    """For each pool: swap-outs, copies, swap-ins and poisons; 0 if there are none."""
    free_pages: int
    recomputes: int
    """Preemptions so far whose pages are computed again."""
    swaps: int
    """Preemptions so far whose pages went to host memory."""
    evictions: int
    cached_tokens: int
    page_sum: int
    """A checksum over the page tables of all sequences that have given theirs back, in that order."""

    @property
    def drafts(self) -> dict[tuple[int, int], int]:
        """How many tokens each row that decodes, by arrival and index, has drafted."""
        return {(arrival, index): count - 1 for arrival, index, _, count in _rows(self.rows) or () if count > 1}


class WatchedScheduler(Scheduler):
    """A scheduler that can say what it has decided."""

    page_sum = 0
    _last_rows: tuple[Sequence, ...] | list[Sequence] = ()
    drafts_of: Mapping[tuple[int, int], int] | None = None
    """In a replay, where there are no tokens to look up: how many a sequence, by arrival and index, has drafted now."""

    def decision(self, plan: StepPlan) -> Decision:
        """A plan that has just been made. To be called once for each, in order."""
        rows: list[int] | int = 0
        sequences = [row[0] for row in plan.rows]
        if plan.num_tokens != len(sequences) or sequences != self._last_rows:
            rows = [x for s, first, count, _ in plan.rows for x in (s.arrival, s.index, first, count)]
        self._last_rows = sequences
        rounds = [row[3] for row in plan.rows]
        is_uniform = bool(rounds) and rounds.count(rounds[0]) == len(rounds)
        pools = self.tables.pools
        return Decision(
            rows,
            rounds[0] if is_uniform else rounds,
            len(plan.samples),
            len(plan.scores),
            _operations(plan.operations),
            sum([pool.allocator.num_free for pool in pools]),
            self.num_recomputes,
            self.num_swaps,
            sum([pool.prefix_cache.num_evictions for pool in pools if pool.prefix_cache]),
            self.cached_tokens,
            self.page_sum,
        )

    def _look_up(self, sequence: Sequence, drafter: Drafter, most: int) -> list[int]:
        return super()._look_up(sequence, drafter, most) if self.drafts_of is None else self._recorded(sequence, most)

    def _guess(self, sequence: Sequence, most: int) -> list[int]:
        return super()._guess(sequence, most) if self.drafts_of is None else self._recorded(sequence, most)

    def _recorded(self, sequence: Sequence, most: int) -> list[int]:
        return [PLAIN] * min((self.drafts_of or {}).get((sequence.arrival, sequence.index), 0), most)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._add_pages(sequence)
        super()._finish(sequence, reason)

    def _put_back(self, victim: Sequence, *, swap: bool | None = None) -> None:
        self._add_pages(victim)
        super()._put_back(victim, swap=swap)

    def _add_pages(self, sequence: Sequence) -> None:
        for pages in sequence.tables:
            self.page_sum = zlib.crc32(pages, self.page_sum)


def _operations(operations: list[PageOperations]) -> list[Any] | int:
    moves = [[one.swap_outs, one.copies, one.swap_ins, one.poisons] for one in operations]
    if not any(map(any, moves)):
        return 0
    return [[[list(pair) for pair in pairs] for pairs in one[:3]] + [one[3]] for one in moves]


def describe(recorded: Decision, now: Decision) -> Iterator[str]:
    """In what two decisions differ, a line for each kind."""
    for name, before, after in zip(Decision._fields, recorded, now, strict=True):
        if before == after:
            continue
        if name == "rows":
            yield from _describe_rows(before, after)
        else:
            yield f"{name.replace('_', ' ')}: {_short(before)} in the recording, {_short(after)} now"


def _describe_rows(recorded: list[int] | int, now: list[int] | int) -> Iterator[str]:
    same = "those of the step before, one token each"
    before, after = _rows(recorded), _rows(now)
    names = [same if rows is None else f"{len(rows)}" for rows in (before, after)]
    yield f"rows: {names[0]} in the recording, {names[1]} now"
    if before is None or after is None:
        return
    for i in range(max(len(before), len(after))):
        ours, theirs = before[i : i + 1], after[i : i + 1]
        if ours != theirs:
            yield f"row {i}: {_row(ours)} in the recording, {_row(theirs)} now"
            return


def _rows(flat: list[int] | int) -> list[list[int]] | None:
    return None if isinstance(flat, int) else [flat[i : i + 4] for i in range(0, len(flat), 4)]


def _row(row: list[list[int]]) -> str:
    if not row:
        return "none"
    arrival, index, first, count = row[0]
    return f"sequence {arrival}/{index} from {first}, {count} tokens"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
