"""Logits -> tokens and log-probabilities.

One uniform number per token, made from a counter (seed, sequence index, position): a token does not depend on its batch
mates, on chunking or on how often the sequence was preempted. It is turned into a token by the inverse of the
cumulative distribution in vocabulary order, which costs one pass: first the tile of 256 tokens, then the token in it.

Penalties come first, then the bias, the mask, top-n-sigma, temperature, top-k, top-p of what is left, min-p. Which
tokens a row has seen is read from its own pages, which carry token ids beside their KV. What no sample needs is
skipped at run time (`lax.cond`), so that one program serves every mix of requests.

On a CPU `native/sample.cc` does all of it to each row by itself, while the row is in the cache: what a row asks for
costs only itself. Elsewhere it costs the few that are in one piece with it (`rows_at_once`).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from quire.config import DEFAULT_MAX_LOGPROBS
from quire.device.inputs import (
    INVALID,
    NOT_FINITE,
    SAMPLE_FIELDS,
    SampleInputs,
    StepOutput,
    default_samples,
)
from quire.device.top_k_top_p import top_k_top_p

TILE = 256
SMALLEST_TILE = 32
PAGES_AT_ONCE = 64
"""Pages of each row that penalties look at in one go."""
MIN_TEMPERATURE = 1e-20
"""A lower temperature is this one: only the likeliest tokens are left long before."""


CUTS = ("top_k_S", "top_p_S", "min_p_S")
ROUNDING = 1e-6
"""Two tokens whose log-probabilities differ by less may have the same weight in float32."""


class Drawn(NamedTuple):
    """What each token was drawn from: the `num_kept` likeliest. Of them, one of logit x had the probability
    exp((x - peak) * inv_temperature) / mass.
    """

    tokens_S: jax.Array
    peak_S: jax.Array
    inv_temperature_S: jax.Array
    num_kept_S: jax.Array
    mass_S: jax.Array


class _Top(NamedTuple):
    """How the likeliest tokens of each row are found."""

    max_logprobs: int
    num_parts: int
    """Parts that the vocabulary is split into, over devices."""

    def of(self, x_SV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest values of each row and where they are; -inf at token 0 behind the last of a small vocabulary.

        First of each part of the vocabulary: devices that have one each then exchange no logits.
        """
        num_samples, vocab_size = x_SV.shape
        part = vocab_size // self.num_parts
        x_SPV = x_SV.reshape(num_samples, self.num_parts, part)
        values_SPX, places_SPX = lax.top_k(x_SPV, min(self.max_logprobs, part))
        ids_SPX = places_SPX + jnp.arange(0, vocab_size, part, dtype=jnp.int32)[None, :, None]
        width = min(self.max_logprobs, vocab_size)
        values_SX, order_SX = lax.top_k(values_SPX.reshape(num_samples, -1), width)
        ids_SX = jnp.take_along_axis(ids_SPX.reshape(num_samples, -1), order_SX, axis=-1)
        missing = ((0, 0), (0, self.max_logprobs - width))
        return jnp.pad(values_SX, missing, constant_values=-jnp.inf), jnp.pad(ids_SX, missing)

    def none(self, num_samples: int) -> tuple[jax.Array, jax.Array]:
        """Zeros instead of ids and log-probabilities, where no sample asks for them."""
        shape = (num_samples, self.max_logprobs)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def rows_at_once(platform: str) -> int | None:
    """How many rows `sample` should take at once on a platform; None for all, as on a CPU."""
    # 8 rows are one tile of a TPU's vector memory. On a GPU each piece costs launches, so they are larger.
    return {"cpu": None, "tpu": 8}.get(platform, 16)


def sample(
    logits_SV: Float[Array, "S V"],
    inputs: SampleInputs,
    tokens_MZ: Int[Array, "M Z"],
    page_table_BP: Int[Array, "B P"],
    *,
    native: bool = False,
    rows_at_once: int | None = None,
    num_parts: int = 1,
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
) -> StepOutput:
    """Draw or score one token for each sample; one round.

    `native`: by the native library, which takes each row by itself. Else `rows_at_once` makes a loop over so many
    samples: what is computed on the way takes that much less memory, and on a TPU fits in the vector memory. None is
    for all of them. `num_parts`: in how many the vocabulary is split over devices. `max_logprobs`: number of
    alternatives of each token.
    """
    if native:
        return sample_natively(logits_SV, inputs, tokens_MZ, page_table_BP, max_logprobs=max_logprobs)
    top = _Top(max_logprobs, num_parts)
    draw_rows = partial(_sample_rows, tokens_MZ=tokens_MZ, page_table_BP=page_table_BP, top=top)
    if rows_at_once is None:
        return draw_rows(logits_SV, inputs)
    num_samples = logits_SV.shape[0]
    rows = min(rows_at_once, num_samples)

    def advance(piece: jax.Array, output: StepOutput) -> StepOutput:
        start = jnp.minimum(piece * rows, num_samples - rows)  # the last piece may begin in the one before it
        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=rows)
        drawn = draw_rows(cut(logits_SV), jax.tree.map(cut, inputs))
        return jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, start, 0), output, drawn)

    return lax.fori_loop(0, -(-num_samples // rows), advance, StepOutput.empty(num_samples, 1, max_logprobs))


def sample_natively(
    logits_SV: jax.Array,
    inputs: SampleInputs,
    tokens_MZ: jax.Array,
    page_table_BP: jax.Array,
    *,
    instruction_set: str = "",
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
) -> StepOutput:
    """`sample` by `native/sample.cc`. What nobody asked for is 0, and a kept mass 1."""
    output, treedef = jax.tree.flatten(jax.eval_shape(partial(StepOutput.empty, len(logits_SV), 1, max_logprobs)))
    fields = (getattr(inputs, name) for name in SAMPLE_FIELDS if name != "packed_index_S")
    call = jax.ffi.ffi_call("quire_sample", output)
    return jax.tree.unflatten(treedef, call(logits_SV, tokens_MZ, page_table_BP, *fields, isa=instruction_set))


def sample_and_score(
    draw_from: Callable[[SampleInputs], StepOutput],
    samples: SampleInputs,
    scores: SampleInputs,
    max_logprobs: int = DEFAULT_MAX_LOGPROBS,
) -> StepOutput:
    """Draw the samples, and score tokens that are there by the same program: as many at a time as there are samples.

    Piece 0 of the loop are the samples, the others are the scores that there are; what is not there costs nothing.
    """
    rows, num_scores = len(samples.packed_index_S), len(scores.packed_index_S)
    num_pieces = 1 + -(-jnp.sum(scores.target_S != INVALID) // rows)
    has_samples = jnp.any(samples.position_S > 0)  # a token that is drawn has one before it
    neutral = default_samples(rows, vocab_size=0)

    def piece_of(piece: jax.Array, start: jax.Array) -> SampleInputs:
        def choose(name: str) -> jax.Array:
            of_sample, of_score = getattr(samples, name), getattr(scores, name)
            if name == "mask_SW":
                return of_sample  # `has_mask_S` says that no score has one
            if of_score is None:
                of_score = jnp.asarray(getattr(neutral, name))
            else:
                of_score = lax.dynamic_slice_in_dim(of_score, start, rows)
            return jnp.where(piece == 0, of_sample, of_score)

        return SampleInputs(**{name: choose(name) for name in SAMPLE_FIELDS})

    def advance(piece: jax.Array, output: StepOutput) -> StepOutput:
        start = jnp.clip((piece - 1) * rows, 0, num_scores - rows)  # the last may begin in the one before it
        drawn = draw_from(piece_of(piece, start))
        place = jnp.where(piece == 0, 0, rows + start)
        return jax.tree.map(lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, place, 0), output, drawn)

    first = 1 - has_samples.astype(jnp.int32)
    whole = lax.fori_loop(first, num_pieces, advance, StepOutput.empty(rows + num_scores, 1, max_logprobs))
    drawn, scored = (jax.tree.map(lambda x, part=part: x[part], whole) for part in (slice(rows), slice(rows, None)))
    return replace(drawn, scores=scored)


def _sample_rows(
    logits_SV: jax.Array,
    inputs: SampleInputs,
    tokens_MZ: jax.Array,
    page_table_BP: jax.Array,
    top: _Top,
) -> StepOutput:
    """`sample`, all rows at once."""
    is_penalised = jnp.any(_has_penalty(inputs))
    is_biased = jnp.any(inputs.bias_ids_SE != INVALID)
    has_mask = jnp.any(inputs.has_mask_S)

    def process() -> jax.Array:
        penalise = partial(_penalise, inputs=inputs, tokens_MZ=tokens_MZ, page_table_BP=page_table_BP)
        processed_SV = lax.cond(is_penalised, penalise, _same, logits_SV)
        processed_SV = lax.cond(is_biased, partial(_add_bias, inputs=inputs), _same, processed_SV)
        return lax.cond(has_mask, partial(_apply_mask, inputs=inputs), _same, processed_SV)

    # A branch that returns all logits as they are copies them: one for everything that is seldom asked for.
    processed_SV = lax.cond(is_penalised | is_biased | has_mask, process, lambda: logits_SV)
    is_cut = jnp.any(inputs.top_n_sigma_S > 0)
    cut_SV = lax.cond(is_cut, partial(_cut_sigma, inputs=inputs), _same, processed_SV)
    drawn = _draw_and_score(cut_SV, processed_SV, inputs, top)
    model = _score(logits_SV, drawn.tokens_S, inputs, top)
    # XLA's maximum on a CPU leaves NaN out for most S, so NaN is looked for by itself.
    is_number_S = ~jnp.any(jnp.isnan(logits_SV), axis=-1) & jnp.isfinite(jnp.max(logits_SV, axis=-1))
    is_finite_S = is_number_S | (inputs.target_S != INVALID)
    output = StepOutput(
        tokens_SR=jnp.where(is_finite_S, drawn.tokens_S, NOT_FINITE),
        logprobs_SR=model.logprobs_S,
        top_ids_SRX=model.top_ids_SX,
        top_logprobs_SRX=model.top_logprobs_SX,
        processed_logprobs_SR=drawn.logprobs_S,
        kept_mass_SR=drawn.kept_mass_S,
        processed_top_ids_SRX=drawn.top_ids_SX,
        processed_top_logprobs_SRX=drawn.top_logprobs_SX,
    )
    return jax.tree.map(lambda x: x[:, None], output)


class Scored(NamedTuple):
    """A token of each row and its log-probability, and the likeliest tokens with theirs: 0 where nobody asked.

    `kept_mass_S` is the probability that what could be drawn had before the rest was cut off.
    """

    tokens_S: jax.Array
    logprobs_S: jax.Array
    kept_mass_S: jax.Array
    top_ids_SX: jax.Array
    top_logprobs_SX: jax.Array


def _draw_and_score(cut_SV: jax.Array, processed_SV: jax.Array, inputs: SampleInputs, top: _Top) -> Scored:
    """Draw, or take the token that is given; scored under what is drawn from.

    That is `cut_SV` after temperature, top-k, top-p and min-p; `processed_SV` is what nothing was cut off yet.
    """
    is_given_S = inputs.target_S != INVALID
    is_random_S, _ = _temperature(inputs)

    def draw(logits_SV: jax.Array, inputs: SampleInputs) -> Drawn:
        return lax.cond(jnp.any(is_random_S), _draw, _greedy, logits_SV, inputs)

    drawn = draw(cut_SV, inputs)
    tokens_S = jnp.where(is_given_S, inputs.target_S, drawn.tokens_S)
    zeros_S, ones_S = jnp.zeros_like(drawn.peak_S), jnp.ones_like(drawn.peak_S)

    def logprob(values: jax.Array) -> jax.Array:
        """Of logits `[S]` or `[S, X]`."""
        peak, inv_temperature, mass = (
            x_S if values.ndim == 1 else x_S[:, None] for x_S in (drawn.peak_S, drawn.inv_temperature_S, drawn.mass_S)
        )
        return (values - peak) * inv_temperature - jnp.log(mass)

    is_cut_S = (inputs.top_k_S > 0) | (inputs.top_p_S < 1) | (inputs.min_p_S > 0) | (inputs.top_n_sigma_S > 0)
    is_cut_S &= is_random_S

    def logprobs() -> jax.Array:
        is_doubtful_S = is_given_S & is_cut_S  # what was drawn could be drawn
        rank = partial(_rank, cut_SV, tokens_S, drawn.inv_temperature_S)
        rank_S = lax.cond(jnp.any(is_doubtful_S), rank, lambda: jnp.zeros_like(tokens_S))
        return jnp.where(is_doubtful_S & (rank_S >= drawn.num_kept_S), -jnp.inf, logprob(_at(cut_SV, tokens_S)))

    def find_top() -> tuple[jax.Array, jax.Array]:
        values_SX, ids_SX = top.of(cut_SV)
        rank_SX = lax.broadcasted_iota(jnp.int32, values_SX.shape, 1)
        return ids_SX, jnp.where(rank_SX < drawn.num_kept_S[:, None], logprob(values_SX), -jnp.inf)

    def kept_mass() -> jax.Array:
        neutral = default_samples(len(tokens_S), vocab_size=0)
        uncut = replace(inputs, **{name: jnp.asarray(getattr(neutral, name)) for name in CUTS})
        uncut_mass_S = draw(processed_SV, uncut).mass_S
        return jnp.where(is_cut_S, drawn.mass_S / uncut_mass_S, 1.0)

    want_logprobs, want_top = jnp.any(inputs.want_logprobs_S), jnp.any(inputs.want_top_S)
    logprobs_S = lax.cond(want_logprobs, logprobs, lambda: zeros_S)
    kept_mass_S = lax.cond(want_logprobs & jnp.any(is_cut_S), kept_mass, lambda: ones_S)
    return Scored(tokens_S, logprobs_S, kept_mass_S, *lax.cond(want_top, find_top, lambda: top.none(len(tokens_S))))


def _rank(x_SV: jax.Array, tokens_S: jax.Array, inv_temperature_S: jax.Array) -> jax.Array:
    """How many tokens of each row come before the one given: those that are likelier, and of equal ones the first.

    Likelier by more than rounding: logits that differ may have weights that do not.
    """
    more_SV = x_SV - _at(x_SV, tokens_S)[:, None]
    ids_SV = lax.broadcasted_iota(jnp.int32, x_SV.shape, 1)
    is_likelier_SV = more_SV * inv_temperature_S[:, None] > ROUNDING
    return jnp.sum(is_likelier_SV | ((more_SV == 0) & (ids_SV < tokens_S[:, None])), axis=-1, dtype=jnp.int32)


def _score(logits_SV: jax.Array, tokens_S: jax.Array, inputs: SampleInputs, top: _Top) -> Scored:
    """The tokens under the model, whatever was done to its logits."""
    zeros_S = jnp.zeros(len(tokens_S), jnp.float32)

    def logprobs() -> tuple[jax.Array, jax.Array, jax.Array]:
        peak_S, log_mass_S = _softmax_scale(logits_SV, 1.0)
        return peak_S, log_mass_S, _at(logits_SV, tokens_S) - peak_S - log_mass_S

    def find_top() -> tuple[jax.Array, jax.Array]:
        values_SX, ids_SX = top.of(logits_SV)
        return ids_SX, values_SX - peak_S[:, None] - log_mass_S[:, None]

    peak_S, log_mass_S, logprobs_S = lax.cond(jnp.any(inputs.want_logprobs_S), logprobs, lambda: (zeros_S,) * 3)
    tops = lax.cond(jnp.any(inputs.want_top_S), find_top, lambda: top.none(len(tokens_S)))
    return Scored(tokens_S, logprobs_S, jnp.ones_like(zeros_S), *tops)


def token_logprobs(
    logits_SV: Float[Array, "S V"],
    tokens_S: Integer[Array, " S"],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    native: bool = False,
) -> Float[Array, " S"]:
    """The log-probability of a token of each row; with `native`, bit for bit the processed one of `sample`.

    -inf for a token that `top_k` and `top_p` cut off.
    """
    logits_SV = lax.optimization_barrier(logits_SV)  # as they are: not computed once more, and otherwise, for the token
    temperature = max(temperature, MIN_TEMPERATURE)
    if native:
        num_samples, vocab = logits_SV.shape
        chosen = {
            "target_S": jnp.clip(tokens_S.astype(jnp.int32), 0, vocab - 1),
            "temperature_S": jnp.full(num_samples, temperature, jnp.float32),
            "top_k_S": jnp.full(num_samples, top_k, jnp.int32),
            "top_p_S": jnp.full(num_samples, top_p, jnp.float32),
            "want_logprobs_S": jnp.ones(num_samples, jnp.bool_),
        }
        inputs = replace(jax.tree.map(jnp.asarray, default_samples(num_samples, vocab_size=0)), **chosen)
        no_history = jnp.zeros((1, 1), jnp.int32)
        logprobs_S = sample_natively(logits_SV, inputs, no_history, no_history).processed_logprobs_SR[:, 0]
        return jnp.where(inputs.target_S == tokens_S.astype(jnp.int32), logprobs_S, jnp.nan)
    inv_temperature = np.float32(1) / np.float32(temperature)
    peak_S, log_mass_S = _softmax_scale(logits_SV, temperature)
    if not top_k and top_p == 1:
        return (_at(logits_SV, tokens_S) - peak_S) * inv_temperature - log_mass_S
    weights_SV = jnp.exp((logits_SV - peak_S[:, None]) * inv_temperature)
    top_k_S, top_p_S = (jnp.full(len(tokens_S), x, t) for x, t in ((top_k, jnp.int32), (top_p, jnp.float32)))
    is_kept_SV = top_k_top_p(lax.stop_gradient(weights_SV), top_k_S, top_p_S)
    log_mass_S = jnp.log(jnp.sum(jnp.where(is_kept_SV, weights_SV, 0.0), axis=-1))
    logprobs_S = (_at(logits_SV, tokens_S) - peak_S) * inv_temperature - log_mass_S
    return jnp.where(_at(is_kept_SV, tokens_S), logprobs_S, -jnp.inf)


def _softmax_scale(logits_SV: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
    """The peak of each row, and the logarithm of the sum of exp((logit - peak) / temperature)."""
    peak_S = lax.stop_gradient(jnp.max(logits_SV, axis=-1))  # it cancels
    return peak_S, jnp.log(jnp.sum(jnp.exp((logits_SV - peak_S[:, None]) / temperature), axis=-1))


def _at(x_SV: jax.Array, tokens_S: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_SV, tokens_S[:, None], axis=-1)[:, 0]


def _same(logits_SV: jax.Array) -> jax.Array:
    return logits_SV


def _has_penalty(inputs: SampleInputs) -> jax.Array:
    is_plain_S = (inputs.presence_penalty_S == 0) & (inputs.frequency_penalty_S == 0)
    return (inputs.repetition_penalty_S != 1) | ~is_plain_S


def _penalise(logits_SV: jax.Array, inputs: SampleInputs, tokens_MZ: jax.Array, page_table_BP: jax.Array) -> jax.Array:
    """Make tokens that a row has seen less likely: by its pages up to the position drawn."""
    seen_SV, counts_SV = _count_seen(logits_SV.shape[1], inputs, tokens_MZ, page_table_BP)
    repetition_S1 = inputs.repetition_penalty_S[:, None]
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    penalised_SV = jnp.where(seen_SV, repeated_SV, logits_SV)
    penalised_SV -= inputs.frequency_penalty_S[:, None] * counts_SV
    return penalised_SV - inputs.presence_penalty_S[:, None] * (counts_SV > 0).astype(jnp.float32)


def _count_seen(
    vocab: int, inputs: SampleInputs, tokens_MZ: jax.Array, page_table_BP: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which tokens each row with a penalty has seen, and how often each is in its output, as float32.

    A few pages of each row at a time, as many times as the longest needs: a page table has room for more.
    """
    pages_SP = page_table_BP[inputs.row_S]
    num_samples, num_pages = pages_SP.shape
    page_size = tokens_MZ.shape[1]
    width = min(PAGES_AT_ONCE, num_pages)
    length_S = jnp.where(_has_penalty(inputs), inputs.position_S, 0)

    def count(piece: jax.Array, found: jax.Array) -> jax.Array:
        first = jnp.minimum(piece * width, num_pages - width)
        tokens_SC = tokens_MZ[lax.dynamic_slice_in_dim(pages_SP, first, width, axis=1)].reshape(num_samples, -1)
        column_SC = first * page_size + lax.broadcasted_iota(jnp.int32, tokens_SC.shape, 1)
        # The last piece may begin in the one before it.
        exists_SC = (column_SC >= piece * width * page_size) & (column_SC < length_S[:, None])
        is_output_SC = exists_SC & (column_SC >= inputs.prompt_len_S[:, None])
        both = jnp.concatenate([jnp.where(is_in_SC, tokens_SC, vocab) for is_in_SC in (exists_SC, is_output_SC)])
        return found.at[lax.broadcasted_iota(jnp.int32, both.shape, 0), both].add(1.0, mode="drop")

    # The counts of all tokens lie above those of the output: one scatter to compile, not two.
    nothing = jnp.zeros((2 * num_samples, vocab), jnp.float32)
    found = lax.fori_loop(0, -(-jnp.max(length_S) // (width * page_size)), count, nothing)
    return found[:num_samples] > 0, found[num_samples:]


def _add_bias(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    rows_SE = lax.broadcasted_iota(jnp.int32, inputs.bias_ids_SE.shape, 0)
    ids_SE = jnp.where(inputs.bias_ids_SE == INVALID, logits_SV.shape[1], inputs.bias_ids_SE)
    return logits_SV.at[rows_SE, ids_SE].add(inputs.bias_SE, mode="drop")


def _apply_mask(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    """Leave the tokens whose bit is set, in a row that has a mask."""
    num_samples, vocab = logits_SV.shape
    shift_11I = lax.broadcasted_iota(jnp.uint32, (1, 1, 32), 2)
    bits_SWI = (inputs.mask_SW[:, :, None] >> shift_11I) & jnp.uint32(1)
    bits_SV = bits_SWI.reshape(num_samples, -1)[:, :vocab]
    bits_SV = jnp.pad(bits_SV, ((0, 0), (0, vocab - bits_SV.shape[1])))  # logits may be padded over devices
    return jnp.where((bits_SV != 0) | ~inputs.has_mask_S[:, None], logits_SV, -jnp.inf)


def _cut_sigma(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    """Leave the tokens within `top_n_sigma` standard deviations of the highest logit."""
    n_S1 = inputs.top_n_sigma_S[:, None]
    lowest_S1 = jnp.max(logits_SV, axis=-1, keepdims=True) - n_S1 * _deviation(logits_SV)[:, None]
    # Not `>= lowest`: a row that is not a number stays as it is.
    return jnp.where((n_S1 > 0) & (logits_SV < lowest_S1), -jnp.inf, logits_SV)


def _deviation(logits_SV: jax.Array) -> jax.Array:
    """The standard deviation of the finite logits of each row, divided by their number: -inf cannot be drawn."""
    is_finite_SV = jnp.isfinite(logits_SV)
    count_S = jnp.sum(is_finite_SV, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    mean_S = _sum_in_order(jnp.where(is_finite_SV, logits_SV, 0.0)) / count_S
    distance_SV = jnp.where(is_finite_SV, logits_SV - mean_S[:, None], 0.0)
    return jnp.sqrt(_sum_in_order(distance_SV * distance_SV) / count_S)


def _sum_in_order(x_SV: jax.Array) -> jax.Array:
    """The sum of each row, to the last bit the same in every batch: XLA's own adds in an order that depends on S.

    First of each tile, which is whole on one device, then of the tiles.
    """
    columns_XSC = lax.platform_dependent(jnp.moveaxis(_tiles(x_SV), -1, 0), tpu=_as_shaped, default=_same)
    return _halve(_halve(columns_XSC, 0), 1)


def _as_shaped(x: jax.Array) -> jax.Array:
    """Keep an array's axes in memory as its shape has them. A TPU's compiler would put the rows innermost, which are
    few, and pad them to the width of its registers: 16 times the memory.
    """
    from jax.experimental import layout

    if hasattr(layout, "DeviceLocalLayout"):  # before jax 0.7 it has other names; our TPU extra asks for more
        return x
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def _halve(x: jax.Array, axis: int) -> jax.Array:
    """The sum along an axis, by adding its halves until there is one number."""
    while (width := x.shape[axis]) > 1:
        if width % 2:
            x = lax.pad(x, jnp.zeros((), x.dtype), [(0, int(i == axis), 0) for i in range(x.ndim)])
        half = x.shape[axis] // 2
        x = lax.slice_in_dim(x, 0, half, axis=axis) + lax.slice_in_dim(x, half, 2 * half, axis=axis)
    return lax.squeeze(x, (axis,))


def _tiles(x_SV: jax.Array) -> jax.Array:
    """`[S, N, 256]`, padded with zeros."""
    num_samples, vocab = x_SV.shape
    return jnp.pad(x_SV, ((0, 0), (0, -vocab % TILE))).reshape(num_samples, -1, TILE)


def take_likeliest(logits_SV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first of the most likely tokens of each row, and its logit.

    One pass over the logits, for the peak of each tile, in vector code: XLA's own argmax is neither on a CPU. A
    vocabulary that has no tiles worth the name takes two.
    """
    num_samples, vocab = logits_SV.shape
    tile = math.gcd(vocab, TILE)
    if tile < SMALLEST_TILE:
        peak_S = jnp.max(logits_SV, axis=-1)
        return _first_equal(logits_SV, peak_S), peak_S
    logits_SNT = logits_SV.reshape(num_samples, -1, tile)
    peaks_SN = jnp.max(logits_SNT, axis=-1)
    peak_S = jnp.max(peaks_SN, axis=-1)
    tile_S = _first_equal(peaks_SN, peak_S)
    inside_ST = jnp.take_along_axis(logits_SNT, tile_S[:, None, None], axis=1)[:, 0]
    return tile_S * tile + _first_equal(inside_ST, peak_S), peak_S


def _first_equal(x_SN: jax.Array, value_S: jax.Array) -> jax.Array:
    """The last index where none is, because the value is NaN."""
    ids_SN = lax.broadcasted_iota(jnp.int32, x_SN.shape, 1)
    return jnp.min(jnp.where(x_SN == value_S[:, None], ids_SN, x_SN.shape[1] - 1), axis=-1)


def _greedy(logits_SV: jax.Array, inputs: SampleInputs) -> Drawn:
    """The most likely token of each row: nothing else had a chance."""
    del inputs
    one_S = jnp.ones(logits_SV.shape[0], jnp.float32)
    num_kept_S = jnp.ones(logits_SV.shape[0], jnp.int32)
    tokens_S, peak_S = take_likeliest(logits_SV)
    return Drawn(tokens_S, peak_S, inv_temperature_S=one_S, num_kept_S=num_kept_S, mass_S=one_S)


def _temperature(inputs: SampleInputs) -> tuple[jax.Array, jax.Array]:
    """Which rows draw at all, and one over their temperature."""
    is_random_S = inputs.temperature_S > 0
    return is_random_S, 1.0 / jnp.where(is_random_S, jnp.maximum(inputs.temperature_S, MIN_TEMPERATURE), 1.0)


def _draw(logits_SV: jax.Array, inputs: SampleInputs) -> Drawn:
    """A token for each row: the most likely where temperature is 0, else by its counter."""
    greedy = _greedy(logits_SV, inputs)
    is_random_S, inv_temperature_S = _temperature(inputs)
    uniform_S = uniform(inputs)
    # The peak is taken off first: logits over a tiny temperature overflow, distances to the peak only vanish.
    weights_SV = jnp.exp((logits_SV - greedy.peak_S[:, None]) * inv_temperature_S[:, None])
    # A token's weight is its probability over that of the likeliest: just what min-p compares.
    top_k_S, top_p_S = jnp.where(is_random_S, inputs.top_k_S, 0), jnp.where(is_random_S, inputs.top_p_S, 1.0)
    is_kept_SV = top_k_top_p(weights_SV, top_k_S, top_p_S) & (weights_SV >= inputs.min_p_S[:, None])
    kept_SV = jnp.where(is_kept_SV, weights_SV, 0.0)
    tokens_S, mass_S = _draw_tiled(kept_SV, uniform_S), jnp.sum(kept_SV, axis=-1)
    num_kept_S = jnp.sum(is_kept_SV, axis=-1, dtype=jnp.int32)
    return Drawn(
        jnp.where(is_random_S, tokens_S, greedy.tokens_S),
        greedy.peak_S,
        inv_temperature_S,
        jnp.where(is_random_S, num_kept_S, greedy.num_kept_S),
        jnp.where(is_random_S, mass_S, greedy.mass_S),
    )


def uniform(inputs: SampleInputs) -> jax.Array:
    """The number in [0, 1) that chooses for each row: it belongs to (seed, sequence index, position)."""

    def draw(seed_2: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), position))

    with jax.threefry_partitionable(True):  # a program may have chosen otherwise, and a seed means the same everywhere
        return jax.vmap(draw)(inputs.seed_S2, inputs.index_S, inputs.position_S)


def _draw_tiled(weights_SV: jax.Array, uniform_S: jax.Array) -> jax.Array:
    """Inverse of the cumulative weights in vocabulary order, in two levels."""
    weights_SNT = _tiles(weights_SV)
    tile_S, rest_S = _invert(jnp.sum(weights_SNT, axis=-1), uniform_S)
    inside_ST = jnp.take_along_axis(weights_SNT, tile_S[:, None, None], axis=1)[:, 0]
    offset_S, _ = _invert_at(inside_ST, rest_S)
    return tile_S * TILE + offset_S


def _invert(weights_SN: jax.Array, uniform_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _invert_at(weights_SN, uniform_S * jnp.sum(weights_SN, axis=-1))


def _invert_at(weights_SN: jax.Array, point_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first index whose cumulative weight exceeds the point, and how far into it the point lies.

    Never an index of weight 0: if rounding puts the point past the end, the last index that has weight.
    """
    cumulative_SN = jnp.cumsum(weights_SN, axis=-1)
    index_S = jnp.sum(cumulative_SN <= point_S[:, None], axis=-1)
    index_S = jnp.minimum(index_S, jnp.argmax(cumulative_SN, axis=-1)).astype(jnp.int32)
    before_S = jnp.take_along_axis(cumulative_SN - weights_SN, index_S[:, None], axis=-1)[:, 0]
    return index_S, jnp.maximum(point_S - before_S, 0.0)
