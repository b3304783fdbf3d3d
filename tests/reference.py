"""When a sequence must end and what its text must be, worked out from its tokens alone, the slow and obvious way."""

import codecs
from typing import NamedTuple

import numpy as np

from quire.core.sampling_params import SamplingParams
from quire.core.stopping import FinishReason, Grammar
from quire.text.tokenizer import Tokenizer


class End(NamedTuple):
    """How a sequence with some output tokens must end, if it must."""

    num_output: int
    reason: FinishReason | None
    text: str


def expected_end(
    params: SamplingParams,
    output: list[int],
    *,
    max_tokens: int,
    eos_ids: frozenset[int],
    tokenizer: Tokenizer | None = None,
    grammar: Grammar | None = None,
) -> End:
    """Where an output ends, why (None: it must go on), and its text up to there. The grammar is a fresh one."""
    eos_ids = frozenset() if params.ignore_eos else eos_ids
    for count in range(1, len(output) + 1):
        reason, drop = _judge(params, eos_ids, output[:count], tokenizer)
        if reason is None and grammar is not None:
            reason = _judge_by_grammar(grammar, params, eos_ids, output[:count])
        if reason is None and count >= max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            return End(count, reason, text_of(params, output[:count], tokenizer, drop))
    return End(len(output), None if max_tokens else FinishReason.LENGTH, text_of(params, output, tokenizer))


def _judge(
    params: SamplingParams, eos_ids: frozenset[int], output: list[int], tokenizer: Tokenizer | None
) -> tuple[FinishReason | None, int]:
    """The reason to end with the last token, and how many tokens at the end have no text."""
    if len(output) < params.min_tokens:
        return None, 0
    if output[-1] in eos_ids:
        return FinishReason.EOS, 1
    if output[-1] in params.stop_token_ids:
        return FinishReason.STOP, 1
    for ids in params.stop_sequences:
        if tuple(output[-len(ids) :]) == ids:
            return FinishReason.STOP, len(ids)
    if tokenizer and params.stop_strings and _first_stop(params, output, tokenizer, flush=False)[1] is not None:
        return FinishReason.STOP, 0
    return None, 0


def _judge_by_grammar(
    grammar: Grammar, params: SamplingParams, eos_ids: frozenset[int], output: list[int]
) -> FinishReason | None:
    if not grammar.advance(output):
        return FinishReason.ABORT
    if tokens_of(grammar.mask()) and allowed_tokens(grammar, params, eos_ids, len(output)):
        return None
    return FinishReason.STOP if grammar.accepts else FinishReason.ABORT


def allowed_tokens(grammar: Grammar, params: SamplingParams, eos_ids: frozenset[int], num_output: int) -> set[int]:
    """What may be drawn after an output that a grammar has read."""
    ends = eos_ids if grammar.accepts else frozenset()
    allowed = tokens_of(grammar.mask()) | ends
    return allowed - eos_ids - set(params.stop_token_ids) if num_output < params.min_tokens else allowed


def tokens_of(mask: np.ndarray) -> set[int]:
    """The tokens whose bits are set."""
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little"))}


def text_of(params: SamplingParams, output: list[int], tokenizer: Tokenizer | None, drop: int = 0) -> str:
    """The text of an output whose last `drop` tokens are a stop; it ends at the first stop string."""
    if tokenizer is None:
        return ""
    text, stop = _first_stop(params, output[: len(output) - drop], tokenizer, flush=True)
    if stop is None and drop and not params.include_stop:
        before, stop = _first_stop(params, output, tokenizer, flush=False)
        if stop is not None and len(before) - len(stop) < len(text):  # it began before the tokens that were dropped
            return before[: len(before) - len(stop)]
        return text
    return text if stop is None or params.include_stop else text[: len(text) - len(stop)]


def _first_stop(
    params: SamplingParams, output: list[int], tokenizer: Tokenizer, *, flush: bool
) -> tuple[str, str | None]:
    """The text up to and with the first stop string that is complete, and which one; all of it without one."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    pieces = [tokenizer.piece(token, params.skip_special) for token in output]
    for i in range(len(pieces) + flush):
        new = decoder.decode(pieces[i]) if i < len(pieces) else decoder.decode(b"", final=True)
        for char in new:
            text += char
            stops = [stop for stop in params.stop_strings if text.endswith(stop)]
            if stops and min(i + 1, len(pieces)) >= params.min_tokens:
                return text, max(stops, key=len)
    return text, None
