"""How an architecture declares its weights: the arrays a model runs on, and the tensors of a checkpoint they come from.

Loading, checking, placing on a mesh and preparing for matmuls all read this declaration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import AttentionConfig

Shape = tuple[int, ...]
Tensor = np.ndarray | jax.Array


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint; a matrix is `[out, in]`."""

    name: str
    """In Hugging Face checkpoints."""
    gguf_name: str
    shape: Shape
    gguf_rotary_heads: int | None = None
    """How many heads the tensor has, where GGUF files keep the two rows of a rotary pair side by side and not half a
    head apart; None where they do not."""
    gguf_added: float = 0.0
    """What GGUF files have added to the numbers."""
    gguf_index: int | None = None
    """Which part of the tensor it is, where GGUF files keep all experts in one; None where it is the tensor."""
    gguf_parts: tuple[str, ...] = ()
    """Where GGUF files keep it otherwise than Hugging Face checkpoints: the tensors there are instead of one of
    `gguf_name`."""
    gguf_join: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None
    """Makes it of `gguf_parts`."""


@dataclass(frozen=True)
class WeightSpec:
    """One array of a model."""

    shape: Shape
    axes: tuple[str | None, ...]
    """Names of the axes; `mesh.py` splits some of them over devices."""
    tensors: tuple[TensorSpec, ...]
    """What it is made of."""
    join: Callable[[Sequence[Tensor]], Tensor]
    """Makes the array from the tensors: numpy's from numpy's, jax's from jax's."""
    contracted_axis: int | None = None
    """The axis that a matmul sums over: 0 for `[in, *out]`, 1 for `[out, in]` and for experts' `[E, in, out]`; None if
    `linear` does not multiply with it."""
    attention: AttentionConfig | None = None
    """Whose heads are in it, if any: `"kv_heads"`: the last two axes are `[K, (G+2)*H]`; `"heads"`: `N*H`, or `N`."""


def array_module(tensors: Sequence[Tensor]) -> Any:
    """Whose functions put such tensors together: jax's for its arrays, else numpy's."""
    return jnp if isinstance(tensors[0], jax.Array) else np


WeightSpecs = dict[str, Any]
"""A tree like that of a model's params: `WeightSpec` by name, and under "layers" a list of such dicts."""
