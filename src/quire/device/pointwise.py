"""What lies between the matmuls of a layer: residual and norm, rotation, gate.

Each is a few lines of JAX, which is what runs on an accelerator. On a CPU XLA's code for them takes a third of a
prompt's time, so there the native library does the same in one sweep (`native`), and rounds where these lines round.
`instruction_set` is one of `native.instruction_sets()`, by default the last: for tests.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Of the gate of gpt-oss."""

Rotary = tuple[jax.Array, jax.Array]
"""Cosine and sine of each token's angles, float32 `[T, X]`: X is half of the dimensions of a head that are turned."""


def rms_norm(
    x: Float[Array, "*any D"], weight: Float[Array, " D"], eps: float, offset: float = 0.0
) -> Float[Array, "*any D"]:
    """Over the last axis, in float32. With an offset, which is added to the weights, they are multiplied in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    normed = x32 * scale if offset else rounded(x32 * scale, x.dtype).astype(jnp.float32)
    weight = weight.astype(jnp.float32) + offset
    return rounded(normed * jax.lax.broadcast_in_dim(weight, x.shape, (x.ndim - 1,)), x.dtype)


def rounded(x: Float[Array, "*any"], dtype: jnp.dtype) -> Float[Array, "*any"]:
    """float32 rounded to a type, here: where XLA fuses a cast with what follows, it may leave the rounding out."""
    if dtype == jnp.bfloat16:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def add_norm(
    x_TD: Float[Array, "T D"],
    delta_TD: Float[Array, "T D"],
    weight_D: Float[Array, " D"],
    eps: float,
    offset: float = 0.0,
    *,
    native: bool,
    instruction_set: str = "",
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """The sum, and the sum normalised. The native library has no code for weights with an offset."""
    if native and not offset:
        call = jax.ffi.ffi_call("quire_add_norm", (_like(x_TD), _like(x_TD)))
        sum_TD, normed_TD = call(x_TD, delta_TD, weight_D, eps=np.float32(eps), isa=instruction_set)
        return sum_TD, normed_TD
    sum_TD = rounded(x_TD.astype(jnp.float32) + delta_TD.astype(jnp.float32), x_TD.dtype)
    return sum_TD, rms_norm(sum_TD, weight_D, eps, offset)


def rotate(x_TNH: Float[Array, "T N H"], rotary: Rotary) -> Float[Array, "T N H"]:
    """Turn the pair (i, i + X) of every head by its angle; dimensions from 2 * X on stay as they are."""
    cos_T1X, sin_T1X = (table[:, None, :] for table in rotary)
    width = cos_T1X.shape[-1]
    first, second = (x_TNH[..., i * width : (i + 1) * width].astype(jnp.float32) for i in (0, 1))
    turned = [first * cos_T1X - second * sin_T1X, second * cos_T1X + first * sin_T1X]
    return jnp.concatenate([*(rounded(x, x_TNH.dtype) for x in turned), x_TNH[..., 2 * width :]], axis=-1)


def split(qkv_TKXH: Float[Array, "T K X H"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, `[T, heads, H]`, of what one matmul made: for each KV head its queries, its key, its value."""
    num_tokens, _, width, head_dim = qkv_TKXH.shape
    q_TNH = qkv_TKXH[:, :, : width - 2].reshape(num_tokens, -1, head_dim)
    return q_TNH, qkv_TKXH[:, :, width - 2], qkv_TKXH[:, :, width - 1]


def split_rotated(
    qkv_TKXH: Float[Array, "T K X H"], rotary: Rotary, *, native: bool, instruction_set: str = ""
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, `[T, heads, H]`, of what one matmul made; q and k rotated. Native code turns whole heads only."""
    if native and 2 * rotary[0].shape[1] == qkv_TKXH.shape[3]:
        outputs = tuple(_like(x) for x in jax.eval_shape(split, qkv_TKXH))
        q_TNH, k_TKH, v_TKH = jax.ffi.ffi_call("quire_rotate", outputs)(qkv_TKXH, *rotary, isa=instruction_set)
        return q_TNH, k_TKH, v_TKH
    q_TNH, k_TKH, v_TKH = split(qkv_TKXH)
    return rotate(q_TNH, rotary), rotate(k_TKH, rotary), v_TKH


def gate(
    gate_up_T2F: Float[Array, "T 2 F"], activation: str = "silu", *, native: bool, instruction_set: str = ""
) -> Float[Array, "T F"]:
    """activation(gate) * up, in float32; what "swiglu_oai" is, see `_swiglu_oai`. The native library knows silu."""
    if native and activation == "silu":
        out = jax.ShapeDtypeStruct((gate_up_T2F.shape[0], gate_up_T2F.shape[2]), gate_up_T2F.dtype)
        return jax.ffi.ffi_call("quire_gate", out)(gate_up_T2F, isa=instruction_set)
    wide_T2F = gate_up_T2F.astype(jnp.float32)
    if activation == "swiglu_oai":
        return rounded(_swiglu_oai(wide_T2F[:, 0], wide_T2F[:, 1]), gate_up_T2F.dtype)
    activate = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}[activation]
    return rounded(activate(wide_T2F[:, 0]) * wide_T2F[:, 1], gate_up_T2F.dtype)


def _swiglu_oai(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gate of gpt-oss: both sides are clamped, the sigmoid is steeper, and up counts one more."""
    gate, up = jnp.minimum(gate, SWIGLU_LIMIT), jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


def soft_cap(x: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """Bounded smoothly to -cap .. cap; as it is where there is no cap."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def _like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
