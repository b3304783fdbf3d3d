"""Which tokens top-k and top-p leave to draw from, without sorting a vocabulary.

Both keep the likeliest tokens: all whose weight lies above some threshold, and of those exactly at it the first few.
The threshold is found by halving the range of float32 values, which order like their bits: 30 passes of compare and
sum give it exactly. On a CPU that is too many, and `native/draw.cc` finds it in one.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

BITS_OF_ONE = 0x3F800000
"""float32 1.0, the weight of the likeliest token, as an integer."""


def top_k_top_p(
    weights_SV: Float[Array, "S V"],
    top_k_S: Int[Array, " S"],
    top_p_S: Float[Array, " S"],
) -> Bool[Array, "S V"]:
    """Keep the `top_k` likeliest (0 for all), then of those the fewest that reach `top_p` of what they weigh together.

    Weights are probabilities over that of the likeliest token. Of equal ones the lower ids come first.
    """
    everything_SV = jnp.ones(weights_SV.shape, bool)
    kept_SV = lax.cond(
        jnp.any(top_k_S > 0), lambda: _likeliest(weights_SV, top_k_S, top_k_S > 0), lambda: everything_SV
    )

    def reach_top_p() -> jax.Array:
        left_SV = jnp.where(kept_SV, weights_SV, 0.0)
        goal_S = top_p_S * jnp.sum(left_SV, axis=-1)
        return kept_SV & _heaviest(left_SV, goal_S, top_p_S < 1)

    return lax.cond(jnp.any(top_p_S < 1), reach_top_p, lambda: kept_SV)


def _likeliest(weights_SV: jax.Array, count_S: jax.Array, asked_S: jax.Array) -> jax.Array:
    """The first `count` tokens in order of likelihood, in rows that asked; everything in others."""

    def count(kept_SV: jax.Array) -> jax.Array:
        return jnp.sum(kept_SV, axis=-1, dtype=jnp.int32)

    threshold_S = _threshold(lambda t_S: count(weights_SV >= t_S[:, None]) >= count_S, asked_S)
    num_ties_S = count_S - count(weights_SV > threshold_S[:, None])
    return _keep(weights_SV, threshold_S, num_ties_S, asked_S)


def _heaviest(weights_SV: jax.Array, goal_S: jax.Array, asked_S: jax.Array) -> jax.Array:
    """The first tokens in order of likelihood that together weigh `goal`, in rows that asked; everything in others."""

    def mass(kept_SV: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept_SV, weights_SV, 0.0), axis=-1)

    threshold_S = _threshold(lambda t_S: mass(weights_SV >= t_S[:, None]) >= goal_S, asked_S)
    missing_S = goal_S - mass(weights_SV > threshold_S[:, None])
    num_ties_S = jnp.ceil(missing_S / jnp.maximum(threshold_S, jnp.finfo(jnp.float32).tiny))
    return _keep(weights_SV, threshold_S, jnp.maximum(num_ties_S, 1).astype(jnp.int32), asked_S)


def _threshold(reaches, asked_S: jax.Array) -> jax.Array:
    """The largest weight such that all weights from it on reach a goal: by halving, on the bits."""

    def as_weight(bits_S: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits_S, jnp.float32)

    def halve(_, bounds):
        low_S, high_S = bounds  # the goal is reached from low on, not from high on
        middle_S = low_S + (high_S - low_S) // 2
        reached_S = reaches(as_weight(middle_S))
        return jnp.where(reached_S, middle_S, low_S), jnp.where(reached_S, high_S, middle_S)

    low_S = jnp.zeros(asked_S.shape, jnp.int32)
    low_S, _ = lax.fori_loop(0, BITS_OF_ONE.bit_length(), halve, (low_S, low_S + (BITS_OF_ONE + 1)))
    return as_weight(low_S)


def _keep(weights_SV: jax.Array, threshold_S: jax.Array, num_ties_S: jax.Array, asked_S: jax.Array) -> jax.Array:
    """What lies above the threshold, and the first few at it; everything in rows that did not ask."""
    is_tie_SV = weights_SV == threshold_S[:, None]
    surplus_S = asked_S & (jnp.sum(is_tie_SV, axis=-1, dtype=jnp.int32) > num_ties_S)

    def first_ties() -> jax.Array:
        return is_tie_SV & (jnp.cumsum(is_tie_SV, axis=-1, dtype=jnp.int32) <= num_ties_S[:, None])

    ties_SV = lax.cond(jnp.any(surplus_S), first_ties, lambda: is_tie_SV)
    return (weights_SV > threshold_S[:, None]) | ties_SV | ~asked_S[:, None]
