"""Which tokens top-k and top-p leave to draw from, without sorting a vocabulary.

Both keep the likeliest tokens: all whose weight lies above some threshold, and of those exactly at it the first few.
The threshold is found by halving the range of float32 values, which order like their bits: 30 passes of compare and
sum give it exactly. On a CPU that is too many, and `native/draw.cc` finds it in one.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BITS_OF_ONE = 0x3F800000
"""float32 1.0, the weight of the likeliest token, as an integer."""
TOP_K, TOP_P = 0, 1


def top_k_top_p(
    weights_SV: Float[Array, "S V"],
    top_k_S: Int[Array, " S"],
    top_p_S: Float[Array, " S"],
) -> Bool[Array, "S V"]:
    """Keep the `top_k` likeliest (0 for all), then of those the fewest that reach `top_p` of what they weigh together.

    Weights are probabilities over that of the likeliest token. Of equal ones the lower ids come first. What no row asks
    for is not done.
    """
    everything_SV = jnp.ones(weights_SV.shape, bool)
    cut = partial(_cut, weights_SV=weights_SV, top_k_S=top_k_S, top_p_S=top_p_S)
    # A loop, so that there is one search to compile, not two.
    first, end = jnp.where(jnp.any(top_k_S > 0), TOP_K, TOP_P), jnp.where(jnp.any(top_p_S < 1), TOP_P + 1, TOP_P)
    return lax.fori_loop(first, end, cut, everything_SV)


def _cut(
    which: jax.Array, kept_SV: jax.Array, weights_SV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array
) -> jax.Array:
    """Of what is kept the first in order of likelihood: as many as reach the goal of top-k or of top-p."""
    is_top_p, vocab = which == TOP_P, weights_SV.shape[1]
    left_SV = jnp.where(kept_SV, weights_SV, 0.0)
    counts_SV = jnp.where(is_top_p, left_SV, 1.0)  # as what a token counts towards the goal

    def reached(is_in_SV: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_in_SV, counts_SV, 0.0), axis=-1)

    asked_S = jnp.where(is_top_p, top_p_S < 1, top_k_S > 0)
    goal_S = jnp.where(is_top_p, top_p_S * jnp.sum(left_SV, axis=-1), jnp.minimum(top_k_S, vocab).astype(jnp.float32))
    threshold_S = _as_weight(
        _largest(lambda bits_S: reached(left_SV >= _as_weight(bits_S)[:, None]) >= goal_S, BITS_OF_ONE, goal_S.shape)
    )
    missing_S = goal_S - reached(left_SV > threshold_S[:, None])
    each_S = jnp.where(is_top_p, jnp.maximum(threshold_S, jnp.finfo(jnp.float32).tiny), 1.0)
    num_ties_S = jnp.clip(jnp.ceil(missing_S / each_S), 1, vocab).astype(jnp.int32)
    return kept_SV & ((left_SV > threshold_S[:, None]) | _first(left_SV == threshold_S[:, None], num_ties_S, asked_S))


def _first(is_tie_SV: jax.Array, num_ties_S: jax.Array, asked_S: jax.Array) -> jax.Array:
    """The first few ties; everything in rows that did not ask."""
    vocab = is_tie_SV.shape[1]
    ids_SV = lax.broadcasted_iota(jnp.int32, is_tie_SV.shape, 1)

    def count(end_S: jax.Array) -> jax.Array:
        return jnp.sum(is_tie_SV & (ids_SV < end_S[:, None]), axis=-1, dtype=jnp.int32)

    all_S = jnp.full(num_ties_S.shape, vocab, jnp.int32)
    has_surplus = jnp.any(asked_S & (count(all_S) > num_ties_S))
    end_S = lax.cond(
        has_surplus, lambda: _largest(lambda end_S: count(end_S) <= num_ties_S, vocab, all_S.shape), lambda: all_S
    )
    return (is_tie_SV & (ids_SV < end_S[:, None])) | ~asked_S[:, None]


def _largest(holds: Callable[[jax.Array], jax.Array], highest: int, shape: tuple[int, ...]) -> jax.Array:
    """The largest integer from 0 to `highest` that holds, if all below it hold too: by halving. 0 if none does."""

    def halve(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_S, high_S = bounds  # low holds, high does not
        middle_S = low_S + (high_S - low_S) // 2
        holds_S = holds(middle_S)
        return jnp.where(holds_S, middle_S, low_S), jnp.where(holds_S, high_S, middle_S)

    low_S = jnp.zeros(shape, jnp.int32)
    low_S, _ = lax.fori_loop(0, highest.bit_length(), halve, (low_S, low_S + (highest + 1)))
    return low_S


def _as_weight(bits_S: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits_S, jnp.float32)
