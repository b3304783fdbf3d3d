"""What stands for a recorded request and for the results of its steps: the lengths are real, the tokens are not."""

from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import Any

import numpy as np

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence
from quire.core.stopping import FinishReason

EOS, STOP, FAILED, PLAIN, OTHER = 0, 1, 2, 3, 4
"""Tokens that stand for an end token, a stop of any kind, one that a grammar does not allow, any other, and one that
was not drafted."""
END_OF = {FinishReason.EOS: EOS, FinishReason.STOP: STOP, FinishReason.ABORT: FAILED, FinishReason.LENGTH: PLAIN}
EOS_IDS = frozenset({EOS})


class StandInGrammar:
    """A grammar that allows everything until its output ends."""

    def __init__(self) -> None:
        self.accepts = False

    def mask(self) -> np.ndarray:
        """Everything, or nothing once the text is whole."""
        return np.array([0 if self.accepts else 0xFFFFFFFF], np.uint32)

    def advance(self, output_token_ids: SequenceOf[int], /) -> bool:
        """Look at the last token, which says how the output goes on."""
        self.accepts = output_token_ids[-1] == STOP
        return output_token_ids[-1] != FAILED

    def num_allowed(self, token_ids: SequenceOf[int], /) -> int:
        """All of them."""
        return len(token_ids)

    def copy(self) -> "StandInGrammar":
        """Another one."""
        return StandInGrammar()


class StandInResult:
    """What a step produced: so many tokens for each sample, and no log-probability of any meaning."""

    top_ids_SRX = top_logprobs_SRX = processed_top_ids_SRX = processed_top_logprobs_SRX = drafted_BR = None

    def __init__(self, tokens: list[list[int]], num_scores: int = 0, num_rows: int = 0) -> None:
        width = max([1, *map(len, tokens)])
        self.tokens_SR = np.array([row + [-1] * (width - len(row)) for row in tokens], np.int32).reshape(-1, width)
        self.logprobs_SR = self.processed_logprobs_SR = self.kept_mass_SR = np.zeros(self.tokens_SR.shape, np.float32)
        self.scores = StandInResult([[PLAIN]] * num_scores) if num_scores else None
        self.pooled_BD = np.zeros((num_rows, 1), np.float32)


@lru_cache(maxsize=1024)
def stand_in_params(**fields: Any) -> SamplingParams:
    """Parameters that let a sequence end by an end token, or by a stop."""
    return SamplingParams(**fields, stop_token_ids=(STOP,))


def stand_in(
    arrival: int,
    prompt_len: int,
    max_tokens: int,
    *,
    index: int = 0,
    priority: int = 0,
    salt: str = "",
    tenant: str = "",
    stream: bool = False,
    keeps_end: bool = False,
    grammar: bool = False,
    **params: Any,
) -> Sequence:
    """The first sequence of a request, or one to fork with; its prompt has a length and no tokens worth the name."""
    request = Request(
        id=str(arrival),
        prompt_token_ids=range(prompt_len),  # pyright: ignore[reportArgumentType]
        params=stand_in_params(max_tokens=max_tokens, **params),
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        stream=stream,
        keeps_end=keeps_end,
    )
    return Sequence(
        request,
        index=index,
        arrival=arrival,
        seed=0,
        max_tokens=max_tokens,
        eos_ids=EOS_IDS,
        grammar=StandInGrammar() if grammar else None,
    )
