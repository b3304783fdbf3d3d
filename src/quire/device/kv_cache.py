"""The KV arrays on the device: created once, donated to every program, never cleared.

Their layout belongs to the attention backend, which declares the arrays of each layer. Here whole pages are copied,
poisoned and moved to and from host memory along each array's page axis, and nothing else is indexed. Beside its KV a
page carries the ids of its tokens, so that wherever a page goes, what a sequence has seen goes with it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import Array, Int

from quire.config import AttentionConfig
from quire.device import native
from quire.device.attention import Backend, LayerKV
from quire.device.mesh import ArraySpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One pool of pages. (A pytree may hold other things than arrays: hence no narrower types.)"""

    layers: Any
    """A `LayerKV` for each layer of the pool."""
    tokens_MZ: Any
    """The token id at each place; only valid where KV is. None in a pool of layers that see only a window."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        if self.tokens_MZ is not None:
            return self.tokens_MZ.shape[0]
        layer = self.layers[0]
        return layer.arrays[0].shape[layer.axes[0].index("pages")]


Caches = tuple[KVCache, ...]
"""Every pool of a model: first that of the layers which see every position, then one for each window."""


def abstract(
    backend: Backend,
    layers: Sequence[AttentionConfig],
    *,
    num_pages: int,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    has_tokens: bool = True,
) -> KVCache:
    """The shape, type and placement of every array of a pool with these layers, in the place of the array."""

    def layer(attention: AttentionConfig) -> LayerKV:
        specs = backend.arrays(attention, num_pages, page_size, dtype)
        return LayerKV(tuple(spec.on(mesh) for spec in specs), tuple(spec.axes for spec in specs))

    tokens_MZ = ArraySpec((num_pages, page_size), np.dtype(np.int32), (None, None)).on(mesh) if has_tokens else None
    return KVCache([layer(attention) for attention in layers], tokens_MZ)


def create(schema: KVCache) -> KVCache:
    """Allocate a pool as `abstract` describes it, with anything in its pages.

    On one CPU device, with the native library, nothing is written: the system gives memory to a page when its first
    token comes, where clearing all of them would take seconds at start.
    """
    return jax.tree.map(lambda array: _allocator(array.shape, array.dtype, array.sharding)(), schema)


def is_committed_late(mesh: Mesh) -> bool:
    """True if the memory of a pool on this mesh is taken as tokens come, and not at once: see `create`."""
    return native.unavailable_reason_on(mesh) is None


def create_zeros(schema: KVCache) -> KVCache:
    """Allocate a pool as `abstract` describes it, with zeros in its pages."""
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), schema)


@functools.cache
def _allocator(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> Callable[[], jax.Array]:
    assert isinstance(sharding.mesh, Mesh)
    if not is_committed_late(sharding.mesh):
        return functools.partial(jnp.zeros, shape, dtype, device=sharding)
    allocate = jax.ffi.ffi_call("quire_allocate", jax.ShapeDtypeStruct(shape, dtype))
    return jax.jit(allocate, out_shardings=sharding)


def placement[T: (KVCache, Caches)](cache: T) -> T:
    """Where the arrays of pools, or of what `abstract` made, live: in the place of the arrays."""
    return jax.tree.map(lambda array: array.sharding, cache)


def page_bytes(
    backend: Backend,
    layers: Sequence[AttentionConfig],
    *,
    page_size: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    has_tokens: bool = True,
) -> int:
    """Bytes of one page on each device: its share of the KV in these layers, and the ids of its tokens."""
    specs = [spec for attention in layers for spec in backend.arrays(attention, 1, page_size, dtype)]
    kv_bytes = sum(spec.bytes_per_device(mesh) for spec in specs)
    return kv_bytes + has_tokens * page_size * np.dtype(np.int32).itemsize


def copy_pages(cache: KVCache, source_C: Int[Array, " C"], target_C: Int[Array, " C"]) -> KVCache:
    """Copy whole pages in every layer; a target outside the pool is dropped."""
    return _map(lambda array, axis: _put(array, axis, target_C, _take(array, axis, source_C)), cache)


def poison_pages(cache: KVCache, pages_C: Int[Array, " C"]) -> KVCache:
    """Fill pages with NaN, or -1 in arrays of integers; a page outside the pool is dropped."""

    def poison(array: jax.Array, axis: int) -> jax.Array:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return _put(array, axis, pages_C, np.nan if is_float else np.array(-1).astype(array.dtype))

    return _map(poison, cache)


def read_pages(cache: KVCache, pages_C: Int[Array, " C"]) -> KVCache:
    """Whole pages, in every layer, out of the pool. A page outside it reads as some other."""
    return _map(lambda array, axis: _take(array, axis, pages_C), cache)


def write_pages(cache: KVCache, pages_C: Int[Array, " C"], content: KVCache) -> KVCache:
    """Put whole pages back; a page outside the pool is dropped."""
    return _map(lambda array, axis, pages: _put(array, axis, pages_C, pages), cache, content)


class HostPages:
    """Pages in host memory, in the layout of the pool. Memory is taken as pages are first used.

    Each process keeps what its own devices hold of them: of an array that is split, its parts; of one that every device
    has, one copy.
    """

    def __init__(self, cache: KVCache, num_pages: int) -> None:
        self.num_pages = num_pages

        def room(array: jax.Array, axis: int) -> _HostArray:
            shapes = {_place(shard.index, axis): shard.data.shape for shard in array.addressable_shards}
            parts = {
                place: np.empty((*shape[:axis], num_pages, *shape[axis + 1 :]), array.dtype)
                for place, shape in shapes.items()
            }
            return _HostArray(array.shape, array.sharding, parts)

        self._arrays = _map(room, cache)
        self.num_bytes = sum(
            part.nbytes
            for array in jax.tree.leaves(self._arrays, is_leaf=lambda leaf: isinstance(leaf, _HostArray))
            for part in array.parts.values()
        )
        """Bytes of all pages."""

    def store(self, pages: np.ndarray, content: KVCache) -> None:
        """Keep the first `len(pages)` pages of a `read_pages`."""

        def keep(array: _HostArray, axis: int, value: jax.Array) -> None:
            values = {_place(shard.index, axis): shard.data for shard in value.addressable_shards}
            for place, part in values.items():
                array.parts[place][_index(axis, pages)] = np.asarray(part)[_index(axis, slice(len(pages)))]

        _map(keep, self._arrays, content)

    def load(self, pages: np.ndarray) -> KVCache:
        """What is kept, as `write_pages` takes it."""

        def fetch(array: _HostArray, axis: int) -> jax.Array:
            shape = (*array.shape[:axis], len(pages), *array.shape[axis + 1 :])
            return jax.make_array_from_callback(
                shape, array.sharding, lambda index: array.parts[_place(index, axis)][_index(axis, pages)]
            )

        return _map(fetch, self._arrays)


class _HostArray(NamedTuple):
    """What a process keeps of the pages of one array."""

    shape: tuple[int, ...]
    """Of the array in the pool."""
    sharding: Sharding
    parts: dict[tuple[slice, ...], np.ndarray]
    """By the place that a part has in the array, along the axes that are not that of pages."""


def _place(index: Any, page_axis: int) -> tuple[slice, ...]:
    return (*index[:page_axis], *index[page_axis + 1 :])


def _map(function: Callable, cache: KVCache, *others: KVCache) -> KVCache:
    """Apply `function(array, page axis, other arrays...)` to every array of the cache."""

    def map_layer(layer: LayerKV, *same: LayerKV) -> LayerKV:
        page_axes = [axes.index("pages") for axes in layer.axes]
        arrays = zip(layer.arrays, page_axes, *(other.arrays for other in same), strict=True)
        return LayerKV(tuple(function(*args) for args in arrays), layer.axes)

    layers = [map_layer(*same) for same in zip(cache.layers, *(other.layers for other in others), strict=True)]
    ids = None if cache.tokens_MZ is None else function(cache.tokens_MZ, 0, *(other.tokens_MZ for other in others))
    return KVCache(layers, ids)


def _take(array: jax.Array, axis: int, pages_C: jax.Array) -> jax.Array:
    return jnp.take(array, pages_C, axis=axis, mode="clip")


def _put(array: jax.Array, axis: int, pages_C: jax.Array, content: Any) -> jax.Array:
    return array.at[_index(axis, pages_C)].set(content, mode="drop")


def _index(axis: int, index: Any) -> tuple:
    return (slice(None),) * axis + (index,)
