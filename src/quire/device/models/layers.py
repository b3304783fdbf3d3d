"""The parts every decoder here is made of, and the decoder itself.

A model is a function of (params, cache, inputs). An architecture's own file says how its config is read, which weights
it has (`dense.py` explains their layout) and which layer it stacks; what architectures compute alike is here. Matrices
come as `linear.convert` makes them for this device, the output head under `unembed`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from quire.config import AttentionConfig, ModelConfig, RopeScaling, RotaryConfig
from quire.device.attention import Backend, LayerKV, paged_attention
from quire.device.inputs import BatchLayout
from quire.device.kv_cache import KVCache
from quire.device.linear import linear
from quire.device.mesh import sharding
from quire.device.pointwise import Rotary, add_norm, gate, rms_norm, rotate, split, split_rotated

Params = dict[str, Any]


@dataclass(frozen=True)
class ModelStatics:
    """What is fixed when a program is compiled: hashable, passed as a static argument."""

    config: ModelConfig
    backend: Backend
    mesh: Mesh
    native: bool = False
    """Whether the native library computes what lies between the matmuls, and helps the sampler."""


LayerFunction = Callable[..., tuple[jax.Array, jax.Array, LayerKV]]
"""Computes one layer; see `decoder_layer`."""


def decoder(
    layer: LayerFunction,
    params: Params,
    cache: KVCache,
    tokens_T: Int[Array, " T"],
    layout: BatchLayout,
    statics: ModelStatics,
) -> tuple[Float[Array, "T D"], KVCache]:
    """Embed, run every layer, normalise. Returns the hidden state of each packed token and the new cache.

    A page remembers the ids of its tokens beside their KV.

    The layer is one jitted function called L times: it is traced and lowered once for each kind of layer there is.
    """
    config = statics.config
    x_TD = params["embed"][tokens_T]
    # Placed as x is: a first layer whose inputs are placed otherwise would be traced apart from the rest.
    delta_TD = jax.lax.with_sharding_constraint(jnp.zeros_like(x_TD), sharding(statics.mesh))
    kinds = dict.fromkeys((attention.rotary, attention.head_dim) for attention in config.attention)
    rotaries = {kind: rotary_table(*kind, layout.positions_T) for kind in kinds}
    call = jax.jit(layer, static_argnames=("attention", "statics"))
    layers = []
    for weights, kv, attention in zip(params["layers"], cache.layers, config.attention, strict=True):
        rotary, static = rotaries[attention.rotary, attention.head_dim], {"attention": attention, "statics": statics}
        x_TD, delta_TD, new_kv = call(weights, x_TD, delta_TD, kv, rotary, layout, **static)
        layers.append(new_kv)
    _, x_TD = add_norm(x_TD, delta_TD, params["norm"], config.norm_eps, native=statics.native)
    ids = cache.tokens_MZ.reshape(-1).at[layout.destinations_T].set(tokens_T, mode="drop")
    return x_TD, KVCache(layers, ids.reshape(cache.tokens_MZ.shape))


def unembed(params: Params, x_SD: Float[Array, "S D"]) -> Float[Array, "S V"]:
    """Logits in float32."""
    return linear(x_SD, params["unembed"], out=jnp.float32)


def decoder_layer(
    weights: Params,
    x_TD: Float[Array, "T D"],
    delta_TD: Float[Array, "T D"],
    kv: LayerKV,
    rotary: Rotary,
    layout: BatchLayout,
    *,
    attention: AttentionConfig,
    statics: ModelStatics,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerKV]:
    """The residual stream plus attention of its norm, then plus the feed-forward of its norm.

    What the last layer adds to the stream comes with it, not yet added, and so does what this one adds.
    """
    eps, native = statics.config.norm_eps, statics.native
    x_TD, normed_TD = add_norm(x_TD, delta_TD, weights["attention_norm"], eps, native=native)
    delta_TD, kv = attend(weights, normed_TD, kv, rotary, layout, attention=attention, statics=statics)
    x_TD, normed_TD = add_norm(x_TD, delta_TD, weights["mlp_norm"], eps, native=native)
    return x_TD, gated_mlp(weights, normed_TD, native=native), kv


def attend(
    weights: Params,
    x_TD: Float[Array, "T D"],
    kv: LayerKV,
    rotary: Rotary,
    layout: BatchLayout,
    *,
    attention: AttentionConfig,
    statics: ModelStatics,
) -> tuple[Float[Array, "T D"], LayerKV]:
    """Project, normalise q and k where the architecture does, rotate, attend, project back."""
    num_tokens, eps = x_TD.shape[0], statics.config.norm_eps
    qkv_TKX = linear(x_TD, weights["qkv"])
    if "qkv_bias" in weights:
        qkv_TKX += weights["qkv_bias"][None]
    qkv_TKXH = qkv_TKX.reshape(num_tokens, attention.num_kv_heads, attention.group_size + 2, attention.head_dim)
    if "q_norm" in weights:
        q_TNH, k_TKH, v_TKH = split(qkv_TKXH)
        q_TNH = rotate(rms_norm(q_TNH, weights["q_norm"], eps), rotary)
        k_TKH = rotate(rms_norm(k_TKH, weights["k_norm"], eps), rotary)
    else:
        q_TNH, k_TKH, v_TKH = split_rotated(qkv_TKXH, rotary, native=statics.native)
    out_TNH, kv = paged_attention(statics.backend, statics.mesh, kv, q_TNH, k_TKH, v_TKH, layout, attention)
    return linear(out_TNH.reshape(num_tokens, -1), weights["output"]), kv


def gated_mlp(weights: Params, x_TD: Float[Array, "T D"], *, native: bool) -> Float[Array, "T D"]:
    """silu(gate) * up, then down."""
    return linear(gate(linear(x_TD, weights["gate_up"]), native=native), weights["down"])


def rotary_table(rotary: RotaryConfig, head_dim: int, positions_T: jax.Array) -> Rotary:
    """Cosine and sine of each token's angles, in float32.

    Behind a barrier: XLA would rather compute them again in every layer, for every head, than read them.
    """
    frequencies_X = jnp.asarray(rotary_frequencies(rotary, head_dim))
    angles_TX = positions_T.astype(jnp.float32)[:, None] * frequencies_X[None, :]
    return jax.lax.optimization_barrier((jnp.cos(angles_TX), jnp.sin(angles_TX)))


def rotary_frequencies(rotary: RotaryConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of dimensions, `[H/2]`."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(rotary.theta) ** exponent).astype(np.float32)
    return frequencies if rotary.scaling is None else _scale(frequencies, rotary.scaling)


def _scale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "factors":
        return frequencies / np.asarray(scaling.factors, np.float32)
    slow = frequencies / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    # llama3: long waves are stretched, short ones kept, and those between are blended.
    wavelengths = 2 * np.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((scaling.original_max_len / wavelengths - low) / (high - low), 0.0, 1.0)
    return ((1 - blend) * slow + blend * frequencies).astype(np.float32)
