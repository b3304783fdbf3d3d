"""Who loses its pages, how, and where they go: exact page ids, no device."""

from typing import Any

import pytest

from quire.core.audit import audit
from quire.core.errors import AuditError
from quire.core.preemption import PreemptionCosts
from quire.core.sequence import SequenceState
from tests.core.fake import Arrivals, host_of, result, run, scheduler


@pytest.fixture
def arrive():
    return Arrivals()


def step(s):
    plan = s.schedule()
    s.commit(plan, result(plan))
    audit(s)
    return plan


def swapping(**more):
    asked: dict[str, Any] = {"num_pages": 5, "num_host_pages": 8} | more
    return scheduler(page_size=4, budget=64, preemption="swap", **asked)


def test_pages_go_to_the_host_and_come_back_elsewhere(arrive):
    s = swapping()
    a, b = arrive(7, 8), arrive(7, 8)
    s.add(a)
    s.add(b)
    step(s)
    step(s)
    plan = s.schedule()  # both need a third page, there is none
    assert b.state is SequenceState.SWAPPED
    assert plan.operations[0].swap_outs == [(2, 0), (3, 1)]
    assert (list(b.host_pages), list(b.pages), b.num_computed) == ([0, 1], [], 8)
    s.commit(plan, result(plan))
    audit(s)
    while a.finish_reason is None:
        step(s)
    plan = s.schedule()
    assert [source for source, _ in plan.operations[0].swap_ins] == [0, 1]
    assert [target for _, target in plan.operations[0].swap_ins] == list(b.pages)[:2]
    assert [(row.first, row.num_tokens) for row in plan.rows] == [(8, 1)], "nothing is computed again"
    s.commit(plan, result(plan))
    run(s)
    assert (s.num_swaps, s.num_recomputes) == (1, 0)
    assert (s.tables.pool.allocator.num_free, host_of(s).num_free) == (5, 8)


def test_out_and_in_again_within_one_plan(arrive):
    """A host page may be filled and then read by one plan: it moves pages out before it moves pages in."""
    s = swapping()
    a = arrive(7, 8)
    s.add(a)
    step(s)
    s.preempt(a, swap=True)
    plan = step(s)
    assert (
        [host for _, host in plan.operations[0].swap_outs]
        == [host for host, _ in plan.operations[0].swap_ins]
        == [0, 1]
    )


def test_a_host_page_that_a_plan_reads_is_not_filled_by_the_same_plan(arrive):
    """Nobody is preempted once somebody got in; should that ever change, the plan must not go to the device."""
    s = swapping(num_host_pages=2)
    a, b = arrive(7, 8), arrive(7, 8)
    s.add(a)
    s.add(b)
    step(s)
    s.preempt(a, swap=True)
    s.tables.take_operations()  # it is there now
    s.tables.start(a, s.tables.find_prefix(a))
    with pytest.raises(AuditError, match="host page 0 is swapped in by this plan, and would be overwritten before"):
        s.preempt(b, swap=True)


@pytest.mark.parametrize("moves", [{"copies": [(0, 3)], "swap_ins": [(1, 3)]}, {"swap_outs": [(0, 1), (2, 1)]}])
def test_a_plan_that_fills_a_page_twice_is_not_run(moves):
    s = swapping()
    for kind, pairs in moves.items():
        setattr(s.tables.pool.operations, kind, pairs)
    with pytest.raises(AuditError, match="fills a page twice"):
        s.tables.take_operations()


def test_no_room_on_the_host_means_recompute(arrive):
    s = swapping(num_host_pages=1)
    for _ in range(2):
        s.add(arrive(7, 8))
    run(s)
    assert (s.num_swaps, s.num_recomputes) == (0, 1)


@pytest.mark.parametrize(
    ("costs", "swaps"), [(PreemptionCosts(1e-3, 1e-5), 1), (PreemptionCosts(1e-6, 1e-3), 0), (PreemptionCosts(), 1)]
)
def test_auto_takes_what_costs_less(arrive, costs, swaps):
    s = swapping()
    s.preemption, s.costs = "auto", costs
    for _ in range(2):
        s.add(arrive(7, 8))
    run(s)
    assert (s.num_swaps, s.num_recomputes) == (swaps, 1 - swaps)


def test_auto_does_not_count_what_a_relative_keeps_alive(arrive):
    """Eight of a child's nine tokens are its parent's: to compute one again is cheaper than to move three pages."""
    s = swapping(num_pages=8)
    s.preemption, s.costs = "auto", PreemptionCosts(seconds_per_token=1, seconds_per_move=1)
    parent = arrive(8, 8)
    s.add(parent)
    step(s)
    child = s.fork(parent)
    step(s)
    assert list(child.pages)[:2] == list(parent.pages)[:2]
    s.preempt(child)
    assert child.state is SequenceState.WAITING
    s.preempt(parent)
    assert parent.state is SequenceState.SWAPPED


def test_lowest_priority_goes_first_then_the_latest_then_the_highest_child(arrive):
    s = scheduler(num_pages=10, page_size=4, rows=8, budget=64)
    urgent, family, late = arrive(3, 9, priority=1), arrive(3, 9, n=3), arrive(3, 9)
    for _ in range(2):
        family.fork()
    for one in (urgent, family, late):
        s.add(one)
    gone = []
    while len(gone) < 2:
        before = list(s.running)
        step(s)
        gone += [one for one in reversed(before) if one.state is SequenceState.WAITING]
    assert gone == [late, family.family[2]]


def test_an_abort_before_the_move_takes_the_move_back(arrive):
    s = swapping(num_pages=8)
    a, b = arrive(7, 8), arrive(7, 8)
    s.add(a)
    s.add(b)
    step(s)
    s.preempt(b, swap=True)
    s.abort(b)
    assert host_of(s).num_free == 8
    assert s.schedule().operations[0].swap_outs == []


def test_the_first_in_order_gets_in_whoever_runs(arrive):
    s = swapping(num_pages=4)
    a, b = arrive(7, 8), arrive(7, 8)
    s.add(a)
    s.add(b)
    step(s)
    s.preempt(a, swap=False)
    step(s)
    assert a.state is SequenceState.RUNNING


def test_a_request_that_fits_the_length_but_not_the_pool_is_refused_at_once(arrive):
    """vLLM #39734: such a request blocked its engine for ever."""
    s = swapping()
    with pytest.raises(ValueError, match=r"needs 6 pages .* the pool has 5 pages"):
        s.add(arrive(16, 6))


def test_a_full_pool_does_not_thrash(arrive):
    """vLLM #18115: with the cache full, sequences preempted each other over and over."""
    s = swapping(num_pages=12, rows=8, num_host_pages=32)
    sequences = [arrive(8, 24) for _ in range(12)]
    for one in sequences:
        s.add(one)
    run(s)
    assert all(one.num_output == 24 for one in sequences)
    assert s.num_preemptions <= 2 * len(sequences)


def test_an_urgent_prompt_does_not_wait_for_a_long_one_to_be_read(arrive):
    """Budget goes in order: the head of the queue before the prompts of those it precedes."""
    s = scheduler(num_pages=100, page_size=4, rows=4, budget=8)
    long = arrive(200, 4)
    s.add(long)
    step(s)
    urgent = arrive(4, 4, priority=1)
    s.add(urgent)
    plan = step(s)
    assert [(row.sequence, row.num_tokens) for row in plan.rows] == [(urgent, 4), (long, 4)]
    assert (urgent.num_output, s.num_preemptions) == (1, 0)


def test_a_head_that_shares_its_beginning_preempts_nobody_for_it(arrive):
    s = scheduler(num_pages=32, page_size=4, rows=8, budget=256, prefix_cache=True)
    first = arrive(80, 8)
    s.add(first)
    step(s)
    for _ in range(3):
        s.add(arrive(80, 8))
    step(s)
    assert len(s.running) == 4
    s.add(arrive(80, 4, priority=1))
    step(s)
    assert (len(s.running), s.num_preemptions) == (5, 0)


def test_a_family_goes_to_the_host_once(arrive):
    """Of what children share one copy goes there, and it is counted once."""
    s = swapping(num_pages=64, num_host_pages=64, rows=8, prefix_cache=True)
    first = arrive(34, 20, n=4)
    for _ in range(3):
        first.fork()
    s.add(first)
    step(s)
    step(s)
    for member in first.family[1:]:
        s.preempt(member, swap=True)
    audit(s)
    assert 64 - host_of(s).num_free == 8 + 3, "eight full pages of the prompt, and each child's own"
    plan = s.schedule()
    assert len(plan.operations[0].swap_outs) == 11
    s.commit(plan, result(plan))
    run(s)
    assert host_of(s).num_free == 64
