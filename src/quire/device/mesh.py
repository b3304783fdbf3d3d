"""The device mesh and how arrays are laid over it. Every array of the device column is placed by these rules.

The mesh axis `model` is tensor parallelism: attention heads, feed-forward columns and the vocabulary are split over
it, padded where they do not divide (`models/padding.py`). Experts are split over all devices, each of which has some
whole ones: over `model`, and over the axis `expert` where the mesh has it, on which everything else is repeated.
A mesh of one device goes through the same rules.

Shape letters, used as suffixes all over the device column:

    T packed tokens    B rows          P pages per row    M pages in the pool   Z page size
    N query heads      K KV heads      G query heads per KV head                H head size
    D model width      F feed-forward  V vocabulary       L layers              E experts
    S samples          R rounds        X top log-probabilities
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from quire.config import DATA_AXIS, EXPERT_AXIS, MESH_AXES, MODEL_AXIS, parse_mesh
from quire.field_error import FieldError
from quire.machine import limit_threads

SPREAD = "spread"
"""An axis that is split for no other reason than to hold a part of an array on each device."""

# Names of array axes -> mesh axes, of which a mesh need not have every one.
RULES: dict[str | None, tuple[str, ...]] = {
    "kv_heads": (MODEL_AXIS,),
    "heads": (MODEL_AXIS,),
    "ffn": (MODEL_AXIS,),
    "vocab": (MODEL_AXIS,),
    "experts": MESH_AXES,
    SPREAD: MESH_AXES,
}


class EngineMesh(NamedTuple):
    """The devices of one of several engines."""

    text: str
    """A config's `mesh`, whose axis `data` is how many engines there are."""
    engine: int
    """Which one, from 0 on."""


class ArraySpec(NamedTuple):
    """One array: its shape, its type and the names of its axes (None for an axis that nobody asks for)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    def bytes_per_device(self, mesh: Mesh) -> int:
        """Bytes that each device holds: all, or its share if an axis is split."""
        num_parts = math.prod(num_devices_of(mesh, axis) for axis in self.axes)
        return math.prod(self.shape) * self.dtype.itemsize // num_parts

    def on(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """The array as it lies on a mesh, for tracing."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding(mesh, *self.axes))


def row_major(placed: Sharding, ndim: int) -> Any:
    """The placement of an array whose last axis is innermost in memory, as its shape says: on a CPU any is.

    By itself a TPU keeps `[V, 576]` the other way round, because 576 does not fill its registers; a lookup of rows then
    copies all of it.
    """
    if next(iter(placed.device_set)).platform == "cpu":
        return placed
    from jax.experimental.layout import Format, Layout  # before jax 0.7 under other names

    return Format(Layout(major_to_minor=tuple(range(ndim))), placed)


def make_row_major(array: Any) -> jax.Array:
    """The array with its last axis innermost in memory: itself where it is."""
    wanted = row_major(array.sharding, array.ndim)
    if wanted in (array.sharding, array.format) or wanted.layout.major_to_minor == array.format.layout.major_to_minor:
        return array
    return jax.device_put(array, wanted)


def make_mesh(devices: Sequence[Any] | None = None, *, expert: int = 1) -> Mesh:
    """A mesh over these devices; by default the first one this process can use. `expert`: the length of that axis."""
    limit_threads()
    devices = jax.local_devices()[:1] if devices is None else devices
    if expert == 1:
        return Mesh(np.array(devices), (MODEL_AXIS,))
    return Mesh(np.array(devices).reshape(-1, expert), (MODEL_AXIS, EXPERT_AXIS))


def mesh_of(given: EngineMesh | str | None) -> Mesh:
    """The mesh that a config's `mesh` means, such as "model=4": over the first devices there are.

    With the axis `data` it is several engines' devices, one engine's after the other's, and one of them must be named.
    """
    if given is None:
        return make_mesh()
    text, engine = given if isinstance(given, EngineMesh) else (given, None)
    limit_threads()
    sizes, devices = parse_mesh(text), jax.devices()
    size = math.prod(sizes.values())
    num_engines = sizes.pop(DATA_AXIS, 1)
    if num_engines > 1 and engine is None:
        raise FieldError(
            f"mesh={text!r} has data={num_engines}, several engines, and this is one: leave data out; AsyncLLM and "
            "`quire serve` take it",
            field="mesh",
        )
    if size > len(devices):
        raise FieldError(
            f"mesh={text!r} needs {size} devices, and there are {len(devices)} ({devices[0].platform}): give at most "
            f"mesh='model={len(devices)}'; to try it on a CPU, start with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size}, or set jax_num_cpu_devices to {size}",
            field="mesh",
        )
    size //= num_engines
    first = size * (engine or 0)
    return make_mesh(devices[first : first + size], expert=sizes.get(EXPERT_AXIS, 1))


def check_mesh(mesh: Mesh) -> Mesh:
    """A mesh that a program gives; ValueError unless it is one that a model can be split over."""
    if MODEL_AXIS not in mesh.shape or any(size > 1 for axis, size in mesh.shape.items() if axis not in MESH_AXES):
        raise FieldError(
            f"mesh has the axes {dict(mesh.shape)}: it needs one called {MODEL_AXIS!r}, and no other of more than one "
            f"device but {EXPERT_AXIS!r}; quire.device.mesh.make_mesh(devices) makes one",
            field="mesh",
        )
    return mesh


def mesh_axes_of(mesh: Mesh, axis: str | None) -> tuple[str, ...]:
    """The axes of a mesh that an array's axis is split over, from its name; none for None."""
    return tuple(name for name in RULES.get(axis, ()) if name in mesh.shape)


def num_devices_of(mesh: Mesh, axis: str | None) -> int:
    """In how many parts an array's axis is split."""
    return math.prod(mesh.shape[name] for name in mesh_axes_of(mesh, axis))


def partition(mesh: Mesh, *axes: str | None) -> PartitionSpec:
    """The spec of an array from the names of its axes; None for an axis that is never split."""
    return PartitionSpec(*(mesh_axes_of(mesh, axis) or None for axis in axes))


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Where an array lives, from the names of its axes."""
    return NamedSharding(mesh, partition(mesh, *axes))


def place(mesh: Mesh, array: np.ndarray | jax.Array, *axes: str | None) -> jax.Array:
    """Put an array on the mesh, each device's part straight to it. An array that is there already is shared."""
    placed = sharding(mesh, *axes)
    if isinstance(array, np.ndarray) and mesh.size > 1:
        return jax.make_array_from_callback(array.shape, placed, lambda index: array[index])
    return jax.device_put(array, placed)
