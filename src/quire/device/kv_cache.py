"""The KV arrays on the device: created once, donated to every program, never cleared.

Their layout belongs to the attention backend. Here whole pages are copied, poisoned and moved to and from host memory
along the page axis that the backend declares, and nothing else is indexed. Beside its KV a page carries the ids of its
tokens, so that wherever a page goes, what a sequence has seen goes with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from quire.config import ModelConfig
from quire.device.attention import Backend
from quire.device.inputs import INVALID
from quire.device.mesh import sharding

Layer = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One tuple of arrays for each layer. (A pytree may hold other things than arrays: hence no narrower type.)"""

    layers: Any
    tokens_MZ: Any
    """The token id at each place; only valid where KV is."""
    page_axis: int = field(metadata={"static": True})
    """Of the layers' arrays."""


def create(
    backend: Backend, model: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype, mesh: Mesh
) -> KVCache:
    """Allocate the pool. The only time its bytes are written without a token."""
    shapes = backend.shapes(model, num_pages, page_size, dtype)
    placed = sharding(mesh, *backend.axes)
    zeros = jax.jit(lambda: tuple(jnp.zeros(shape, dtype) for shape in shapes), out_shardings=placed)
    layers = [zeros() for _ in range(model.num_layers)]
    tokens_MZ = jax.device_put(np.zeros((num_pages, page_size), np.int32), sharding(mesh))
    return KVCache(layers, tokens_MZ, page_axis=backend.axes.index("pages"))


def placement(backend: Backend, mesh: Mesh) -> KVCache:
    """Where the arrays live, in the place of the arrays."""
    kv = sharding(mesh, *backend.axes)
    return KVCache(kv, sharding(mesh), page_axis=backend.axes.index("pages"))


@partial(jax.jit, donate_argnums=0)
def copy_pages(cache: KVCache, source_C: Int[Array, " C"], target_C: Int[Array, " C"]) -> KVCache:
    """Copy whole pages in every layer. Donates the cache; a target outside the pool is dropped."""
    return _map(lambda array, axis: _put(array, axis, target_C, _take(array, axis, source_C)), cache)


@partial(jax.jit, donate_argnums=0)
def poison_pages(cache: KVCache, pages_C: Int[Array, " C"]) -> KVCache:
    """Fill pages with NaN in every layer. Donates the cache; a page outside the pool is dropped."""

    def poison(array: jax.Array, axis: int) -> jax.Array:
        return _put(array, axis, pages_C, jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else INVALID)

    return _map(poison, cache)


@jax.jit
def read_pages(cache: KVCache, pages_C: Int[Array, " C"]) -> KVCache:
    """Whole pages, in every layer, out of the pool. A page outside it reads as some other."""
    return _map(lambda array, axis: _take(array, axis, pages_C), cache)


@partial(jax.jit, donate_argnums=0)
def write_pages(cache: KVCache, pages_C: Int[Array, " C"], content: KVCache) -> KVCache:
    """Put whole pages back. Donates the cache; a page outside the pool is dropped."""
    return _map(lambda array, axis, pages: _put(array, axis, pages_C, pages), cache, content)


class HostPages:
    """Pages in host memory, in the layout of the pool. Memory is taken as pages are first used."""

    def __init__(self, cache: KVCache, num_pages: int) -> None:
        self.num_pages = num_pages

        def room(array: jax.Array, axis: int) -> np.ndarray:
            return np.empty((*array.shape[:axis], num_pages, *array.shape[axis + 1 :]), array.dtype)

        self._arrays = _map(room, cache)

    def store(self, pages: np.ndarray, content: KVCache) -> None:
        """Keep the first `len(pages)` pages of a `read_pages`."""

        def keep(array: np.ndarray, axis: int, value: jax.Array) -> None:
            array[_index(axis, pages)] = np.asarray(value)[_index(axis, slice(len(pages)))]

        _map(keep, self._arrays, content)

    def load(self, pages: np.ndarray) -> KVCache:
        """What is kept, as `write_pages` takes it."""
        return _map(lambda array, axis: array[_index(axis, pages)], self._arrays)


def _map(function: Callable, cache: KVCache, *others: KVCache) -> KVCache:
    """Apply `function(array, page axis, other arrays...)` to every array of the cache."""
    layers = jax.tree.map(
        lambda *arrays: function(arrays[0], cache.page_axis, *arrays[1:]), cache.layers, *(o.layers for o in others)
    )
    return KVCache(layers, function(cache.tokens_MZ, 0, *(o.tokens_MZ for o in others)), cache.page_axis)


def _take(array: jax.Array, axis: int, pages_C: jax.Array) -> jax.Array:
    return jnp.take(array, pages_C, axis=axis, mode="clip")


def _put(array: jax.Array, axis: int, pages_C: jax.Array, content: Any) -> jax.Array:
    return array.at[_index(axis, pages_C)].set(content, mode="drop")


def _index(axis: int, index: Any) -> tuple:
    return (slice(None),) * axis + (index,)
