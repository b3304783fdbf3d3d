"""Logits -> tokens and log-probabilities.

One uniform number per token, made from a counter (seed, sequence index, position): a token does not depend on its batch
mates, on chunking or on how often the sequence was preempted. It is turned into a token by the inverse of the
cumulative distribution in vocabulary order, which costs one pass: first the tile of 256 tokens, then the token in it.
On a CPU `native/draw.cc` does it all while a row is in the cache.

Penalties come first, then the bias, the mask, temperature, top-k, top-p of what is left, min-p. Which tokens a row has
seen is read from its own pages, which carry token ids beside their KV. What no sample of the step needs is skipped at
run time (`lax.cond`), so that one program serves every mix of requests.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from quire.device.inputs import INVALID, NUM_TOP_LOGPROBS, SampleInputs, StepOutput
from quire.device.top_k_top_p import top_k_top_p

TILE = 256
SMALLEST_TILE = 32
MIN_TEMPERATURE = 1e-20
"""A lower temperature is this one: only the likeliest tokens are left long before."""


class Drawn(NamedTuple):
    """What each token was drawn from: the `num_kept` likeliest. Of them, one of logit x had the probability
    exp((x - peak) * inv_temperature) / mass.
    """

    tokens_S: jax.Array
    peak_S: jax.Array
    inv_temperature_S: jax.Array
    num_kept_S: jax.Array
    mass_S: jax.Array


def sample(
    logits_SV: Float[Array, "S V"],
    inputs: SampleInputs,
    tokens_MZ: Int[Array, "M Z"],
    page_table_BP: Int[Array, "B P"],
    *,
    native: bool = False,
) -> StepOutput:
    """Draw or score one token for each sample; one round. `native` where the library is there to help."""
    is_penalised = jnp.any((inputs.repetition_S != 1) | (inputs.presence_S != 0) | (inputs.frequency_S != 0))
    is_biased = jnp.any(inputs.bias_ids_SE != INVALID)
    is_processed = is_penalised | is_biased | inputs.has_mask
    scored_S = inputs.target_S != INVALID
    is_random = jnp.any((inputs.temperature_S > 0) & ~scored_S)

    def process() -> jax.Array:
        penalise = partial(_penalise, inputs=inputs, tokens_MZ=tokens_MZ, page_table_BP=page_table_BP)
        processed_SV = lax.cond(is_penalised, penalise, _same, logits_SV)
        processed_SV = lax.cond(is_biased, partial(_add_bias, inputs=inputs), _same, processed_SV)
        return lax.cond(inputs.has_mask, partial(_apply_mask, inputs=inputs), _same, processed_SV)

    def draw(x_SV: jax.Array) -> tuple[Drawn, jax.Array, jax.Array]:
        """What was drawn from these logits, the tokens that count, and their logits among these."""
        drawn = lax.cond(is_random, draw_native if native else _draw, _greedy, x_SV, inputs)
        tokens_S = jnp.where(scored_S, inputs.target_S, drawn.tokens_S)
        return drawn, tokens_S, at_token(x_SV, tokens_S)

    def at_token(x_SV: jax.Array, tokens_S: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x_SV, tokens_S[:, None], axis=-1)[:, 0]

    # Not `draw(cond(...))`: a branch that returns all logits as they are copies them.
    drawn, tokens_S, processed_S = lax.cond(is_processed, lambda: draw(process()), lambda: draw(logits_SV))

    def logprobs():
        total_S = jax.nn.logsumexp(logits_SV, axis=-1)
        logprobs_S = (processed_S - drawn.peak_S) * drawn.inv_temperature_S - jnp.log(drawn.mass_S)
        return at_token(logits_SV, tokens_S) - total_S, logprobs_S, total_S

    num_samples = logits_SV.shape[0]
    zeros_S = jnp.zeros(num_samples, jnp.float32)
    logprobs_S, processed_logprobs_S, total_S = lax.cond(inputs.want_logprobs, logprobs, lambda: (zeros_S,) * 3)

    def top() -> tuple[jax.Array, ...]:
        return _top_logprobs(logits_SV, total_S, is_processed, process, drawn)

    ids_SX = jnp.zeros((num_samples, NUM_TOP_LOGPROBS), jnp.int32)
    zeros_SX = jnp.zeros((num_samples, NUM_TOP_LOGPROBS), jnp.float32)
    tops = lax.cond(inputs.want_top, top, lambda: (ids_SX, zeros_SX, ids_SX, zeros_SX))
    top_ids_SX, top_logprobs_SX, processed_top_ids_SX, processed_top_SX = tops
    return StepOutput(
        tokens_SR=tokens_S[:, None],
        logprobs_SR=logprobs_S[:, None],
        top_ids_SRX=top_ids_SX[:, None],
        top_logprobs_SRX=top_logprobs_SX[:, None],
        processed_logprobs_SR=processed_logprobs_S[:, None],
        processed_top_ids_SRX=processed_top_ids_SX[:, None],
        processed_top_logprobs_SRX=processed_top_SX[:, None],
    )


def _top_logprobs(
    logits_SV: jax.Array, total_S: jax.Array, is_processed: jax.Array, process: Callable[[], jax.Array], drawn: Drawn
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The likeliest tokens and their log-probabilities under the model, then under what was drawn from."""
    width = min(NUM_TOP_LOGPROBS, logits_SV.shape[1])
    values_SX, ids_SX = lax.top_k(logits_SV, width)
    drawn_values_SX, drawn_ids_SX = lax.cond(
        is_processed, lambda: tuple(lax.top_k(process(), width)), lambda: (values_SX, ids_SX)
    )
    drawn_SX = (drawn_values_SX - drawn.peak_S[:, None]) * drawn.inv_temperature_S[:, None]
    drawn_SX -= jnp.log(drawn.mass_S)[:, None]
    rank_SX = lax.broadcasted_iota(jnp.int32, drawn_SX.shape, 1)
    drawn_SX = jnp.where(rank_SX < drawn.num_kept_S[:, None], drawn_SX, -jnp.inf)
    missing = ((0, 0), (0, NUM_TOP_LOGPROBS - width))
    ids_SX, values_SX, drawn_ids_SX, drawn_SX = (
        jnp.pad(x_SX, missing) for x_SX in (ids_SX, values_SX - total_S[:, None], drawn_ids_SX, drawn_SX)
    )
    return ids_SX, values_SX, drawn_ids_SX, drawn_SX


def _same(logits_SV: jax.Array) -> jax.Array:
    return logits_SV


def _penalise(logits_SV: jax.Array, inputs: SampleInputs, tokens_MZ: jax.Array, page_table_BP: jax.Array) -> jax.Array:
    """Make tokens that a row has seen less likely: by its pages up to the position drawn."""
    num_samples, vocab = logits_SV.shape
    seen_SC = tokens_MZ[page_table_BP[inputs.row_S]].reshape(num_samples, -1)
    column_SC = lax.broadcasted_iota(jnp.int32, seen_SC.shape, 1)
    row_SC = lax.broadcasted_iota(jnp.int32, seen_SC.shape, 0)
    exists_SC = column_SC < inputs.position_S[:, None]
    is_output_SC = exists_SC & (column_SC >= inputs.prompt_len_S[:, None])
    nowhere = jnp.int32(vocab)
    seen_SV = jnp.zeros((num_samples, vocab), bool)
    seen_SV = seen_SV.at[row_SC, jnp.where(exists_SC, seen_SC, nowhere)].set(True, mode="drop")
    counts_SV = jnp.zeros((num_samples, vocab), jnp.float32)
    counts_SV = counts_SV.at[row_SC, jnp.where(is_output_SC, seen_SC, nowhere)].add(1.0, mode="drop")
    repetition_S1 = inputs.repetition_S[:, None]
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    penalised_SV = jnp.where(seen_SV, repeated_SV, logits_SV)
    penalised_SV -= inputs.frequency_S[:, None] * counts_SV
    return penalised_SV - inputs.presence_S[:, None] * (counts_SV > 0).astype(jnp.float32)


def _add_bias(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    rows_SE = lax.broadcasted_iota(jnp.int32, inputs.bias_ids_SE.shape, 0)
    ids_SE = jnp.where(inputs.bias_ids_SE == INVALID, logits_SV.shape[1], inputs.bias_ids_SE)
    return logits_SV.at[rows_SE, ids_SE].add(inputs.bias_SE, mode="drop")


def _apply_mask(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    """Leave the tokens whose bit is set."""
    num_samples, vocab = logits_SV.shape
    shift_11I = lax.broadcasted_iota(jnp.uint32, (1, 1, 32), 2)
    bits_SWI = (inputs.mask_SW[:, :, None] >> shift_11I) & jnp.uint32(1)
    return jnp.where(bits_SWI.reshape(num_samples, -1)[:, :vocab] != 0, logits_SV, -jnp.inf)


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


def draw_native(logits_SV: jax.Array, inputs: SampleInputs, *, instruction_set: str = "") -> Drawn:
    """A token for each row by `native/draw.cc`, which does what `_draw` does while a row is in the cache."""
    is_random_S, inv_temperature_S, uniform_S = _counter(inputs)
    ints_S, floats_S = (jax.ShapeDtypeStruct(is_random_S.shape, dtype) for dtype in (jnp.int32, jnp.float32))
    call = jax.ffi.ffi_call("quire_draw", (ints_S, floats_S, ints_S, floats_S))
    how = (jnp.where(is_random_S, inv_temperature_S, 0.0), inputs.top_k_S, inputs.top_p_S, inputs.min_p_S, uniform_S)
    tokens_S, peak_S, num_kept_S, mass_S = call(logits_SV, *how, isa=instruction_set)
    return Drawn(tokens_S, peak_S, inv_temperature_S, num_kept_S, mass_S)


def _counter(inputs: SampleInputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which rows draw at all, one over their temperature, and the number in [0, 1) that chooses."""
    is_random_S = inputs.temperature_S > 0
    inv_temperature_S = 1.0 / jnp.where(is_random_S, jnp.maximum(inputs.temperature_S, MIN_TEMPERATURE), 1.0)
    return is_random_S, inv_temperature_S, jax.vmap(_uniform)(inputs.seed_S2, inputs.index_S, inputs.position_S)


def _draw(logits_SV: jax.Array, inputs: SampleInputs) -> Drawn:
    """A token for each row: the most likely where temperature is 0, else by its counter."""
    greedy = _greedy(logits_SV, inputs)
    is_random_S, inv_temperature_S, uniform_S = _counter(inputs)
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


def _uniform(seed_2: jax.Array, index: jax.Array, position: jax.Array) -> jax.Array:
    """The number in [0, 1) that belongs to (seed, sequence index, position)."""
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), position))


def _draw_tiled(weights_SV: jax.Array, uniform_S: jax.Array) -> jax.Array:
    """Inverse of the cumulative weights in vocabulary order, in two levels."""
    num_samples, vocab = weights_SV.shape
    weights_SNT = jnp.pad(weights_SV, ((0, 0), (0, -vocab % TILE))).reshape(num_samples, -1, TILE)
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
