"""The parts every decoder here is made of, and the decoder itself.

A model is a function of (params, cache, inputs). An architecture's own file says how its checkpoint is read and which
layer it stacks; what architectures share is here.

Weights are stored input x output, the layout in which stock XLA multiplies fast on a CPU, and what reads the same input
is one matmul:

    qkv      [D, K, (G+2)*H]   for each KV head: its G query heads, its key, its value (so heads split over a mesh)
    output   [N*H, D]
    gate_up  [D, 2, F]
    down     [F, D]
    embed    [V, D]            looked up by row; also the output head when tied

That is the public layout; `linear.prepare` turns the matrices among them into what runs here, the head under `unembed`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from quire.config import ModelConfig, RopeScaling
from quire.device.attention import Backend, paged_attention
from quire.device.inputs import BatchLayout
from quire.device.kv_cache import KVCache, Layer
from quire.device.linear import linear

Params = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """What is fixed when a program is compiled: hashable, passed as a static argument."""

    config: ModelConfig
    backend: Backend
    mesh: Mesh


LayerFunction = Callable[..., tuple[jax.Array, Layer]]


def decoder(
    layer: LayerFunction,
    params: Params,
    cache: KVCache,
    tokens_T: Int[Array, " T"],
    layout: BatchLayout,
    parts: Parts,
) -> tuple[Float[Array, "T D"], KVCache]:
    """Embed, run every layer, normalise. Returns the hidden state of each packed token and the new cache.

    A page remembers the ids of its tokens beside their KV.

    The layer is one jitted function called L times: it is traced and lowered once.
    """
    x_TD = params["embed"][tokens_T]
    rotary = rotary_table(parts.config, layout.positions_T)
    call = jax.jit(layer, static_argnames=("window", "parts"))
    layers = []
    for weights, kv, window in zip(params["layers"], cache.layers, parts.config.windows, strict=True):
        x_TD, new_kv = call(weights, x_TD, kv, rotary, layout, window=window, parts=parts)
        layers.append(new_kv)
    x_TD = rms_norm(x_TD, params["norm"], parts.config.norm_eps)
    ids = cache.tokens_MZ.reshape(-1).at[layout.destinations_T].set(tokens_T, mode="drop")
    return x_TD, KVCache(layers, ids.reshape(cache.tokens_MZ.shape), cache.page_axis)


def unembed(params: Params, x_SD: Float[Array, "S D"]) -> Float[Array, "S V"]:
    """Logits in float32."""
    return linear(x_SD, params["unembed"], out=jnp.float32)


def decoder_layer(
    weights: Params,
    x_TD: Float[Array, "T D"],
    kv: Layer,
    rotary: tuple[jax.Array, jax.Array],
    layout: BatchLayout,
    *,
    window: int | None,
    parts: Parts,
) -> tuple[Float[Array, "T D"], Layer]:
    """The residual stream plus attention of its norm, then plus the feed-forward of its norm."""
    eps = parts.config.norm_eps
    normed_TD = rms_norm(x_TD, weights["attention_norm"], eps)
    attended_TD, kv = attention(weights, normed_TD, kv, rotary, layout, window=window, parts=parts)
    x_TD = x_TD + attended_TD
    return x_TD + gated_mlp(weights, rms_norm(x_TD, weights["mlp_norm"], eps)), kv


def attention(
    weights: Params,
    x_TD: Float[Array, "T D"],
    kv: Layer,
    rotary: tuple[jax.Array, jax.Array],
    layout: BatchLayout,
    *,
    window: int | None,
    parts: Parts,
) -> tuple[Float[Array, "T D"], Layer]:
    """Project, normalise q and k where the architecture does, rotate, attend, project back."""
    config = parts.config
    num_tokens, group, head_dim = x_TD.shape[0], config.group_size, config.head_dim
    qkv_TKX = linear(x_TD, weights["qkv"])
    if "qkv_bias" in weights:
        qkv_TKX += weights["qkv_bias"][None]
    qkv_TKXH = qkv_TKX.reshape(num_tokens, config.num_kv_heads, group + 2, head_dim)
    q_TNH = qkv_TKXH[:, :, :group].reshape(num_tokens, config.num_heads, head_dim)
    k_TKH, v_TKH = qkv_TKXH[:, :, group], qkv_TKXH[:, :, group + 1]
    if "q_norm" in weights:
        q_TNH = rms_norm(q_TNH, weights["q_norm"], config.norm_eps)
        k_TKH = rms_norm(k_TKH, weights["k_norm"], config.norm_eps)
    out_TNH, kv = paged_attention(
        parts.backend,
        parts.mesh,
        kv,
        rotate(q_TNH, rotary),
        rotate(k_TKH, rotary),
        v_TKH,
        layout,
        scale=head_dim**-0.5,
        window=window,
    )
    return linear(out_TNH.reshape(num_tokens, -1), weights["output"]), kv


def gated_mlp(weights: Params, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """silu(gate) * up, in float32, then down."""
    gate_up_T2F = linear(x_TD, weights["gate_up"]).astype(jnp.float32)
    inner_TF = jax.nn.silu(gate_up_T2F[:, 0]) * gate_up_T2F[:, 1]
    return linear(inner_TF.astype(x_TD.dtype), weights["down"])


def rms_norm(x: Float[Array, "*any D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*any D"]:
    """Over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * jax.lax.broadcast_in_dim(weight, x.shape, (x.ndim - 1,))


def rotary_table(config: ModelConfig, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each token's angles, in float32.

    Behind a barrier: XLA would rather compute them again in every layer, for every head, than read them.
    """
    angles_TX = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(rotary_frequencies(config))[None, :]
    return jax.lax.optimization_barrier((jnp.cos(angles_TX), jnp.sin(angles_TX)))


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each pair of dimensions, `[H/2]`."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


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


def rotate(x_TNH: Float[Array, "T N H"], rotary: tuple[jax.Array, jax.Array]) -> Float[Array, "T N H"]:
    """Turn the pair (i, i + H/2) of every head by its angle."""
    cos_T1X, sin_T1X = (table[:, None, :] for table in rotary)
    first, second = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos_T1X - second * sin_T1X, second * cos_T1X + first * sin_T1X], axis=-1)
    return turned.astype(x_TNH.dtype)
