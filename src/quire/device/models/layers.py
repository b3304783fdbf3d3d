"""The parts every decoder here is made of, and the decoder itself.

A model is a function of (params, cache, inputs). An architecture's own file says how its config is read, which weights
it has (`dense.py` explains their layout) and which layer it stacks; what architectures compute alike is here. Matrices
come as `linear.convert` makes them for this device, the output head under `unembed`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from quire.config import AttentionConfig, ModelConfig
from quire.device.attention import Backend, LayerKV, paged_attention
from quire.device.blocked import look_up
from quire.device.inputs import BatchLayout
from quire.device.kv_cache import Caches, KVCache
from quire.device.linear import linear
from quire.device.mesh import sharding
from quire.device.models.heads import key_sources, output_sources, unpadded
from quire.device.models.rotary import rotary_table
from quire.device.pointwise import Rotary, add_norm, gate, rms_norm, rotate, soft_cap, split, split_rotated

Params = dict[str, Any]


@dataclass(frozen=True)
class ModelStatics:
    """What is fixed when a program is compiled: hashable, passed as a static argument."""

    config: ModelConfig
    """With the heads that run on this mesh: see `padding.py`."""
    backend: Backend
    mesh: Mesh
    windows: tuple[int, ...] = ()
    """Windows whose layers have pools of their own."""
    native: bool = False
    """Whether the native library computes what lies between the matmuls, and samples."""

    @property
    def pools(self) -> list[int]:
        """For each layer, which pool keeps its KV."""
        return self.config.pools(self.windows)


@runtime_checkable
class LayerFunction(Protocol):
    """Computes one layer; see `decoder_layer`."""

    def __call__(
        self,
        weights: Params,
        x_TD: jax.Array,
        delta_TD: jax.Array,
        kv: LayerKV,
        rotary: Rotary | None,
        layout: BatchLayout,
        /,
        *,
        attention: AttentionConfig,
        statics: ModelStatics,
    ) -> tuple[jax.Array, jax.Array, LayerKV]:
        """Return the residual stream, what this layer adds to it, not yet added, and the layer's new KV."""
        ...


Project = Callable[
    [Params, jax.Array, Rotary | None, AttentionConfig, ModelStatics], tuple[jax.Array, jax.Array, jax.Array]
]
"""Makes q, k and v, `[T, heads, H]`, of a layer's input; see `project_qkv`."""
FeedForward = Callable[[Params, jax.Array, BatchLayout, ModelStatics], jax.Array]
"""A layer's feed-forward, of its weights, its input, the layout of the batch and what is fixed; see `gated_mlp`."""
Finish = Callable[[jax.Array, Params, str, ModelStatics], jax.Array]
"""Changes what the "attention" or the "mlp" of a layer adds; see `normalise_once_more`."""


def decoder(
    layer: LayerFunction,
    params: Params,
    caches: Caches,
    tokens_T: Int[Array, " T"],
    layout: BatchLayout,
    statics: ModelStatics,
) -> tuple[Float[Array, "T D"], Caches]:
    """Embed, run every layer, normalise. Returns the hidden state of each packed token and the new KV.

    Padding is zeros from beginning to end, as far as the attention backend makes none of it anything else.

    A page remembers the ids of its tokens beside their KV.

    The layer is one jitted function called L times: it is traced and lowered once for each kind of layer there is.
    """
    config = statics.config
    x_TD = look_up(params["embed"], tokens_T, like=params["norm"])
    x_TD = jnp.where(layout.is_token_T[:, None], x_TD, jnp.zeros((), x_TD.dtype))
    if config.embedding_multiplier != 1:
        x_TD *= jnp.asarray(config.embedding_multiplier, x_TD.dtype)
    # Placed as x is: a first layer whose inputs are placed otherwise would be traced apart from the rest.
    delta_TD = jax.lax.with_sharding_constraint(jnp.zeros_like(x_TD), sharding(statics.mesh))
    kinds = dict.fromkeys((attention.rotary, attention.head_dim) for attention in config.attention)
    rotaries = {kind: rotary_table(*kind, layout.positions_T) for kind in kinds}
    call = jax.jit(layer, static_argnames=("attention", "statics"))
    layouts = [layout.of(pool) for pool in range(len(caches))]
    before, after = [iter(cache.layers) for cache in caches], [[] for _ in caches]
    for weights, attention, pool in zip(params["layers"], config.attention, statics.pools, strict=True):
        rotary, static = rotaries[attention.rotary, attention.head_dim], {"attention": attention, "statics": statics}
        x_TD, delta_TD, new_kv = call(weights, x_TD, delta_TD, next(before[pool]), rotary, layouts[pool], **static)
        after[pool].append(new_kv)
    _, x_TD = add_norm(x_TD, delta_TD, params["norm"], config.norm_eps, config.norm_offset, native=statics.native)
    ids_MZ = caches[0].tokens_MZ
    ids_MZ = ids_MZ.reshape(-1).at[layout.destinations_T].set(tokens_T, mode="drop").reshape(ids_MZ.shape)
    return x_TD, (KVCache(after[0], ids_MZ), *(KVCache(layers, None) for layers in after[1:]))


def unembed(params: Params, x_SD: Float[Array, "S D"], config: ModelConfig) -> Float[Array, "S V"]:
    """Logits in float32. Where the vocabulary is padded to divide over devices, what is no token can never be drawn."""
    logits_SV = linear(x_SD, params["unembed"], out=jnp.float32)
    if config.logits_divisor != 1:
        logits_SV /= config.logits_divisor
    logits_SV = soft_cap(logits_SV, config.logits_soft_cap)
    if logits_SV.shape[1] == config.vocab_size:
        return logits_SV
    token_SV = jax.lax.broadcasted_iota(jnp.int32, logits_SV.shape, 1)
    return jnp.where(token_SV < config.vocab_size, logits_SV, -jnp.inf)


def decoder_layer(
    weights: Params,
    x_TD: Float[Array, "T D"],
    delta_TD: Float[Array, "T D"],
    kv: LayerKV,
    rotary: Rotary | None,
    layout: BatchLayout,
    *,
    attention: AttentionConfig,
    statics: ModelStatics,
    project: Project | None = None,
    mlp: FeedForward | None = None,
    finish: Finish | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerKV]:
    """The residual stream plus attention of its norm, then plus the feed-forward of its norm.

    What the last layer adds to the stream comes with it, not yet added, and so does what this one adds. An architecture
    may have its own way to make q, k and v, its own feed-forward, and something to do to what either adds.
    """
    norm, native = (statics.config.norm_eps, statics.config.norm_offset), statics.native
    x_TD, normed_TD = add_norm(x_TD, delta_TD, weights["attention_norm"], *norm, native=native)
    delta_TD, kv = attend(weights, normed_TD, kv, rotary, layout, attention=attention, statics=statics, project=project)
    if finish is not None:
        delta_TD = finish(delta_TD, weights, "attention", statics)
    x_TD, normed_TD = add_norm(x_TD, delta_TD, weights["mlp_norm"], *norm, native=native)
    delta_TD = mlp(weights, normed_TD, layout, statics) if mlp else gated_mlp(weights, normed_TD, statics)
    return x_TD, delta_TD if finish is None else finish(delta_TD, weights, "mlp", statics), kv


def normalise_once_more(
    delta_TD: Float[Array, "T D"], weights: Params, part: str, statics: ModelStatics
) -> Float[Array, "T D"]:
    """For `finish`: the norm of what attention or feed-forward adds."""
    return rms_norm(delta_TD, weights[f"post_{part}_norm"], statics.config.norm_eps, statics.config.norm_offset)


def attend(
    weights: Params,
    x_TD: Float[Array, "T D"],
    kv: LayerKV,
    rotary: Rotary | None,
    layout: BatchLayout,
    *,
    attention: AttentionConfig,
    statics: ModelStatics,
    project: Project | None = None,
) -> tuple[Float[Array, "T D"], LayerKV]:
    """Project, attend, project back. An architecture may have its own way to make q, k and v."""
    q_TNH, k_TKH, v_TKH = (project or project_qkv)(weights, x_TD, rotary, attention, statics)
    out_TNH, kv = paged_attention(
        statics.backend, statics.mesh, kv, q_TNH, k_TKH, v_TKH, layout, attention, weights.get("sinks")
    )
    out_TD = linear(out_TNH.reshape(x_TD.shape[0], -1), weights["output"])
    if "output_bias" in weights:
        out_TD = jnp.where(layout.is_token_T[:, None], out_TD + weights["output_bias"][None], out_TD)
    return out_TD, kv


def project_qkv(
    weights: Params,
    x_TD: Float[Array, "T D"],
    rotary: Rotary | None,
    attention: AttentionConfig,
    statics: ModelStatics,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v; q and k of each head normalised where the architecture does, and rotated."""
    config = statics.config
    qkv_TKX = linear(x_TD, weights["qkv"])
    if "qkv_bias" in weights:
        qkv_TKX += weights["qkv_bias"][None]
    qkv_TKXH = qkv_TKX.reshape(-1, attention.num_kv_heads, attention.group_size + 2, attention.head_dim)
    if rotary is not None and "q_norm" not in weights:
        return split_rotated(qkv_TKXH, rotary, native=statics.native)
    q_TNH, k_TKH, v_TKH = split(qkv_TKXH)
    if "q_norm" in weights:
        q_TNH = rms_norm(q_TNH, weights["q_norm"], config.norm_eps, config.norm_offset)
        k_TKH = rms_norm(k_TKH, weights["k_norm"], config.norm_eps, config.norm_offset)
    if rotary is not None:
        q_TNH, k_TKH = rotate(q_TNH, rotary), rotate(k_TKH, rotary)
    return q_TNH, k_TKH, v_TKH


def project_normed_together(
    weights: Params,
    x_TD: Float[Array, "T D"],
    rotary: Rotary | None,
    attention: AttentionConfig,
    statics: ModelStatics,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `project_qkv`, with q and k each normalised as one long vector."""
    eps, public = statics.config.norm_eps, unpadded(attention)
    qkv_TKX = linear(x_TD, weights["qkv"])
    q_TNH, k_TKH, v_TKH = split(qkv_TKX.reshape(-1, attention.num_kv_heads, attention.group_size + 2, public.head_dim))
    q_TNH = _norm_of_heads(q_TNH, weights["q_norm"], eps, output_sources(public, attention))
    k_TKH = _norm_of_heads(k_TKH, weights["k_norm"], eps, key_sources(public, attention))
    return (q_TNH, k_TKH, v_TKH) if rotary is None else (rotate(q_TNH, rotary), rotate(k_TKH, rotary), v_TKH)


def _norm_of_heads(
    x_TNH: Float[Array, "T N H"], weight: jax.Array, eps: float, sources_N: np.ndarray
) -> Float[Array, "T N H"]:
    """Over all heads of the model, each counted once. `sources_N`: which of them each head that runs is, if any."""
    head_dim = x_TNH.shape[2]
    num_heads = weight.shape[0] // head_dim
    x32 = x_TNH.astype(jnp.float32)
    is_counted_N = np.isin(np.arange(len(sources_N)), np.unique(sources_N, return_index=True)[1])
    is_counted_N &= sources_N < num_heads
    squares_TN = jnp.where(jnp.asarray(is_counted_N)[None, :], jnp.sum(x32 * x32, axis=2), 0)
    scale_T = jax.lax.rsqrt(jnp.sum(squares_TN, axis=1) / (num_heads * head_dim) + eps)
    weight_NH = weight.reshape(num_heads, head_dim)[np.minimum(sources_N, num_heads - 1)]
    return (x32 * scale_T[:, None, None]).astype(x_TNH.dtype) * weight_NH[None]


def gated_mlp(weights: Params, x_TD: Float[Array, "T D"], statics: ModelStatics) -> Float[Array, "T D"]:
    """activation(gate) * up, then down."""
    gate_up_T2F = linear(x_TD, weights["gate_up"])
    return linear(gate(gate_up_T2F, statics.config.activation, native=statics.native), weights["down"])
