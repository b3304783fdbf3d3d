"""How an architecture declares its weights: the arrays a model runs on, and the tensors of a checkpoint they come from.

Loading, checking, placing on a mesh and preparing for matmuls all read this declaration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint; a matrix is `[out, in]`."""

    name: str
    """In Hugging Face checkpoints."""
    gguf_name: str
    shape: Shape
    gguf_rotary_heads: int | None = None
    """How many heads the tensor has, where GGUF files keep the two rows of a rotary pair side by side and not half a
    head apart; None where they do not."""


@dataclass(frozen=True)
class WeightSpec:
    """One array of a model."""

    shape: Shape
    axes: tuple[str | None, ...]
    """Names of the axes; `mesh.py` splits some of them over devices."""
    tensors: tuple[TensorSpec, ...]
    """What it is made of."""
    join: Callable[[Sequence[np.ndarray]], np.ndarray]
    """Makes the array from the tensors."""
    contracted_axis: int | None = None
    """The axis that a matmul sums over: 0 for `[in, *out]`, 1 for `[out, in]`; None if it is not multiplied with."""


WeightSpecs = dict[str, Any]
"""A tree like that of a model's params: `WeightSpec` by name, and under "layers" a list of such dicts."""
