"""Pages can be trusted: random lives of an engine, with the audit after every operation.

The driver is for number, Hypothesis for the shortest history that fails, the mutations show that there is power in it.
"""

import multiprocessing
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from quire import SamplingParams
from quire.core.draft_pages import DraftPages
from quire.core.errors import AuditError
from quire.testing import KVError
from tests.core import test_prefix_cache
from tests.effort import slow
from tests.histories import CONFIGS, DRAFT_MODELS, WEIGHTS, History, play_history
from tests.mutations import MUTATIONS, RARE_MUTATIONS

HISTORY = 400
"""Operations in one history."""
NUM_SEEDS = 200
"""Histories that a mutation may survive."""
FIRST_SEED = {
    "mix_the_swapped_with_new_weights": 4, "poison_what_was_just_filled": 4, "believe_a_swap_that_failed": 29,
    "accept_what_was_drawn_behind_a_wrong_draft": 14, "draft_while_stops_are_forbidden": 86,
    "share_half_a_character": 11, "share_forced_tokens_with_the_parent": 3, "start_behind_what_must_be_scored": 3,
    "sleep_with_pages": 3, "slide_a_position_too_far": 7, "never_slide": 7, "take_a_windows_pages_from_the_front": 26,
    "share_a_partial_page_of_a_window": 7, "find_a_prefix_beyond_its_windows": 7,
    "leave_a_windows_pages_on_the_host": 7, "admit_by_the_first_pool_alone": 11, "grow_by_the_first_pool_alone": 13,
    "reserve_ahead_by_the_first_pool_alone": 13, "promise_nothing_in_windows": 139,
    "make_room_in_the_first_pool_alone": 11, "take_a_known_page_of_a_window_for_nothing": 12,
}  # fmt: skip
"""Where to begin with a mutation that few histories meet: with the first that does."""
RARE = {
    "share_forced_tokens_with_the_parent", "promise_nothing_in_windows", "grow_by_the_first_pool_alone",
    "take_a_known_page_of_a_window_for_nothing", "reserve_ahead_by_the_first_pool_alone",
    "admit_by_the_first_pool_alone", "copy_from_the_unwritten", "make_room_in_the_first_pool_alone",
    "leave_a_windows_pages_on_the_host", "share_a_partial_page_of_a_window", "take_a_windows_pages_from_the_front",
    "never_slide", "slide_a_position_too_far", "find_a_prefix_beyond_its_windows", "share_half_a_character",
    "draft_while_stops_are_forbidden",
}  # fmt: skip
"""Mutations that take the most histories to find; CI looks for them."""
HAPPENINGS = (
    "add", "fork", "abort", "abort in flight", "swap", "recompute", "rounds", "prefix", "failing step", "reset",
    "weights, keep", "weights, recompute", "weights, abort",
)  # fmt: skip


def play_many(first: int, last: int) -> Counter:
    total = Counter()
    for seed in range(first, last):
        try:
            total += play_history(seed, HISTORY)
        except Exception as error:
            error.add_note(f"history {seed}: repeat it with play_history({seed}, {HISTORY})")
            raise
    return total


@pytest.fixture(scope="module")
def total() -> Counter:
    return play_many(10_000_000, 10_000_018)


def test_some_histories(total):
    assert total["rounds"] > total["steps"] > 1000
    for kind in (
        "swaps", "recomputes", "evictions", "copies", "cached tokens", "constrained", "set_weights", "fail",
        "forced tokens", "forks with params", "unscored forks", "refused forks", "ends found",
    ):  # fmt: skip
        assert total[kind] > 0, kind


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams) if field.name != "pooling"])
def test_every_operation_meets_every_sampling_parameter(total, name):
    """A new field must be drawn at random, too; a row with a form runs one round at a time.

    A prompt that is pooled generates nothing, so that little can happen to it: `test_embed.py` has its histories.
    """
    missing = [what for what in HAPPENINGS if not total[what, name] and (what, name) != ("rounds", "structured")]
    assert not missing


def test_histories_with_a_draft_model():
    """Its device catches lies, too: a guess that does not follow from all tokens before it is an error."""
    total = Counter()
    for seed in range(2 * len(DRAFT_MODELS)):
        total += play_history(seed, HISTORY, DRAFT_MODELS)
    assert total["drafted"] > total["accepted drafts"] > 100
    for kind in ("swaps", "recomputes", "copies", "cached tokens", "set_weights", "fail"):
        assert total[kind] > 0, kind


@pytest.mark.parametrize("forgotten", ["move", "write", "end", "forget"])
def test_pages_that_the_draft_model_lacks_are_found(forgotten, monkeypatch):
    """Where its KV has gone to, that somebody else has written a page, that there is anything to catch up on, that a
    step which failed has taken all of it."""
    write = DraftPages.write
    forget = {
        "move": lambda self, operations: None,
        "write": lambda self, *args, is_drafted: write(self, *args, is_drafted=True) if is_drafted else None,
        "end": lambda self, pages, most: most,
        "forget": lambda self: None,
    }
    monkeypatch.setattr(DraftPages, forgotten, forget[forgotten])
    with pytest.raises((KVError, AuditError)):
        sum((play_history(seed, HISTORY, DRAFT_MODELS) for seed in range(NUM_SEEDS)), Counter())


@pytest.mark.slow
def test_many_operations_without_a_finding(num_operations, fresh_seed):
    num_histories, chunk, start = num_operations // HISTORY, 25, time.monotonic()
    first = fresh_seed * 1_000_000
    last = first + num_histories
    total = Counter()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(play_many, range(first, last, chunk), range(first + chunk, last + chunk, chunk)):
            total += part
    assert sum(total[name] for name in WEIGHTS) >= num_operations
    counts = {name: count for name, count in total.items() if isinstance(name, str)}
    print(f"\n{num_histories} histories from {first} on in {time.monotonic() - start:.0f} s: {counts}")


class Life(RuleBasedStateMachine):
    """The same rules, every choice drawn by Hypothesis, so that a failing history shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History(0, **CONFIGS[0])

    def play(self, name: str, choices: random.Random) -> None:
        self.history.random = choices
        self.history.play(name)

    @rule(choices=st.randoms(use_true_random=False))
    def add(self, choices):
        self.play("add", choices)

    @rule()
    def step(self):
        self.history.play("step")

    @precondition(lambda self: self.history.alive)
    @rule(
        name=st.sampled_from(["fork", "abort_one", "abort_request", "abort_in_flight", "preempt", "fail"]),
        choices=st.randoms(use_true_random=False),
    )
    def disturb(self, name, choices):
        self.play(name, choices)

    @rule(
        name=st.sampled_from(["evict", "set_weights", "reset", "snapshot"]), choices=st.randoms(use_true_random=False)
    )
    def meddle(self, name, choices):
        self.play(name, choices)

    def teardown(self) -> None:
        self.history.drain()


@pytest.mark.slow
def test_10000_operations_by_hypothesis():
    run_state_machine_as_test(
        Life, settings=settings(max_examples=200, stateful_step_count=50, deadline=None, print_blob=True)
    )


@pytest.mark.parametrize("name", [slow(name) if name in RARE else name for name in MUTATIONS])
def test_a_mutation_is_found(name, monkeypatch):
    MUTATIONS[name](monkeypatch)
    start = time.monotonic()
    for seed in range(FIRST_SEED.get(name, 0), NUM_SEEDS):
        try:
            play_history(seed, HISTORY)
        except (AttributeError, NameError, TypeError):
            raise  # the mutation itself is out of date
        except Exception as finding:
            print(f"\n{name}: history {seed}, {time.monotonic() - start:.2f} s: {type(finding).__name__}: {finding}")
            return
    pytest.fail(f"{NUM_SEEDS} histories did not find it")


@pytest.mark.parametrize("name", RARE_MUTATIONS)
def test_a_rare_mutation_is_found_by_an_exact_test(name, monkeypatch):
    RARE_MUTATIONS[name](monkeypatch)
    exact_test, cases = {
        "share_a_last_page_of_two_weight_versions": (
            test_prefix_cache.test_a_last_page_with_kv_of_two_weight_versions_is_not_found, [()]
        ),
        "reach_ahead_by_the_first_pool_alone": (
            test_prefix_cache.test_rounds_reserve_no_more_pages_than_every_window_has, [(i,) for i in range(6, 14)]
        ),
    }[name]  # fmt: skip
    with pytest.raises((AssertionError, AuditError, ValueError, RuntimeError)):
        _ = [exact_test(*case) for case in cases]
