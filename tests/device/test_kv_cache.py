"""Whole pages are copied, poisoned and moved along the axis the backend declares, and nothing else is touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from quire.device import kv_cache
from quire.device.attention import Backend, get_backend
from quire.device.mesh import ArraySpec, make_mesh
from tests.tiny import tiny_config

NUM_PAGES = 6


Content = list[np.ndarray]


def filled(name: str, num_devices: int) -> tuple[kv_cache.KVCache, Content]:
    """A cache of random numbers, and what is in it page by page."""
    backend, mesh = backend_of(name), make_mesh(jax.devices()[:num_devices])
    size = {"num_pages": NUM_PAGES, "page_size": 4, "dtype": jnp.dtype("float32")}
    cache = kv_cache.create(kv_cache.abstract(backend, tiny_config().attention, **size, mesh=mesh))
    rng = np.random.default_rng(0)
    leaves = [
        jax.device_put((100 * rng.random(leaf.shape)).astype(leaf.dtype), leaf.sharding)
        for leaf in jax.tree.leaves(cache)
    ]
    cache = jax.tree.unflatten(jax.tree.structure(cache), leaves)
    return cache, by_page(cache)


def by_page(cache: kv_cache.KVCache) -> Content:
    arrays = [
        np.moveaxis(np.array(array), axes.index("pages"), 0)
        for layer in cache.layers
        for array, axes in zip(layer.arrays, layer.axes, strict=True)
    ]
    return [*arrays, np.array(cache.tokens_MZ)]


class ThreeArrays:
    """A backend that keeps int8 values, their scales, and flags: each with the pages along another axis."""

    def arrays(self, attention, num_pages, page_size, dtype):
        heads, size = attention.num_kv_heads, attention.head_dim
        return (
            ArraySpec((heads, num_pages, page_size, size), np.dtype(np.int8), ("kv_heads", "pages", None, None)),
            ArraySpec((heads, page_size, num_pages), dtype, ("kv_heads", None, "pages")),
            ArraySpec((num_pages, page_size), np.dtype(np.uint8), ("pages", None)),
        )

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout, attention, sinks_N=None):
        raise NotImplementedError


def backend_of(name: str) -> Backend:
    return ThreeArrays() if name == "three arrays" else get_backend(name)


every_layout = pytest.mark.parametrize("name", ["xla", "reference", "native", "three arrays"])
one_and_two_devices = pytest.mark.parametrize("num_devices", [1, 2])


@every_layout
@one_and_two_devices
def test_pages_are_copied_then_poisoned_and_what_lies_outside_is_dropped(name, num_devices):
    cache, before = filled(name, num_devices)
    cache = jax.jit(kv_cache.copy_pages)(cache, np.array([1, 4, 2], np.int32), np.array([3, 0, NUM_PAGES], np.int32))
    cache = jax.jit(kv_cache.poison_pages)(cache, np.array([5, NUM_PAGES], np.int32))
    for old, new in zip(before, by_page(cache), strict=True):
        np.testing.assert_array_equal(new[[3, 0]], old[[1, 4]])
        np.testing.assert_array_equal(new[[1, 2, 4]], old[[1, 2, 4]])
        assert np.isnan(new[5]).all() if new.dtype == np.float32 else (new[5] == np.array(-1).astype(new.dtype)).all()


@every_layout
def test_bytes_of_a_page(name):
    cache, content = filled(name, num_devices=1)
    counted = kv_cache.page_bytes(
        backend_of(name), tiny_config().attention, page_size=4, dtype=jnp.dtype("float32"), mesh=make_mesh()
    )
    assert (
        counted * NUM_PAGES == sum(array.nbytes for array in content) == sum(x.nbytes for x in jax.tree.leaves(cache))
    )


def test_each_array_lies_on_the_mesh_as_it_was_declared():
    cache, _ = filled("three arrays", num_devices=2)
    layer = kv_cache.placement(cache).layers[1]
    assert [sharding.spec for sharding in layer.arrays] == [
        PartitionSpec("model", None, None, None), PartitionSpec("model", None, None), PartitionSpec(None, None)
    ]  # fmt: skip


@every_layout
@one_and_two_devices
def test_pages_go_to_host_memory_and_come_back_elsewhere(name, num_devices):
    cache, before = filled(name, num_devices)
    host = kv_cache.HostPages(cache, 3)
    pages = np.array([4, 1, 0], np.int32)  # of which two are wanted
    host.store(np.array([2, 0]), jax.jit(kv_cache.read_pages)(cache, pages))
    cache = jax.jit(kv_cache.poison_pages)(cache, np.array([4, 1], np.int32))
    cache = jax.jit(kv_cache.write_pages)(cache, np.array([5, 3, NUM_PAGES], np.int32), host.load(np.array([0, 2, 2])))
    for old, new in zip(before, by_page(cache), strict=True):
        np.testing.assert_array_equal(new[[5, 3]], old[[1, 4]])
        np.testing.assert_array_equal(new[[0, 2]], old[[0, 2]])
