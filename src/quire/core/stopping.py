"""Why a sequence ends, and what the scheduler asks of whoever reads its text: stop strings and grammars.

Text and grammars live outside this column; these are their interfaces.
"""

from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from typing import Protocol

import numpy as np


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    NOT_FINITE = "not_finite"
    """The model's logits are NaN or infinite, so that no token can be drawn. Or nothing is drawn, and a score or an
    embedding is NaN."""


class StopDetector(Protocol):
    """What a sequence asks of whoever turns its tokens into text."""

    def advance(self, output_token_ids: SequenceOf[int], /) -> bool:
        """Read on in the output, given whole, and say whether a stop string is complete."""
        ...

    def fork(self) -> "StopDetector":
        """Another one that has read the same tokens, for another sequence of the same request."""
        ...


class Grammar(Protocol):
    """What a sequence asks of whoever constrains its tokens. End tokens are the sequence's own business."""

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""
        ...

    def mask(self) -> np.ndarray:
        """The tokens that may come next, end tokens left out: bit t % 32 of word t // 32. The caller's own."""
        ...

    def advance(self, output_token_ids: SequenceOf[int], /) -> bool:
        """Read on in the output, given whole. False if a token may not be there, or if all has failed."""
        ...

    def num_allowed(self, token_ids: SequenceOf[int], /) -> int:
        """How many of these may come next, one after another. Reads nothing."""
        ...

    def copy(self) -> "Grammar":
        """Another one that has read the same."""
        ...
