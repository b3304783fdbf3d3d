"""A model's arrays over several devices: what does not divide evenly is padded, and scarce KV heads are repeated.

Every device runs the same program on the same shapes. So each axis that a mesh splits is as long as a multiple of the
devices:

    vocabulary, feed-forward   zeros at the end; a vocabulary so far that a device has whole tiles of the sampler's
    experts                    zeros at the end, to which no token is ever routed
    KV heads                   zeros at the end, or each of them `copies` times with a share of its query heads

8 KV heads of 8 query heads over 16 devices: each KV head on two of them, each with 4 of its query heads. 3 of 3 over 2:
a fourth KV head of zeros. What is added changes no result: rows of the output projection that belong to padded heads
are zeros, and so are rows of `down`; `unembed` masks the logits of tokens that do not exist.

Padding happens where weights are made ready to run (`weights.py`). The layout of docs/weights.md knows none of it, and
on one device there is none.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from quire.config import ModelConfig
from quire.device.mesh import MODEL_AXIS, SPREAD, num_devices_of, sharding
from quire.device.models import get_architecture
from quire.device.models.heads import output_sources, padded_attention, qkv_sources
from quire.device.models.weight_specs import Shape, WeightSpec, WeightSpecs
from quire.device.sampler import TILE
from quire.field_error import FieldError


def padded_config(config: ModelConfig, mesh: Mesh) -> ModelConfig:
    """A model with the heads that run on a mesh; of one device, the config itself."""
    num_devices = mesh.shape[MODEL_AXIS]
    if config.experts is None and mesh.size > num_devices:
        raise FieldError(
            f"the mesh has {mesh.size} devices, of which the axis 'model' has {num_devices}: the axis 'expert' is for "
            f"mixtures of experts, and this model has none; give mesh='model={mesh.size}'",
            field="mesh",
        )
    if num_devices == 1:
        return config
    kinds = {attention: padded_attention(attention, num_devices) for attention in set(config.attention)}
    return replace(config, attention=tuple(kinds[attention] for attention in config.attention))


def padded_specs(config: ModelConfig, mesh: Mesh) -> WeightSpecs:
    """The arrays that run on a mesh, from the config as the model states it; only shapes and axes are of use."""

    def pad(spec: WeightSpec) -> WeightSpec:
        return replace(spec, shape=tuple(map(padded_length, spec.shape, spec.axes)))

    def padded_length(length: int, axis: str | None) -> int:
        num_devices = num_devices_of(mesh, axis)
        if num_devices == 1:
            return length
        unit = num_devices * (TILE if axis == "vocab" else 1)
        return -(-length // unit) * unit

    padded = padded_config(config, mesh)
    return jax.tree.map(pad, get_architecture(config.architecture).weights(padded))


@dataclass(frozen=True)
class Padding:
    """How one array of the public layout becomes the one that runs on a mesh, and back, bit by bit."""

    mesh: Mesh
    public: WeightSpec
    padded: WeightSpec

    @property
    def is_needed(self) -> bool:
        """Whether the two differ."""
        return self.public.shape != self.padded.shape

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Names of the axes by which the array of the public layout is placed.

        Where the axis that devices split has to grow, another that divides is split, so that nobody holds the whole
        array even then. If none does, every device does, until the array has grown.
        """
        if not self.is_needed:
            return self.public.axes
        size = self.mesh.size
        lengths = zip(self.public.shape, self.padded.shape, strict=True)
        even = [i for i, (old, new) in enumerate(lengths) if old == new and old % size == 0]
        return tuple(SPREAD if i in even[:1] else None for i in range(len(self.public.shape)))

    def apply(self, array: jax.Array) -> jax.Array:
        """The array that runs, from that of the public layout placed by `axes`: the same one if nothing is needed."""
        if not self.is_needed:
            return array
        units = _units(self.public, self.padded)
        grown = _take(array, units.sources, units.view, units.axis, self.padded.shape, self._spread)
        return jax.device_put(grown, sharding(self.mesh, *self.padded.axes))

    def undo(self, array: jax.Array) -> jax.Array:
        """The array of the public layout, placed by `axes`."""
        if not self.is_needed:
            return array
        units = _units(self.public, self.padded)
        spread = jax.device_put(array, self._spread)
        return _take(spread, units.places, units.padded_view, units.axis, self.public.shape, self._spread)

    @property
    def _spread(self) -> NamedSharding:
        return sharding(self.mesh, *self.axes)


@dataclass(frozen=True)
class _Units:
    """An array seen as units in a row along one axis (heads, columns, tokens), some of which are taken."""

    view: Shape
    """The shape of the public array with the units along `axis`."""
    axis: int
    sources: np.ndarray
    """For each unit that runs, the public one it is; past the last for zeros."""

    @property
    def padded_view(self) -> Shape:
        return (*self.view[: self.axis], len(self.sources), *self.view[self.axis + 1 :])

    @property
    def places(self) -> np.ndarray:
        """For each public unit, the first place where it runs."""
        units, first = np.unique(self.sources, return_index=True)
        return first[units < self.view[self.axis]].astype(np.int32)


def _units(public: WeightSpec, padded: WeightSpec) -> _Units:
    if public.attention is None or padded.attention is None:
        (axis,) = (i for i, (old, new) in enumerate(zip(public.shape, padded.shape, strict=True)) if old != new)
        sources = np.minimum(np.arange(padded.shape[axis]), public.shape[axis])
        return _Units(public.shape, axis, sources.astype(np.int32))
    head_dim = public.attention.head_dim
    if "kv_heads" in public.axes:
        axis = public.axes.index("kv_heads")
        shape, sources = public.shape[:axis], qkv_sources(public.attention, padded.attention)
        return _Units(
            (*shape, public.attention.num_kv_heads * (public.attention.group_size + 2), head_dim), axis, sources
        )
    axis = public.axes.index("heads")
    num_heads, size = public.attention.num_heads, public.shape[axis]
    shape = (*public.shape[:axis], num_heads, size // num_heads, *public.shape[axis + 1 :])
    return _Units(shape, axis, output_sources(public.attention, padded.attention))


@partial(jax.jit, static_argnames=("view", "axis", "shape", "placed"))
def _take(array: jax.Array, index: jax.Array, view: Shape, axis: int, shape: Shape, placed: NamedSharding) -> jax.Array:
    """Units of an array along one axis of a view of it, as an array of another shape; zeros for those past the last."""
    taken = jnp.take(array.reshape(view), index, axis=axis, mode="fill", fill_value=0)
    return jax.lax.with_sharding_constraint(taken.reshape(shape), placed)
