"""A draft that is wrong leaves no trace, and one that is right is accepted with what was drawn behind it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.audit import audit
from quire.core.drafts import FIRST_DRAFTS, FIRST_PAUSE, LONGEST_MATCH, LONGEST_PAUSE, SHORTEST_MATCH, Drafter
from quire.core.sequence import SequenceState
from quire.core.stopping import FinishReason
from tests.core.fake import Arrivals, result, run, scheduler

TOKENS = st.sampled_from((0, 1, 256, 1 << 16, 0x01010101, 0x01000100))
"""Bytes of one and its neighbour look like another."""


def drafted(drafts: list[int], **knobs):
    """A scheduler that always drafts the same, and a sequence with a prompt of 3 that has drawn a 4."""
    s = scheduler(page_size=2, drafts=8, **knobs)
    s._look_up = lambda sequence, drafter, most: drafts[:most]
    sequence = Arrivals()(3, 40, eos=frozenset({9}))
    s.add(sequence)
    s.commit(plan := s.schedule(), result(plan, 4))
    return s, sequence


def drawn_behind(plan, tokens: list[int]):
    """What a step of one row drew at its positions, in order."""
    made = result(plan)
    made.tokens_SR = np.array(tokens, np.int32)[:, None]
    made.logprobs_SR = -np.arange(len(tokens), dtype=np.float32)[:, None]
    return made


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=12), st.integers(1, 9))
def test_what_followed_the_longest_known_end_is_found(pieces, most):
    drafter, tokens = Drafter(0), []
    for piece in pieces:
        drafter.read(piece)
        tokens += piece
        assert drafter.num_read == len(tokens)
        assert drafter.find(most) == followers(tokens, most)


def followers(tokens: list[int], most: int) -> list[int]:
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return [tokens[end + i % (len(tokens) - end)] for i in range(most)]
    return []


def test_bytes_that_match_inside_of_tokens_are_given_up(monkeypatch):
    """A prompt can be made of them: 0x00010100 again and again, and 0x00000101 twice at its end."""
    drafter = Drafter(0)
    drafter.read([0x00000101, 0x00000101, 7] + [0x00010100] * 100 + [0x00000101] * 2)
    assert drafter.find(2) == []
    monkeypatch.setattr("quire.core.drafts.MAX_FALSE_MATCHES", 1000)
    assert drafter.find(2) == [7, 0x00010100], "there was a true match behind them"


def test_how_many_are_drafted_follows_what_was_accepted():
    drafter = Drafter(10)
    drafter.learn(20, 3, 3)
    assert drafter.most == 7
    drafter.learn(28, 7, 4)
    assert drafter.most == 7, "most of them"
    drafter.learn(30, 7, 3)
    assert drafter.most == FIRST_DRAFTS
    pauses = []
    for _ in range(9):
        drafter.learn(100, 3, 0)
        pauses.append(drafter.resume_at - 100)
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    drafter.learn(200, 3, 1)
    drafter.learn(201, 3, 0)
    assert drafter.resume_at == 201 + FIRST_PAUSE


@pytest.mark.parametrize(
    ("drawn", "accepted"),
    [([5, 6, 7, 8], (5, 6, 7, 8)), ([5, 6, 1, 8], (5, 6, 1)), ([1, 6, 7, 8], (1,)), ([5, 9, 7, 8], (5, 9))],
    ids=["all", "some", "none", "up to an end token"],
)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_draws_are_accepted_up_to_the_first_that_was_not_drafted(drawn, accepted, prefix_cache):
    s, sequence = drafted([5, 6, 7], prefix_cache=prefix_cache)
    plan = s.schedule()
    assert [(row.first, row.num_tokens) for row in plan.rows] == [(3, 4)]
    assert [(sample.packed_index, sample.position) for sample in plan.samples] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert len(sequence.pages) == 4, "room for positions up to 6"
    (event,) = s.commit(plan, drawn_behind(plan, drawn))
    assert event.token_ids == accepted
    assert (s.drafted_tokens, s.accepted_drafts) == (3, len(accepted) - 1)
    audit(s)
    num_computed = 3 + len(accepted)
    if 9 in accepted:
        assert event.finish_reason is FinishReason.EOS
    else:
        assert (sequence.num_computed, len(sequence.pages)) == (num_computed, -(-num_computed // 2))
        assert s.schedule().rows[0].first == num_computed
    assert s.tables.pool.num_cached * 2 <= num_computed, "what was not accepted is in no known page"


def test_log_probabilities_are_those_of_the_accepted_tokens():
    s = scheduler(drafts=8)
    s._look_up = lambda sequence, drafter, most: [5, 6, 7]
    s.add(sequence := Arrivals()(3, 40, logprobs=0))
    s.commit(plan := s.schedule(), result(plan, 4))
    s.commit(plan := s.schedule(), drawn_behind(plan, [5, 6, 1, 8]))
    assert [(entry.token_id, entry.logprob) for entry in sequence.logprobs[1:]] == [(5, 0.0), (6, -1.0), (1, -2.0)]


@pytest.mark.parametrize(
    ("params", "most"), [({}, 3), ({"max_rounds": 2}, 1), ({"max_rounds": 1}, 0), ({"min_tokens": 3}, 1)], ids=str
)
def test_a_row_draws_no_more_than_may_be_drawn_before_the_host_looks(params, most):
    s = scheduler(drafts=8)
    s._look_up = lambda sequence, drafter, most: [5, 6, 7][:most]
    s.add(Arrivals()(3, 40, **params))
    s.commit(plan := s.schedule(), result(plan, 4))
    assert s.schedule().num_tokens == 1 + most


def test_a_budget_is_not_drafted_beyond():
    s, sequence = drafted([5, 6, 7])
    sequence.max_tokens = 3
    plan = s.schedule()
    assert plan.num_tokens == 2, "two are left"
    (event,) = s.commit(plan, drawn_behind(plan, [5, 6]))
    assert (event.token_ids, event.finish_reason) == ((5, 6), FinishReason.LENGTH)


def test_nobody_gives_way_for_drafts():
    """They go as far as free pages reach; in a pool without any there are none."""
    s, sequence = drafted([5, 6, 7])
    s.tables.pool.allocate(61)
    plan = s.schedule()
    assert (plan.num_tokens, len(sequence.pages)) == (3, 3), "three pages of 2"
    assert plan.drafts == {0: [5, 6]}
    s, sequence = drafted([5, 6, 7])
    s.tables.pool.allocate(62)
    assert (s.schedule().drafts, len(sequence.pages)) == ({}, 2)


def test_a_sequence_aborted_in_flight_takes_its_drafts_along():
    s, sequence = drafted([5, 6, 7])
    plan = s.schedule()
    s.abort(sequence)
    assert s.commit(plan, drawn_behind(plan, [5, 6, 7, 8])) == []
    assert s.drafted_tokens == 0
    assert sequence.state is SequenceState.FINISHED
    audit(s)
    assert s.tables.pool.allocator.num_free == 64


@pytest.mark.parametrize(("rows", "share"), [(1, 3), (2, 3), (3, 0), (8, 0)])
def test_rows_share_a_step_while_there_is_enough_for_each(rows, share):
    s = scheduler(drafts=8, budget=32)
    s._look_up = lambda sequence, drafter, most: [5] * most
    arrive = Arrivals()
    for _ in range(rows):
        s.add(arrive(3, 40))
    s.commit(plan := s.schedule(), result(plan, 4))
    plan = s.schedule()
    assert [row.num_tokens for row in plan.rows] == [1 + share] * rows
    assert [sample.row for sample in plan.samples] == [i for i in range(rows) for _ in range(1 + share)]


def test_a_sequence_that_repeats_itself_takes_fewer_steps():
    def tokens_of(drafts: int) -> tuple[list[int], int]:
        s = scheduler(num_pages=200, drafts=drafts)
        s.add(sequence := Arrivals()(3, 200))
        history = run(s, token=lambda sequence, position: position % 7)
        return sequence.output_token_ids, len(history)

    (plain, steps), (ahead, fewer) = tokens_of(0), tokens_of(8)
    assert plain == ahead
    assert (steps, fewer < 40) == (200, True)
