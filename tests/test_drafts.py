"""Drafts change nothing but the number of steps: tokens and log-probabilities are those without."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from quire import LLM, SamplingParams, Structured
from quire.config import EngineConfig
from quire.core.drafts import Drafter
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.field_error import FieldError
from quire.testing import fake_engine
from tests.effort import nightly, slow
from tests.test_rounds import PARAMS, PROMPTS
from tests.tiny import VOCAB, tiny_config, tiny_llm
from tests.words import tiny_tokenizer

ASKED = PARAMS | {
    "forked": SamplingParams(seed=7, n=3, max_tokens=21, logprobs=1),
    "until a string": SamplingParams(seed=4, max_tokens=40, stop=["a", "e1", "t"], ignore_eos=True),
    "biased": SamplingParams(seed=4, max_tokens=21, logit_bias={5: 2.0, 11: -1.0}, min_p=0.05),
    "of a form": SamplingParams(seed=4, max_tokens=30, structured=Structured(regex="[a-f]{3,20}")),
}
Answers = dict[tuple[tuple[int, ...], int], tuple[list[int], list]]


def answers(llm: LLM, params: SamplingParams) -> Answers:
    """The tokens, the reason and the log-probabilities of every sequence, by prompt and index."""
    outputs = llm.generate(PROMPTS, params, progress=False)
    return {
        (tuple(output.prompt_token_ids), i): ([*one.token_ids, one.finish_reason], one.logprobs or [])
        for output in outputs
        for i, one in enumerate(output.outputs)
    }


def foresee(llm: LLM, known: Answers, seed: int = 0) -> None:
    """Have an engine draft what comes next, now and then with a mistake in it."""
    rng = random.Random(seed)

    def look_up(sequence: Sequence, drafter: Drafter, most: int) -> list[int]:
        (*tokens, _), _ = known[sequence.request.prompt_token_ids, sequence.index]
        rest = tokens[sequence.num_output : sequence.num_output + most]
        return [token if rng.random() < 0.85 else rng.randrange(VOCAB) for token in rest]

    llm.engine.scheduler._look_up = look_up


def check_same(got: Answers, expected: Answers) -> None:
    assert {key: tokens for key, (tokens, _) in got.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, entries) in got.items():
        for ours, theirs in zip(entries, expected[key][1], strict=True):
            assert (ours.token_id, [i for i, _ in ours.top]) == (theirs.token_id, [i for i, _ in theirs.top])
            assert np.allclose(
                (ours.logprob, ours.processed_logprob), (theirs.logprob, theirs.processed_logprob), atol=1e-4
            )


@pytest.fixture(scope="module")
def plain():
    with tiny_llm(tokenizer=tiny_tokenizer(), max_rounds=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def ahead():
    with tiny_llm(tokenizer=tiny_tokenizer(), drafts=16, max_rounds=4, debug=True, fail_on_compile=True) as llm:
        yield llm


@pytest.mark.parametrize("name", ASKED)
def test_tokens_do_not_depend_on_drafts(plain, ahead, name):
    """Greedy, seeded, penalised, forked, ended by anything: with good drafts, bad ones, and those that are found."""
    expected, before = answers(plain, ASKED[name]), ahead.engine.stats()
    foresee(ahead, expected)
    check_same(answers(ahead, ASKED[name]), expected)
    stats = ahead.engine.stats()
    accepted, drafted = stats.accepted_drafts - before.accepted_drafts, stats.drafted_tokens - before.drafted_tokens
    if name == "of a form":
        assert drafted == 0, "the host has to say what may come next, after every token"
    else:
        assert 0 < accepted < drafted
    del ahead.engine.scheduler._look_up  # as it is by itself
    check_same(answers(ahead, ASKED[name]), expected)
    assert ahead.engine.stats().held_pages == 0


@pytest.mark.parametrize(
    "knobs",
    [
        {"preemption": "swap", "num_host_pages": 64, "num_pages": 20},
        slow({"preemption": "recompute", "num_pages": 20}),
        nightly({"preemption": "recompute", "num_pages": 40, "page_size": 2, "max_num_batched_tokens": 16}),
        nightly({"attention": "reference", "matmul": "xla"}),
        nightly({"attention": "xla", "matmul": "xla", "prefix_cache": False}),
        nightly({"deterministic": True, "max_num_batched_tokens": 16}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["forked", slow("penalised")])
def test_nor_on_what_happens_to_them(plain, knobs, name):
    params = replace(ASKED[name], n=3)  # enough to run out of pages
    expected = answers(plain, params)
    with tiny_llm(drafts=16, debug=True, max_model_len=64, max_rounds=4, **knobs) as llm:
        foresee(llm, expected)
        check_same(answers(llm, params), expected)
        stats = llm.engine.stats()
        assert stats.accepted_drafts
        assert bool(stats.preemptions) == ("preemption" in knobs)


@pytest.mark.parametrize("windows", [(5, None), nightly((3, 9))])
def test_drafts_in_layers_that_see_a_window(windows):
    config = tiny_config(windows=windows, eos_ids=())
    params = SamplingParams(seed=1, max_tokens=40)
    with tiny_llm(config, max_rounds=1) as llm:
        expected = answers(llm, params)
    with tiny_llm(config, drafts=16, debug=True) as llm:
        foresee(llm, expected)
        check_same(answers(llm, params), expected)
        assert llm.engine.stats().accepted_drafts


@pytest.mark.slow
def test_in_bfloat16_the_log_probabilities_are_the_same_to_the_last_bit():
    """On the native path, as in any batch."""
    params, knobs = SamplingParams(seed=1, max_tokens=40, logprobs=0), {"dtype": "bfloat16"}
    with tiny_llm(max_rounds=1, **knobs) as llm:
        expected = answers(llm, params)
    with tiny_llm(drafts=16, **knobs) as llm:
        foresee(llm, expected)
        assert answers(llm, params) == expected
        assert llm.engine.stats().accepted_drafts


def test_statistics_count_a_step_with_drafts_as_one_round():
    engine = fake_engine(eos_ids=(), drafts=8, max_rounds=4, num_pages=40)
    (sequence,) = engine.add(Request(id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=9, seed=1)))
    tokens = alone(lambda: fake_engine(eos_ids=(), num_pages=40))
    engine.scheduler._look_up = lambda sequence, drafter, most: tokens[sequence.num_output :][:most]
    engine.step()
    before = engine.stats()
    assert [event.token_ids for event in engine.step()] == [tuple(tokens[1:5])]
    after = engine.stats()
    assert (after.steps - before.steps, after.rounds - before.rounds) == (1, 1)
    assert (after.computed_tokens - before.computed_tokens, after.generated_tokens - before.generated_tokens) == (4, 4)
    assert (after.drafted_tokens, after.accepted_drafts) == (3, 3)
    while engine.has_work:
        engine.step()
    assert sequence.output_token_ids == tokens


def alone(build: Callable) -> list[int]:
    engine = build()
    (sequence,) = engine.add(Request(id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=9, seed=1)))
    while engine.has_work:
        engine.step()
    return sequence.output_token_ids


@pytest.mark.parametrize("drafts", [-1, 1, 3, 1025, True, "8", 2.5, None])
def test_a_number_of_drafts_that_cannot_be_is_refused_by_name(drafts):
    with pytest.raises(FieldError, match="drafts=") as caught:
        EngineConfig(drafts=drafts)
    assert caught.value.field == "drafts"


def test_drafts_must_fit_into_a_step():
    with pytest.raises(FieldError, match=r"drafts=64 is more than max_num_batched_tokens=32.*lower the first"):
        EngineConfig(drafts=64, max_num_batched_tokens=32, max_num_seqs=4)
