"""Protects the judge of every oracle test: it must forgive near-ties, and nothing else.

`assert_greedy_equal` goes on after a tie, so a mistake in it would quietly stop checking. Plain lists stand in for
both models here; the oracle's environment is not needed.
"""

import pytest

from tests.oracle.harness import TieRule, assert_greedy_equal

CLEAR, TIE = 1.0, 1e-4


def oracle(tokens: list[int], ties: set[int] = frozenset()) -> dict:
    gaps = [TIE if i in ties else CLEAR for i in range(len(tokens))]
    return {"tokens": tokens, "gaps": gaps, "runners_up": [0] * len(tokens)}


class Model:
    """Generates from a table: prompt -> tokens. Records every batch it was given."""

    def __init__(self, table: dict[tuple[int, ...], list[int]]):
        self.table = table
        self.batches: list[list[tuple[list[int], int]]] = []

    def __call__(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        self.batches.append(list(zip(prompts, max_tokens, strict=True)))
        return [self.table[tuple(prompt)][:n] for prompt, n in zip(prompts, max_tokens, strict=True)]


def test_compare_finds_no_difference():
    assert TieRule().compare([1, 2, 3], oracle([1, 2, 3])) is None


def test_compare_returns_and_keeps_an_allowed_tie():
    rule = TieRule()
    assert rule.compare([1, 9, 9], oracle([1, 2, 3], {1})) == 1
    assert rule.ties == ["sequence, step 1: ours 9, oracle 2, gap 1.00e-04"]


def test_compare_rejects_a_clear_difference():
    with pytest.raises(AssertionError, match=r"step 2: ours 9, oracle 3, gap 1\.00e\+00: a wrong token"):
        TieRule().compare([1, 2, 9], oracle([1, 2, 3], {1}))


@pytest.mark.parametrize("gap", [1e-3, float("nan")])
def test_compare_allows_only_gaps_below_the_limit(gap: float):
    theirs = oracle([1]) | {"gaps": [gap]}
    with pytest.raises(AssertionError, match="wrong token"):
        TieRule().compare([2], theirs)


@pytest.mark.parametrize("ours", [[1, 2], [1, 2, 3, 4]])
def test_compare_rejects_another_length(ours: list[int]):
    with pytest.raises(AssertionError, match="tokens from step 0"):
        TieRule().compare(ours, oracle([1, 2, 3]))


def test_equal_sequences_are_generated_once():
    model = Model({(7,): [1, 2], (8,): [3]})
    assert assert_greedy_equal(model, [[7], [8]], [oracle([1, 2]), oracle([3])], 0) == []
    assert model.batches == [[([7], 2), ([8], 1)]]


def test_goes_on_from_the_oracles_token_after_a_tie():
    model = Model({(7,): [1, 9, 9, 9], (7, 1, 2): [3, 4]})
    ties = assert_greedy_equal(model, [[7]], [oracle([1, 2, 3, 4], {1})], 1)
    assert ties == ["prompt 0 (1 tokens), step 1: ours 9, oracle 2, gap 1.00e-04"]
    assert model.batches == [[([7], 4)], [([7, 1, 2], 2)]]


def test_continuations_of_one_round_share_a_batch_and_ties_repeat():
    model = Model(
        {
            (7,): [9, 9, 9],
            (6,): [5, 5],
            (8,): [4, 9, 9],
            (7, 1): [9, 9],
            (8, 4, 5): [6],
            (7, 1, 2): [3],
        }
    )
    theirs = [oracle([1, 2, 3], {0, 1}), oracle([5, 5]), oracle([4, 5, 6], {1})]
    ties = assert_greedy_equal(model, [[7], [6], [8]], theirs, 3)
    assert model.batches[1:] == [[([7, 1], 2), ([8, 4, 5], 1)], [([7, 1, 2], 1)]]
    assert [tie.split(":")[0] for tie in ties] == [
        "prompt 0 (1 tokens), step 0",
        "prompt 2 (1 tokens), step 1",
        "prompt 0 (1 tokens), step 1",
    ]


def test_a_tie_at_the_last_step_ends_the_sequence():
    model = Model({(7,): [1, 9]})
    assert len(assert_greedy_equal(model, [[7]], [oracle([1, 2], {1})], 1)) == 1
    assert len(model.batches) == 1


def test_a_wrong_token_after_a_tie_is_found():
    model = Model({(7,): [9, 0, 0], (7, 1): [2, 9]})
    with pytest.raises(AssertionError, match="step 2: ours 9, oracle 3"):
        assert_greedy_equal(model, [[7]], [oracle([1, 2, 3], {0})], 5)


def test_too_many_ties_fail_and_are_listed():
    model = Model({(7,): [9], (8,): [9]})
    theirs = [oracle([1], {0}), oracle([2], {0})]
    with pytest.raises(AssertionError, match=r"2 ties, at most 1 allowed:\nprompt 0.*\nprompt 1.*oracle 2"):
        assert_greedy_equal(model, [[7], [8]], theirs, 1)


def test_a_missing_output_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        assert_greedy_equal(lambda prompts, max_tokens: [[1]], [[7], [8]], [oracle([1]), oracle([2])], 0)
