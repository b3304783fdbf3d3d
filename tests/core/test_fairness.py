"""Tenants are served in proportion to their weights: what each was served, when it gets in, and what that costs."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.core.audit import audit
from quire.core.preemption import QUANTUM
from quire.core.sequence import Sequence, SequenceState
from quire.core.tenants import MAX_IDLE, MAX_WEIGHT, MIN_WEIGHT, Tenants
from quire.field_error import FieldError
from tests.core.fake import Arrivals, result, run, scheduler


@pytest.fixture
def arrive():
    return Arrivals()


class Served(Counter[str]):
    """The tokens that each tenant was served: positions that no earlier step has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[Sequence, int] = {}

    def add(self, plan) -> None:
        for sequence, first, num_tokens, _ in plan.rows:
            end, before = first + num_tokens, self.ends.get(sequence, 0)
            self[sequence.request.tenant] += max(end - max(first, before), 0)
            self.ends[sequence] = max(end, before)


def step(s, served: Served | None = None):
    """One step, of one round where `served` counts it."""
    plan = s.schedule()
    assert plan
    if served is not None:
        served.add(plan)
    s.commit(plan, result(plan))
    if s.tables.pool.allocator.num_pages <= 64:  # the audit takes as long as there are pages
        audit(s)
    return plan


def crowd(s, arrive, count: int, *, tenant: str = "a", prompt_len: int = 8, max_tokens: int = 64) -> list[Sequence]:
    sequences = [arrive(prompt_len, max_tokens, tenant=tenant) for _ in range(count)]
    for sequence in sequences:
        s.add(sequence)
    return sequences


def steps_until(s, sequence: Sequence, most: int = 1000) -> int:
    """Steps until the first token of a sequence."""
    for number in range(1, most):
        step(s)
        if sequence.num_output:
            return number
    raise AssertionError(f"{sequence} has no token after {most} steps")


# -- time to first token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [8, 30, 250])
def test_a_tenant_beside_many_streams_of_another_gets_its_first_token_in_the_next_step(arrive, streams):
    s = scheduler(num_pages=2048, rows=8, budget=64, max_rounds=4)
    crowd(s, arrive, streams, max_tokens=200)
    for _ in range(20):
        step(s)
    for _ in range(20):
        one = arrive(16, 16, tenant="b")
        s.add(one)
        assert steps_until(s, one) == 1
        while one.finish_reason is None:
            step(s)


def test_prompts_of_another_do_not_take_the_whole_budget(arrive):
    s = scheduler(num_pages=20_000, rows=8, budget=64)
    crowd(s, arrive, 30, prompt_len=5000)
    for _ in range(20):
        step(s)
    for _ in range(5):
        one = arrive(16, 16, tenant="b")
        s.add(one)
        assert steps_until(s, one) == 1
        while one.finish_reason is None:
            step(s)


def test_a_tenant_gets_in_where_another_holds_all_pages(arrive):
    """Eight rows are free, and no page."""
    s = scheduler(num_pages=64, rows=16, budget=64)
    crowd(s, arrive, 30, prompt_len=24, max_tokens=100)
    for _ in range(20):
        step(s)
    assert len(s.running) < 16
    one = arrive(16, 16, tenant="b")
    s.add(one)
    assert steps_until(s, one) == 1


# -- shares ----------------------------------------------------------------------------------------------------------


def test_rows_follow_weights(arrive):
    s = scheduler(num_pages=4096, rows=8, budget=64)
    s.set_tenant_weights({"a": 3})
    crowd(s, arrive, 40, max_tokens=1000)
    for _ in range(10):
        step(s)
    crowd(s, arrive, 40, tenant="b", max_tokens=1000)
    for _ in range(400):
        step(s)
    assert Counter(x.request.tenant for x in s.running) == {"a": 6, "b": 2}


def test_one_that_waits_alone_takes_what_others_leave(arrive):
    s = scheduler(num_pages=4096, rows=8, budget=64)
    crowd(s, arrive, 2, tenant="b", max_tokens=100)
    crowd(s, arrive, 40, max_tokens=100)
    step(s)
    step(s)
    assert Counter(x.request.tenant for x in s.running) == {"a": 6, "b": 2}
    assert s.num_preemptions == 0


@pytest.mark.parametrize("tenants", [9, 20])
def test_more_tenants_than_rows_take_turns(arrive, tenants):
    """Each has one endless stream: nobody waits for the end of another's."""
    s = scheduler(num_pages=40_000, rows=8, budget=64, num_host_pages=40_000, preemption="swap")
    for i in range(tenants):
        crowd(s, arrive, 1, tenant=f"t{i}", max_tokens=5000)
    served = Served()
    for _ in range(3000):
        step(s, served)
    assert len(served) == tenants
    lag = max(served.values()) - min(served.values())
    assert lag <= 2 * (QUANTUM + max(served.values()))
    assert s.num_preemptions * QUANTUM <= served.total()


def test_priority_is_among_requests_of_one_tenant(arrive):
    s = scheduler(num_pages=256, rows=2, budget=64)
    urgent = [arrive(8, 64, tenant="a", priority=9) for _ in range(4)]
    usual = [arrive(8, 64, tenant="b") for _ in range(4)]
    for one in [*urgent, *usual]:
        s.add(one)
    step(s)
    assert Counter(x.request.tenant for x in s.running) == {"a": 1, "b": 1}
    low, high = arrive(8, 64, tenant="b", priority=-1), arrive(8, 64, tenant="b", priority=1)
    s.add(low)
    s.add(high)
    while high.state is SequenceState.WAITING:
        step(s)
    assert (low.state, usual[1].state) == (SequenceState.WAITING, SequenceState.WAITING)


def test_what_was_found_in_the_cache_or_is_computed_again_is_not_charged(arrive):
    s = scheduler(num_pages=64, rows=2, budget=64, prefix_cache=True)
    one = arrive(32, 2, tenant="a")
    s.add(one)
    run(s)
    (tenant,) = s.tenants
    assert tenant.clock == 33
    again = arrive(32, 9, tenant="a")
    s.add(again)
    step(s)
    assert (again.num_cached_tokens, tenant.clock) == (28, 33 + 4)
    s.preempt(again, swap=False)
    s.clear_prefix_cache()
    step(s)
    assert tenant.clock == 33 + 4 + 1


def test_a_tenant_cannot_save_up_what_it_did_not_use(arrive):
    s = scheduler(num_pages=4096, rows=4, budget=64)
    crowd(s, arrive, 40, max_tokens=100)
    for _ in range(500):
        step(s)
    crowd(s, arrive, 40, tenant="b", max_tokens=100)
    served = Served()
    for _ in range(400):
        step(s, served)
    assert served["b"] - served["a"] < 4 * 108


def test_a_tenant_does_not_lose_its_debt_by_pausing(arrive):
    """Large prompts, one at a time, with nothing in between that waits: they get no more than their share."""
    s = scheduler(num_pages=4096, rows=4, budget=64)
    crowd(s, arrive, 400, max_tokens=30)
    one, served = None, Served()
    for _ in range(1000):
        if one is None or one.finish_reason is not None:
            one = arrive(500, 1, tenant="b")
            s.add(one)
        step(s, served)
    assert served["b"] <= served["a"] + 2 * 500


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_requests_of_one_step_do_not_stop_the_time_that_others_start_at(arrive, max_tokens):
    """A tenant with one short request after another is not repaid with all that it was served."""
    s = scheduler(num_pages=4096, rows=8, budget=64)
    for _ in range(500):
        crowd(s, arrive, 1, prompt_len=16, max_tokens=max_tokens)
        while s.running or s.waiting:
            step(s)
    crowd(s, arrive, 40, tenant="b", prompt_len=16, max_tokens=max_tokens)
    for _ in range(10):
        step(s)
        crowd(s, arrive, 4, tenant="b", prompt_len=16, max_tokens=max_tokens)
    one = arrive(16, max_tokens, tenant="a")
    s.add(one)
    steps = 0
    while one.finish_reason is None:
        step(s)
        crowd(s, arrive, 4, tenant="b", prompt_len=16, max_tokens=max_tokens)
        steps += 1
    assert steps <= max_tokens + 1


def test_a_stream_of_new_tenants_does_not_stop_one_that_runs(arrive):
    """As where each user has a salt of its own: a new tenant is not served before all that came earlier, for ever."""
    s = scheduler(num_pages=4096, rows=8, budget=64)
    crowd(s, arrive, 20, prompt_len=16, max_tokens=50)
    while s.running or s.waiting:
        step(s)
    one, number = arrive(8, 20, tenant="a"), 0
    s.add(one)
    for _ in range(80):
        while len(s.waiting) < 20:
            number += 1
            crowd(s, arrive, 1, tenant=f"t{number}", max_tokens=1)
        step(s)
    assert one.finish_reason is not None


def test_a_tenant_with_one_long_stream_cannot_save_up_what_it_did_not_use(arrive):
    """Its stream takes one token of each step; when many more of its requests come, others keep their rows."""
    s = scheduler(num_pages=40_000, rows=8, budget=64)
    crowd(s, arrive, 1, max_tokens=5000)
    crowd(s, arrive, 400, tenant="b", max_tokens=30)
    for _ in range(300):
        step(s)
    crowd(s, arrive, 400, max_tokens=30)
    served = Served()
    for _ in range(200):
        step(s, served)
    assert served["a"] <= served["b"] + 8 * 38 + 2 * QUANTUM


def test_tenants_that_only_come_once_are_forgotten():
    tenants = Tenants()
    for i in range(3 * MAX_IDLE):
        one = tenants.of(f"t{i}")
        tenants.wait(one)
        tenants.start(one)
        one.charge(10)
        tenants.begin_step()
        tenants.stop(one)
    assert len(list(tenants)) <= MAX_IDLE + 1


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "2", True, 1e9, 1e-4, 1e-17, 1001, 10**400])
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(FieldError, match=r"weights\['a'\]=.* must be a number from 0.001 to 1,000") as refused:
        scheduler().set_tenant_weights({"a": weight})
    assert refused.value.field == "weights"


def test_what_is_left_of_the_weights_is_exact_after_many_tenants_came_and_went():
    """Their sum is what shares are divided by: it must not drift, and never be 0 beside a tenant."""
    tenants, weights = Tenants(), {"small": MIN_WEIGHT, "third": 1 / 3, "large": MAX_WEIGHT}
    tenants.set_weights(weights)
    small, third, large = map(tenants.of, weights)
    tenants.wait(small)
    for _ in range(2000):
        tenants.wait(large)
        tenants.wait(third)
        tenants.end_wait(large)
        tenants.end_wait(third)
    assert tenants.active_weight == MIN_WEIGHT
    assert tenants.excess(small, 8) == -8
    tenants.set_weights({})
    assert tenants.active_weight == 1
    tenants.end_wait(small)
    assert tenants.active_weight == 0


# -- properties ------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@example(seed=2097152, weights=[0.5, 2], rows=6, num_pages=40)
@given(
    seed=st.integers(0, 1 << 32),
    weights=st.lists(st.sampled_from([0.5, 1, 2, 3]), min_size=2, max_size=6),
    rows=st.integers(1, 6),
    num_pages=st.sampled_from([40, 400]),
)
def test_the_lag_of_a_tenant_that_always_waits_is_bounded(seed, weights, rows, num_pages):
    """By what the running sequences of another may still cost, whatever has been served before."""
    rng, arrive = random.Random(seed), Arrivals()
    s = scheduler(num_pages=num_pages, rows=rows, budget=32, prefix_cache=rng.random() < 0.5, num_host_pages=40)
    s.set_tenant_weights({f"t{i}": weight for i, weight in enumerate(weights)})
    kinds = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in weights]
    longest = max(map(sum, kinds))
    served, behind = Served(), 0.0
    for _ in range(300):
        for i, (prompt_len, max_tokens) in enumerate(kinds):
            while s.tenants.of(f"t{i}").num_waiting <= rows:  # a step can start, and end, as many as there are rows
                s.add(arrive(rng.randint(1, prompt_len), rng.randint(1, max_tokens), tenant=f"t{i}"))
        step(s, served)
        shares = [served[f"t{i}"] / weight for i, weight in enumerate(weights)]
        behind = max(behind, max(shares) - min(shares))
    assert behind * min(weights) <= (rows + 1) * longest + 2 * QUANTUM


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32), rows=st.integers(1, 6), tenants=st.integers(1, 8))
def test_work_is_conserved_and_everything_ends(seed, rows, tenants):
    """A row is left free only where the pages or the tokens of a step do not suffice for the next in order."""
    rng, arrive = random.Random(seed), Arrivals()
    budget = rng.choice((8, 32))
    s = scheduler(num_pages=rng.choice((24, 400)), rows=rows, budget=budget, prefix_cache=True, num_host_pages=20)
    left, alive = 60, []
    while left or s.running or s.waiting:
        for _ in range(rng.choice((0, 0, 1, 3, 9)) if left else 0):
            left -= left > 0
            tenant = f"t{rng.randrange(tenants)}"
            alive.append(arrive(rng.randint(1, 40), rng.randint(1, 30), tenant=tenant, priority=rng.choice((0, 0, 1))))
            s.add(alive[-1])
        if not (s.running or s.waiting):
            continue
        recomputes = s.num_preemptions
        plan = s.schedule()
        head = s.waiting.peek()
        if head is not None and len(s.running) < rows and s.num_preemptions == recomputes:
            prefix = s.tables.find_prefix(head)
            needed = [
                a + b for a, b in zip(s.tables.num_new(head, prefix), s.tables.num_promised(s.running), strict=True)
            ]
            assert plan.num_tokens >= budget - rows or not s.tables.has_room(needed)
        s.commit(plan, result(plan))  # pyright: ignore
    audit(s)
    assert all(one.finish_reason is not None for one in alive)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_rows_are_taken_seldom(seed):
    """Each row that a tenant takes is paid: by its first request after a pause, or by a quantum that it was behind."""
    rng, arrive = random.Random(seed), Arrivals()
    s = scheduler(num_pages=4000, rows=rng.choice((2, 8)), budget=64)
    kinds = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(rng.randint(2, 12))]
    served, pauses = Served(), 0
    for _ in range(300):
        for i, (prompt_len, max_tokens) in enumerate(kinds):
            tenant = s.tenants.of(f"t{i}")
            pauses += tenant.num_waiting + tenant.num_running == 0
            if tenant.num_waiting < 3 and rng.random() < 0.5:
                s.add(arrive(rng.randint(1, prompt_len), rng.randint(1, max_tokens), tenant=f"t{i}"))
        if s.running or s.waiting:
            step(s, served)
    assert s.num_preemptions <= pauses + served.total() / QUANTUM
