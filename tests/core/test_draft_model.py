"""The draft model, on the host: which KV it has, what it computes so that it can guess, and how often it does."""

from typing import Any

import numpy as np
import pytest

from quire.core.audit import audit
from quire.core.draft_pages import DraftPages
from quire.core.drafts import FIRST_PAUSE, LONGEST_PAUSE, UNKNOWN, Guesses
from quire.core.plan import PageOperations, StepPlan
from quire.core.scheduler import Scheduler
from tests.core.fake import Arrivals, Result, result, scheduler


def drafting(**knobs) -> Scheduler:
    """A scheduler with a draft model that knows 64 positions."""
    asked: dict[str, Any] = {"drafts": 8, "draft_len": 64, "budget": 16} | knobs
    return scheduler(**asked)


def draft_rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Of what the draft model computes beside a plan: arrival, first position, tokens."""
    return [(row.sequence.arrival, row.first, row.num_tokens) for row in plan.draft_rows]


def guessed(plan: StepPlan, drafts: list[list[int]], drawn: list[int]) -> Result:
    """The result of a step in which these were guessed, and these drawn."""
    made = result(plan)
    made.tokens_SR = np.array(drawn, np.int32)[:, None]
    made.drafted_BR = np.array(drafts, np.int32)
    return made


def test_pages_know_how_far_the_draft_model_got():
    pages = DraftPages(num_pages=10, num_host_pages=4, page_size=4)
    table = [5, 9, 2]
    assert pages.end(table, 10) == 0
    pages.write(table, 0, 7, is_drafted=True)
    assert (pages.end(table, 10), pages.end(table, 6)) == (7, 6)
    pages.write(table, 7, 9, is_drafted=False)
    assert pages.end(table, 9) == 7, "the target went on alone"
    pages.write(table, 7, 10, is_drafted=True)
    assert pages.end(table, 10) == 10
    pages.write(table, 9, 10, is_drafted=False)
    assert pages.end(table, 10) == 9, "the same positions hold something else"
    pages.write([5, 3], 4, 8, is_drafted=False)
    assert pages.end([5, 3], 8) == 4


def test_pages_are_moved_in_the_order_of_a_step():
    pages = DraftPages(num_pages=10, num_host_pages=4, page_size=4)
    pages.write([1, 2], 0, 7, is_drafted=True)
    pages.move(PageOperations(swap_outs=[(2, 0)], copies=[(1, 2)], swap_ins=[(0, 4)]))
    assert [pages.end([page], 4) for page in (1, 2, 4)] == [4, 4, 3]


def test_how_many_guesses_pay_follows_from_how_many_were_accepted():
    guesses = Guesses()
    assert guesses.most == 3
    for _ in range(20):
        guesses.learn(10, 3, 3)
    assert guesses.most > 16
    for _ in range(5):
        guesses.learn(10, 7, 2)
    assert 2 <= guesses.most <= 3, "two of three are right"
    guesses.learn(10, 3, 0)
    assert guesses.resume_at == 0, "one that was wrong is no reason to stop"


def test_guesses_that_are_wrong_again_and_again_pause_longer_and_longer():
    guesses, pauses = Guesses(), []
    for _ in range(30):
        before = guesses.resume_at
        guesses.learn(1000, guesses.most, 0)
        if guesses.resume_at != before or pauses:
            pauses.append(guesses.resume_at - 1000)
            guesses.resume_at = 0
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert guesses.most == 1, "after a pause one is tried"
    guesses.learn(1000, 1, 1)
    guesses.learn(1000, 1, 0)
    guesses.learn(1000, 1, 0)
    assert guesses.resume_at == 1000 + FIRST_PAUSE


def test_it_goes_along_with_a_prompt_and_guesses_behind_it():
    s = drafting()
    s.add(sequence := Arrivals()(20, 40))
    plan = s.schedule()
    assert draft_rows(plan) == [(1, 0, 16)]
    s.commit(plan, result(plan))
    plan = s.schedule()
    assert draft_rows(plan) == [(1, 16, 4)]
    s.commit(plan, result(plan, 4))
    plan = s.schedule()
    assert (draft_rows(plan), plan.drafts, plan.num_tokens) == ([], {0: [UNKNOWN] * 3}, 4)
    (event,) = s.commit(plan, guessed(plan, [[5, 6, 7, 9]], [5, 6, 8, 1]))
    assert event.token_ids == (5, 6, 8)
    assert (s.drafted_tokens, s.accepted_drafts) == (3, 2)
    assert draft_rows(s.schedule()) == [], "it has all that was accepted"
    audit(s)
    assert sequence.num_computed == 23


def test_it_catches_up_on_rounds_without_drafts():
    s = drafting(max_rounds=4)
    s.add(sequence := Arrivals()(6, 40))
    s.commit(plan := s.schedule(), result(plan, 4))
    assert sequence.drafter is None
    s.drafts = 0
    plan = s.schedule()
    assert (plan.rows[0].max_rounds, draft_rows(plan)) == (4, [])
    made = result(plan)
    made.tokens_SR = np.array([[1, 2, 3, 4]], np.int32)
    s.commit(plan, made)
    s.drafts = 8
    plan = s.schedule()
    assert draft_rows(plan) == [(1, 6, 4)]
    assert plan.drafts


def test_what_it_lacks_beyond_a_step_comes_before_its_guesses():
    """Positions that nobody guessed behind, more than fit into one step."""
    s = drafting(prefix_cache=True, page_size=4, budget=16)
    arrive = Arrivals()
    s.add(arrive(40, 1))
    while s.running or s.waiting:
        plan = s.schedule()
        assert draft_rows(plan) == [], "nobody guesses for it"
        s.commit(plan, result(plan))
    s.add(arrive(40, 40))
    seen = []
    while not (plan := s.schedule()).drafts:
        seen += draft_rows(plan)
        s.commit(plan, result(plan))
    assert seen == [(2, 0, 16), (2, 16, 16)]
    assert draft_rows(plan) == [(2, 32, plan.rows[0].first - 32)]


def test_rows_that_share_pages_do_not_write_them_twice():
    s = drafting(prefix_cache=True, drafts=16, budget=32)
    arrive = Arrivals()
    s.add(arrive(9, 1))
    s.commit(plan := s.schedule(), result(plan))
    for _ in range(2):
        s.add(arrive(9, 40))
    plan = s.schedule()
    assert draft_rows(plan) == [(2, 0, 8)]
    assert [(row.first, row.num_tokens) for row in plan.rows] == [(8, 4), (8, 1)], "only one of them can guess"
    s.commit(plan, guessed(plan, [[1, 2, 3]], [1, 2, 3, 4, 5]))
    plan = s.schedule()
    assert draft_rows(plan) == [(3, 8, 1)], "what it shares with the other is there now"
    assert list(plan.drafts) == [0, 1]
    audit(s)


@pytest.mark.parametrize(("rows", "num_followed"), [(2, 2), (3, 0)])
def test_rows_are_followed_where_there_is_room_for_drafts_of_each(rows, num_followed):
    s = drafting(budget=32)
    arrive = Arrivals()
    for _ in range(rows - 1):
        s.add(arrive(3, 40))
    s.commit(plan := s.schedule(), result(plan, 4))
    s.add(arrive(5, 40))
    assert len(draft_rows(s.schedule())) == num_followed


@pytest.mark.parametrize("params", [{"max_rounds": 1}, {"max_tokens": 1}], ids=str)
def test_what_is_never_drafted_is_not_computed(params):
    s = drafting()
    s.add(Arrivals()(5, **{"max_tokens": 40} | params))
    assert draft_rows(s.schedule()) == []


@pytest.mark.parametrize(("max_tokens", "is_worth"), [(2, False), (3, True)])
def test_a_long_prompt_is_not_computed_for_a_few_drafts(max_tokens, is_worth):
    """Neither with the prompt nor before drafts. The prompt has 65 times as many tokens as may be drafted, or 33."""
    s = drafting(num_pages=64, page_size=4, budget=128, draft_len=256)
    s.add(Arrivals()(65, max_tokens))
    plan = s.schedule()
    assert bool(draft_rows(plan)) == is_worth
    s.commit(plan, result(plan, 4))
    plan = s.schedule()
    assert (draft_rows(plan), bool(plan.drafts)) == ([], is_worth)


def test_nothing_is_drafted_beyond_the_positions_it_knows():
    s = drafting(draft_len=8)
    s.add(Arrivals()(5, 40))
    s.commit(plan := s.schedule(), result(plan, 4))
    plan = s.schedule()
    assert plan.num_tokens == 3, "positions 5 to 7"
    s.commit(plan, guessed(plan, [[1, 2]], [1, 2, 3]))
    assert not s.schedule().drafts
