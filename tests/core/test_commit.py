"""Commit decides how far a row was computed: what the device did beyond what is accepted leaves no trace."""

import numpy as np
import pytest

from quire.core.audit import audit
from quire.core.commit import agreed_draws
from quire.core.plan import NOT_FINITE
from tests.core.fake import Arrivals, result, scheduler


def decode_rounds(s, rounds: int, drawn: list[list[int]]):
    """Commit a step in which every row may run `rounds`, and row i drew `drawn[i]`."""
    plan = s.schedule()
    assert [row.max_rounds for row in plan.rows] == [rounds] * len(plan.rows)
    made = result(plan)
    made.tokens_SR = np.full((len(drawn), rounds), -1, np.int32)
    for i, tokens in enumerate(drawn):
        made.tokens_SR[i, : len(tokens)] = tokens
    return s.commit(plan, made)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_row_may_draw_fewer_tokens_than_pages_were_reserved_for(prefix_cache):
    """A device may come back early for its own reasons; the sequence goes on from what it drew."""
    arrive = Arrivals()
    s = scheduler(page_size=2, max_rounds=8, prefix_cache=prefix_cache)
    early, whole = arrive(3, 40), arrive(3, 40)
    for sequence in (early, whole):
        s.add(sequence)
    s.commit(plan := s.schedule(), result(plan))
    decode_rounds(s, 8, [[5, 6], [5] * 8])
    assert (early.num_computed, len(early.pages)) == (5, 3), "room for 8 tokens was reserved, and given back"
    assert (whole.num_computed, len(whole.pages)) == (11, 6)
    audit(s)
    assert [row.first for row in s.schedule().rows] == [5, 11]


def test_tokens_after_a_stop_are_not_computed_positions():
    arrive = Arrivals()
    s = scheduler(page_size=2, max_rounds=8, prefix_cache=True)
    stopped = arrive(3, 40, eos=frozenset({9}))
    s.add(stopped)
    s.commit(plan := s.schedule(), result(plan))
    (event,) = decode_rounds(s, 8, [[5, 9, 6, 6, 6, 6, 6, 6]])
    assert event.token_ids == (5, 9)
    audit(s)
    assert s.tables.pool.num_cached == 2, "pages of 5 computed positions; what was drawn after the stop is in none"


def test_pages_that_a_step_without_finite_logits_filled_are_not_published():
    arrive = Arrivals()
    s = scheduler(page_size=2, max_rounds=8, prefix_cache=True)
    s.add(arrive(6, 40))
    plan = s.schedule()
    made = result(plan)
    made.tokens_SR = np.full_like(made.tokens_SR, NOT_FINITE)
    (event,) = s.commit(plan, made)
    assert (event.token_ids, event.finish_reason) == ((), "not_finite")
    audit(s)
    assert s.tables.pool.num_cached == 0, "the prompt's pages may hold what is not finite"


def test_a_draft_that_is_no_token_agrees_with_nothing():
    assert agreed_draws([5, NOT_FINITE, 7], [5, NOT_FINITE]) == [5, NOT_FINITE]


def test_a_chunk_of_a_prompt_is_computed_as_far_as_it_was_planned():
    arrive = Arrivals()
    s = scheduler(page_size=4, budget=8)
    sequence = arrive(20, 4)
    s.add(sequence)
    ends = []
    while not sequence.num_output:
        s.commit(plan := s.schedule(), result(plan))
        ends.append(sequence.num_computed)
    assert ends == [8, 16, 20]


def test_a_prompt_that_is_only_scored_is_computed_whole():
    arrive = Arrivals()
    s = scheduler(page_size=4, prefix_cache=True)
    s.add(arrive(8, 0, prompt_logprobs=True))
    s.commit(plan := s.schedule(), result(plan))
    assert s.tables.pool.num_cached == 2
