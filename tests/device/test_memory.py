"""How many pages a budget buys: never more than it holds, never more than could be used, never none."""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import SamplingParams
from quire.config import engine_config
from quire.device import kv_cache, memory, native
from quire.device.attention import get_backend
from quire.device.mesh import make_mesh
from quire.device.models.padding import padded_config
from quire.engine.pool_size import default_pool_bytes, host_pages, pool_pages
from tests.effort import nightly
from tests.tiny import tiny_config, tiny_llm

MODEL = tiny_config(max_len=64)
PAGE_BYTES = 16 * (2 * 2 * 2 * 8 * 4 + 4)
"""16 tokens: K and V, two layers, two heads of eight, float32; and an id of four bytes."""


def pages(budget: int, **knobs) -> int:
    config = engine_config(dtype="float32", page_size=16, max_num_batched_tokens=4096, memory_budget=budget, **knobs)
    (count,) = pool_pages(config, MODEL.max_len, page_bytes=[PAGE_BYTES], budget=budget)
    return count


@given(st.integers(PAGE_BYTES, 5000 * PAGE_BYTES))
def test_a_budget_is_kept_and_hardly_any_of_it_wasted(budget):
    count = pages(budget, max_num_seqs=4096)
    assert count * PAGE_BYTES <= budget
    assert count >= budget // PAGE_BYTES * 7 // 8


def test_budgets_that_are_close_make_the_same_programs():
    assert pages(1000 * PAGE_BYTES, max_num_seqs=4096) == pages(1020 * PAGE_BYTES, max_num_seqs=4096)


def test_no_more_pages_than_every_row_at_full_length_could_use():
    assert pages(1 << 30, max_num_seqs=8) == 8 * 64 // 16


def test_a_budget_without_room_for_a_page_says_so():
    with pytest.raises(ValueError, match=rf"memory_budget={PAGE_BYTES - 1:,} bytes holds no page of {PAGE_BYTES:,}"):
        pages(PAGE_BYTES - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "num_devices"),
    [
        ("auto", 1),
        nightly("xla", 2),
        nightly("reference", 1),
    ],
)
def test_bytes_of_a_page_are_those_that_the_pool_takes_for_it(attention, num_devices):
    with tiny_llm(MODEL, num_devices, attention=attention, page_size=16, num_pages=12, max_num_seqs=1) as llm:
        cache = llm.engine.runner.create_cache(12)
    devices = jax.devices()[:num_devices]
    counted = memory.page_bytes(MODEL, mesh=make_mesh(devices), dtype="float32", page_size=16, attention=attention)
    assert counted == PAGE_BYTES + (num_devices - 1) * 16 * 4, "each device has the ids of all tokens"
    assert {device: bytes_on(device, cache) for device in devices} == dict.fromkeys(
        devices, 12 * counted // num_devices
    )


def bytes_on(device: jax.Device, cache) -> int:
    shards = [shard for array in jax.tree.leaves(cache) for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize("attention", ["xla", "reference", "native"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_devices", "kv_heads_each"),
    [(9, 3, 2, 2), (9, 3, 4, 1), (4, 2, 4, 1), (4, 1, 4, 1), (10, 5, 4, 2)],
)
def test_padded_and_repeated_heads_take_pages_too(attention, heads, kv_heads, num_devices, kv_heads_each):
    config, devices = tiny_config(num_heads=heads, num_kv_heads=kv_heads), jax.devices()[:num_devices]
    mesh = make_mesh(devices)
    backend = get_backend(attention)
    size = {"num_pages": 12, "page_size": 4, "dtype": jnp.dtype("float32")}
    cache = kv_cache.create(kv_cache.abstract(backend, padded_config(config, mesh).attention, **size, mesh=mesh))
    expected = 12 * 4 * (2 * 2 * kv_heads_each * 8 * 4 + 4)
    assert {bytes_on(device, cache) for device in devices} == {expected}
    page_bytes = memory.page_bytes(config, mesh=mesh, dtype="float32", page_size=4, attention=attention)
    assert 12 * page_bytes == num_devices * expected


def own_bytes() -> int:
    """Memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_a_pool_takes_memory_as_tokens_come():
    before = own_bytes()
    config = tiny_config(num_kv_heads=8, num_heads=8, head_dim=64)
    size = {"num_pages": 1 << 12, "page_size": 16, "dtype": jnp.dtype("float32"), "mesh": make_mesh()}
    cache = jax.block_until_ready(kv_cache.create(kv_cache.abstract(get_backend("native"), config.attention, **size)))
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) > 512 << 20
    assert own_bytes() - before < 128 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        ("xla", "float32"), ("native", "bfloat16"),
        nightly("reference", "float32"), nightly("xla", "bfloat16"), nightly("native", "float32"),
    ],
)  # fmt: skip
def test_what_is_in_new_pages_does_not_matter(attention, dtype, monkeypatch):
    def fill(array):
        value = np.nan if jnp.issubdtype(array.dtype, jnp.floating) else 5  # a token that there is
        return jnp.full(array.shape, value, array.dtype, device=array.sharding)

    def tokens() -> list:
        params = SamplingParams(max_tokens=12, temperature=0, n=2, repetition_penalty=1.3)
        outputs = llm.generate([[1, 2, 3, 4, 6, 7], [9, 8]], params)
        return [one.token_ids for output in outputs for one in output.outputs]

    with tiny_llm(attention=attention, dtype=dtype) as llm:
        llm.engine.zero_cache()
        expected = tokens()
        monkeypatch.setattr(kv_cache, "create_zeros", lambda schema: jax.tree.map(fill, schema))
        llm.engine.zero_cache()
        assert tokens() == expected


def test_a_share_of_what_is_free():
    assert default_pool_bytes(100 << 20, is_host_memory=True) == 25 << 20
    assert default_pool_bytes(100 << 30, is_host_memory=True) == 4 << 30
    assert default_pool_bytes(100 << 30, is_host_memory=False) == 85 << 30
    assert memory.is_host_memory(make_mesh())
    assert 0 < memory.available_bytes(make_mesh()) < 1 << 50


def test_host_pages():
    def count(**knobs):
        config = engine_config(dtype="float32", page_size=16, **knobs)
        return host_pages(config, 100, page_bytes=PAGE_BYTES, available_bytes=400 * PAGE_BYTES)

    assert count() == 50
    assert count(num_pages=100) == 50
    assert count(num_host_pages=7) == 7
    assert count(preemption="recompute") == 0
