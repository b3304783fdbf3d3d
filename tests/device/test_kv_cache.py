"""Whole pages are copied and poisoned along the axis the backend declares, and nothing else is touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.device import kv_cache
from quire.device.attention import get_backend
from quire.device.mesh import make_mesh
from tests.tiny import tiny_config

NUM_PAGES = 6


@pytest.mark.parametrize("name", ["xla", "reference"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_pages_are_copied_then_poisoned_and_what_lies_outside_is_dropped(name, num_devices):
    backend, mesh = get_backend(name), make_mesh(jax.devices()[:num_devices])
    cache = kv_cache.create(
        backend, tiny_config(), num_pages=NUM_PAGES, page_size=4, dtype=jnp.dtype("float32"), mesh=mesh
    )
    rng = np.random.default_rng(0)
    before = [rng.standard_normal(array.shape).astype(np.float32) for array in jax.tree.leaves(cache)]
    filled = [jax.device_put(x, y.sharding) for x, y in zip(before, jax.tree.leaves(cache), strict=True)]
    cache = jax.tree.unflatten(jax.tree.structure(cache), filled)

    cache = kv_cache.copy_pages(cache, np.array([1, 4, 2], np.int32), np.array([3, 0, NUM_PAGES], np.int32))
    cache = kv_cache.poison_pages(cache, np.array([5, NUM_PAGES], np.int32))

    axis = backend.axes.index("pages")
    for old, new in zip(before, jax.tree.leaves(cache), strict=True):
        old, new = np.moveaxis(old, axis, 0), np.moveaxis(np.asarray(new), axis, 0)
        np.testing.assert_array_equal(new[[3, 0]], old[[1, 4]])
        np.testing.assert_array_equal(new[[1, 2, 4]], old[[1, 2, 4]])
        assert np.isnan(new[5]).all()
