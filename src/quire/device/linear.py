"""Every matmul of a model, and the kinds of weights it multiplies with.

A model calls `linear(x, weight)` and does not know which kind it has:

    an array     [in, *out]: stock XLA
    Transposed   [out, in]: the same for an output head, which is stored like an embedding
    Packed       bfloat16 in the order in which the native library reads it
    Int8         int8 with one scale per output; activations become two int8 terms on the way

`convert` makes these from the public layout of docs/weights.md. (A pytree may hold other things than arrays:
hence no narrower types of their fields.)
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from quire.device import native

PANEL_WIDTH = 16
"""Output columns in a panel of packed weights; `native/linear.h` explains the layout."""
INNER_ALIGNMENT = 64
"""Bytes to a multiple of which the inner dimension of packed weights is padded."""
MIN_MAGNITUDE = np.float32(1e-20)
"""The largest magnitude of a token is taken as no less, so that a token of zeros has a scale."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """A matrix stored output x input."""

    array: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A bfloat16 matrix for the native library: `[out / 16, in / 2, 16, 2]`."""

    panels: Any
    output_shape: tuple[int, ...] = field(metadata={"static": True})
    """Of one row of the product."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """An int8 matrix and a float32 scale per output: `[in, *out]`, or packed as `[out / 16, in / 4, 16, 4]`."""

    values: Any
    scale: Any
    packed: bool = field(metadata={"static": True})


Weight = jax.Array | Transposed | Packed | Int8


def linear(x: Float[Array, "T D"], weight: Any, out: Any = None, instruction_set: str = "") -> Float[Array, "T *out"]:
    """The product in the type of x, or `out`. float32 stays float32 on every platform.

    `instruction_set` is one of `native.instruction_sets()`, by default the last: for tests.
    """
    out = jnp.dtype(out or x.dtype)
    match weight:
        case Packed(panels, shape):
            return _call("quire_linear_bf16", x, panels, output_shape=shape, out=out, isa=instruction_set)
        case Int8():
            return _int8(x, weight, out, instruction_set)
        case Transposed(array):
            return _product(x, array, 1, out)
        case _:
            return _product(x, weight, 0, out)


def _int8(x: jax.Array, weight: Int8, out: jnp.dtype, isa: str) -> jax.Array:
    """Two terms for each activation: a token's outliers leave the rest of it too few of 8 bits."""
    if weight.packed:
        shape = weight.scale.shape
        return _call("quire_linear_int8", x, weight.values, weight.scale, output_shape=shape, out=out, isa=isa)
    first, scale_T = quantize(x, axis=1)
    x32 = x.astype(jnp.float32)
    both = jnp.concatenate([x32, x32 - first.astype(jnp.float32) * scale_T[:, None]])
    sums = one_term(both, weight)
    return (sums[: len(x)] + sums[len(x) :]).astype(out)


def one_term(x: jax.Array, weight: Int8) -> jax.Array:
    """The product of int8 that is not packed, in float32: each token of x is quantised by its largest magnitude."""
    x_int8, scale_T = quantize(x, axis=1)
    sums = _product(x_int8, weight.values, 0, jnp.dtype(jnp.int32)).astype(jnp.float32)
    return sums * (scale_T.reshape(-1, *(1,) * weight.scale.ndim) * weight.scale[None])


def _product(x: jax.Array, weight: jax.Array, inner_axis: int, out: jnp.dtype) -> jax.Array:
    precision = "highest" if x.dtype == jnp.float32 else "default"
    dims = (((1,), (inner_axis,)), ((), ()))
    return jax.lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=out)


def _call(
    target: str, x: jax.Array, *weight: jax.Array, output_shape: tuple[int, ...], out: jnp.dtype, isa: str
) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], math.prod(output_shape)), out)
    return jax.ffi.ffi_call(target, result)(x, *weight, isa=isa).reshape(-1, *output_shape)


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """To int8, symmetric, with one float32 scale for what lies along an axis. The native library does the same."""
    x32 = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x32), axis=axis, keepdims=True), MIN_MAGNITUDE)
    values = jnp.round(x32 * (np.float32(127) / largest)).astype(jnp.int8)
    return values, jnp.squeeze(largest * np.float32(1 / 127), axis)


# -- which kind, and how it is made from the public layout ---------------------------------------------------------


@dataclass(frozen=True)
class MatmulKind:
    """How the matmuls of a model are computed."""

    native: bool
    int8: bool

    @property
    def converts(self) -> bool:
        """Whether matrices are made anew from the public layout, or used as they are."""
        return self.native or self.int8


def choose_kind(matmul: str, quantize: str | None, dtype: str, mesh: Mesh) -> MatmulKind:
    """What the config's knobs mean on this mesh; "native" where it cannot be is an error that says why."""
    if matmul == "xla":
        return MatmulKind(native=False, int8=quantize == "int8")
    reason = _native_unavailable_reason(quantize, dtype, mesh)
    if matmul == "native" and reason:
        raise ValueError(f"matmul='native': {reason}; matmul='auto' takes what there is")
    return MatmulKind(native=reason is None, int8=quantize == "int8")


def _native_unavailable_reason(quantize: str | None, dtype: str, mesh: Mesh) -> str | None:
    if dtype != "bfloat16" and quantize is None:
        return f"the native matmul takes bfloat16, or any type with quantize='int8', not {dtype}"
    return native.unavailable_reason_on(mesh)


def convert(array: jax.Array, contracted_axis: int, kind: MatmulKind) -> Weight:
    """What `linear` multiplies with, from an array `[in, *out]` (contracted axis 0) or `[out, in]` (1).

    Shares memory with the array where it stays as it is; otherwise waits until the new one is made.
    """
    is_transposed = contracted_axis == 1
    if not kind.converts:
        return Transposed(array) if is_transposed else array
    return jax.block_until_ready(_convert(array, is_transposed, kind))


@functools.partial(jax.jit, static_argnames=("is_transposed", "kind"))
def _convert(array: jax.Array, is_transposed: bool, kind: MatmulKind) -> Packed | Int8:
    if not kind.int8:
        return Packed(pack(array, is_transposed), array.shape[:1] if is_transposed else array.shape[1:])
    values, scale = quantize(array, axis=1 if is_transposed else 0)
    if kind.native:
        return Int8(pack(values, is_transposed), scale, packed=True)
    return Int8(values.T if is_transposed else values, scale, packed=False)


def pack(array: jax.Array, transposed: bool = False) -> jax.Array:
    """A matrix, bfloat16 or int8 and `[in, *out]` or transposed `[out, in]`, in the native library's order."""
    matrix = array if transposed else array.reshape(array.shape[0], -1)
    columns, inner = matrix.shape if transposed else matrix.shape[::-1]
    group = 4 // matrix.dtype.itemsize
    num_groups = INNER_ALIGNMENT // 4 * -(-inner * matrix.dtype.itemsize // INNER_ALIGNMENT)
    shape = (-(-columns // PANEL_WIDTH), num_groups, PANEL_WIDTH, group)
    return jax.ffi.ffi_call("quire_pack", jax.ShapeDtypeStruct(shape, matrix.dtype))(matrix, transposed=transposed)
