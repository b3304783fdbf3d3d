"""Many rounds in one dispatch change nothing but the number of dispatches."""

import numpy as np
import pytest

from quire import SamplingParams
from quire.core.request import Request
from quire.core.scheduler import WATCHED_ROUNDS
from quire.device.inputs import INVALID
from quire.testing import fake_engine
from tests.effort import slow
from tests.tiny import VOCAB, tiny_config, tiny_llm

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(1, VOCAB, size=n).tolist() for n in (1, 3, 4, 5, 9, 16, 21)]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=21),
    "seeded": SamplingParams(seed=3, max_tokens=21, temperature=0.9, top_p=0.9, logprobs=2),
    "penalised": SamplingParams(seed=3, max_tokens=21, repetition_penalty=1.3, presence_penalty=0.4, logprobs=0),
    "until a token": SamplingParams(temperature=0, max_tokens=40, stop_token_ids=list(range(30, 40)), ignore_eos=True),
    "not before": SamplingParams(seed=1, max_tokens=21, min_tokens=7, stop_token_ids=list(range(40, 97))),
    "until a phrase": SamplingParams(seed=2, max_tokens=40, stop=[[i, j] for i in range(4) for j in range(15)][:16]),
}


@pytest.fixture(scope="module")
def one_round():
    with tiny_llm(max_rounds=1, debug=True) as llm:
        yield llm


@pytest.fixture(scope="module", params=[slow(2), 5, slow(16)])
def many_rounds(request):
    with tiny_llm(max_rounds=request.param, debug=True) as llm:
        yield llm


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_do_not_depend_on_the_number_of_rounds(one_round, many_rounds, name):
    expected = one_round.generate(PROMPTS, PARAMS[name], progress=False)
    outputs = many_rounds.generate(PROMPTS, PARAMS[name], progress=False)
    for ours, theirs in zip(outputs, expected, strict=True):
        (a,), (b,) = ours.outputs, theirs.outputs
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        if a.logprobs is not None:
            assert np.allclose([x.logprob for x in a.logprobs], [x.logprob for x in b.logprobs], atol=1e-4)
            assert [x.top for x in a.logprobs] == [
                tuple((i, pytest.approx(v, abs=1e-4)) for i, v in x.top) for x in b.logprobs
            ]
    assert many_rounds.engine.stats().held_pages == 0


def request(name: str, **params) -> Request:
    stream = params.pop("stream", False)
    return Request(id=name, prompt_token_ids=(1, 2, 3), params=SamplingParams(**params), stream=stream)


@pytest.mark.slow
def test_a_dispatch_of_k_rounds_makes_k_tokens_for_every_row():
    config = tiny_config(eos_ids=())
    with tiny_llm(config, max_rounds=16, num_pages=256) as llm:
        for i in range(4):
            llm.engine.add(request(str(i), temperature=0, max_tokens=33))
        assert sum(len(event.token_ids) for event in llm.engine.step()) == 4, "the prompts"
        for _ in range(2):
            before = llm.engine.stats()
            events = llm.engine.step()
            after = llm.engine.stats()
            assert [len(event.token_ids) for event in events] == [16] * 4
            assert (after.steps - before.steps, after.rounds - before.rounds) == (1, 16)
            assert after.computed_tokens - before.computed_tokens == 64
        assert not llm.engine.has_work


def test_a_row_that_stops_gives_what_was_reserved_for_it_back_before_the_next_schedule():
    engine = fake_engine(eos_ids=(), max_rounds=8, num_pages=40, debug=True)
    (goes_on,) = engine.add(request("goes on", temperature=0, max_tokens=30))
    (stops,) = engine.add(request("stops", seed=1, max_tokens=30, stop_token_ids=list(range(1, 6))))
    engine.step()
    while not stops.finish_reason:
        engine.step()
    assert stops.num_output < 8
    tables = engine.scheduler.tables
    assert len(stops.pages) == 0
    assert tables.num_available == 40 - len(goes_on.pages)
    engine.audit()


def test_the_device_stops_by_itself_at_a_stop_id():
    with tiny_llm(tiny_config(eos_ids=()), max_rounds=16) as llm:
        runner, seen = llm.engine.runner, []
        run = runner.run

        def watch(inputs):
            handle = run(inputs)
            seen.append(handle.result().tokens_SR)
            return handle

        runner.run = watch
        (first,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12), progress=False)
        stop = first.outputs[0].token_ids[5]
        length = first.outputs[0].token_ids.index(stop) + 1
        seen.clear()
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop]), progress=False)
    assert (seen[-1][0] == INVALID).tolist() == [i >= length - 1 for i in range(16)]


@pytest.mark.parametrize("reason", ["stream", "waiting"])
def test_groups_are_small_when_somebody_watches_or_waits(reason):
    engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=40, max_num_seqs=2)
    for i in range(2):
        engine.add(request(str(i), temperature=0, max_tokens=20, stream=reason == "stream"))
    if reason == "waiting":
        engine.add(request("late", temperature=0, max_tokens=1))
    engine.step()
    sizes = set()
    while engine.scheduler.running:
        sizes |= {len(event.token_ids) for event in engine.step()}
    assert max(sizes) == WATCHED_ROUNDS


def test_a_dispatch_runs_no_more_rounds_than_any_of_its_requests_asks_for():
    def run(**hurried):
        engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=40)
        patient, quick = (
            engine.add(request(name, seed=1, max_tokens=most, **params))[0]
            for name, most, params in (("patient", 30, {}), ("quick", 12, hurried))
        )
        engine.step()
        sizes = []
        while engine.has_work:
            sizes.append([len(event.token_ids) for event in engine.step()])
        return sizes, patient.tokens, quick.tokens

    sizes, *tokens = run(max_rounds=3)
    assert sizes == [[3, 3]] * 3 + [[3, 2], [16], [1]]
    free, *others = run()
    assert free == [[16, 11], [13]]
    assert tokens == others
    assert run(max_rounds=1000) == (free, *others), "the engine's own limit holds"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_a_limit_that_is_none_is_refused_by_name(value):
    with pytest.raises(ValueError, match="max_rounds="):
        SamplingParams(max_rounds=value)


def test_who_waits_gets_the_place_of_the_first_budget_that_ends():
    engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=40, max_num_seqs=2)
    engine.add(request("long", temperature=0, max_tokens=20))
    engine.add(request("short", temperature=0, max_tokens=3))
    (late,) = engine.add(request("late", temperature=0, max_tokens=5))
    engine.step()
    assert {len(event.token_ids) for event in engine.step()} == {2}, "not four: the short one ends after two"
    engine.step()
    assert late.num_output == 1


def test_nobody_gives_way_for_pages_that_are_reserved_ahead():
    engine = fake_engine(eos_ids=(), max_rounds=16, page_size=2, num_pages=10, max_num_seqs=2, debug=True)
    engine.add(request("cached", temperature=0, max_tokens=9))
    while engine.has_work:
        engine.step()
    cached = engine.stats().cached_pages
    assert cached == 5, "eleven positions were computed"
    engine.add(Request(id="a", prompt_token_ids=(9, 9, 9), params=SamplingParams(temperature=0, max_tokens=12)))
    engine.step()
    sizes = [len(event.token_ids) for event in engine.step()]
    assert sizes == [7], "to the end of the free pages, not to the end of the sixteen rounds"
    assert engine.stats().evictions == 0
    while engine.has_work:
        engine.step()
    assert engine.stats().evictions > 0, "what it does need it takes"


def test_meanwhile_runs_while_the_device_computes_and_its_error_loses_nothing():
    engine = fake_engine(eos_ids=(), max_rounds=4, num_pages=40)
    (sequence,) = engine.add(request("a", temperature=0, max_tokens=6))
    called = []
    engine.step(meanwhile=lambda: called.append(engine.scheduler.in_flight is not None))
    assert called == [True]
    with pytest.raises(ZeroDivisionError):
        engine.step(meanwhile=lambda: 1 / 0)
    assert sequence.num_output == 5, "the step was committed all the same"
    engine.step()
    engine.step(meanwhile=lambda: called.append("nothing to do"))
    assert called[-1] == "nothing to do"
    assert sequence.num_output == 6


def test_timing_tells_the_parts_of_a_step_apart(caplog):
    caplog.set_level("INFO", logger="quire")
    engine = fake_engine(eos_ids=(), max_rounds=4, num_pages=40, log_timing=True)
    engine.add(request("a", temperature=0, max_tokens=60))
    engine.step()
    before = engine.stats().timing
    engine._timing_log._logged_at -= 1
    engine.step()
    spent = engine.stats().timing - before
    assert min(spent.plan_s, spent.dispatch_s, spent.wait_s, spent.output_s) > 0
    assert spent.host_s == pytest.approx(spent.plan_s + spent.dispatch_s + spent.output_s)
    (line,) = caplog.messages
    assert "1 running, 0 waiting, 4.0 rounds a step; plan" in line
