"""The judge of a finished step: which tokens are accepted, whether a sequence ends with them, how far it was computed.

The device's own stop test is an optimisation. A row may have computed and drawn more than is accepted here; what comes
after the first stop is dropped, with its log-probabilities and pages. A row with a grammar may get more than it drew:
the tokens that have to follow.
"""

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from quire.core.errors import AuditError
from quire.core.plan import NOT_FINITE, Row, Sample, StepPlan, StepResult, TokenResult
from quire.core.sequence import Sequence, SequenceState, TokenEvent, TokenLogprob, Version
from quire.core.stopping import FinishReason, Grammar

MAX_FORCED = 64
"""Tokens that grammars leave no choice about and that are accepted in one step, at most: all rows wait for them."""


def accept_tokens(
    samples: Iterable[tuple[int, Sample]],
    result: StepResult,
    version: Version,
    drafts: Mapping[int, SequenceOf[int]],
) -> list[TokenEvent]:
    """Append what was drawn to its sequences, and what grammars force behind it, up to the first stop.

    `samples` come with their index in the result.

    `drafts` are those of rows: of such a row there is one sample, and what was drawn behind its drafts follows it in
    the result.
    """
    events, forced_left = [], MAX_FORCED
    all_tokens = result.tokens_SR.tolist()
    for i, sample in samples:
        sequence = sample.sequence
        if sequence.state is SequenceState.FINISHED:
            continue  # aborted while the step was in flight
        tokens, drafted = all_tokens[i], drafts.get(sample.row)
        if drafted:
            tokens = agreed_draws([draw for (draw,) in all_tokens[i : i + 1 + len(drafted)]], drafted)
        if tokens[-1] >= 0 and _is_plain(sequence, tokens):
            output, most = sequence.output_token_ids, sequence.max_tokens
            if len(output) + len(tokens) > most:
                tokens = tokens[: most - len(output)]
            output += tokens
            sequence.num_tokens += len(tokens)
            sequence.weight_versions += [version] * len(tokens)
            events.append(TokenEvent(sequence, tuple(tokens), FinishReason.LENGTH if len(output) >= most else None))
            continue
        reason, accepted = None, []
        for n, token_id in enumerate(tokens):
            if token_id < 0:
                reason = FinishReason.NOT_FINITE if token_id == NOT_FINITE else None
                break
            accepted.append(token_id)
            if sequence.params.logprobs is not None:
                at = (i + n, 0) if drafted else (i, n)
                sequence.logprobs.append(_logprob(sequence, result, at, processed=True))
            reason = _accept(sequence, token_id, version)
            if reason is not None:
                break
        while reason is None and forced_left and (forced := _forced_token(sequence, len(accepted))) is not None:
            accepted.append(forced)
            reason = _accept(sequence, forced, version)
            forced_left -= 1
        events.append(TokenEvent(sequence, tuple(accepted), reason))
    return events


def _accept(sequence: Sequence, token_id: int, version: Version) -> FinishReason | None:
    """Append a token; returns why the sequence ends with it, if it does."""
    sequence.output_token_ids.append(token_id)
    sequence.num_tokens += 1
    sequence.weight_versions.append(version)
    return stop_reason(sequence)


def _forced_token(sequence: Sequence, num_accepted: int) -> int | None:
    """The token that a grammar allows next, if there is exactly one: it would be drawn whatever the logits are.

    So nothing is computed to draw it; its KV is, in the next step. Not behind a step that drew nothing, not where its
    log-probability is asked for, and not where the request wants no more tokens at once.
    """
    params = sequence.params
    if sequence.mask is None or params.logprobs is not None or num_accepted in (0, params.max_rounds):
        return None
    if np.count_nonzero(sequence.mask) > 1:
        return None
    index = int(sequence.mask.argmax())
    word = int(sequence.mask[index])
    return index * 32 + word.bit_length() - 1 if word.bit_count() == 1 else None


def agreed_draws(draws: SequenceOf[int], drafts: SequenceOf[int]) -> SequenceOf[int]:
    """The draws that count: each was drawn behind what had been drafted, up to the first draw that is something else.

    They are what would have been drawn one at a time: a draw depends on nothing but the tokens before it.
    """
    for i, (draw, draft) in enumerate(zip(draws, drafts, strict=False)):
        if draw != draft or draw < 0:  # a draft model's NOT_FINITE is no token, even if the model agrees
            return draws[: i + 1]
    return draws


def _is_plain(sequence: Sequence, tokens: SequenceOf[int]) -> bool:
    """Whether nothing is to be said or judged of each of these by itself: they are accepted in one go."""
    params = sequence.params
    if params.logprobs is not None or sequence.grammar is not None or params.stop:
        return False
    stop_ids = params.stop_token_ids
    return sequence.eos_ids.isdisjoint(tokens) and not (stop_ids and any(stop in tokens for stop in stop_ids))


def accept_scores(plan: StepPlan, result: StepResult) -> None:
    """Take over the log-probabilities of tokens that were there before; those of a sequence come in order.

    Also under the parameters to draw with, where these are all that a request is about.
    """
    for i, (sequence, _, position, _) in enumerate(plan.scores):
        if sequence.state is not SequenceState.RUNNING:
            continue  # aborted while the step was in flight
        scores = sequence.prompt_logprobs if position < sequence.prompt_len else sequence.logprobs
        scores.append(_logprob(sequence, _asked(result.scores), (i, 0), processed=sequence.request.scores_draws))


def accept_pooled(plan: StepPlan, result: StepResult) -> None:
    """Take over the hidden states that a step pooled: a mean begins with position 0 and goes on chunk by chunk."""
    for row, _ in plan.embeds:
        sequence, first = plan.rows[row].sequence, plan.rows[row].first
        if sequence.state is not SequenceState.RUNNING:
            continue  # aborted while the step was in flight
        pooled_D = _asked(result.pooled_BD)[row].copy()  # a view would keep all rows of the step
        if first and sequence.params.pooling == "mean":
            pooled_D += _asked(sequence.pooled_D)
        sequence.pooled_D = pooled_D


def has_finite_results(sequence: Sequence) -> bool:
    """True if no log-probability and no hidden state of a sequence that draws nothing is NaN."""
    if sequence.pooled_D is not None and not np.isfinite(sequence.pooled_D).all():
        return False
    return not any(entry and math.isnan(entry.logprob) for entry in sequence.prompt_logprobs)


def computed_end(row: Row) -> int:
    """Up to which position the KV of a row is valid, once its tokens have been accepted.

    Every round after the first computed the token drawn before it. A token that was not accepted has no place in the
    sequence, and what was computed from it does not count; neither does the KV of the newest token, which nobody needs
    before the step that computes the token after it.
    """
    written = row.first + row.num_tokens + row.max_rounds - 1
    if not row.sequence.max_tokens:  # only scored: nothing is ever drawn
        return written
    return min(written, row.sequence.num_tokens - 1)


def stop_reason(sequence: Sequence) -> FinishReason | None:
    """Judge the newest output token: does the sequence end with it, and why."""
    output, params = sequence.output_token_ids, sequence.params
    if len(output) >= params.min_tokens:
        token_id = output[-1]
        if token_id in sequence.eos_ids:
            sequence.num_stop_tokens = 1
            return FinishReason.EOS
        if token_id in params.stop_token_ids:
            sequence.num_stop_tokens = 1
            return FinishReason.STOP
        if params.stop and _at_stop(sequence):
            return FinishReason.STOP
    if sequence.grammar is not None and (reason := _follow_grammar(sequence, sequence.grammar)):
        return reason
    return FinishReason.LENGTH if len(output) >= sequence.max_tokens else None


def _at_stop(sequence: Sequence) -> bool:
    """Whether the output ends with a stop sequence of token ids, or its text with a stop string."""
    output = sequence.output_token_ids
    for stop in sequence.params.stop:
        if stop[-1] == output[-1] and len(output) >= len(stop) and tuple(output[-len(stop) :]) == stop:
            sequence.num_stop_tokens = len(stop)
            return True
    return bool(sequence.has_stop_strings and sequence.detokenizer and sequence.detokenizer.advance(output))


def _follow_grammar(sequence: Sequence, grammar: Grammar) -> FinishReason | None:
    """Take the newest token through the grammar and find what may follow; if nothing may, the sequence ends."""
    if not grammar.advance(sequence.output_token_ids):
        return FinishReason.ABORT
    text = grammar.mask()
    has_text = text.any()
    sequence.mask = allowed_tokens(sequence, grammar, text)
    if has_text and sequence.mask.any():
        return None
    return FinishReason.STOP if grammar.accepts else FinishReason.ABORT


def allowed_tokens(sequence: Sequence, grammar: Grammar, mask: np.ndarray) -> np.ndarray:
    """The tokens that may be drawn next: text that goes on, the end where it may be, no stop before `min_tokens`."""
    if grammar.accepts:
        for token_id in sequence.eos_ids:
            mask[token_id >> 5] |= 1 << (token_id & 31)
    for token_id in sequence.forbidden_ids:
        mask[token_id >> 5] &= 0xFFFFFFFF ^ (1 << (token_id & 31))
    return mask


def _logprob(sequence: Sequence, result: TokenResult, at: tuple[int, int], *, processed: bool) -> TokenLogprob:
    """What the step says of one token: under the model itself, and if `processed` under what it is drawn from."""
    count = sequence.params.logprobs or 0
    token_id, logprob = int(result.tokens_SR[at]), float(_asked(result.logprobs_SR)[at])
    top = _top(result.top_ids_SRX, result.top_logprobs_SRX, at, count)
    if not processed:
        return TokenLogprob(token_id, logprob, top)
    processed_top = _top(result.processed_top_ids_SRX, result.processed_top_logprobs_SRX, at, count)
    return TokenLogprob(
        token_id,
        logprob,
        top,
        float(_asked(result.processed_logprobs_SR)[at]),
        processed_top,
        float(_asked(result.kept_mass_SR)[at]),
    )


def _top(
    ids_SRX: np.ndarray | None, logprobs_SRX: np.ndarray | None, at: tuple[int, int], count: int
) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens and their log-probabilities, as many as were asked for; none that is impossible."""
    if not count:
        return ()
    pairs = zip(_asked(ids_SRX)[at][:count].tolist(), _asked(logprobs_SRX)[at][:count].tolist(), strict=True)
    return tuple((id_, value) for id_, value in pairs if value > float("-inf"))


def _asked[T](result: T | None) -> T:
    if result is None:
        raise AuditError("a request asked for what its steps did not fetch")
    return result
