"""Every matmul of a model, and the kinds of weights it multiplies with.

A model calls `linear(x, weight)`, or with the matrices of experts `grouped_linear(x, weight, group_sizes)`, and does
not know which kind it has:

    an array     [in, *out]: stock XLA
    Transposed   [out, in]: the same for an output head, which is stored like an embedding; on accelerators also
                 [n, in, out] for [in, n, out], which their compilers would otherwise bring in that order at every call
    Packed       bfloat16 in the order in which the native library reads it
    Int8         int8 with one scale per output; activations become two int8 terms on the way
    WeightOnly   int8 or int4 with scales that are applied after the product; activations stay as they are
    Mxfp4        of experts: 4 bits a weight, expanded on the way
    Blocked      4, 6 or 8 bits a weight in blocks of 32, for the native library: see `blocked.py`

Matrices of experts have an axis more in front, `[E, in, out]`, and so has everything that is made of them.

`convert` makes these from the public layout of docs/weights.md, and `restore` goes back. (A pytree may hold other
things than arrays: hence no narrower types of their fields.)
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from quire.device import native
from quire.device.blocked import PANEL_WIDTH, Blocked, Format, grouped_blocked, linear_blocked, nearest
from quire.device.mesh import ArraySpec, sharding
from quire.field_error import FieldError

INNER_ALIGNMENT = 64
"""Bytes to a multiple of which the inner dimension of packed weights is padded: see `native/linear.h`."""
GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale in int4: the first of these that divides what a device has of the input."""
WEIGHT_BITS = {"int8-weights": 8, "int4-weights": 4}
"""Of a matrix, for each way to quantise weights alone."""
BLOCKED = ("int4", "gguf")
"""Ways to quantise for which only the native library has code."""
MXFP4_BLOCK, MXFP4_BIAS = 32, 127
"""Weights that share a scale; what is added to its exponent."""
MXFP4_TOP_EXPONENT = 3
"""The largest weight of a block, 4 or 6, is below two to this."""
MXFP4_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
"""Halfway between the magnitudes that a weight can have."""
MIN_MAGNITUDE = np.float32(1e-20)
"""The largest magnitude of a token is taken as no less, so that a token of zeros has a scale."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Transposed:
    """An array whose second axis is the input: `[out, in]` or `[n, in, out]`."""

    array: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A bfloat16 matrix for the native library: `[out / 16, in / 2, 16, 2]`; those of experts in float32, too."""

    panels: Any
    output_shape: tuple[int, ...] = field(metadata={"static": True})
    """Of one row of the product."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """An int8 matrix, as it is, `Transposed` or packed as `[out / 16, in / 4, 16, 4]`; a float32 scale per output."""

    values: Any
    scale: Any
    packed: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightOnly:
    """An int8 or int4 matrix, as it is or `Transposed`; float32 scales `[groups, *out]` of equal parts of the input.

    int8 has one group, and so have experts, whose scales are `[E, 1, out]`. The scale multiplies a group's product, not
    its weights: nobody ever holds those dequantised.
    """

    values: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4:
    """Experts' matrices in 4 bits a weight, of which 32 next to each other along the input share a power of two.

    A weight is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two next to each other along the input are a byte of
    `codes`, `[E, in / 2, out]`, the first in the low bits; `scales`, `[E, in / 32, out]`, are exponents plus 127. For
    the native library both have panels of 16 outputs, `[E, out / 16, in / 2, 16]` and `[E, out / 16, in / 32, 16]`.
    """

    codes: Any
    scales: Any
    num_outputs: int = field(metadata={"static": True})
    packed: bool = field(metadata={"static": True})


Weight = jax.Array | Transposed | Packed | Int8 | WeightOnly | Mxfp4 | Blocked


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
        case WeightOnly(values, scale):
            return _weight_only(x, values, scale).astype(out)
        case Blocked():
            return linear_blocked(x, weight, out, instruction_set)
        case _:
            return _product(x, weight, out)


def grouped_linear(
    x: Float[Array, "X D"], weight: Any, group_sizes: Int[Array, " E"], instruction_set: str = ""
) -> Float[Array, "X F"]:
    """The product of each row with the matrix of its expert, in the type of x. Rows are sorted by expert.

    `group_sizes` says how many rows each expert has. What rows behind them become is zeros or not said: nobody may
    read them. On a CPU stock XLA multiplies every row with every expert; the native library does not.
    """
    match weight:
        case Packed(panels, (columns,)):
            result = jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype)
            return jax.ffi.ffi_call("quire_grouped", result)(x, panels, group_sizes, isa=instruction_set)
        case Int8(values, scale, packed=True):
            result = jax.ShapeDtypeStruct((x.shape[0], scale.shape[1]), x.dtype)
            call = jax.ffi.ffi_call("quire_grouped_int8", result)
            return call(x, values, scale, group_sizes, isa=instruction_set)
        case Int8(values, scale):
            first, left = _terms(x)
            sums = [_grouped_one_term(term, values, scale, group_sizes) for term in (first, left)]
            return (sums[0] + sums[1]).astype(x.dtype)
        case WeightOnly(values, scale):
            sums = _grouped_product(x, values, group_sizes, jnp.float32)
            return (sums * _row_scales(scale[:, 0], group_sizes, len(x))).astype(x.dtype)
        case Mxfp4(codes, scales, num_outputs, packed=True):
            result = jax.ShapeDtypeStruct((x.shape[0], num_outputs), x.dtype)
            call = jax.ffi.ffi_call("quire_grouped_mxfp4", result)
            return call(x, codes, scales, group_sizes, isa=instruction_set)
        case Blocked():
            return grouped_blocked(x, weight, group_sizes, instruction_set)
        case Mxfp4():
            return _grouped_product(x, _expand(weight, x.shape[1], x.dtype), group_sizes, x.dtype)
        case _:
            return _grouped_product(x, weight, group_sizes, x.dtype)


def _grouped_product(x: jax.Array, weight: jax.Array, group_sizes: jax.Array, out: Any) -> jax.Array:
    return jax.lax.ragged_dot(x, weight, group_sizes, precision=_precision(x), preferred_element_type=jnp.dtype(out))


def _grouped_one_term(x: jax.Array, values: jax.Array, scale: jax.Array, group_sizes: jax.Array) -> jax.Array:
    x_int8, scale_X = quantize(x, axis=1)
    sums = _grouped_product(x_int8, values, group_sizes, jnp.int32).astype(jnp.float32)
    return sums * (scale_X[:, None] * _row_scales(scale, group_sizes, len(x)))


def _row_scales(scale: jax.Array, group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """For each row the scales `[out]` of its expert's outputs; of rows behind the last group, some expert's."""
    return jnp.repeat(scale, group_sizes, axis=0, total_repeat_length=num_rows)


def _int8(x: jax.Array, weight: Int8, out: jnp.dtype, isa: str) -> jax.Array:
    """Two terms for each activation: a token's outliers leave the rest of it too few of 8 bits."""
    if weight.packed:
        shape = weight.scale.shape
        return _call("quire_linear_int8", x, weight.values, weight.scale, output_shape=shape, out=out, isa=isa)
    sums = one_term(jnp.concatenate(_terms(x)), weight)
    return (sums[: len(x)] + sums[len(x) :]).astype(out)


def _terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each token, and what int8 leaves of it, in float32."""
    values, scale_T = quantize(x, axis=1)
    x32 = x.astype(jnp.float32)
    return x32, x32 - values.astype(jnp.float32) * scale_T[:, None]


def one_term(x: jax.Array, weight: Int8) -> jax.Array:
    """The product of int8 that is not packed, in float32: each token of x is quantised by its largest magnitude."""
    x_int8, scale_T = quantize(x, axis=1)
    sums = _product(x_int8, weight.values, jnp.dtype(jnp.int32)).astype(jnp.float32)
    return sums * (scale_T.reshape(-1, *(1,) * weight.scale.ndim) * weight.scale[None])


def _weight_only(x: jax.Array, values: jax.Array | Transposed, scale: jax.Array) -> jax.Array:
    """The product in float32, group by group. A TPU's compiler makes one loop of all of this."""
    num_groups = scale.shape[0]
    array, inner_axis = (values.array, 1) if isinstance(values, Transposed) else (values, 0)
    grouped = _split(array, inner_axis, num_groups).astype(x.dtype)  # exact: bfloat16 has 8 significant bits
    dims = (((2,), (inner_axis + 1,)), ((1,), (inner_axis,)))
    x_grouped, wide = _split(x, 1, num_groups), jnp.float32
    products = jax.lax.dot_general(x_grouped, grouped, dims, precision=_precision(x), preferred_element_type=wide)
    return jnp.sum(products * scale[:, None], axis=0)


def _split(array: jax.Array, axis: int, num_groups: int) -> jax.Array:
    """An array with one axis split in two: groups, and what is in a group."""
    return array.reshape(*array.shape[:axis], num_groups, -1, *array.shape[axis + 1 :])


def _product(x: jax.Array, weight: jax.Array | Transposed, out: jnp.dtype) -> jax.Array:
    array, inner_axis = (weight.array, 1) if isinstance(weight, Transposed) else (weight, 0)
    dims = (((1,), (inner_axis,)), ((), ()))
    return jax.lax.dot_general(x, array, dims, precision=_precision(x), preferred_element_type=out)


def _precision(x: jax.Array) -> str:
    return "highest" if x.dtype == jnp.float32 else "default"


def _call(
    target: str, x: jax.Array, *weight: jax.Array, output_shape: tuple[int, ...], out: jnp.dtype, isa: str
) -> jax.Array:
    result = jax.ShapeDtypeStruct((x.shape[0], math.prod(output_shape)), out)
    return jax.ffi.ffi_call(target, result)(x, *weight, isa=isa).reshape(-1, *output_shape)


def _to_mxfp4(array: jax.Array, packed: bool) -> Mxfp4:
    """The nearest there is to the matrices of experts; what MXFP4 holds exactly stays as it is, bit by bit."""
    num_experts, inner, outputs = array.shape
    padded = jnp.pad(
        array.astype(jnp.float32), ((0, 0), (0, -inner % MXFP4_BLOCK), (0, -outputs % PANEL_WIDTH * packed))
    )
    blocks = padded.reshape(num_experts, -1, MXFP4_BLOCK, padded.shape[2])
    largest = jnp.max(jnp.abs(blocks), axis=2)
    exponent = jnp.where(largest > 0, jnp.frexp(largest)[1] - MXFP4_TOP_EXPONENT, 1 - MXFP4_BIAS)
    exponent = jnp.clip(exponent, 1 - MXFP4_BIAS, MXFP4_BIAS)
    scaled = jnp.ldexp(blocks, -exponent[:, :, None])
    magnitude = jnp.searchsorted(jnp.asarray(MXFP4_BOUNDS), jnp.abs(scaled), method="compare_all")
    bits = magnitude.astype(jnp.uint8) | (jnp.signbit(scaled).astype(jnp.uint8) << 3)
    pairs = bits.reshape(num_experts, -1, 2, padded.shape[2])
    codes, scales = pairs[:, :, 0] | (pairs[:, :, 1] << 4), (exponent + MXFP4_BIAS).astype(jnp.uint8)
    if packed:
        codes, scales = (x.reshape(*x.shape[:2], -1, PANEL_WIDTH).swapaxes(1, 2) for x in (codes, scales))
    return Mxfp4(codes, scales, outputs, packed)


def _to_int4(array: jax.Array, contracted_axis: int) -> Blocked:
    """Blocks of 4 bits with minima; the output head, whose rounding goes straight into the logits, in 8."""
    has_experts = _has_experts(array.ndim, contracted_axis)
    is_head = contracted_axis == 1 and not has_experts
    matrix = array if contracted_axis == 1 else array.reshape(array.shape[0], -1)
    weight = nearest(matrix, transposed=is_head, to=Format.Q8_0 if is_head else Format.Q4_1)
    return replace(weight, output_shape=_output_shape(array.shape, contracted_axis))


def _expand(weight: Mxfp4, inner: int, dtype: jnp.dtype) -> jax.Array:
    """The matrices of experts, `[E, in, out]`."""
    codes, scales = weight.codes, weight.scales
    bits = jnp.stack([codes & 15, codes >> 4], axis=2).reshape(codes.shape[0], -1, codes.shape[2])
    magnitude = bits & 7
    exponent = jnp.maximum(magnitude >> 1, 1) - 1
    doubled = ((magnitude & 1) | jnp.where(magnitude > 1, 2, 0).astype(jnp.uint8)) << exponent
    signed = jnp.where(bits > 7, -0.5, 0.5).astype(dtype) * doubled.astype(dtype)
    scale = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32).astype(dtype)
    blocks = signed.reshape(*scale.shape[:2], MXFP4_BLOCK, -1) * scale[:, :, None]
    return blocks.reshape(signed.shape)[:, :inner]


def quantize(x: jax.Array, axis: int, bits: int = 8) -> tuple[jax.Array, jax.Array]:
    """To int8 or int4, symmetric, with one float32 scale for what lies along an axis.

    The native library does the same in int8.
    """
    x32, limit = x.astype(jnp.float32), 2 ** (bits - 1) - 1
    largest = jnp.maximum(jnp.max(jnp.abs(x32), axis=axis, keepdims=True), MIN_MAGNITUDE)
    values = jnp.round(x32 * (np.float32(limit) / largest)).astype(jnp.int8 if bits == 8 else jnp.int4)
    return values, jnp.squeeze(largest * np.float32(1 / limit), axis)


# -- which kind, and how it is made from the public layout ---------------------------------------------------------


@dataclass(frozen=True)
class MatmulKind:
    """How the matmuls of a model are computed."""

    native: bool
    int8: bool
    input_second: bool = False
    """Whether `[in, n, out]` is kept as `[n, in, out]`: on TPUs. A GPU multiplies `[in, n * out]`."""
    weight_bits: int | None = None
    """8 or 4 where only the weights are quantised."""
    native_experts: bool = False
    """Whether experts' matrices are packed: where `native` is, and in float32, too."""
    mxfp4_experts: bool = False
    """Whether experts' matrices are kept in 4 bits."""
    int4: bool = False
    """Whether weights are rounded to blocks of 4 bits, for the native library."""
    stored: bool = False
    """Whether weights that came in blocks stay so: what there is of others is as without `quantize`."""

    def bits(self, contracted_axis: int) -> int | None:
        """Of one matrix where only the weights are quantised: the output head, `[out, in]`, always has 8.

        Its rounding goes straight into the logits, and no later layer makes up for it.
        """
        return 8 if self.weight_bits == 4 and contracted_axis == 1 else self.weight_bits

    def packs(self, ndim: int, contracted_axis: int) -> bool:
        """Whether such a matrix is packed for the native library."""
        return self.native_experts if _has_experts(ndim, contracted_axis) else self.native

    def reorders(self, ndim: int, contracted_axis: int) -> bool:
        """Whether such a matrix, `[in, n, out]`, is kept as `[n, in, out]`."""
        return self.input_second and ndim == 3 and contracted_axis == 0

    def converts(self, ndim: int, contracted_axis: int) -> bool:
        """Whether a matrix of so many axes is made anew from the public layout, or used as it is."""
        is_quantised = self.int8 or self.int4 or self.weight_bits is not None
        is_quantised |= self.mxfp4_experts and _has_experts(ndim, contracted_axis)
        return is_quantised or self.packs(ndim, contracted_axis) or self.reorders(ndim, contracted_axis)


def _has_experts(ndim: int, contracted_axis: int) -> bool:
    """Whether an array is the matrices of experts, `[E, in, out]`; contracted axis 1 also says `[out, in]`."""
    return contracted_axis == 1 and ndim == 3


def choose_kind(matmul: str, quantize: str | None, dtype: str, mesh: Mesh) -> MatmulKind:
    """What the config's knobs mean on this mesh; "native" where it cannot be is an error that says why."""
    reason = _native_unavailable_reason(quantize, dtype, mesh)
    if quantize in BLOCKED:
        check_blocked(matmul, quantize, mesh)
    if matmul == "native" and reason:
        raise ValueError(f"matmul='native': {reason}; matmul='auto' takes what there is")
    has_library = matmul != "xla" and native.unavailable_reason_on(mesh) is None
    return MatmulKind(
        native=matmul != "xla" and reason is None,
        native_experts=has_library and quantize not in WEIGHT_BITS,
        mxfp4_experts=quantize == "mxfp4",
        int8=quantize == "int8",
        input_second=mesh.devices.flat[0].platform == "tpu",
        weight_bits=WEIGHT_BITS.get(quantize or ""),
        int4=quantize == "int4",
        stored=quantize == "gguf",
    )


def check_blocked(matmul: str, quantize: str, mesh: Mesh) -> None:
    """Raise FieldError where weights in blocks cannot be multiplied: there is native code for them, and no other."""
    reason = "matmul='xla' is without it" if matmul == "xla" else native.unavailable_reason_on(mesh)
    if reason:
        raise FieldError(
            f"quantize={quantize!r} needs the native library: {reason}; take quantize='int8', or on accelerators "
            "'int4-weights'",
            field="quantize",
        )


def _native_unavailable_reason(quantize: str | None, dtype: str, mesh: Mesh) -> str | None:
    if dtype != "bfloat16" and quantize in (None, "mxfp4", "gguf"):
        return f"the native matmul takes bfloat16, or any type with quantize='int8', not {dtype}"
    if quantize in WEIGHT_BITS:
        return f"quantize={quantize!r} leaves activations as they are, which the native int8 matmul does not take"
    return native.unavailable_reason_on(mesh)


def convert(array: jax.Array, contracted_axis: int, kind: MatmulKind, into: Weight | None = None) -> Weight:
    """What `linear` multiplies with, from an array `[in, *out]` (contracted axis 0) or `[out, in]` (1).

    Of experts, `[E, in, out]` (1), what `grouped_linear` does. Shares memory with the array where it stays as it is;
    otherwise waits until the new one is made, in the memory of `into` if that is one made earlier of such an array. It
    is gone afterwards.
    """
    if not kind.converts(array.ndim, contracted_axis):
        return Transposed(array) if contracted_axis == 1 and array.ndim == 2 else array
    shape = array.sharding.shard_shape(array.shape)
    num_groups = _num_groups(array.shape, shape, contracted_axis, kind)
    if into is None:
        return jax.block_until_ready(convert_in_jit(array, contracted_axis, kind, num_groups))
    return jax.block_until_ready(_convert_into(into, array, contracted_axis, kind, num_groups))


def _num_groups(shape: tuple[int, ...], shape_each: tuple[int, ...], contracted_axis: int, kind: MatmulKind) -> int:
    """Parts of the input with a scale of their own, from the shapes of a matrix and of what a device has of it."""
    if kind.weight_bits == 4 and _has_experts(len(shape), contracted_axis):
        raise FieldError(
            "quantize='int4-weights' is not supported for experts: XLA for TPUs has no ragged_dot with int4; "
            "take quantize='int8-weights'",
            field="quantize",
        )
    if kind.bits(contracted_axis) != 4:
        return 1
    inner = shape_each[contracted_axis]
    size = next((size for size in GROUP_SIZES if inner % size == 0), None)
    if size is None:
        raise FieldError(
            f"quantize='int4-weights' takes the inputs of a matmul in groups of {', '.join(map(str, GROUP_SIZES))}: "
            f"none divides the {inner} that each device has of {shape[contracted_axis]}; take "
            "quantize='int8-weights', or another number of devices",
            field="quantize",
        )
    return shape[contracted_axis] // size


@functools.partial(jax.jit, static_argnames=("contracted_axis", "kind", "num_groups"))
def convert_in_jit(array: jax.Array, contracted_axis: int, kind: MatmulKind, num_groups: int = 1) -> Weight:
    """What `convert` makes, for use inside a jitted function; `num_groups` is for int4 alone."""
    is_packed = kind.packs(array.ndim, contracted_axis)
    if kind.mxfp4_experts and _has_experts(array.ndim, contracted_axis):
        return _to_mxfp4(array, is_packed)
    if kind.int4:
        return _to_int4(array, contracted_axis)
    if bits := kind.bits(contracted_axis):
        values, scale = quantize(_split(array, contracted_axis, num_groups), contracted_axis + 1, bits)
        values = _ordered(values.reshape(array.shape), contracted_axis, kind)
        has_experts = _has_experts(array.ndim, contracted_axis)
        return WeightOnly(values, scale if has_experts else jnp.moveaxis(scale, contracted_axis, 0))
    if not kind.int8:
        if is_packed:
            return Packed(pack(array, contracted_axis), _output_shape(array.shape, contracted_axis))
        return _ordered(array, contracted_axis, kind)
    values, scale = quantize(array, contracted_axis)
    if is_packed:
        return Int8(pack(values, contracted_axis), scale, packed=True)
    return Int8(_ordered(values, contracted_axis, kind), scale, packed=False)


@functools.partial(
    jax.jit, static_argnames=("contracted_axis", "kind", "num_groups"), donate_argnames="old", keep_unused=True
)
def _convert_into(old: Weight, array: jax.Array, contracted_axis: int, kind: MatmulKind, num_groups: int) -> Weight:
    """The same in the memory of `old`, which is given away: XLA finds that it has the shapes of the result."""
    return convert_in_jit(array, contracted_axis, kind, num_groups)


def _output_shape(shape: tuple[int, ...], contracted_axis: int) -> tuple[int, ...]:
    """Of one row of the product."""
    return shape[:1] if contracted_axis == 1 and len(shape) == 2 else shape[contracted_axis + 1 :]


def _ordered(array: Any, contracted_axis: int, kind: MatmulKind) -> Any:
    if contracted_axis == 1:
        return Transposed(array) if array.ndim == 2 else array
    return Transposed(jnp.moveaxis(array, 0, 1)) if kind.reorders(array.ndim, contracted_axis) else array


def convert_spec(array: ArraySpec, contracted_axis: int, kind: MatmulKind, mesh: Mesh) -> Any:
    """What `convert` makes of such an array on a mesh: an `ArraySpec` in the place of each array."""
    ndim = len(array.shape)
    if kind.packs(ndim, contracted_axis):
        shapes = jax.eval_shape(lambda x: convert_in_jit(x, contracted_axis, kind, 1), jax.ShapeDtypeStruct(*array[:2]))
        return jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype, (None,) * len(x.shape)), shapes)

    def ordered(dtype: np.dtype) -> ArraySpec | Transposed:
        if contracted_axis == 1 and ndim == 2:
            return Transposed(array._replace(dtype=dtype))
        if not kind.reorders(ndim, contracted_axis):
            return array._replace(dtype=dtype)
        (inner, n, out), (inner_axis, n_axis, out_axis) = array.shape, array.axes
        return Transposed(ArraySpec((n, inner, out), dtype, (n_axis, inner_axis, out_axis)))

    if kind.mxfp4_experts and _has_experts(ndim, contracted_axis):
        num_experts, inner, outputs = array.shape
        num_blocks = -(-inner // MXFP4_BLOCK)
        lengths = (num_blocks * MXFP4_BLOCK // 2, num_blocks)
        codes, scales = (ArraySpec((num_experts, n, outputs), np.dtype(np.uint8), array.axes) for n in lengths)
        return Mxfp4(codes, scales, outputs, packed=False)

    def rest(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        return sizes[:contracted_axis] + sizes[contracted_axis + 1 :]

    if bits := kind.bits(contracted_axis):
        shape_each = sharding(mesh, *array.axes).shard_shape(array.shape)
        num_groups = _num_groups(array.shape, shape_each, contracted_axis, kind)
        groups_axis = array.axes[contracted_axis] if num_groups > 1 else None
        shape, axes = (num_groups, *rest(array.shape)), (groups_axis, *rest(array.axes))
        if _has_experts(ndim, contracted_axis):
            shape, axes = (shape[1], 1, shape[2]), (axes[1], None, axes[2])
        scale = ArraySpec(shape, np.dtype(np.float32), axes)
        return WeightOnly(ordered(np.dtype(jnp.int8 if bits == 8 else jnp.int4)), scale)
    if not kind.int8:
        return ordered(array.dtype)
    scale = ArraySpec(rest(array.shape), np.dtype(np.float32), rest(array.axes))
    return Int8(ordered(np.dtype(np.int8)), scale, packed=False)


def pack(array: jax.Array, contracted_axis: int = 0) -> jax.Array:
    """A matrix in the native library's order, `[in, *out]` (contracted axis 0) or `[out, in]` (1); or experts'."""
    has_experts = _has_experts(array.ndim, contracted_axis)
    transposed = contracted_axis == 1 and not has_experts
    matrix = array if contracted_axis == 1 else array.reshape(array.shape[0], -1)
    inner, columns = matrix.shape[-2:][::-1] if transposed else matrix.shape[-2:]
    group = 4 // matrix.dtype.itemsize
    num_groups = INNER_ALIGNMENT // 4 * -(-inner * matrix.dtype.itemsize // INNER_ALIGNMENT)
    shape = (*matrix.shape[:-2], -(-columns // PANEL_WIDTH), num_groups, PANEL_WIDTH, group)
    return jax.ffi.ffi_call("quire_pack", jax.ShapeDtypeStruct(shape, matrix.dtype))(matrix, transposed=transposed)


def restore(weight: Weight, contracted_axis: int, shape: tuple[int, ...]) -> jax.Array:
    """The array of the public layout that `convert` made a weight from, bit by bit, as a copy.

    ValueError for int8 and int4, from which there is no way back.
    """
    match weight:
        case Int8() | WeightOnly() | Mxfp4() | Blocked():
            raise ValueError("quantised weights are rounded: what they were made from is gone; quantize=None keeps it")
        case Packed(panels):
            return _unpack(panels, contracted_axis, shape)
        case Transposed(array) if array.ndim == 3:
            return jnp.moveaxis(array, 0, 1)
        case Transposed(array):
            return jnp.copy(array)
        case _:
            return jnp.copy(weight)


@functools.partial(jax.jit, static_argnames=("contracted_axis", "shape"))
def _unpack(panels: jax.Array, contracted_axis: int, shape: tuple[int, ...]) -> jax.Array:
    """What `pack` was given: panels are `[*experts, out / 16, in / group, 16, group]`, both padded with zeros."""
    inner, columns = shape[contracted_axis], math.prod(_output_shape(shape, contracted_axis))
    *experts, panel_count, num_groups, width, group = panels.shape
    padded = (*experts, panel_count * width, num_groups * group)
    matrix = panels.swapaxes(-3, -2).reshape(padded)[..., :columns, :inner]
    return matrix if contracted_axis == 1 and len(shape) == 2 else matrix.swapaxes(-1, -2).reshape(shape)
