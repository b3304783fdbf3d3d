"""The KV arrays on the device: created once, donated to every program, never cleared.

Their layout belongs to the attention backend. Here whole pages are copied or poisoned along the page axis that the
backend declares, and nothing else is indexed.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from quire.config import ModelConfig
from quire.device.attention import Backend
from quire.device.mesh import sharding

Layer = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One tuple of arrays for each layer. (A pytree may hold other things than arrays: hence no narrower type.)"""

    layers: list[Any]
    page_axis: int = field(metadata={"static": True})


def create(
    backend: Backend, model: ModelConfig, *, num_pages: int, page_size: int, dtype: jnp.dtype, mesh: Mesh
) -> KVCache:
    """Allocate the pool. The only time its bytes are written without a token."""
    shape = backend.shape(model, num_pages, page_size)
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding(mesh, *backend.axes))
    layers = [tuple(zeros() for _ in range(2)) for _ in range(model.num_layers)]
    return KVCache(layers=layers, page_axis=backend.axes.index("pages"))


@partial(jax.jit, donate_argnums=0)
def copy_pages(cache: KVCache, source_C: Int[Array, " C"], target_C: Int[Array, " C"]) -> KVCache:
    """Copy whole pages in every layer. Donates the cache; a target outside the pool is dropped."""

    def copy(array: jax.Array) -> jax.Array:
        pages = jnp.take(array, source_C, axis=cache.page_axis, mode="clip")
        return _at(array, cache.page_axis, target_C).set(pages, mode="drop")

    return jax.tree.map(copy, cache)


@partial(jax.jit, donate_argnums=0)
def poison_pages(cache: KVCache, pages_C: Int[Array, " C"]) -> KVCache:
    """Fill pages with NaN in every layer. Donates the cache; a page outside the pool is dropped."""
    return jax.tree.map(lambda array: _at(array, cache.page_axis, pages_C).set(jnp.nan, mode="drop"), cache)


def _at(array: jax.Array, axis: int, index: jax.Array):
    return array.at[(slice(None),) * axis + (index,)]
