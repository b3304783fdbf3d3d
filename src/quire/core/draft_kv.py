"""What the draft model has computed, and what it is to compute beside a plan so that it can guess.

It goes along with prompts. What it leaves out - rounds without drafts, more rows than drafts are for, pages of requests
that nobody guesses for - it catches up on before it guesses:

    positions      0 ........................... first        newest token, drafts
    target         computed ...................
    draft model    computed .....  draft rows ..              rounds of decoding

So a guess always follows from all that stands before it. Catching up may write what the draft model lacks of a page
that several sequences hold: they have the same tokens there, so whoever writes it writes the same. Refuses to know:
tokens, what is drawn.
"""

from collections.abc import Iterable, Mapping

from quire.core.commit import computed_end
from quire.core.draft_pages import DraftPages
from quire.core.plan import PageOperations, Row, StepPlan
from quire.core.sequence import Sequence, SequenceState

WORTH_COMPUTING = 64
"""Tokens that the draft model computes, at the most, for each that may yet be drafted."""


class DraftKV:
    """The KV of a draft model, in pages that have the ids of the target's."""

    def __init__(self, pages: DraftPages, *, max_len: int, max_tokens: int) -> None:
        self._pages = pages
        self.max_len = max_len
        """Positions that the model knows."""
        self._max_tokens = max_tokens
        """That it computes in one step."""

    def move(self, operations: PageOperations) -> None:
        """Pages are moved and copied for both models; before anything is planned over them."""
        self._pages.move(operations)

    def follow(self, plan: StepPlan) -> None:
        """Go along with a plan that computes prompts, so few that their sequences will be guessed for."""
        if plan.can_go_on:
            return
        ends = {
            i: min(first + num_tokens, self.max_len)
            for i, (sequence, first, num_tokens, _) in enumerate(plan.rows)
            if _may_be_drafted(sequence)
        }
        self._plan(plan, ends)

    def catch_up(self, plan: StepPlan, rows: Iterable[int]) -> list[int]:
        """Compute what it lacks before the newest tokens of rows that decode; returns those that then lack nothing."""
        ends = {i: plan.rows[i].first for i in rows}
        lacking = {i: end - self._pages.end(plan.rows[i].sequence.pages, end) for i, end in ends.items()}
        return self._plan(plan, {i: end for i, end in ends.items() if _is_worth(plan.rows[i].sequence, lacking[i])})

    def _plan(self, plan: StepPlan, ends: Mapping[int, int]) -> list[int]:
        """Compute rows up to these positions, as far as a step reaches; returns those that are complete with it.

        What several rows share, one of them computes: the others find it there in the next step.
        """
        complete: list[int] = []
        written: set[int] = set()
        left, page_size = self._max_tokens, self._pages.page_size
        for i, end in ends.items():
            sequence, first = plan.rows[i].sequence, plan.rows[i].first
            start = self._pages.end(sequence.pages, min(first, end))
            reached = min(end, start + left)
            if start < reached:
                pages = sequence.pages[start // page_size : -(-reached // page_size)]
                if not written.isdisjoint(pages):
                    continue
                written.update(pages)
                left -= reached - start
                plan.draft_rows.append(Row(sequence, start, reached - start, 1))
            if reached == end:
                complete.append(i)
        return complete

    def commit(self, plan: StepPlan, *, has_failed: bool) -> None:
        """Take down what a step wrote, once its tokens have been accepted and before its pages are published.

        When the draft model `has_failed`, it has nothing any more.
        """
        pages = self._pages
        if has_failed:
            pages.forget()
            return
        for row in plan.rows:
            if row.sequence.state is SequenceState.RUNNING:
                pages.write(row.sequence.pages, row.first, computed_end(row), is_drafted=False)
        for sequence, first, num_tokens, _ in plan.draft_rows:
            if sequence.state is SequenceState.RUNNING:
                pages.write(sequence.pages, first, first + num_tokens, is_drafted=True)
        for row in map(plan.rows.__getitem__, plan.drafts):
            if row.sequence.state is SequenceState.RUNNING:
                pages.write(row.sequence.pages, row.first, computed_end(row), is_drafted=True)


def _may_be_drafted(sequence: Sequence) -> bool:
    """Whether there will ever be drafts for a sequence, and enough for what its prompt takes."""
    may_be = sequence.grammar is None and sequence.params.max_rounds != 1
    return may_be and _is_worth(sequence, sequence.num_tokens)


def _is_worth(sequence: Sequence, num_lacking: int) -> bool:
    """Whether as many drafts may follow as computing so many tokens is worth."""
    return num_lacking <= WORTH_COMPUTING * (sequence.max_tokens - sequence.num_output - 1)
