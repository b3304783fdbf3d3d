"""Logits -> tokens and log-probabilities.

One uniform number per token, made from a counter (seed, sequence index, position): a token does not depend on its batch
mates, on chunking or on how often the sequence was preempted. It is turned into a token by the inverse of the
cumulative distribution, which costs one pass over the vocabulary.

    drawn from everything       in vocabulary order: first the tile of 256 tokens, then the token in it
    cut by top-k or top-p       in order of likelihood, over the PREFIX most likely tokens; a row whose cut lies beyond
                                them takes a full sort, in the rare step that has such a row

The order of the cuts is top-k, then top-p of what is left, then min-p. What no sample of the step needs is skipped at
run time (`lax.cond`), so that one program serves every mix of requests.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from quire.device.inputs import INVALID, NUM_TOP_LOGPROBS, SampleInputs, StepOutput

TILE = 256
PREFIX = 256
COLDEST = 1e-20
"""A lower temperature is this one: only the likeliest tokens are left long before."""


def sample(logits_SV: Float[Array, "S V"], inputs: SampleInputs) -> StepOutput:
    """Draw or score one token for each sample; one round."""
    biased_SV = lax.cond(jnp.any(inputs.bias_ids_SE != INVALID), _add_bias, lambda x, *_: x, logits_SV, inputs)
    scored_S = inputs.target_S != INVALID
    random_S = (inputs.temperature_S > 0) & ~scored_S
    tokens_S = lax.cond(jnp.any(random_S), _draw, lambda x, *_: _argmax(x), biased_SV, inputs)
    tokens_S = jnp.where(scored_S, inputs.target_S, tokens_S)

    def logprobs():
        total_S = jax.nn.logsumexp(logits_SV, axis=-1)
        return jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=-1)[:, 0] - total_S, total_S

    num_samples = logits_SV.shape[0]
    zeros_S = jnp.zeros(num_samples, jnp.float32)
    logprobs_S, total_S = lax.cond(inputs.want_logprobs, logprobs, lambda: (zeros_S, zeros_S))

    def top():
        values_SX, ids_SX = lax.top_k(logits_SV, min(NUM_TOP_LOGPROBS, logits_SV.shape[1]))
        missing = ((0, 0), (0, NUM_TOP_LOGPROBS - ids_SX.shape[1]))
        return jnp.pad(ids_SX, missing), jnp.pad(values_SX - total_S[:, None], missing)

    shape = (num_samples, NUM_TOP_LOGPROBS)
    top_ids_SX, top_logprobs_SX = lax.cond(
        inputs.want_top, top, lambda: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    )
    return StepOutput(
        tokens_SR=tokens_S[:, None],
        logprobs_SR=logprobs_S[:, None],
        top_ids_SRX=top_ids_SX[:, None],
        top_logprobs_SRX=top_logprobs_SX[:, None],
    )


def _add_bias(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    rows_SE = lax.broadcasted_iota(jnp.int32, inputs.bias_ids_SE.shape, 0)
    ids_SE = jnp.where(inputs.bias_ids_SE == INVALID, logits_SV.shape[1], inputs.bias_ids_SE)
    return logits_SV.at[rows_SE, ids_SE].add(inputs.bias_SE, mode="drop")


def _argmax(logits_SV: jax.Array) -> jax.Array:
    return jnp.argmax(logits_SV, axis=-1).astype(jnp.int32)


def _draw(logits_SV: jax.Array, inputs: SampleInputs) -> jax.Array:
    """A token for each row: the most likely where temperature is 0, else by its counter."""
    greedy_S = _argmax(logits_SV)
    hot_S = inputs.temperature_S > 0
    # The peak is taken off first: logits over a tiny temperature overflow, distances to the peak only vanish.
    cooling_S = 1.0 / jnp.where(hot_S, jnp.maximum(inputs.temperature_S, COLDEST), 1.0)
    below_peak_SV = logits_SV - jnp.max(logits_SV, axis=-1, keepdims=True)
    weights_SV = jnp.exp(below_peak_SV * cooling_S[:, None])
    uniform_S = jax.vmap(_uniform)(inputs.seed_S2, inputs.index_S, inputs.position_S)
    cut_S = hot_S & ((inputs.top_k_S > 0) | (inputs.top_p_S < 1))

    # A token's weight is its probability over that of the likeliest: just what min-p compares.
    all_S = _draw_tiled(jnp.where(weights_SV >= inputs.min_p_S[:, None], weights_SV, 0.0), uniform_S)
    total_S = jnp.sum(weights_SV, axis=-1)
    drawn_S = lax.cond(jnp.any(cut_S), _draw_cut, lambda *_: all_S, weights_SV, total_S, uniform_S, cut_S, inputs)
    return jnp.where(hot_S, jnp.where(cut_S, drawn_S, all_S), greedy_S)


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


def _draw_cut(
    weights_SV: jax.Array, total_S: jax.Array, uniform_S: jax.Array, cut_S: jax.Array, inputs: SampleInputs
) -> jax.Array:
    """Rows with top-k or top-p: over the most likely tokens, all of the vocabulary only where they do not suffice."""
    width = min(PREFIX, weights_SV.shape[1])
    values_SW, ids_SW = lax.top_k(weights_SV, width)
    short_S, fits_S = _draw_sorted(values_SW, ids_SW, total_S, uniform_S, inputs)
    if width == weights_SV.shape[1]:
        return short_S

    def sort_all():
        values_SV, ids_SV = lax.top_k(weights_SV, weights_SV.shape[1])
        full_S, _ = _draw_sorted(values_SV, ids_SV, total_S, uniform_S, inputs)
        return jnp.where(fits_S, short_S, full_S)

    return lax.cond(jnp.any(cut_S & ~fits_S), sort_all, lambda: short_S)


def _draw_sorted(
    weights_SW: jax.Array, ids_SW: jax.Array, total_S: jax.Array, uniform_S: jax.Array, inputs: SampleInputs
) -> tuple[jax.Array, jax.Array]:
    """Draw from the W most likely tokens, and say of each row whether what it keeps lies among them."""
    width = weights_SW.shape[1]
    rank_SW = lax.broadcasted_iota(jnp.int32, weights_SW.shape, 1)
    top_k_S = jnp.where(inputs.top_k_S > 0, inputs.top_k_S, jnp.iinfo(jnp.int32).max)
    kept_SW = rank_SW < top_k_S[:, None]
    cumulative_SW = jnp.cumsum(jnp.where(kept_SW, weights_SW, 0.0), axis=-1)
    mass_S = jnp.where(top_k_S <= width, cumulative_SW[:, -1], total_S)
    # The smallest set that reaches top-p: a token stays while those before it have not reached it.
    before_SW = cumulative_SW - weights_SW
    kept_SW &= (before_SW < (inputs.top_p_S * mass_S)[:, None]) | (inputs.top_p_S >= 1)[:, None]
    kept_SW |= rank_SW == 0
    kept_SW &= weights_SW >= inputs.min_p_S[:, None]
    index_S, _ = _invert(jnp.where(kept_SW, weights_SW, 0.0), uniform_S)
    mass_known_S = (top_k_S <= width) | (inputs.top_k_S == 0)
    fits_S = (top_k_S <= width) | (mass_known_S & (cumulative_SW[:, -1] >= inputs.top_p_S * mass_S))
    return jnp.take_along_axis(ids_SW, index_S[:, None], axis=-1)[:, 0], fits_S
