"""Lays out steps of an engine with a draft model: the target's, and beside it the draft model's over the same pages."""

from dataclasses import replace

from quire.core.plan import PageOperations, Row, Sample, StepPlan
from quire.device.inputs import DraftInputs, StepInputs
from quire.engine.packer import Packer


class DraftPacker:
    """A packer for each of the two models. The draft model's knows one pool: all of its layers keep every position."""

    def __init__(self, target: Packer, draft: Packer) -> None:
        self._target = target
        self._draft = draft

    def pack(self, plan: StepPlan) -> StepInputs:
        """Lay a plan out in the smallest shapes that hold it."""
        return replace(self._target.pack(plan), draft=self._pack_draft(plan))

    def _pack_draft(self, plan: StepPlan) -> DraftInputs | None:
        operations, catch_up, guess = plan.operations[0], None, None
        if plan.draft_rows or (not plan.drafts and operations != PageOperations()):
            num_tokens = sum(row.num_tokens for row in plan.draft_rows)
            catch_up = self._draft.pack(StepPlan(plan.draft_rows, num_tokens=num_tokens, operations=[operations]))
            operations = PageOperations()
        if plan.drafts:
            guess = self._pack_guess(plan, operations)
        return DraftInputs(catch_up, guess) if catch_up or guess else None

    def _pack_guess(self, plan: StepPlan, operations: PageOperations) -> StepInputs:
        """A round for each draft, and one more: the last draft may be accepted, and then its KV must be there.

        Drawn as the target draws, with the same random numbers: the likelier that it is the same token. Nothing ends a
        row before that.
        """
        drafted = [(plan.rows[i], len(drafts)) for i, drafts in plan.drafts.items()]
        rows = [Row(row.sequence, row.first, 1, 1 + num_drafts) for row, num_drafts in drafted]
        samples = [Sample(row.sequence, i, i, row.first + 1) for i, row in enumerate(rows)]
        packed = self._draft.pack(StepPlan(rows, samples, num_tokens=len(rows), operations=[operations]))
        return replace(
            packed,
            samples=replace(packed.samples, want_logprobs_S=None, want_top_S=None),
            rounds=replace(packed.rounds, stop_ids_BE=None),
        )
