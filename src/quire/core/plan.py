"""The decision for one step, in host terms: what the scheduler hands on and what it gets back.

A plan is made fresh every step. Rows say which positions are computed, samples say which logits are drawn from, scores
which of them say how likely a given token was: they are apart because a row may have none (a chunk inside a prompt),
several samples may draw from one row, and a row may have a score for each of its tokens. Embeds say which hidden states
are handed out: a row that is embedded has one. Drafts are tokens at the end of a row that its sequence does not have
yet: a sample stands behind each. Where a draft model guesses them, they are known when the step has run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.sequence import Sequence

NOT_FINITE = -2
"""Stands in a step's result for a token that could not be drawn, because the model's logits are NaN or infinite."""


class Row(NamedTuple):
    """Positions `first .. first+num_tokens-1` of a sequence are computed in this step."""

    sequence: Sequence
    first: int
    num_tokens: int
    max_rounds: int
    """Tokens this row may produce before the host sees them; its pages reach that far."""


class Sample(NamedTuple):
    """Draw the token at `position` from the logits of one packed token."""

    sequence: Sequence
    row: int
    """Which row of the step that token is in: the history that penalties look at."""
    packed_index: int
    """Which token of the step, counted over all rows in order."""
    position: int


class Score(NamedTuple):
    """Find the log-probability of the token at `position`, which is there, by the logits of the token before it."""

    sequence: Sequence
    packed_index: int
    """Which token of the step the logits are of, counted over all rows in order."""
    position: int
    token_id: int


class Embed(NamedTuple):
    """Add up the hidden states of a row's tokens, from one of them to the row's last."""

    row: int
    packed_index: int
    """The first of them, counted over all rows in order."""


@dataclass(slots=True)
class PageOperations:
    """Whole pages to touch before anything is written, in this order."""

    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    """(page, host page)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to)."""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(host page, page)."""
    poisons: list[int] = field(default_factory=list)
    """Pages nobody holds, to fill with NaN so that any stray read is loud."""


@dataclass(slots=True)
class StepPlan:
    """One step. Truthy when there is something to compute."""

    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    embeds: list[Embed] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Row -> the tokens that were guessed behind its sequence's newest one: the last that it computes. With a draft
    model UNKNOWN until the step has run."""
    draft_rows: list[Row] = field(default_factory=list)
    """With a draft model: what it computes so that it has seen what it is to guess from, before its guesses."""
    num_tokens: int = 0
    operations: list[PageOperations] = field(default_factory=lambda: [PageOperations()])
    """For each pool of pages, in the order of `PageTables.pools`."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def can_go_on(self) -> bool:
        """Whether the device could run more than one round: every row has one token, and draws one for itself."""
        one_each = self.num_tokens == len(self.rows) == len(self.samples) and not self.scores
        return one_each and all(sample.row == i for i, sample in enumerate(self.samples))

    @property
    def judged_samples(self) -> Iterable[tuple[int, Sample]]:
        """The samples with their index, but for those behind a draft: they are judged with the one before the draft."""
        samples, rows = enumerate(self.samples), self.rows
        if not self.drafts:
            return samples
        return [(i, sample) for i, sample in samples if sample.position == rows[sample.row].first + 1]

    @property
    def has_long_prompts(self) -> bool:
        """Whether most of its tokens are of prompts: then its time tells what a token costs."""
        of_prompts = sum(row.num_tokens for row in self.rows if row.first < row.sequence.prompt_len)
        return of_prompts > 2 * len(self.rows)


class TokenResult(Protocol):
    """What a step says of tokens, one column a round; padding after the last is ignored."""

    @property
    def tokens_SR(self) -> np.ndarray:
        """Drawn (or scored) token ids; negative in rounds that a row took no part in, NOT_FINITE where none could be
        drawn.
        """
        ...

    @property
    def logprobs_SR(self) -> np.ndarray | None:
        """Their raw log-probabilities; None if nobody in the step asked, as all that follows."""
        ...

    @property
    def top_ids_SRX(self) -> np.ndarray | None:
        """The most likely tokens, likeliest first."""
        ...

    @property
    def top_logprobs_SRX(self) -> np.ndarray | None:
        """Their log-probabilities."""
        ...

    @property
    def processed_logprobs_SR(self) -> np.ndarray | None:
        """The tokens' log-probabilities under what they are drawn from; -inf for one that could not be drawn."""
        ...

    @property
    def kept_mass_SR(self) -> np.ndarray | None:
        """The probability that all tokens which could be drawn have together, before the others were cut off."""
        ...

    @property
    def processed_top_ids_SRX(self) -> np.ndarray | None:
        """The likeliest tokens of what is drawn from."""
        ...

    @property
    def processed_top_logprobs_SRX(self) -> np.ndarray | None:
        """Their log-probabilities; -inf for a token that could not be drawn."""
        ...


class StepResult(TokenResult, Protocol):
    """What commit needs of a finished step: an entry for each of the plan's samples, in order."""

    @property
    def scores(self) -> TokenResult | None:
        """An entry for each of the plan's scores; None if it has none."""
        ...

    @property
    def drafted_BR(self) -> np.ndarray | None:
        """What a draft model guessed for each row with drafts, in order; no column if it failed, and has no KV of any
        page. None if it was not asked to.
        """
        ...

    @property
    def pooled_BD(self) -> np.ndarray | None:
        """For each row that the plan embeds, the sum of its hidden states; None if it embeds none."""
        ...
