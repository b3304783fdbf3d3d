"""How many pages a budget buys: never more than it holds, never more than could be used, never none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import engine_config
from quire.device.mesh import make_mesh
from quire.engine.pool_size import host_pages, pool_pages
from tests.tiny import tiny_config

MODEL = tiny_config(max_len=64)
MESH = make_mesh()
PAGE_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""16 tokens, K and V, two layers, two heads of eight, float32."""


def pages(budget: int, **knobs) -> int:
    config = engine_config(dtype="float32", page_size=16, memory_budget=budget, max_num_batched_tokens=4096, **knobs)
    return pool_pages(config, MODEL, MODEL.max_len, MESH)


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


def test_host_pages():
    def count(**knobs):
        return host_pages(engine_config(dtype="float32", page_size=16, **knobs), MODEL, 100)

    assert count() == 50
    assert count(num_host_pages=7) == 7
    assert count(preemption="recompute") == 0
