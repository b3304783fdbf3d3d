"""How many pages a budget buys: never more than it holds, never more than could be used, never none."""

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import engine_config
from quire.device import memory
from quire.device.mesh import make_mesh
from quire.engine.pool_size import default_pool_bytes, host_pages, pool_pages
from tests.tiny import tiny_config, tiny_llm

MODEL = tiny_config(max_len=64)
PAGE_BYTES = 16 * (2 * 2 * 2 * 8 * 4 + 4)
"""16 tokens: K and V, two layers, two heads of eight, float32; and an id of four bytes."""


def pages(budget: int, **knobs) -> int:
    config = engine_config(dtype="float32", page_size=16, memory_budget=budget, max_num_batched_tokens=4096, **knobs)
    return pool_pages(config, MODEL.max_len, page_bytes=PAGE_BYTES, default_budget=0)


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


@pytest.mark.parametrize("attention", ["auto", "xla", "reference"])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_bytes_of_a_page_are_those_that_the_pool_takes_for_it(attention, num_devices):
    with tiny_llm(MODEL, num_devices, attention=attention, page_size=16, num_pages=12) as llm:
        cache = llm.engine.runner.create_cache(12)
    knobs = {"dtype": "float32", "page_size": 16, "attention": attention}
    assert memory.page_bytes(MODEL, mesh=make_mesh(), **knobs) == PAGE_BYTES
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) == 12 * PAGE_BYTES


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
