"""The decision for one step, in host terms: what the scheduler hands on and what it gets back.

A plan is made fresh every step. Rows say which positions are computed, samples say which logits are drawn from:
they are apart because a row may have none (a chunk inside a prompt), one, or many (prompt log-probabilities), and
several samples may draw from one row. Embeds say which hidden states are handed out: a row that is embedded has one.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from quire.core.sequence import Sequence


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
    target: int | None
    """Score this token instead of drawing one: its log-probability is what the sample is for."""


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
    embeds: list[Embed] = field(default_factory=list)
    num_tokens: int = 0
    operations: list[PageOperations] = field(default_factory=lambda: [PageOperations()])
    """For each pool of pages, in the order of `PageTables.pools`."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def can_go_on(self) -> bool:
        """Whether the device could run more than one round: every row has one token, and draws one for itself."""
        return self.num_tokens == len(self.rows) == len(self.samples) and all(
            sample.row == i and sample.target is None for i, sample in enumerate(self.samples)
        )


class StepResult(Protocol):
    """What commit needs of a finished step; `S` counts the plan's samples, padding after them is ignored."""

    @property
    def tokens_SR(self) -> np.ndarray:
        """Drawn (or scored) token ids, one column a round; negative in rounds that a row took no part in."""
        ...

    @property
    def logprobs_SR(self) -> np.ndarray | None:
        """Their raw log-probabilities; None if no sample of the step asked, as all that follows."""
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
        """The tokens' log-probabilities under what they were drawn from."""
        ...

    @property
    def processed_top_ids_SRX(self) -> np.ndarray | None:
        """The likeliest tokens of that."""
        ...

    @property
    def processed_top_logprobs_SRX(self) -> np.ndarray | None:
        """Their log-probabilities; -inf for a token that could not be drawn."""
        ...

    @property
    def pooled_BD(self) -> np.ndarray | None:
        """For each row that the plan embeds, the sum of its hidden states; None if it embeds none."""
        ...
