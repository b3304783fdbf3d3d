"""Pages can be looked at: the map, the readings, the audit; and zeroing is something one asks for."""

import jax
import numpy as np
import pytest

from quire import AuditError, SamplingParams
from quire.core.request import Request
from quire.testing import fake_engine
from tests.tiny import tiny_llm


def request(i, prompt, **params) -> Request:
    params = {"max_tokens": 20, "ignore_eos": True, "seed": 1} | params
    return Request(id=i, prompt_token_ids=tuple(prompt), params=SamplingParams(**params))


def engine_with_everything(windows=(None,)):
    """Two that share a page, one swapped, one cached prefix of somebody gone."""
    engine = fake_engine(num_pages=16, page_size=4, num_host_pages=4, vocab_size=50, windows=windows)
    engine.add(request("gone", range(30, 39), max_tokens=1))
    engine.step()
    engine.add(request("pair", range(1, 7), n=2))
    (out,) = engine.add(request("out", range(11, 16)))
    for _ in range(3):
        engine.step()
    engine.scheduler.preempt(out, swap=True)
    return engine


def test_the_map_tells_owner_refcount_fill_hash_and_tier():
    engine = engine_with_everything()
    pages = engine.page_map()
    assert len(pages) == 16 + 4
    shared = [page for page in pages if len(page.owners) == 2]
    assert [(page.owners, page.refcount, page.fill, page.tier) for page in shared] == [
        (("pair/0", "pair/1"), 3, 4, "device")  # two sequences and the prefix cache
    ]
    assert len(shared[0].hash or "") == 64
    cached = [page for page in pages if page.hash and not page.owners]
    assert len(cached) >= 2
    swapped = [page for page in pages if page.tier == "host" and page.owners]
    assert [(page.owners, page.fill) for page in swapped] == [(("out/0",), 4), (("out/0",), 3)]
    last = [page for page in pages if page.owners == ("pair/1",)][-1]
    assert (last.refcount, last.fill, last.hash is not None) == (2, 4, True), "full, and published"


def test_usage_is_that_of_the_fullest_pool():
    engine = fake_engine(num_pages=16, page_size=4, vocab_size=50, windows=(None, 3), window_pages=(10,))
    assert engine.stats().usage_ratio == 0
    engine.add(request("one", range(1, 15)))
    for _ in range(3):
        engine.step()
    (one,) = engine.scheduler.running
    assert engine.stats().usage_ratio == len(one.pages) / 16 > len(one.windows[0].pages) / 10
    held = engine.scheduler.tables.windows[0].allocate(8)
    assert engine.stats().usage_ratio == (len(one.windows[0].pages) + 8) / 10
    engine.scheduler.tables.windows[0].drop(held)


def test_the_map_as_text_is_a_grid_with_a_legend():
    text = str(engine_with_everything().page_map())
    lines = text.splitlines()
    assert lines[0] == "device: 16 pages of 4 tokens"
    grid = lines[1].split()[1]
    assert len(grid) == 16
    assert {"#", "_", "."} <= set(grid)
    assert "host: 4 pages of 4 tokens" in lines
    assert any(line.startswith(". free") for line in lines)
    assert any(line.endswith(" pair") for line in lines)


def test_the_seeds_checks_are_readings():
    engine = engine_with_everything()
    stats = engine.stats()
    assert stats.free_pages + stats.cached_pages + stats.held_pages == stats.num_pages
    assert stats.table_pages == stats.expected_table_pages == sum(len(s.pages) for s in engine.scheduler.running)
    assert (stats.min_refcount, stats.max_refcount, stats.leaked_pages) == (0, 3, 0)
    assert (stats.swapped, stats.num_host_pages - stats.free_host_pages) == (1, 2)
    engine.reset()
    stats = engine.stats()
    assert (stats.held_pages, stats.table_pages, stats.free_host_pages) == (0, 0, 4)


def lose_a_page(engine):
    engine.scheduler.running[0].pages.pop()


def hold_one_more(engine):
    engine.scheduler.tables.pool.allocator.retain([engine.scheduler.running[0].pages[0]])


def forget_a_sequence(engine):
    engine.scheduler.running.pop()


def swap_two_owners(engine):
    a, b = engine.scheduler.running
    a.pages[-1], b.pages[-1] = b.pages[-1], b.pages[-1]


def free_a_cached_page(engine):
    cache = engine.scheduler.tables.pool.prefix_cache
    engine.scheduler.tables.pool.allocator.release([next(iter(cache._idle))])


def publish_a_partial_page(engine):
    sequence = engine.scheduler.running[0]
    engine.scheduler.tables.pool.prefix_cache.publish(b"x", sequence.pages[-1])


def lose_a_host_page(engine):
    next(iter(engine.scheduler.waiting)).host_pages.pop()


@pytest.mark.parametrize(
    "damage",
    [lose_a_page, hold_one_more, forget_a_sequence, swap_two_owners, free_a_cached_page, publish_a_partial_page,
     lose_a_host_page],
)  # fmt: skip
def test_the_audit_finds_damage(damage):
    engine = engine_with_everything()
    engine.step()  # the swapped one comes back
    engine.scheduler.preempt(engine.scheduler.running[-1], swap=True)
    engine.audit()
    damage(engine)
    with pytest.raises(AuditError, match=r"page|sequence"):
        engine.audit()


def test_a_leak_shows_in_the_readings():
    engine = engine_with_everything()
    held = engine.scheduler.tables.pool.allocator.allocate(2)
    assert engine.stats().leaked_pages == 2
    engine.scheduler.tables.pool.allocator.release(held)
    assert engine.stats().leaked_pages == 0


def test_zeroing_loses_nothing_that_is_on_its_way_to_the_host():
    engine = fake_engine(vocab_size=50)
    (sequence,) = engine.add(request("r", range(1, 7)))
    engine.step()
    engine.step()
    engine.scheduler.preempt(sequence, swap=True)
    engine.zero_cache()
    engine.audit()
    while engine.has_work:
        engine.step()
    assert sequence.num_output == 20


def test_zeroing_is_explicit_and_only_when_nothing_is_held():
    with tiny_llm() as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        before = llm.generate([[5, 6, 7, 8, 9]], params, progress=False)[0]
        engine = llm.engine
        engine.add(request("r", [1, 2, 3]))
        engine.step()
        with pytest.raises(RuntimeError, match=r"1 sequences hold pages; abort them, or reset\(\) first"):
            engine.zero_cache()
        engine.reset()
        assert engine.stats().cached_pages > 0
        engine.zero_cache()
        assert engine.stats().cached_pages == 0, "what is zeroed cannot be found"
        assert all(not np.asarray(array).any() for array in jax.tree.leaves(engine.runner._caches))
        after = llm.generate([[5, 6, 7, 8, 9]], params, progress=False)[0]
        assert (after.num_cached_tokens, after.outputs[0].token_ids) == (0, before.outputs[0].token_ids)


def test_a_reset_keeps_what_is_cached_and_clearing_forgets_it():
    engine = engine_with_everything()
    engine.reset()
    cached = engine.stats().cached_pages
    assert cached > 0
    assert engine.clear_prefix_cache() == cached
    assert engine.stats().free_pages == engine.stats().num_pages
    engine.audit()
