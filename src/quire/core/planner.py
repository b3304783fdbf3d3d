"""Fills one plan within a step's budgets of tokens and samples."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from quire.core.page_tables import PageTables
from quire.core.plan import Embed, Row, Sample, Score, StepPlan
from quire.core.sequence import Sequence


class Planner:
    """One plan in the making.

    Until a running sequence is claimed, the token (if it decodes) and the sample that are its due are set aside, so
    that a long prompt before it in order, or what a grammar forced there, cannot take them.
    """

    def __init__(self, max_tokens: int, max_samples: int, running: SequenceOf[Sequence]) -> None:
        self.plan = StepPlan()
        self.started: list[Sequence] = []
        """Who got a row in this very plan; the newest last."""
        self._tokens_left = max_tokens
        self._samples_left = max_samples
        self._tokens_set_aside = sum(map(_decodes, running))
        self._samples_set_aside = len(running)

    def claim(self, sequence: Sequence) -> int:
        """A running sequence's turn: what was set aside for it goes to the common budget. Returns its share of that."""
        self._samples_set_aside -= 1
        if _decodes(sequence):
            self._tokens_set_aside -= 1
        return self.share(sequence, sequence.num_computed)

    def share(self, sequence: Sequence, computed: int) -> int:
        """How many tokens of this sequence, of which `computed` are done, fit into the step; 0 for none."""
        if self._samples_left - self._samples_set_aside < 1:
            return 0
        return min(sequence.num_tokens - computed, self._tokens_left - self._tokens_set_aside)

    def add_decoding(self, sequence: Sequence) -> None:
        """Plan the newest token of a running sequence, and draw the next: both were set aside for it.

        This is `claim` and `add` for what nearly every row of a busy engine is.
        """
        plan, first = self.plan, sequence.num_computed
        plan.samples.append(Sample(sequence, len(plan.rows), plan.num_tokens, first + 1))
        plan.rows.append(Row(sequence, first, 1, 1))
        plan.num_tokens += 1
        self._tokens_set_aside -= 1
        self._samples_set_aside -= 1
        self._tokens_left -= 1
        self._samples_left -= 1

    def add(self, sequence: Sequence, num_tokens: int, waiting_for_prompt: SequenceOf[Sequence] = ()) -> None:
        """Plan the next `num_tokens` of a sequence, and what is to be scored and drawn by them.

        The logits of position p are for position p+1: a chunk [first, end) may score first+1 .. end, where `end`
        itself is drawn, not scored, once every known token is in. Then those `waiting_for_prompt` draw from the same
        logits, as far as the samples go.
        """
        plan = self.plan
        first, row = sequence.num_computed, len(plan.rows)
        end = first + num_tokens
        samples, base = plan.samples, plan.num_tokens - first - 1
        num_samples_before = len(samples)
        for part in sequence.unscored_between(first + 1, end + 1):
            for position, token_id in zip(part, sequence.tokens_between(part.start, part.stop), strict=True):
                plan.scores.append(Score(sequence, base + position, position, token_id))
        if end == sequence.num_tokens and sequence.max_tokens:
            samples.append(Sample(sequence, row, base + end, end))
            if waiting_for_prompt and end == sequence.prompt_len:
                spare = self._samples_left - self._samples_set_aside - 1
                samples += [Sample(child, row, base + end, end) for child in waiting_for_prompt[: max(spare, 0)]]
        if sequence.params.pooling == "mean":
            plan.embeds.append(Embed(row, plan.num_tokens))
        elif sequence.params.pooling and end == sequence.num_tokens:
            plan.embeds.append(Embed(row, plan.num_tokens + num_tokens - 1))
        plan.rows.append(Row(sequence, first, num_tokens, 1))
        plan.num_tokens += num_tokens
        self._tokens_left -= num_tokens
        self._samples_left -= len(samples) - num_samples_before


def _decodes(sequence: Sequence) -> bool:
    """Whether a token in every step is its due. It may have more to compute: what its grammar forced."""
    return sequence.num_tokens - sequence.num_computed == 1 or sequence.num_computed >= sequence.prompt_len


def add_drafts(plan: StepPlan, tables: PageTables, drafts: Mapping[int, list[int]]) -> None:
    """Let rows of a plan that only decodes compute guessed tokens too, and draw behind each of them.

    Nobody gives way for them: a row takes as many as the free pages reach. Pages of what is not accepted go back at
    commit.
    """
    rows, samples, plan.rows, plan.samples, plan.num_tokens = plan.rows, plan.samples, [], [], 0
    for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        end = tables.reachable_end(row.sequence, row.first + 1 + len(drafts.get(i, ())))
        tables.grow(row.sequence, end)
        num_tokens, base = end - row.first, plan.num_tokens
        if num_tokens > 1:
            plan.drafts[i] = drafts[i][: num_tokens - 1]
        plan.rows.append(row._replace(num_tokens=num_tokens))
        plan.samples += [
            sample._replace(packed_index=base + n, position=sample.position + n) for n in range(num_tokens)
        ]
        plan.num_tokens += num_tokens


def reserve_rounds(plan: StepPlan, tables: PageTables, most: int) -> None:
    """Let each row go on for up to `most` rounds, as far as its budget and the free pages reach.

    Nobody is preempted, and in no pool anything cached is given up, to reserve ahead. What a row does not use of its
    pages goes back at commit.
    """
    rows = plan.rows
    for i, row in enumerate(rows):
        sequence = row.sequence
        end = tables.reachable_end(sequence, row.first + min(most, most_unseen(sequence)))
        tables.grow(sequence, end)
        rows[i] = row._replace(max_rounds=end - row.first)


def most_unseen(sequence: Sequence) -> int:
    """Tokens that may be drawn for a sequence that decodes before the host looks: with a grammar, one."""
    if sequence.grammar is not None:
        return 1
    most = sequence.max_tokens - sequence.num_output
    missing = sequence.params.min_tokens - sequence.num_output
    return min(most, missing) if missing > 0 else most  # until then its stop ids are forbidden, after it they are not
