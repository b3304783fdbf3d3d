"""The device mesh and how arrays are laid over it. Every array of the device column is placed by these rules.

One mesh axis, `model`: tensor parallelism. Attention heads, feed-forward columns and the vocabulary are split over
it; everything else is whole on every device. A mesh of one device goes through the same rules.

Shape letters, used as suffixes all over the device column:

    T packed tokens    B rows          P pages per row    M pages in the pool   Z page size
    N query heads      K KV heads      G query heads per KV head                H head size
    D model width      F feed-forward  V vocabulary       L layers
    S samples          R rounds        X top log-probabilities
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MODEL_AXIS = "model"

# Names of array axes -> mesh axis.
RULES: dict[str | None, str | None] = {
    "kv_heads": MODEL_AXIS,
    "heads": MODEL_AXIS,
    "ffn": MODEL_AXIS,
    "vocab": MODEL_AXIS,
}


class ArraySpec(NamedTuple):
    """One array: its shape, its type and the names of its axes (None for an axis that nobody asks for)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, over all devices."""
        return math.prod(self.shape) * self.dtype.itemsize


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over these devices; by default the first one this process can use."""
    devices = jax.local_devices()[:1] if devices is None else devices
    return Mesh(np.array(devices), (MODEL_AXIS,))


def partition(*axes: str | None) -> PartitionSpec:
    """The spec of an array from the names of its axes; None for an axis that is never split."""
    return PartitionSpec(*(RULES.get(axis) for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Where an array lives, from the names of its axes."""
    return NamedSharding(mesh, partition(*axes))


def place(mesh: Mesh, array: np.ndarray | jax.Array, *axes: str | None) -> jax.Array:
    """Put an array on the mesh. A split axis must divide evenly, or the error names it; a vocabulary that does not is
    kept whole on every device. Shares memory with an array that is there already.
    """
    size = mesh.shape[MODEL_AXIS]
    for axis, length in zip(axes, array.shape, strict=True):
        if axis == "vocab" and length % size:
            return jax.device_put(array, sharding(mesh))
        if RULES.get(axis) and length % size:
            raise ValueError(f"axis {axis!r} of length {length} cannot be split over {size} devices; use fewer devices")
    return jax.device_put(array, sharding(mesh, *axes))
