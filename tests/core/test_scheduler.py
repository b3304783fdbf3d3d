"""Who runs when, on which pages: exact plans, exact page ids, and never a page too many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core import preemption
from quire.core.audit import audit
from quire.core.errors import RequestError
from quire.core.sequence import SequenceState
from quire.core.stopping import FinishReason
from tests.core.fake import Arrivals, result, run, scheduler


@pytest.fixture
def arrive():
    return Arrivals()


def shape(plan):
    return [(row.sequence.request.id, row.first, row.num_tokens) for row in plan.rows]


def test_a_prompt_is_computed_in_chunks_and_drawn_from_once_it_is_whole(arrive):
    s = scheduler(budget=16, rows=4)
    s.add(arrive(40))
    plans = []
    for _ in range(3):
        plans.append(s.schedule())
        s.commit(plans[-1], result(plans[-1]))
    assert [shape(plan) for plan in plans] == [[("r1", 0, 16)], [("r1", 16, 16)], [("r1", 32, 8)]]
    assert [len(plan.samples) for plan in plans] == [0, 0, 1]
    assert plans[2].samples[0].packed_index == 7
    assert plans[2].samples[0].position == 40


def test_after_prefill_the_newest_token_has_no_kv_yet(arrive):
    """Pitfall 2.8.1 of the seeds: cur_len = T + 1 after prefill."""
    s = scheduler()
    sequence = arrive(5)
    s.add(sequence)
    plan = s.schedule()
    s.commit(plan, result(plan))
    assert sequence.num_computed == 5
    assert len(sequence.tokens) == 6
    plan = s.schedule()
    assert shape(plan) == [("r1", 5, 1)], "the sampled token is computed at position T, not T + 1"


def test_decoding_sequences_get_their_token_before_a_long_prompt_takes_the_rest(arrive):
    s = scheduler(budget=8, rows=4)
    first, second = arrive(2, 9), arrive(2, 9)
    s.add(first)
    s.add(second)
    run(s, steps=1)
    s.add(arrive(30, priority=5))
    assert shape(s.schedule()) == [("r3", 0, 6), ("r1", 2, 1), ("r2", 2, 1)]


def test_mixed_steps_pack_rows_one_after_the_other(arrive):
    s = scheduler(budget=16)
    for length in (3, 5, 4):
        s.add(arrive(length))
    plan = s.schedule()
    assert shape(plan) == [("r1", 0, 3), ("r2", 0, 5), ("r3", 0, 4)]
    assert [sample.packed_index for sample in plan.samples] == [2, 7, 11]
    assert plan.num_tokens == 12


def test_pages_are_reserved_before_they_are_written_and_only_those(arrive):
    s = scheduler(page_size=4)
    sequence = arrive(6)
    s.add(sequence)
    plan = s.schedule()
    assert sequence.pages.tolist() == [0, 1]
    s.commit(plan, result(plan))
    for expected in ([0, 1], [0, 1], [0, 1, 2]):  # positions 6, 7, 8
        plan = s.schedule()
        assert sequence.pages.tolist() == expected
        s.commit(plan, result(plan))


def test_pages_are_back_before_the_next_schedule_whatever_the_reason(arrive):
    s = scheduler(num_pages=8, page_size=4)
    by_length, by_eos, by_stop, by_abort = (
        arrive(4, 1),
        arrive(4, 9, eos={9}),
        arrive(4, 9, stop_token_ids=(8,)),
        arrive(4, 9),
    )
    for sequence in (by_length, by_eos, by_stop, by_abort):
        s.add(sequence)
    tokens = {by_length: 7, by_eos: 9, by_stop: 8, by_abort: 7}
    plan = s.schedule()
    s.commit(plan, result(plan, lambda sequence, _: tokens[sequence]))
    assert [x.finish_reason for x in tokens] == [FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP, None]
    assert s.tables.pool.allocator.num_free == 7
    s.abort(by_abort)
    assert by_abort.finish_reason is FinishReason.ABORT
    assert s.tables.pool.allocator.num_free == 8
    audit(s)


def test_abort_in_flight_gives_pages_back_and_its_token_is_dropped(arrive):
    s = scheduler()
    gone, stays = arrive(4), arrive(4)
    s.add(gone)
    s.add(stays)
    plan = s.schedule()
    s.abort(gone)
    events = s.commit(plan, result(plan))
    assert [event.sequence for event in events] == [stays]
    assert gone.num_output == 0
    assert len(gone.pages) == 0
    audit(s)


def test_abort_while_waiting_leaves_the_queue_and_a_second_abort_says_no(arrive):
    s = scheduler(rows=1)
    first, second, third = arrive(2), arrive(2), arrive(2)
    for sequence in (first, second, third):
        s.add(sequence)
    s.commit(plan := s.schedule(), result(plan))
    assert s.abort(second)
    assert not s.abort(second)
    assert len(s.waiting) == 1
    run(s)
    assert third.finish_reason is FinishReason.LENGTH


def test_priority_then_arrival(arrive):
    s = scheduler(rows=1, budget=4)
    order = [
        arrive(2, 1),
        arrive(2, 1, priority=-5),
        arrive(2, 1, priority=10),
        arrive(2, 1),
        arrive(2, 1, priority=10),
    ]
    for sequence in order:
        s.add(sequence)
    finished = [event.sequence.request.id for events in run(s) for event in events]
    assert finished == ["r3", "r5", "r1", "r4", "r2"]


def test_the_head_of_the_queue_is_not_overtaken_by_a_smaller_request(arrive):
    s = scheduler(num_pages=8, page_size=4, budget=32)
    s.add(arrive(20, 5))  # 5 pages and one to grow into
    run(s, steps=1)
    s.add(arrive(12, 2))
    s.add(arrive(1, 2))
    assert [row.sequence.request.id for row in s.schedule().rows] == ["r1"]


def test_when_the_pool_is_full_the_last_in_order_is_recomputed(arrive):
    s = scheduler(num_pages=5, page_size=4, budget=32)
    old, young = arrive(7, 12), arrive(7, 9)
    s.add(old)
    s.add(young)
    history = run(s)
    assert s.num_preemptions > 0
    assert old.preemptions == 0
    assert young.preemptions > 0
    assert old.num_output == 12
    assert young.num_output == 9
    assert s.tables.pool.allocator.num_free == 5
    assert len(history) < 60, "no thrashing: a preempted sequence comes back when there is room for it"


def test_preempted_tokens_are_kept_and_recomputed_from_the_first(arrive):
    s = scheduler(num_pages=4, page_size=2, budget=32)
    old, young = arrive(2, 6), arrive(2, 5)
    s.add(old)
    s.add(young)
    seen = []
    while young.preemptions == 0:
        s.commit(plan := s.schedule(), result(plan))
    kept = list(young.tokens)
    assert young.state is SequenceState.WAITING
    assert young.num_computed == 0
    while young.num_computed == 0:
        plan = s.schedule()
        seen = [(row.first, row.num_tokens) for row in plan.rows if row.sequence is young]
        s.commit(plan, result(plan))
    assert seen == [(0, len(kept))]
    assert young.tokens[: len(kept)] == kept


def test_a_higher_priority_takes_the_place_of_a_lower_one(arrive):
    s = scheduler(rows=1, budget=8)
    low, high = arrive(2, 8), arrive(2, 2, priority=1)
    s.add(low)
    run(s, steps=2)
    s.add(high)
    assert [row.sequence for row in s.schedule().rows] == [high]
    assert low.state is SequenceState.WAITING


def test_room_made_for_a_priority_is_room_enough(arrive):
    """Just as many are preempted as let the head of the queue in, in the same step."""
    s = scheduler(num_pages=12, page_size=4, budget=64)
    lows = [arrive(4, 20) for _ in range(4)]
    for sequence in lows:
        s.add(sequence)
    run(s, steps=2)  # 8 pages held, 4 promised
    high = arrive(16, 4, priority=1)
    s.add(high)
    plan = s.schedule()
    assert high in [row.sequence for row in plan.rows]
    assert [x.state for x in lows] == [SequenceState.RUNNING] * 2 + [SequenceState.WAITING] * 2
    audit(s)


def test_nobody_is_preempted_for_a_request_that_would_not_fit_anyway(arrive):
    s = scheduler(num_pages=8, page_size=4, budget=32)
    equal, low, big = arrive(16, 9, priority=1), arrive(2, 9), arrive(20, 9, priority=1)
    s.add(equal)
    s.add(low)
    run(s, steps=1)
    s.add(big)
    s.schedule()
    assert low.state is SequenceState.RUNNING


@pytest.mark.parametrize(("prompt_len", "gets_in"), [(40, True), (41, False)])
@pytest.mark.parametrize("windows", [(), ((8, 64),)], ids=["no_window", "window"])
def test_pages_are_not_looked_at_for_a_request_that_all_candidates_could_not_make_room_for(
    arrive, monkeypatch, prompt_len, gets_in, windows
):
    """It may wait for long: steps would cost the pages that all of them hold."""
    looked_at, add = [], preemption._Room.add
    monkeypatch.setattr(preemption._Room, "add", lambda room, victim: (looked_at.append(victim), add(room, victim)))
    s = scheduler(num_pages=16, page_size=4, budget=64, windows=windows)
    equal, lows = arrive(16, 9, priority=1), [arrive(4, 9) for _ in range(3)]
    for sequence in (equal, *lows):
        s.add(sequence)
    run(s, steps=1)  # of 16 pages, the first holds or was promised 6, and each of the others 3
    head = arrive(prompt_len, 9, priority=1)
    s.add(head)
    step = s.schedule()
    assert (head in [row.sequence for row in step.rows]) == gets_in
    assert len(looked_at) == (3 if gets_in else 0)
    assert equal.state is SequenceState.RUNNING
    audit(s)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(arrive):
    s = scheduler(num_pages=4, page_size=4)
    s.add(arrive(10, 7))  # 16 positions: the last token needs none
    with pytest.raises(RequestError, match=r"needs 5 pages for a prompt of 10 \+ 8 new tokens, the pool has 4"):
        s.add(arrive(10, 8))


def test_a_request_as_large_as_the_pool_runs_to_its_end(arrive):
    """vLLM #39734: a request that fits the model's length but not the pool must not hang."""
    s = scheduler(num_pages=4, page_size=4, budget=8)
    full = arrive(10, 7)
    s.add(arrive(3, 5))
    s.add(full)
    run(s, steps=200)
    assert full.finish_reason is FinishReason.LENGTH


def test_a_plan_is_committed_once_and_before_the_next(arrive):
    s = scheduler()
    s.add(arrive(3))
    plan = s.schedule()
    with pytest.raises(RuntimeError, match="commit"):
        s.schedule()
    s.commit(plan, result(plan))
    with pytest.raises(RuntimeError, match="committed once"):
        s.commit(plan, result(plan))


def test_commit_takes_a_row_of_several_rounds_up_to_its_stop(arrive):
    s = scheduler()
    sequence = arrive(3, 9, eos={2})
    s.add(sequence)
    plan = s.schedule()
    made = result(plan)
    made.tokens_SR = made.tokens_SR.repeat(4, axis=1)
    made.tokens_SR[0] = [5, 6, 2, 8]
    (event,) = s.commit(plan, made)
    assert event.token_ids == (5, 6, 2)
    assert sequence.output_token_ids == [5, 6, 2]
    assert sequence.finish_reason is FinishReason.EOS


def test_prompt_log_probabilities_take_one_score_for_each_prompt_token_and_no_more_steps(arrive):
    s = scheduler(rows=2, budget=6, max_num_samples=2)
    scored, other = arrive(9, 0, prompt_logprobs=True), arrive(3, 2)
    s.add(scored)
    s.add(other)
    positions = []
    while s.running or s.waiting:
        plan = s.schedule()
        assert len(plan.samples) <= 2
        positions.append([x.position for x in plan.scores if x.sequence is scored])
        s.commit(plan, result(plan))
    assert positions[:2] == [[1, 2, 3, 4, 5, 6], [7, 8]]
    assert not any(positions[2:])
    assert scored.finish_reason is FinishReason.LENGTH
    assert [entry and entry.token_id for entry in scored.prompt_logprobs] == [None, *range(101, 109)]


def test_a_preempted_score_does_not_score_twice(arrive):
    s = scheduler(rows=2, budget=3, num_pages=6, page_size=4, max_num_samples=2)
    s.add(arrive(8, 12))
    scored = arrive(12, 1, prompt_logprobs=True)
    s.add(scored)
    run(s)
    assert scored.preemptions > 0
    assert [entry and entry.token_id for entry in scored.prompt_logprobs] == [None, *range(101, 112)]


@pytest.mark.parametrize(("is_preempted", "running"), [(False, "recompute"), (True, "recompute"), (True, "abort")])
def test_new_weights_score_an_unfinished_prompt_anew(arrive, is_preempted, running):
    """Who was preempted in the middle of it has not begun, has no pages, and has scores."""
    s = scheduler(rows=2, budget=4)
    scored = arrive(9, 0, prompt_logprobs=True)
    s.add(scored)
    run(s, steps=1)
    assert len(scored.prompt_logprobs) == 5
    if is_preempted:
        s.preempt(scored, swap=False)
    assert s.set_version(1, running=running) == []
    assert scored.prompt_logprobs == [None]
    run(s)
    assert [entry and entry.token_id for entry in scored.prompt_logprobs] == [None, *range(101, 109)]


def test_new_weights_leave_the_scores_of_a_family_that_has_drawn(arrive):
    """One of three has found no sample in the step that computed the prompt; the scores are the family's."""
    s = scheduler(rows=3, budget=32, max_num_samples=2)
    first = arrive(9, 4, prompt_logprobs=True, n=3)
    family = [first, first.fork(), first.fork()]
    s.add(first)
    run(s, steps=1)
    assert [bool(one.num_output) for one in family] == [True, True, False]
    s.set_version(1, running="recompute")
    run(s)
    for one in family:
        assert [entry and entry.token_id for entry in one.prompt_logprobs] == [None, *range(101, 109)]


def test_min_tokens_holds_every_stop_back(arrive):
    s = scheduler()
    sequence = arrive(3, 9, eos={7}, min_tokens=3, stop_token_ids=(7,), stop=((7, 7),))
    s.add(sequence)
    run(s)
    assert sequence.num_output == 3


def test_a_stop_sequence_of_ids_ends_where_its_last_id_is(arrive):
    s = scheduler()
    sequence = arrive(3, 9, stop=((5, 6),))
    s.add(sequence)
    run(s, token=lambda _, position: [4, 5, 5, 6, 9, 9, 9, 9, 9][position - 3])
    assert sequence.output_token_ids == [4, 5, 5, 6]
    assert sequence.num_stop_tokens == 2
    assert sequence.finish_reason is FinishReason.STOP


def test_reset_ends_everything_and_the_engine_goes_on(arrive):
    s = scheduler(rows=2)
    sequences = [arrive(5) for _ in range(5)]
    for sequence in sequences:
        s.add(sequence)
    s.commit(plan := s.schedule(), result(plan))
    assert s.reset() == 5
    assert {x.finish_reason for x in sequences} == {FinishReason.ABORT}
    assert s.tables.pool.allocator.num_free == s.tables.pool.allocator.num_pages
    again = arrive(5)
    s.add(again)
    run(s)
    assert again.finish_reason is FinishReason.LENGTH


def test_freed_pages_are_poisoned_before_anything_is_written(arrive):
    s = scheduler(poison_freed=True, num_pages=4, page_size=4)
    s.add(arrive(4, 1))
    s.commit(plan := s.schedule(), result(plan))
    s.add(arrive(4, 1))
    plan = s.schedule()
    assert plan.operations[0].poisons == [0]
    assert plan.rows[0].sequence.pages.tolist() == [0], "the poisoned page is the one written next"


def test_a_low_priority_is_not_preempted_for_a_head_that_could_not_start(arrive):
    s = scheduler(rows=2, budget=8, num_pages=100)
    low, long = arrive(2, 50), arrive(100, 5, priority=1)
    s.add(low)
    run(s, steps=2)
    s.add(long)
    run(s, steps=2)
    s.add(arrive(4, 5, priority=1))
    s.schedule()
    assert low.state is SequenceState.RUNNING, "the prompt under way takes every token of the step"


def test_an_idle_schedule_forgets_no_poison(arrive):
    s = scheduler(poison_freed=True)
    s.add(arrive(4, 1))
    s.commit(plan := s.schedule(), result(plan))
    assert not s.schedule()
    s.add(arrive(4, 1))
    assert s.schedule().operations[0].poisons == [0]


ACTIONS = st.sampled_from(["add", "add", "step", "step", "step", "step", "abort", "abort in flight", "reset"])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 1 << 30), st.lists(ACTIONS, min_size=10, max_size=80))
def test_any_history_keeps_every_page_and_ends(seed, history):
    """Random requests, aborts in flight and resets over a small pool: audited all the way, nothing left, all ended."""
    rng, arrive = np.random.default_rng(seed), Arrivals()
    page_size, num_pages = int(rng.choice([1, 3, 4])), int(rng.integers(6, 17))
    rows = int(rng.integers(1, 5))
    s = scheduler(
        num_pages, page_size, rows, rows + int(rng.integers(0, 9)), max_num_samples=rows + int(rng.integers(0, 3))
    )
    sequences = []

    def step(abort_in_flight: bool = False) -> None:
        plan = s.schedule()
        audit(s)
        if not plan:
            assert not s.running
            assert not s.waiting
            return
        assert plan.num_tokens <= s.max_num_batched_tokens
        assert len(plan.samples) <= s.max_num_samples
        assert len(plan.rows) <= s.max_num_seqs
        if abort_in_flight:
            s.abort(plan.rows[int(rng.integers(len(plan.rows)))].sequence)
            audit(s)
        s.commit(plan, result(plan, lambda *_: int(rng.integers(0, 30))))

    for action in history:
        if action == "add":
            room = page_size * num_pages
            prompt = int(rng.integers(1, room))
            scored = bool(rng.random() < 0.3)
            new = int(rng.integers(0 if scored else 1, room - prompt + 2))
            sequence = arrive(prompt, new, priority=int(rng.integers(0, 3)), eos={0}, prompt_logprobs=scored)
            s.add(sequence)
            sequences.append(sequence)
        elif action == "abort" and sequences:
            s.abort(sequences[int(rng.integers(len(sequences)))])
        elif action == "reset":
            s.reset()
        else:
            step(action == "abort in flight")
        audit(s)
    for _ in range(3000):
        if not (s.running or s.waiting):
            break
        step()
    assert all(sequence.finish_reason for sequence in sequences)
    assert s.tables.pool.allocator.num_free == num_pages
    for sequence in sequences:
        if sequence.params.prompt_logprobs and sequence.finish_reason is not FinishReason.ABORT:
            assert len(sequence.prompt_logprobs) == sequence.prompt_len
