"""Sequences with a grammar among others: their text has its form, and nobody else notices."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core import commit
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.scheduler import WATCHED_ROUNDS
from quire.core.sequence import SequenceState
from quire.structured.form import Structured
from quire.testing import fake_engine
from tests.effort import slow
from tests.histories import ToyGrammar
from tests.tiny import VOCAB, tiny_config, tiny_llm
from tests.words import EOS, PIECES, tiny_tokenizer

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(2, VOCAB, size=n).tolist() for n in (1, 3, 4, 9, 17, 30)]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = {
    "regex": (Structured(regex="[ab]{2,5}(12|no)"), lambda t: re.fullmatch("[ab]{2,5}(12|no)", t)),
    "choice": (Structured(choice=["yes", "no", "maybe"]), lambda t: t in ("yes", "no", "maybe")),
    "schema": (Structured(json_schema=SCHEMA), lambda t: list(json.loads(t)) == ["a", "b"]),
    "grammar": (Structured(grammar='start: "a" start "b" | "12"'), lambda t: re.fullmatch("a*12b*", t)),
}
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 1.5, "seed": 7}
FREE = SamplingParams(seed=11, max_tokens=24, top_p=0.9, logprobs=2)


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(tokenizer=tiny_tokenizer(), debug=True, fail_on_compile=True) as llm:
        yield llm


def run(llm: LLM, params, prompts=PROMPTS):
    outputs = llm.generate(prompts, params, progress=False)
    llm.engine.audit()
    assert llm.engine.stats().held_pages == 0
    return outputs


def answers(outputs) -> list:
    return [[(c.token_ids, c.text, c.finish_reason) for c in output.outputs] for output in outputs]


def structured(name: str, **params) -> SamplingParams:
    return SamplingParams(**{"structured": FORMS[name][0], "max_tokens": 100} | params)


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FORMS)
def test_every_text_has_its_form(llm, name, how):
    for output in run(llm, structured(name, n=3, **how)):
        for completion in output.outputs:
            assert completion.finish_reason in ("stop", "eos"), completion
            assert FORMS[name][1](completion.text), completion


def mixed() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every form, greedy and not, some of them several times over, among requests that have none."""
    params = [structured(name, n=n, max_tokens=40, **how) for name in FORMS for how, n in ((GREEDY, 1), (SAMPLED, 3))]
    params = [one for pair in zip(params, [FREE] * len(params), strict=True) for one in pair]
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params


@pytest.fixture(scope="module")
def alone(llm):
    return [answers(run(llm, one, [prompt]))[0] for prompt, one in zip(*mixed(), strict=True)]


def test_nobody_notices_who_shares_the_batch(llm, alone):
    prompts, params = mixed()
    assert answers(run(llm, params, prompts)) == alone


@pytest.mark.parametrize("knobs", [{"max_rounds": 1}, slow({"max_rounds": 3, "attention": "reference"})], ids=str)
def test_rounds_and_backends_change_nothing(alone, knobs):
    prompts, params = mixed()
    with tiny_llm(tokenizer=tiny_tokenizer(), debug=True, **knobs) as other:
        assert answers(run(other, params, prompts)) == alone


def test_what_is_forced_is_what_would_be_drawn(llm, alone):
    prompts, params = mixed()
    one_by_one = [replace(one, max_rounds=1) if one.structured else one for one in params]
    steps = llm.engine.stats().steps
    assert answers(run(llm, one_by_one, prompts)) == alone
    assert answers(run(llm, [replace(one, logprobs=0) for one in params], prompts)) == alone
    drawn = (llm.engine.stats().steps - steps) / 2
    assert answers(run(llm, params, prompts)) == alone
    assert llm.engine.stats().steps - steps < 2.9 * drawn


@pytest.mark.parametrize("preemption", [slow("recompute"), "swap"])
def test_a_preemption_neither_loses_nor_doubles_a_token(alone, preemption):
    prompts, params = mixed()
    small = {"num_pages": 14, "max_num_batched_tokens": 11, "prefix_cache": False, "preemption": preemption}
    host = {"num_host_pages": 64} if preemption == "swap" else {}
    with tiny_llm(tokenizer=tiny_tokenizer(), debug=True, **small, **host) as other:
        assert answers(run(other, params, prompts)) == alone
        assert other.engine.stats().preemptions >= 3


@pytest.mark.slow
def test_two_devices_agree(alone):
    prompts, params = mixed()
    with tiny_llm(num_devices=2, tokenizer=tiny_tokenizer()) as other:
        assert answers(run(other, params, prompts)) == alone


@pytest.mark.slow
def test_a_step_lost_on_the_device_is_computed_again_and_not_read_again(alone):
    prompts, params = mixed()
    with tiny_llm(tokenizer=tiny_tokenizer(), max_num_seqs=8) as other:
        real, count = other.engine.runner.run, 0

        def run_and_fail(inputs):
            nonlocal count
            count += 1
            handle = real(inputs)
            if count == 3:
                raise KeyboardInterrupt
            return handle

        other.engine.runner.run = run_and_fail
        requests = [
            Request(id=str(i), prompt_token_ids=tuple(prompt), params=one)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        families = [other.engine.add(request) for request in requests]
        while other.engine.has_work:
            try:
                other.engine.step()
            except KeyboardInterrupt:
                count = 100
        assert [[s.output_token_ids for s in family] for family in families] == [
            [token_ids for token_ids, _, _ in one] for one in alone
        ]


def test_a_fork_goes_on_from_where_it_was(llm):
    request = Request(
        id="fork",
        prompt_token_ids=(5, 6, 7),
        params=SamplingParams(structured=Structured(regex="[ab]{12}(12|no)"), temperature=2.0, seed=1, max_tokens=40),
    )
    (sequence,) = llm.engine.add(request)
    while sequence.num_output < 4:
        llm.engine.step()
    children = [llm.engine.fork(sequence) for _ in range(3)]
    texts = []
    family = [sequence, *children]
    while any(one.state is not SequenceState.FINISHED for one in family):
        llm.engine.step()
    for one in family:
        text = b"".join(PIECES[i] for i in one.output_token_ids if i != EOS).decode()
        assert re.fullmatch("[ab]{12}(12|no)", text), text
        assert one.output_token_ids[:4] == sequence.output_token_ids[:4]
        texts.append(text)
    assert len(set(texts)) > 1
    assert llm.engine.stats().held_pages == 0


def test_stop_strings_stop_ids_and_budgets_still_end_a_sequence(llm):
    form = Structured(regex="[ab]{30}")
    for output in run(llm, SamplingParams(structured=form, stop=["ba"], seed=3, temperature=2.0)):
        (completion,) = output.outputs
        assert completion.finish_reason == "stop"
        assert re.fullmatch("a*b*", completion.text), completion.text
    ids = [PIECES.index(b"b"), PIECES.index(b"ab")]
    for output in run(llm, SamplingParams(structured=form, stop_token_ids=ids, seed=3, temperature=2.0)):
        (completion,) = output.outputs
        assert completion.token_ids[-1] in ids or len(completion.text) == 30
    for output in run(llm, SamplingParams(structured=form, max_tokens=5, seed=3)):
        (completion,) = output.outputs
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 5)
    exact = run(llm, SamplingParams(structured=Structured(choice=["aba"]), max_tokens=3, **GREEDY))
    assert {(output.outputs[0].text, output.outputs[0].finish_reason) for output in exact} == {("aba", "stop")}


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_end_is_allowed_where_the_form_may_end_and_nowhere_else(llm, how):
    """`a{2,}` may go on for ever: only an end token, or the budget, ends it."""
    form, push = Structured(regex="a{2,}"), {EOS: 100.0}
    for output in run(llm, SamplingParams(structured=form, logit_bias=push, max_tokens=20, **how)):
        (completion,) = output.outputs
        assert (completion.text, completion.finish_reason, completion.token_ids[-1]) == ("aa", "eos", EOS)
    for output in run(llm, SamplingParams(structured=form, logit_bias=push, max_tokens=20, ignore_eos=True, **how)):
        (completion,) = output.outputs
        assert (completion.text, completion.finish_reason) == ("a" * 20, "length")
    for output in run(llm, SamplingParams(structured=form, logit_bias=push, max_tokens=20, min_tokens=6, **how)):
        (completion,) = output.outputs
        assert (completion.text, completion.finish_reason) == ("a" * 6, "eos")


def test_what_may_not_end_yet_and_cannot_go_on_ends(llm):
    """`min_tokens` and `ignore_eos` forbid the end; a form that is complete has nothing else."""
    form = Structured(choice=["no"])
    for params in ({"min_tokens": 10}, {"ignore_eos": True}):
        for output in run(llm, SamplingParams(structured=form, max_tokens=20, **params)):
            assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("no", "stop")
    stops = [PIECES.index(piece) for piece in (b"o",)]
    for output in run(llm, SamplingParams(structured=form, max_tokens=20, min_tokens=10, stop_token_ids=stops)):
        assert output.outputs[0].finish_reason in ("abort", "stop"), "all that can follow is a stop that is forbidden"
    empty = Structured(choice=[""])
    for output in run(llm, SamplingParams(structured=empty, max_tokens=20)):
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "eos")
    for params in ({"min_tokens": 10}, {"ignore_eos": True}):
        with pytest.raises(RequestError, match=r"what structured allows has no beginning that ignore_eos="):
            run(llm, SamplingParams(structured=empty, max_tokens=20, **params))


def test_a_model_without_end_tokens_ends_where_nothing_can_follow():
    with tiny_llm(tiny_config(eos_ids=()), tokenizer=endless_tokenizer()) as other:
        for output in run(other, SamplingParams(structured=Structured(choice=["no", "yes"]), seed=1)):
            assert output.outputs[0].text in ("no", "yes")
            assert output.outputs[0].finish_reason == "stop"
        for output in run(other, SamplingParams(structured=Structured(regex="a+"), seed=1, max_tokens=9)):
            assert (output.outputs[0].text[0], output.outputs[0].finish_reason) == ("a", "length")


def endless_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_ids = frozenset()
    return tokenizer


def test_the_leading_space_of_a_form_is_not_stripped():
    """SentencePiece puts a space before a text and takes it off again; a form that begins with one means it."""
    with tiny_llm(tokenizer=tiny_tokenizer(strips_leading_space=True)) as other:
        for output in run(other, SamplingParams(structured=Structured(regex="  [ab]{3}"), seed=1)):
            assert re.fullmatch("  [ab]{3}", output.outputs[0].text)
        free = run(other, SamplingParams(seed=1, max_tokens=8, logit_bias={PIECES.index(b" a"): 100.0}))
        assert {output.outputs[0].text for output in free} == {"a" + " a" * 7}


def test_a_row_inherits_no_mask(llm):
    """One row, one after the other: what was free before a constrained one is the same after it."""
    with tiny_llm(tokenizer=tiny_tokenizer(), max_num_seqs=1, prefix_cache=False) as one_row:
        for prompt in PROMPTS:
            (before,) = answers(run(one_row, FREE, [prompt]))
            (constrained,) = run(one_row, structured("regex", **SAMPLED), [prompt])
            assert FORMS["regex"][1](constrained.outputs[0].text)
            (after,) = answers(run(one_row, FREE, [prompt]))
            assert after == before


def test_masks_cost_no_program_and_nothing_is_sent_where_there_are_none(llm):
    sent, real = [], llm.engine.runner.run

    def watch(inputs):
        sent.append(inputs.samples.mask_SW)
        return real(inputs)

    llm.engine.runner.run = watch
    try:
        before = llm.engine.stats().programs
        run(llm, FREE)
        assert sent
        assert all(mask is None for mask in sent)
        sent.clear()
        run(llm, structured("choice", **GREEDY))
        assert all(mask is not None for mask in sent)
    finally:
        del llm.engine.runner.run
    stats = llm.engine.stats()
    assert (stats.programs, stats.compiles_after_warmup) == (before, 0)


def test_log_probabilities_are_the_models_own_and_those_of_what_was_left(llm):
    params = SamplingParams(structured=Structured(regex="[ab12]{8}"), temperature=0.8, seed=5, logprobs=20)
    able = {i for i, piece in enumerate(PIECES) if piece and set(piece) <= set(b"ab12")}
    for prompt, output in zip(PROMPTS, run(llm, params), strict=True):
        (completion,) = output.outputs
        scores = llm.score(prompt + completion.token_ids)[-len(completion.token_ids) :]
        np.testing.assert_allclose([entry.logprob for entry in completion.logprobs], scores, atol=1e-4)
        assert not {id_ for entry in completion.logprobs for id_, _ in entry.top} <= able
        for entry in completion.logprobs:
            assert {id_ for id_, _ in entry.processed_top} <= able | {EOS}
            assert sum(np.exp(value) for _, value in entry.processed_top) == pytest.approx(1, abs=1e-4)
            assert dict(entry.processed_top)[entry.token_id] == pytest.approx(entry.processed_logprob, abs=1e-5)


def test_a_prompt_is_scored_whatever_its_sequence_may_say(llm):
    params = structured("choice", prompt_logprobs=True, **GREEDY)
    for prompt, output in zip(PROMPTS, run(llm, params), strict=True):
        assert FORMS["choice"][1](output.outputs[0].text)
        scores = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
        np.testing.assert_allclose(scores, llm.score(prompt), atol=1e-4)


def request(name: str, *, priority: int = 0, prompt_len: int = 3, **params) -> Request:
    prompt = tuple(range(1, prompt_len + 1)) if prompt_len < 8 else (1, 2, 3, 4) * (prompt_len // 4)
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**params), priority=priority)


def test_a_constrained_row_waits_for_the_host_after_every_token_and_others_go_on():
    engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=40, max_num_seqs=3, debug=True)
    (free,) = engine.add(request("free", temperature=0, max_tokens=40))
    (constrained,) = engine.add(request("constrained", temperature=0, max_tokens=5), ToyGrammar())
    assert {len(event.token_ids) for event in engine.step()} == {1}, "the prompts"
    while constrained.finish_reason is None:
        counts = {event.sequence: len(event.token_ids) for event in engine.step()}
        assert counts == {free: WATCHED_ROUNDS, constrained: 1}
    assert len(engine.step()[0].token_ids) == 16, "alone again"


class OneOfTwoThenOne(ToyGrammar):
    """A grammar that leaves a choice behind every third token, and allows nothing after twenty-four."""

    @property
    def accepts(self):
        return len(self.seen) == 24

    def mask(self):
        allowed = () if self.accepts else (3, 5) if len(self.seen) % 3 == 0 else (4,)
        return np.array([sum(1 << token for token in allowed)], np.uint32)

    def advance(self, output_token_ids):
        self.seen = tuple(output_token_ids)
        return True

    def copy(self):
        return OneOfTwoThenOne(self.seen)


def test_what_a_grammar_forces_comes_with_the_token_before_it():
    outputs = []
    for asked, counts in (({}, [3] * 8), ({"max_rounds": 2}, [2, 1] * 8), ({"logprobs": 0}, [1] * 24)):
        engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=40, debug=True)
        (sequence,) = engine.add(request("x", temperature=0, max_tokens=40, **asked), OneOfTwoThenOne())
        got = []
        while sequence.finish_reason is None:
            got += [len(event.token_ids) for event in engine.step()]
        assert got == counts
        assert (sequence.finish_reason, sequence.num_output) == ("stop", 24)
        assert engine.stats().generated_tokens == 24
        assert engine.stats().computed_tokens == 3 + 24 - counts[-1], "every token once, but for the last drawn"
        engine.audit()
        outputs.append(sequence.output_token_ids)
    assert outputs[1:] == outputs[:1] * 2
    assert {3, 5} <= set(outputs[0])


STOPS_WHERE_FORCED = [
    ({"stop_token_ids": (4,)}, "stop", 2),
    ({"stop_token_ids": (4,), "min_tokens": 5}, "abort", 1),
    ({"stop": ((4, 4),)}, "stop", 3),
    ({"stop": ((4, 4),), "min_tokens": 4}, "stop", 6),
    ({"stop": ((4, 3), (4, 5))}, "stop", 4),
    ({"max_tokens": 5}, "length", 5),
]


@pytest.mark.parametrize(("asked", "reason", "num_output"), STOPS_WHERE_FORCED)
def test_a_stop_within_what_is_forced_is_where_it_is_without(asked, reason, num_output):
    """In the middle of a forced stretch, at its end, and across it and what is drawn next; also in a fork."""
    ends = []
    for rounds in (None, 1):
        engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=60, debug=True)
        params = {"temperature": 0, "max_tokens": 40, "max_rounds": rounds, "n": 2} | asked
        sequences = engine.add(request("x", **params), OneOfTwoThenOne())
        while engine.has_work:
            sequences += [event.sequence for event in engine.step() if event.sequence not in sequences]
            engine.audit()
        ends.append([(one.finish_reason, one.output_token_ids, one.num_stop_tokens) for one in sequences])
    assert len(ends[0]) == 2
    assert {(why, len(output)) for why, output, _ in ends[0]} == {(reason, num_output)}
    assert ends[0] == ends[1]


def test_a_long_stretch_that_is_forced_takes_several_steps_and_ends_with_its_budget(monkeypatch):
    monkeypatch.setattr(commit, "MAX_FORCED", 16)
    engine = fake_engine(eos_ids=(), num_pages=60, debug=True)
    only = type("Only", (OneOfTwoThenOne,), {"mask": lambda self: np.array([1 << 4], np.uint32), "accepts": False})
    (sequence,) = engine.add(request("x", temperature=0, max_tokens=40), only())
    counts = []
    while sequence.finish_reason is None:
        counts += [len(event.token_ids) for event in engine.step()]
    assert counts == [1 + 16, 1 + 16, 40 - 2 * (1 + 16)]
    assert (sequence.finish_reason, sequence.output_token_ids) == ("length", [4] * 40)


def test_what_is_forced_takes_no_place_from_others(monkeypatch):
    """Nor does a prompt before it in order take its own."""
    monkeypatch.setattr(commit, "MAX_FORCED", 4)
    engine = fake_engine(eos_ids=(), num_pages=400, max_num_seqs=4, max_num_batched_tokens=8, debug=True)
    only = type("Only", (OneOfTwoThenOne,), {"mask": lambda self: np.array([1 << 4], np.uint32), "accepts": False})
    forced = [engine.add(request(name, temperature=0, max_tokens=60), only())[0] for name in "ab"]
    (free,) = engine.add(request("free", temperature=0, max_tokens=60))
    while not free.num_output:
        engine.step()
    (first,) = engine.add(request("first", temperature=0, max_tokens=1, priority=1, prompt_len=40))
    while first.finish_reason is None:
        before = free.num_output, *(sequence.num_computed for sequence in forced)
        engine.step()
        after = free.num_output, *(sequence.num_computed for sequence in forced)
        ended = [True, *(sequence.finish_reason is not None for sequence in forced)]
        assert all(now > then or end for then, now, end in zip(before, after, ended, strict=True))
        assert free.num_output > before[0]


@pytest.mark.parametrize("num_forced", [1, 2])
def test_a_fork_goes_on_behind_what_is_forced(num_forced):
    engine = fake_engine(eos_ids=(), num_pages=60, debug=True)
    (parent,) = engine.add(request("x", temperature=0, max_tokens=40, max_rounds=1 + num_forced), OneOfTwoThenOne())
    engine.step()
    assert parent.num_output == 1 + num_forced
    child = engine.fork(parent)
    while engine.has_work:
        engine.step()
        engine.audit()
    assert child.output_token_ids == parent.output_token_ids
    assert (child.finish_reason, child.num_output) == ("stop", 24)


class FailsAtThree:
    """A grammar that allows everything and fails at its third token."""

    accepts = False

    def mask(self):
        return np.full(1, 0xFFFFFFFF, np.uint32)

    def advance(self, output_token_ids):
        return len(output_token_ids) < 3

    def copy(self):
        return self


def test_a_grammar_that_fails_ends_its_sequence_and_nobody_elses():
    alone = fake_engine(eos_ids=(), num_pages=40, debug=True)
    (expected,) = alone.add(request("b", temperature=0, max_tokens=12))
    engine = fake_engine(eos_ids=(), num_pages=40, debug=True)
    failing = engine.add(request("a", temperature=0, max_tokens=12, n=2), FailsAtThree())
    (bystander,) = engine.add(request("b", temperature=0, max_tokens=12))
    for one in (alone, engine):
        while one.has_work:
            one.step()
    assert [(s.num_output, s.finish_reason) for s in failing] == [(3, "abort")] * 2
    assert bystander.tokens == expected.tokens
    assert engine.stats().held_pages == 0


def test_a_form_that_cannot_be_is_refused_before_anything_runs(llm):
    before = llm.engine.stats().steps
    with pytest.raises(RequestError, match=r"prompts\[1\]: structured\.regex is refused: .*unclosed group"):
        run(llm, [FREE, SamplingParams(structured=Structured(regex="(a"))], PROMPTS[:2])
    with (
        tiny_llm() as without,
        pytest.raises(RequestError, match="structured constrains text and there is no tokenizer"),
    ):
        without.generate([[1]], SamplingParams(structured=Structured(regex="a")))
    assert llm.engine.stats().steps == before
    assert not llm.engine.has_work


def test_what_another_thread_has_compiled_is_taken_as_it_is(llm, monkeypatch):
    form = Structured(choice=["ab", "ba"])
    grammar = llm.engine.compile_grammar(form, "salt")
    monkeypatch.setattr(llm.engine, "_grammar", lambda request: pytest.fail("compiled again"))
    (sequence,) = llm.engine.add(request("given", structured=form, seed=1), grammar)
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.tokenizer.decode(sequence.output_token_ids) in ("ab", "ba")
    assert (sequence.grammar, sequence.mask) == (None, None), "nothing is held by what has ended"


@pytest.mark.slow
def test_a_real_model_writes_what_the_schema_says(smollm2_gguf):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "languages": {"type": "array", "items": {"enum": ["English", "Français", "日本語"]}, "maxItems": 3},
        },
        "required": ["name", "age", "languages"],
        "additionalProperties": False,
    }
    with LLM(smollm2_gguf, quiet=True, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1024) as real:
        message = [{"role": "user", "content": "Describe a person who lives in Kyoto, as JSON."}]
        prompt = real.chat_prompt(message)
        plain = SamplingParams(temperature=0, max_tokens=24)
        form = Structured(json_schema=schema)
        params = [SamplingParams(structured=form, max_tokens=200, **how) for how in (GREEDY, SAMPLED)]
        (before,) = real.generate([prompt], plain, progress=False)
        first, second, after = real.generate([prompt] * 3, [*params, plain], progress=False)
        for output in (first, second):
            (completion,) = output.outputs
            print(repr(completion.text))
            person = json.loads(completion.text)
            assert list(person) == ["name", "age", "languages"]
            assert 0 <= person["age"] <= 120
            assert set(person["languages"]) <= {"English", "Français", "日本語"}
            assert completion.finish_reason in ("stop", "eos")
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
