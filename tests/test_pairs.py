"""Every two features meet: each pair in one request, in both orders, with all the checks of the random histories.

docs/testing.md has the table of pairs that have a test of their own besides.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence, SequenceState
from quire.core.stopping import FinishReason
from quire.structured.form import Structured
from tests.effort import slow
from tests.histories import ROOTS, History

ROOT = Path(__file__).resolve().parents[1]
DOCS = (ROOT / "docs" / "testing.md").read_text()
NUM_SEEDS = 12
NUM_BEFORE = 3
"""Output tokens after which something is done to a request."""


def fork(history: History, family: list[Sequence]) -> None:
    child = history.fork_one(running(history, family))
    assert child is not None
    family.append(child)


def recompute(history: History, family: list[Sequence]) -> None:
    history.engine.scheduler.preempt(running(history, family), swap=False)


def swap(history: History, family: list[Sequence]) -> None:
    target = running(history, family)
    history.engine.scheduler.preempt(target, swap=True)
    assert target.state is SequenceState.SWAPPED


def change_weights(history: History, family: list[Sequence]) -> None:
    history.set_weights("keep" if family[0].seed % 3 == 0 else "recompute")


def abort(history: History, family: list[Sequence]) -> None:
    """The last that is alive, and in some histories the first: whoever is left goes on."""
    alive = [s for s in family if not s.finish_reason]
    if not alive:
        raise EndedError
    target = alive[0 if family[0].seed % 2 else -1]
    history.abort_one(target)
    assert (target.finish_reason, len(target.pages), len(target.host_pages)) == (FinishReason.ABORT, 0, 0)


def running(history: History, family: list[Sequence]) -> Sequence:
    """A member with tokens of its own and a row: what was preempted before has one again after some steps."""
    for _ in range(20):
        able = [s for s in family if s.state is SequenceState.RUNNING and s.num_output]
        if able:
            return able[-1]
        history.play("step")
    raise EndedError


class EndedError(Exception):
    """Nobody is left to do anything to."""


@dataclass(frozen=True)
class Feature:
    """What a request asks for, or what is done to it."""

    params: dict[str, Any] = field(default_factory=dict)
    act: Callable[[History, list[Sequence]], None] | None = None
    seen: Callable[[Sequence], object] = lambda sequence: True
    """Whether a sequence that has ended shows it."""


FEATURES = {
    "fork": Feature(act=fork, seen=lambda s: s.num_inherited > s.prompt_len),
    "n": Feature({"n": 3}, seen=lambda s: s.index > 0),
    "stop strings": Feature({"stop": ["b a", "aab", "\u00e9", "ba"]}, seen=lambda s: s.finish_reason == "stop"),
    "grammar": Feature({"structured": Structured(regex="[ab]{5,9}( a)?")}),
    "log-probabilities": Feature({"logprobs": 2}, seen=lambda s: len(s.logprobs) == s.num_output > 0),
    "penalties": Feature({"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}),
    "streams": Feature(),
    "preemption": Feature(act=recompute, seen=lambda s: s.preemptions),
    "swap": Feature(act=swap, seen=lambda s: s.preemptions),
    "weights": Feature(act=change_weights, seen=lambda s: len(set(s.weight_versions)) == 2),
    "prefix": Feature(seen=lambda s: s.num_cached_tokens),
    "abort": Feature({"n": 2}, act=abort, seen=lambda s: s.finish_reason == "abort"),
}
PAIRS = list(combinations(FEATURES, 2))


def live(names: tuple[str, str], seed: int) -> list[Sequence]:
    """One request with two features, from its first token to its last page back; returns all its sequences."""
    history = History(seed, page_size=2, num_pages=40, num_host_pages=20, max_rounds=1 + seed % 2, debug=True)
    params = {"seed": seed, "max_tokens": 12, "temperature": seed % 2 / 2, "ignore_eos": True}
    for name in names:
        params |= FEATURES[name].params
    request = {"prompt_token_ids": tuple(ROOTS[0][:9]), "params": SamplingParams(**params)}
    if "prefix" in names:
        history.admit(Request(id="before", **request))
        history.drain()
    history.admit(Request(id="r", **request, stream="streams" in names))
    family = list(history.alive)
    acts = [act for name in (names if seed % 4 < 2 else names[::-1]) if (act := FEATURES[name].act)]
    while family[0].num_output < NUM_BEFORE and not family[0].finish_reason:
        history.play("step")
    try:
        for act in acts:
            act(history, family)
            history.check()
            if seed % 3 == 0:
                history.play("step")
    except EndedError:
        pass  # in this history too few lived long enough
    history.drain()
    history.replay()
    return family


@pytest.mark.parametrize(
    "pair",
    [pair if i % 6 == 0 else slow(pair) for i, pair in enumerate(PAIRS)],
    ids=[" and ".join(pair) for pair in PAIRS],
)
def test_two_features_meet(pair):
    """Tokens, log-probabilities, ends and texts are checked by the history; here, that both features were there."""
    seen = Counter()
    for seed in range(NUM_SEEDS):
        family = live(pair, seed)
        assert all(sequence.finish_reason for sequence in family)
        seen.update(name for name in pair if any(map(FEATURES[name].seen, family)))
        seen["both"] += all(any(map(FEATURES[name].seen, family)) for name in pair)
    assert seen["both"] > 0, seen


def test_the_table_of_pairs_names_tests_that_exist_and_features_that_are_crossed_here():
    table = DOCS.partition("## Pairs of features")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 20
    for first, second, test in rows[2:]:
        assert (first, second) in PAIRS, (first, second)
        assert "::" in test
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", table)
    assert len(names) >= len(rows) - 2
    for path, name in names:
        body = ast.parse((ROOT / path).read_text()).body
        assert name in [node.name for node in body if isinstance(node, ast.FunctionDef)], f"{path}::{name}"
