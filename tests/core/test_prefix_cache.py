"""Which pages are found, when, by whom, and in which order they are given up: exact page ids, no device."""

import pytest

from quire.core.audit import audit
from quire.core.prefix_cache import page_hash, page_root
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence, Weights
from tests.core.fake import prefix_cache_of, result, run, scheduler


def sequence(tokens, arrival=1, max_tokens=1, salt="", priority=0, **params) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, **params)
    request = Request(
        id=f"r{arrival}", prompt_token_ids=tuple(tokens), params=params, cache_salt=salt, priority=priority
    )
    return Sequence(request, index=0, arrival=arrival, seed=0, max_tokens=max_tokens)


def cached(num_pages=8, **more):
    return scheduler(num_pages=num_pages, page_size=4, rows=4, budget=64, prefix_cache=True, **more)


def finish(s, *sequences):
    for one in sequences:
        s.add(one)
    run(s)


def test_a_second_prompt_shares_the_full_pages_and_computes_the_rest():
    s = cached()
    finish(s, sequence(range(10)))
    second = sequence([*range(8), 50, 51, 52], 2)
    s.add(second)
    plan = s.schedule()
    assert list(second.pages) == [0, 1, 2]
    assert [(row.first, row.num_tokens) for row in plan.rows] == [(8, 3)]
    assert second.num_cached_tokens == 8
    assert s.tables.pool.allocator.refcounts[:3].tolist() == [2, 2, 1]
    s.commit(plan, result(plan))
    audit(s)


def test_the_last_token_is_always_computed():
    s = cached()
    finish(s, sequence(range(8)))
    again = sequence(range(8), 2)
    s.add(again)
    plan = s.schedule()
    assert [(row.first, row.num_tokens) for row in plan.rows] == [(4, 4)]
    s.commit(plan, result(plan))
    assert s.tables.pool.num_cached == 2, "the recomputed page was the same one: there are no two of it"


def test_a_page_is_not_visible_before_its_step_is_committed():
    s = cached()
    s.add(sequence(range(9), max_tokens=3))
    plan = s.schedule()
    assert prefix_cache_of(s).num_pages == 0
    late = sequence(range(9), 2)
    s.add(late)
    assert s.tables.find_prefix(late).pages == []
    s.commit(plan, result(plan))
    assert s.tables.find_prefix(late).pages == [0, 1]


def test_partial_pages_and_the_token_just_drawn_are_never_published():
    s = cached()
    first = sequence(range(7), max_tokens=3)
    s.add(first)
    plan = s.schedule()
    s.commit(plan, result(plan))  # seven computed, the eighth drawn: one page is full
    assert prefix_cache_of(s).num_pages == 1
    plan = s.schedule()
    s.commit(plan, result(plan))
    assert prefix_cache_of(s).num_pages == 2


def test_generated_tokens_are_found_too():
    s = cached()
    finish(s, sequence(range(6), max_tokens=7))  # computes 12 positions, tokens 6..11 are 7
    follow_up = sequence([*range(6), *[7] * 6, 1, 2], 2)
    assert s.tables.find_prefix(follow_up).num_tokens == 12


@pytest.mark.parametrize(
    ("salt", "weights", "found"),
    [("", (0, 0), 8), ("b", (0, 0), 0), ("", (1, 0), 0), ("", ("0", 0), 0), ("", (0, 1), 0)],
)
def test_only_the_same_salt_and_weights_find_a_page(salt, weights, found):
    s = cached()
    finish(s, sequence(range(9)))
    s.tables.weights = Weights(*weights)
    assert s.tables.find_prefix(sequence(range(9), 2, salt=salt)).num_tokens == found


@pytest.mark.parametrize("changes", [0, 1])
def test_a_swapped_sequence_takes_its_first_pages_from_the_cache_only_under_the_weights_that_computed_it(changes):
    s = cached(num_host_pages=8)
    s.max_num_seqs = 1
    swapped, first = sequence(range(9), 1, max_tokens=4), sequence(range(9), 2, priority=1)
    s.add(swapped)
    plan = s.schedule()
    s.commit(plan, result(plan))
    s.preempt(swapped, swap=True)
    s.tables.pool.evict(8)
    for change in range(changes):
        s.set_version(change + 1, running="keep")
    s.add(first)
    plan = s.schedule()
    assert [row.sequence for row in plan.rows] == [first]
    s.commit(plan, result(plan))
    known = s.tables.find_prefix(sequence(range(9), 3)).pages
    assert len(known) == 2
    plan = s.schedule()
    assert [row.sequence for row in plan.rows] == [swapped]
    assert len(plan.operations[0].swap_ins) == (3 if changes else 1)
    assert (list(swapped.pages)[:2] == known) == (not changes)
    s.commit(plan, result(plan))
    audit(s)


def test_the_chain_is_over_everything_before():
    zero = Weights(0, 0)
    root = page_root(4, "", zero)
    assert len({root, page_root(4, "x", zero), page_root(4, "", Weights(1, 1)), page_root(8, "", zero)}) == 4
    first, other = page_hash(root, [1, 2, 3, 4]), page_hash(root, [1, 2, 3, 5])
    assert first != other
    assert page_hash(first, [9, 9, 9, 9]) != page_hash(other, [9, 9, 9, 9])
    assert len(first) == 32


def test_least_recently_used_goes_first_and_leaves_before_parents():
    s = cached()
    finish(s, sequence(range(9), 1))  # pages 0, 1 known
    finish(s, sequence(range(50, 59), 2))
    old, new = [0, 1], s.tables.find_prefix(sequence(range(50, 59), 9)).pages
    assert s.tables.find_prefix(sequence(range(9), 9)).pages == old
    finish(s, sequence(range(9), 3))  # the older prefix is used again
    order = [prefix_cache_of(s).evict(1)[0] for _ in range(4)]
    assert order == [new[1], new[0], 1, 0]


def test_a_parent_outlives_every_child_even_when_children_end_at_different_times():
    s = cached(num_pages=16)
    shared = list(range(4))
    finish(s, sequence([*shared, 10, 11, 12, 13, 14], 1))
    finish(s, sequence([*shared, 20, 21, 22, 23, 24], 2))
    parent = s.tables.find_prefix(sequence([*shared, 0], 9)).pages
    order = [prefix_cache_of(s).evict(1)[0] for _ in range(3)]
    assert order[-1:] == parent


def test_pages_of_two_who_computed_the_same_at_once_become_one():
    s = cached()
    a, b = sequence(range(9), 1, max_tokens=3), sequence(range(9), 2, max_tokens=3)
    s.add(a)
    s.add(b)
    plan = s.schedule()
    assert (list(a.pages), list(b.pages)) == ([0, 1, 2], [3, 4, 5])
    s.commit(plan, result(plan))
    audit(s)
    assert (list(a.pages), list(b.pages)) == ([0, 1, 2], [0, 1, 5])
    assert s.tables.pool.allocator.num_free == 4


def test_prompt_log_probabilities_do_not_read_the_cache_and_feed_it():
    s = cached(max_num_samples=64)
    finish(s, sequence(range(9), 1, prompt_logprobs=True))
    assert s.tables.find_prefix(sequence(range(9), 2)).num_tokens == 8
    scored = sequence(range(9), 3, prompt_logprobs=True)
    assert s.tables.find_prefix(scored).num_tokens == 0
    finish(s, scored)
    assert len(scored.prompt_logprobs) == 9


def test_cached_pages_make_room_before_anybody_is_preempted():
    s = cached(num_pages=4)
    finish(s, sequence(range(12), 1))
    assert (s.tables.pool.allocator.num_free, s.tables.pool.num_cached) == (1, 3)
    finish(s, sequence(range(50, 62), 2, max_tokens=4))
    assert s.num_preemptions == 0
    assert prefix_cache_of(s).num_evictions == 3


def test_off_is_off():
    s = scheduler(num_pages=8, page_size=4, prefix_cache=False)
    finish(s, sequence(range(9)))
    assert s.tables.find_prefix(sequence(range(9), 2)).num_tokens == 0
    assert s.tables.pool.allocator.num_free == 8


def keeping(tokens, arrival, max_tokens) -> Sequence:
    """A sequence whose last page, full or not, stays in the prefix cache."""
    request = Request(
        id=f"r{arrival}", prompt_token_ids=tuple(tokens), params=SamplingParams(max_tokens=max_tokens), keeps_end=True
    )
    return Sequence(request, index=0, arrival=arrival, seed=0, max_tokens=max_tokens)


def step(s):
    plan = s.schedule()
    s.commit(plan, result(plan))
    audit(s)
    return plan


def test_a_last_page_with_kv_of_two_weight_versions_is_not_found():
    s = scheduler(num_pages=64, page_size=8, rows=3, budget=8, prefix_cache=True)
    s.add(keeping([1, 2, 3], 1, 3))
    step(s)
    s.set_version(1, "keep")
    run(s)
    second = keeping([1, 2, 3, 7, 7, 7, 9], 2, 3)
    s.add(second)
    assert step(s).rows[0].first == 0
    assert second.num_cached_tokens == 0


def test_a_last_page_that_lacks_one_token_is_found():
    s = scheduler(num_pages=64, page_size=4, rows=3, budget=8, prefix_cache=True)
    finish(s, keeping([1, 2, 3], 1, 1))
    second = keeping([1, 2, 3, 7, 9], 2, 3)
    s.add(second)
    assert step(s).rows[0].first == 3


@pytest.mark.parametrize("pages", range(6, 14))
def test_rounds_reserve_no_more_pages_than_every_window_has(pages):
    s = scheduler(num_pages=64, page_size=2, rows=3, budget=8, windows=((3, pages),), max_rounds=16)
    for arrival in range(1, 4):
        s.add(sequence(range(1, 4), arrival, 30))
    run(s, steps=60)
