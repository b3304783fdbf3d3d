"""Rotary position embedding: the angle of each token and pair of dimensions, from a layer's config."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import RopeScaling, RotaryConfig
from quire.device.pointwise import Rotary


def rotary_table(rotary: RotaryConfig | None, head_dim: int, positions_T: jax.Array) -> Rotary | None:
    """Cosine and sine of each token's angles, in float32; None for a layer that does not rotate.

    Behind a barrier: XLA would rather compute them again in every layer, for every head, than read them.
    """
    if rotary is None:
        return None
    frequencies_X = jnp.asarray(rotary_frequencies(rotary, head_dim))
    angles_TX = positions_T.astype(jnp.float32)[:, None] * frequencies_X[None, :]
    factor = rotary.scaling.attention_factor if rotary.scaling else 1.0
    return jax.lax.optimization_barrier((jnp.cos(angles_TX) * factor, jnp.sin(angles_TX) * factor))


def rotary_frequencies(rotary: RotaryConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of dimensions that is turned."""
    dims = rotary.dims or head_dim
    exponent = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    periods = (np.float32(rotary.theta) ** exponent).astype(np.float32)
    scaling = rotary.scaling
    if scaling is not None and scaling.kind == "factors":
        return 1 / (np.asarray(scaling.factors, np.float32) * periods)
    return 1 / periods if scaling is None else _scale(1 / periods, scaling, rotary.theta)


def _scale(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    slow = frequencies / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "proportional":
        return np.where(np.arange(len(slow)) < int(scaling.proportion * len(slow)), slow, 0).astype(np.float32)
    blend = _yarn_blend(len(slow), scaling, theta) if scaling.kind == "yarn" else _llama3_blend(frequencies, scaling)
    return ((1 - blend) * slow + blend * frequencies).astype(np.float32)


def _llama3_blend(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long waves are stretched (0), short ones kept (1), and those between are blended."""
    wavelengths = 2 * np.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((scaling.original_max_len / wavelengths - low) / (high - low), 0.0, 1.0)


def _yarn_blend(num_pairs: int, scaling: RopeScaling, theta: float) -> np.ndarray:
    """The same by the number of a pair: kept up to the one that turns `beta_fast` times over the original length."""

    def pair_that_turns(times: float) -> float:
        return num_pairs * math.log(scaling.original_max_len / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    return 1 - np.clip((np.arange(num_pairs) - first) / max(last - first, 1e-3), 0.0, 1.0)
