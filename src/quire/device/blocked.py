"""Weights in blocks of 4, 6 or 8 bits, as GGUF files store them and as `quantize="int4"` makes them: on a CPU alone.

32 weights next to each other along the input share a scale, and of some formats a minimum: a weight is
`scale * code + minimum`. The native library multiplies the codes with activations that it rounds to int8, each 32 of
them by a scale of their own, so that nothing is ever expanded; `native/blocked.h` says how a panel of 16 outputs lies
in memory. Each panel has a format of its own: what one matmul multiplies may come from tensors of several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from quire.device import native

PANEL_WIDTH, BLOCK, LINE = 16, 32, 64
"""Outputs in a panel; weights in a block; the bytes of which a panel has a multiple."""
BLOCKS_OF_SCALES = 8
"""Blocks whose scales share one more, of the formats that end in K."""


class Format(IntEnum):
    """How the blocks of a panel are stored: the names are llama.cpp's, the numbers the native library's."""

    Q4_0 = 0
    Q4_1 = 1
    Q8_0 = 2
    Q4_K = 3
    Q6_K = 4

    def panel_bytes(self, inner: int) -> int:
        """Of a panel with so many inputs."""
        num_blocks = -(-inner // BLOCK)
        codes = {Format.Q8_0: 8, Format.Q6_K: 6}.get(self, 4) * LINE
        scales = {Format.Q4_1: 4, Format.Q4_K: 2}.get(self, 2) * PANEL_WIDTH
        shared = {Format.Q4_K: 4, Format.Q6_K: 2}.get(self, 0) * PANEL_WIDTH * -(-num_blocks // BLOCKS_OF_SCALES)
        return -(-(num_blocks * (codes + scales) + shared) // LINE) * LINE


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocked:
    """A matrix in panels of 16 outputs, all of them as bytes one behind the other; of experts `[E, bytes]`."""

    panels: Any
    formats: Any
    """A `Format` for each panel; of experts, for each panel of every expert."""
    output_shape: tuple[int, ...] = field(metadata={"static": True})
    """Of one row of the product."""


class StoredTensor(NamedTuple):
    """A matrix `[out, in]` as a GGUF file has it."""

    format: Format
    data: np.ndarray
    """uint8, `[out, bytes of a row]`."""
    rows: np.ndarray
    """For each output, where it is among the file's rows."""
    inner: int


def linear_blocked(x: Float[Array, "T D"], weight: Blocked, out: Any, instruction_set: str) -> Float[Array, "T *out"]:
    """The product in the type `out`."""
    result = jax.ShapeDtypeStruct((x.shape[0], math.prod(weight.output_shape)), out)
    call = jax.ffi.ffi_call("quire_linear_blocked", result)
    return call(x, weight.panels, weight.formats, isa=instruction_set).reshape(-1, *weight.output_shape)


def grouped_blocked(
    x: Float[Array, "X D"], weight: Blocked, group_sizes: Int[Array, " E"], instruction_set: str
) -> Float[Array, "X F"]:
    """The product of each row with the matrix of its expert, in the type of x."""
    call = jax.ffi.ffi_call("quire_grouped_blocked", jax.ShapeDtypeStruct((x.shape[0], *weight.output_shape), x.dtype))
    return call(x, weight.panels, weight.formats, group_sizes, isa=instruction_set)


def look_up(embedding: Any, tokens_T: Int[Array, " T"], like: jax.Array) -> Float[Array, "T D"]:
    """The rows of an embedding, `[V, D]`: of a blocked one, expanded to the type and width of `like`, `[D]`."""
    if not isinstance(embedding, Blocked):
        return embedding[tokens_T]
    result = jax.ShapeDtypeStruct((tokens_T.shape[0], like.shape[0]), like.dtype)
    return jax.ffi.ffi_call("quire_look_up_blocked", result)(embedding.panels, embedding.formats, tokens_T)


def nearest(matrix: Float[Array, "*experts X Y"], *, transposed: bool, to: Format) -> Blocked:
    """The nearest there is, by squares, to `[in, out]`, or transposed: `to` Q4_1 or Q8_0."""
    inner, columns = matrix.shape[-2:][::-1] if transposed else matrix.shape[-2:]
    num_panels = -(-columns // PANEL_WIDTH)
    shape = (*matrix.shape[:-2], num_panels * to.panel_bytes(inner))
    call = jax.ffi.ffi_call("quire_pack_nearest", jax.ShapeDtypeStruct(shape, jnp.uint8))
    panels = call(matrix, transposed=transposed, format=np.int64(to))
    return Blocked(panels, jnp.full(num_panels, int(to), jnp.uint8), (columns,))


def join_stored(tensors: Sequence[StoredTensor], columns: np.ndarray, output_shape: tuple[int, ...]) -> Blocked | None:
    """One matrix of several tensors, bit by bit: for each output of it which it is of all theirs, counted through.

    None where the outputs of a panel are of two tensors: there is no format for that.
    """
    ends = np.cumsum([len(tensor.rows) for tensor in tensors])
    owners = np.searchsorted(ends, columns, side="right")
    panel_owners = owners[::PANEL_WIDTH]
    if np.any(owners != np.repeat(panel_owners, PANEL_WIDTH)[: len(owners)]):
        return None
    sizes = [tensor.format.panel_bytes(tensor.inner) for tensor in tensors]
    begins = np.concatenate([[0], np.cumsum([sizes[owner] for owner in panel_owners])])
    panels = _empty_lines(int(begins[-1]))
    borders = np.flatnonzero(np.diff(panel_owners)) + 1
    for first, end in zip([0, *borders], [*borders, len(panel_owners)], strict=True):
        owner = panel_owners[first]
        tensor, start = tensors[owner], ends[owner] - len(tensors[owner].rows)
        rows = tensor.rows[columns[first * PANEL_WIDTH : end * PANEL_WIDTH] - start]
        native.pack_stored(int(tensor.format), tensor.inner, tensor.data, rows, panels[begins[first] : begins[end]])
    formats = np.array([tensors[owner].format for owner in panel_owners], np.uint8)
    return Blocked(panels, formats, output_shape)


def _empty_lines(num_bytes: int) -> np.ndarray:
    """Bytes from the start of a line of the CPU's cache on: so JAX takes them as an array without a copy."""
    memory = np.empty(num_bytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + num_bytes]
