"""What lies between the matmuls of a layer: residual and norm, rotation, gate.

Each is a few lines of JAX, which is what runs on an accelerator. On a CPU XLA's code for them takes a third of a
prompt's time, so there the native library does the same in one sweep (`native`), and rounds where these lines round.
`instruction_set` is one of `native.instruction_sets()`, by default the last: for tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Rotary = tuple[jax.Array, jax.Array]
"""Cosine and sine of each token's angles, float32 `[T, H / 2]`."""


def rms_norm(x: Float[Array, "*any D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*any D"]:
    """Over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * jax.lax.broadcast_in_dim(weight, x.shape, (x.ndim - 1,))


def add_norm(
    x_TD: Float[Array, "T D"],
    delta_TD: Float[Array, "T D"],
    weight_D: Float[Array, " D"],
    eps: float,
    *,
    native: bool,
    instruction_set: str = "",
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """The sum, and the sum normalised."""
    if native:
        call = jax.ffi.ffi_call("quire_add_norm", (_like(x_TD), _like(x_TD)))
        sum_TD, normed_TD = call(x_TD, delta_TD, weight_D, eps=np.float32(eps), isa=instruction_set)
        return sum_TD, normed_TD
    sum_TD = x_TD + delta_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps)


def rotate(x_TNH: Float[Array, "T N H"], rotary: Rotary) -> Float[Array, "T N H"]:
    """Turn the pair (i, i + H/2) of every head by its angle."""
    cos_T1X, sin_T1X = (table[:, None, :] for table in rotary)
    first, second = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos_T1X - second * sin_T1X, second * cos_T1X + first * sin_T1X], axis=-1)
    return turned.astype(x_TNH.dtype)


def split(qkv_TKXH: Float[Array, "T K X H"]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, `[T, heads, H]`, of what one matmul made: for each KV head its queries, its key, its value."""
    num_tokens, _, width, head_dim = qkv_TKXH.shape
    q_TNH = qkv_TKXH[:, :, : width - 2].reshape(num_tokens, -1, head_dim)
    return q_TNH, qkv_TKXH[:, :, width - 2], qkv_TKXH[:, :, width - 1]


def split_rotated(
    qkv_TKXH: Float[Array, "T K X H"], rotary: Rotary, *, native: bool, instruction_set: str = ""
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, `[T, heads, H]`, of what one matmul made; q and k rotated."""
    if native:
        outputs = tuple(_like(x) for x in jax.eval_shape(split, qkv_TKXH))
        q_TNH, k_TKH, v_TKH = jax.ffi.ffi_call("quire_rotate", outputs)(qkv_TKXH, *rotary, isa=instruction_set)
        return q_TNH, k_TKH, v_TKH
    q_TNH, k_TKH, v_TKH = split(qkv_TKXH)
    return rotate(q_TNH, rotary), rotate(k_TKH, rotary), v_TKH


def gate(gate_up_T2F: Float[Array, "T 2 F"], *, native: bool, instruction_set: str = "") -> Float[Array, "T F"]:
    """silu(gate) * up, in float32."""
    if native:
        out = jax.ShapeDtypeStruct((gate_up_T2F.shape[0], gate_up_T2F.shape[2]), gate_up_T2F.dtype)
        return jax.ffi.ffi_call("quire_gate", out)(gate_up_T2F, isa=instruction_set)
    wide_T2F = gate_up_T2F.astype(jnp.float32)
    return (jax.nn.silu(wide_T2F[:, 0]) * wide_T2F[:, 1]).astype(gate_up_T2F.dtype)


def _like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
