"""Forks with a future of their own: other sampling parameters, and tokens that the caller forces."""

import re

import numpy as np
import pytest

from quire import SamplingParams
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.llm import new_text
from quire.structured.form import Structured
from quire.testing import fake_engine
from tests.tiny import tiny_config, tiny_llm
from tests.words import toy_tokenizer


def request(i="r", prompt_len=10, **params) -> Request:
    return Request(id=str(i), prompt_token_ids=tuple(range(1, 1 + prompt_len)), params=SamplingParams(**params))


def engine(**knobs):
    defaults = {"num_pages": 200, "max_num_seqs": 64, "max_num_batched_tokens": 64, "max_model_len": 128, "debug": True}
    return fake_engine(vocab_size=97, **(defaults | knobs))


def finish(e) -> None:
    while e.has_work:
        e.step()


def begin(e, num_output: int = 4, name: str = "r", prompt_len: int = 6, **params):
    """A sequence that has drawn some tokens."""
    (sequence,) = e.add(request(name, prompt_len=prompt_len, **{"max_tokens": 20, "ignore_eos": True} | params))
    while sequence.num_output < num_output:
        e.step()
    return sequence


@pytest.mark.parametrize("forced", [[], [7], list(range(20, 29))], ids=len)
@pytest.mark.parametrize("how", [{"temperature": 0}, {"seed": 3, "temperature": 0.7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("knobs", [{}, {"max_rounds": 4}, {"prefix_cache": False}, {"page_size": 1}], ids=str)
def test_a_fork_with_forced_tokens_is_a_fresh_request_with_those_tokens_in_its_prompt(forced, how, knobs):
    """Draws depend on seed, index and position: the fresh request's sequence is the one with the fork's index."""
    e = engine(**{"page_size": 4, "num_host_pages": 20} | knobs)
    parent = begin(e, **how)
    child = e.fork(parent, SamplingParams(**how, max_tokens=20, ignore_eos=True), forced)
    again = e.fork(parent, token_ids=forced)
    prompt = tuple(child.tokens)
    assert prompt == (*parent.tokens, *forced)
    num_begun = child.num_output
    finish(e)
    for sequence in (child, again):
        fresh = engine(prefix_cache=False)
        params = SamplingParams(**how, max_tokens=20 - num_begun, ignore_eos=True, n=sequence.index + 1)
        expected = fresh.add(Request(id="f", prompt_token_ids=prompt, params=params))[-1]
        finish(fresh)
        assert sequence.tokens == expected.tokens
        assert sequence.num_output == 20
    assert e.stats().held_pages == 0


def test_the_pages_of_a_fork_with_forced_tokens_are_its_parents_up_to_where_they_part():
    e = engine(page_size=4)
    parent = begin(e, num_output=4, prompt_len=6, seed=1)
    assert (parent.num_tokens, parent.num_computed) == (10, 9)
    before = e.stats()
    child = e.fork(parent, token_ids=[7, 8, 9])
    e.step()
    after = e.stats()
    assert list(child.pages)[:2] == list(parent.pages)[:2]
    assert set(child.pages[2:]).isdisjoint(parent.pages)
    assert after.page_copies - before.page_copies == 1, "the third page, of which the parent had computed one token"
    assert after.computed_tokens - before.computed_tokens == 1 + 4, "its tenth token, and the three that were forced"
    finish(e)


@pytest.mark.parametrize("disturb", ["abort", "swap", "recompute", "child swap", "child recompute"])
def test_forced_tokens_survive_whatever_happens(disturb):
    def run(disturb):
        e = engine(page_size=4, num_host_pages=50)
        parent = begin(e, seed=1)
        child = e.fork(parent, SamplingParams(seed=9, max_tokens=20, ignore_eos=True, logprobs=1), [7, 8, 9])
        if disturb == "abort":
            e.abort(parent)
        elif disturb in ("swap", "recompute"):
            e.scheduler.preempt(parent, swap=disturb == "swap")
        elif disturb:
            e.step()
            e.scheduler.preempt(child, swap=disturb == "child swap")
        finish(e)
        return child.tokens, child.logprobs

    assert run(disturb) == run(None)


def test_other_params_are_the_forks_alone():
    e = fake_engine(tokenizer=toy_tokenizer(), num_pages=60, debug=True)
    parent = begin(e, num_output=3, seed=4, stop=["zz"])
    params = SamplingParams(
        temperature=0, max_tokens=9, stop_token_ids=[3], min_tokens=5, logprobs=2, skip_special=False
    )
    child = e.fork(parent, params)
    grandchild = e.fork(child)
    assert child.params is grandchild.params is params
    assert (child.max_tokens, child.seed, parent.max_tokens) == (9, 4, 20)
    assert (child.index, grandchild.index, parent.family) == (1, 2, [parent, child, grandchild])
    assert e.fork(parent, SamplingParams(seed=8)).seed == 8
    finish(e)
    assert child.tokens == grandchild.tokens, "greedy"
    assert len(child.logprobs) == child.num_output <= 9
    assert parent.logprobs == []
    assert parent.num_output == 20
    assert e.abort("r") == 0
    e.audit()


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 4], ids=["at once", "in chunks"])
def test_what_a_fork_begins_with_is_scored_like_a_prompt(chunk):
    """The forced tokens, and the parent's, who had not been asked for log-probabilities."""
    with tiny_llm(
        tiny_config(eos_ids=()), max_num_seqs=4, max_num_batched_tokens=chunk, max_rounds=1, debug=True
    ) as llm:
        e = llm.engine
        parent = begin(e, num_output=5, temperature=0)
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=True)
        child = e.fork(parent, params, [40, 41, 42])
        silent = e.fork(parent, token_ids=[40, 41, 42])
        twin = e.fork(child)
        finish(e)
        assert twin.logprobs[8:] == child.logprobs[8:]
        scores = [entry.logprob for entry in child.logprobs]
        assert (len(scores), len(silent.logprobs)) == (12, 0)
        assert silent.tokens[: child.num_tokens] == child.tokens
        assert scores == pytest.approx(llm.score(child.tokens)[child.prompt_len - 1 :], abs=1e-4)
        prompt_scores = [entry.logprob for entry in child.prompt_logprobs[1:] if entry]
        assert prompt_scores == pytest.approx(llm.score(child.tokens)[: child.prompt_len - 1], abs=1e-4)
        for i, entry in enumerate(child.logprobs):
            assert entry.token_id == child.output_token_ids[i]
            assert len(entry.top) == 2
            assert (entry.processed_logprob is None) == (i < 8), "five of the parent and three forced were not drawn"
        assert parent.prompt_logprobs == [None], "it did not ask"


def test_log_probabilities_that_a_parent_has_are_kept():
    e = engine()
    parent = begin(e, num_output=4, seed=1, logprobs=0)
    child = e.fork(parent, SamplingParams(max_tokens=9, logprobs=3, ignore_eos=True), [7])
    assert child.logprobs == parent.logprobs
    finish(e)
    assert child.logprobs[:4] == parent.logprobs[:4]
    assert (child.logprobs[4].token_id, child.logprobs[4].processed_logprob) == (7, None)
    assert len(child.logprobs) == 9


def test_forced_tokens_carry_the_version_of_when_they_were_forced():
    e = engine()
    parent = begin(e, num_output=3, seed=1)
    e.set_weights(5, version="new")
    child = e.fork(parent, token_ids=[7, 8])
    finish(e)
    assert child.weight_versions == [0] * 3 + ["new"] * (2 + 15)


def test_forced_tokens_are_text_and_part_of_a_form():
    tokenizer = toy_tokenizer()
    e = fake_engine(tokenizer=tokenizer, num_pages=60, eos_ids=(), debug=True)
    a, b, space_a = (next(i for i in range(20) if tokenizer.piece(i, True) == x) for x in (b"a", b"b", b" a"))
    form = Structured(regex="[ab]{4}( a)+")
    parent = begin(e, num_output=1, seed=1, structured=form, max_tokens=12)
    while parent.num_output < 2:
        e.step()
    text = tokenizer.decode(parent.output_token_ids)
    missing = [a] * (4 - len(text))
    child = e.fork(parent, token_ids=[*missing, space_a])
    with pytest.raises(RequestError, match=r"token_ids\[0\]=\d+ may not be there: structured allows no such output"):
        e.fork(parent, token_ids=[space_a] if missing else [b])
    other = e.fork(parent, SamplingParams(structured=Structured(regex="[ab ]{5,30}"), max_tokens=12, seed=2))
    with pytest.raises(RequestError, match=r"output token 0 of the parent, \d+, may not be there: structured"):
        e.fork(parent, SamplingParams(structured=Structured(regex="\u00e9+")))
    finish(e)
    assert new_text(child).startswith(text + "a" * len(missing) + " a a")
    assert re.fullmatch("[ab]{4}( a)+", new_text(parent))
    assert re.fullmatch("[ab ]{5,30}", new_text(other))


REFUSED = {
    "eos": ({"ignore_eos": False}, [5, 0], r"token_ids\[1\]=0 ends a sequence with these params \(eos\): ignore_eos"),
    "stop id": ({"stop_token_ids": [7]}, [7], r"token_ids\[0\]=7 ends .* \(stop\): min_tokens"),
    "stop sequence": ({"stop": [[7, 8]]}, [7, 8, 9], r"token_ids\[1\]=8 ends .* \(stop\)"),
    "length": ({"max_tokens": 6}, [7, 8, 9], r"token_ids\[1\]=8 ends .* \(length\): raise max_tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("given", ["the parent's", "its own"])
def test_a_forced_token_that_ends_the_fork_is_refused_and_nothing_changes(name, given):
    params, forced, says = REFUSED[name]
    params = {"max_tokens": 20, "ignore_eos": True, "seed": 2} | params
    e = engine()
    (parent,) = e.add(request(prompt_len=6, **params | ({} if given == "the parent's" else {"max_tokens": 20})))
    while parent.num_output < 4 and not parent.finish_reason:
        e.step()
    assert not parent.finish_reason, "another prompt is needed"
    with pytest.raises(RequestError, match=says) as error:
        e.fork(parent, None if given == "the parent's" else SamplingParams(**params), forced)
    assert error.value.field == "token_ids"
    assert (parent.family, parent.next_index) == ([parent], 1)
    assert e.fork(parent).index == 1
    e.audit()


def test_a_stop_that_the_parent_went_past_is_told_with_the_way_on():
    e = fake_engine(tokenizer=toy_tokenizer(), num_pages=60, eos_ids=(), debug=True)
    parent = begin(e, num_output=6, seed=1)
    stop = parent.output_token_ids[2]
    first = parent.output_token_ids.index(stop)
    with pytest.raises(
        RequestError, match=rf"output token {first} of the parent, {stop}, ends .* \(stop\): min_tokens"
    ):
        e.fork(parent, SamplingParams(stop_token_ids=[stop], max_tokens=20))
    child = e.fork(parent, SamplingParams(stop_token_ids=[stop], max_tokens=20, min_tokens=6, seed=5))
    finish(e)
    assert child.output_token_ids[:6] == parent.output_token_ids[:6]
    assert stop not in child.output_token_ids[6:-1]


@pytest.mark.parametrize(
    ("more", "field", "says"),
    [
        ({"token_ids": [97]}, "token_ids", "token 97 is no token id"),
        ({"token_ids": [-1]}, "token_ids", "token -1 is no token id"),
        ({"token_ids": [True]}, "token_ids", "token True is no token id"),
        ({"token_ids": "abc"}, "token_ids", "must be a list of token ids"),
        ({"token_ids": 5}, "token_ids", "must be a list of token ids"),
        ({"params": {"n": 1}}, "params", "must be SamplingParams"),
        ({"params": SamplingParams(n=2)}, "params", r"n=2\) must be SamplingParams\(...\) with n=1"),
        ({"params": SamplingParams(max_tokens=1000)}, "prompt", "more than max_model_len"),
        ({"params": SamplingParams(stop="x")}, "stop", "no tokenizer"),
        ({"params": SamplingParams(stop_token_ids=[97])}, "stop_token_ids", "not below the vocabulary"),
        ({"params": SamplingParams(structured=Structured(regex="a"))}, "structured", "no tokenizer"),
        ({"params": SamplingParams(max_tokens=4)}, "params", r"output token 3 of the parent, \d+, ends .* \(length\)"),
    ],
    ids=str,
)
def test_a_fork_that_cannot_be_says_why(more, field, says):
    e = engine()
    parent = begin(e, seed=1)
    with pytest.raises(RequestError, match=says) as error:
        e.fork(parent, **more)
    assert error.value.field == field
    assert parent.family == [parent]


def test_an_array_of_tokens_is_as_good_as_a_list():
    e = engine()
    parent = begin(e, seed=1)
    assert e.fork(parent, token_ids=np.array([7, 8])).tokens == e.fork(parent, token_ids=(7, 8)).tokens
