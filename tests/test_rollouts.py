"""Rollouts: from any thread, in groups, while weights change. Nothing is lost, and nothing is told twice."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quire import Rollouts, SamplingParams
from quire.async_llm import GenerationError, OverloadError, UnavailableError
from quire.core.errors import RequestError
from quire.testing import InjectedError
from tests.fake_llm import LONG_S, Gate, fake_llm, gated
from tests.tiny import tiny_config, tiny_llm, tiny_params, tiny_tensors

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 1, 2]]


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def rollouts(gate):
    with Rollouts.from_factory(lambda: fake_llm(gate, max_num_seqs=8)) as rollouts:
        yield rollouts
        gate.open()
        rollouts.call(lambda engine: engine.audit())
        assert rollouts.call(lambda engine: engine.stats().held_pages) == 0


def tokens(output) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


def test_a_future_has_what_an_llm_says(rollouts):
    with fake_llm() as llm:
        expected, (of_text,) = llm.generate(PROMPTS, GREEDY), llm.generate("ab", GREEDY)
    one, many = rollouts.submit(PROMPTS[0], GREEDY), rollouts.submit(PROMPTS, GREEDY)
    assert one.result(LONG_S) == expected[0]
    assert many.result(LONG_S) == expected
    assert rollouts.submit(np.array(PROMPTS[0]), GREEDY).result(LONG_S).outputs == expected[0].outputs
    answer = rollouts.submit("ab", GREEDY).result(LONG_S)
    assert (answer.prompt, answer.outputs) == ("ab", of_text.outputs)


def test_equal_prompts_of_a_call_are_one_request_of_samples_that_differ(rollouts):
    params = SamplingParams(seed=3, n=2, max_tokens=8, ignore_eos=True)
    other = SamplingParams(seed=4, n=2, max_tokens=8, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
    with fake_llm() as llm:
        (folded,) = llm.generate([PROMPTS[0]], SamplingParams(seed=3, n=4, max_tokens=8, ignore_eos=True))
        (alone,) = llm.generate([PROMPTS[1]], params)
        (with_other,) = llm.generate([PROMPTS[0]], other)
    before = rollouts.call(lambda engine: engine.stats().prompt_tokens)
    outputs = rollouts.submit(prompts, [params, params, params, other]).result(LONG_S)
    assert tokens(outputs[0]) + tokens(outputs[2]) == tokens(folded)
    assert (tokens(outputs[1]), tokens(outputs[3])) == (tokens(alone), tokens(with_other))
    assert [[sample.index for sample in output.outputs] for output in outputs] == [[0, 1]] * 4
    assert [output.index for output in outputs] == [0, 1, 2, 3]
    assert len({tuple(sample) for output in (outputs[0], outputs[2]) for sample in tokens(output)}) == 4
    after = rollouts.call(lambda engine: engine.stats().prompt_tokens)
    assert after - before == 4 + 2 + 4, "prompts are computed once"


def test_groups_come_in_the_order_they_end_and_each_once(rollouts, gate):
    gate.close()
    for name, length in (("long", 40), ("short", 2), ("middle", 20)):
        rollouts.submit([PROMPTS[0]] * 2, SamplingParams(max_tokens=length, ignore_eos=True), group=name)
    rollouts.submit(PROMPTS[1], SamplingParams(max_tokens=10, ignore_eos=True), group="short")
    gate.open()
    groups = list(rollouts)
    assert [group.group for group in groups] == ["short", "middle", "long"]
    assert [len(group.outputs) for group in groups] == [3, 2, 2]
    assert list(rollouts) == []
    assert rollouts.num_under_way == rollouts.num_finished == 0


def test_an_event_loop_gets_them_too_and_a_cancelled_task_takes_none(rollouts, gate):
    async def main():
        gate.close()
        for i in range(3):
            rollouts.submit(PROMPTS[0], GREEDY, group=i)
        for _ in range(50):  # more than threads there are to wait in
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(aiter(rollouts)), 0.001)
        await asyncio.to_thread(gate.open)
        return [group.group async for group in rollouts]

    assert asyncio.run(main()) == [0, 1, 2]


def test_collect_takes_the_first_that_are_whole_and_the_rest_goes_on(rollouts):
    rollouts.pause()
    for i in range(4):
        rollouts.submit([PROMPTS[0]] * 2, SamplingParams(max_tokens=4 + 30 * (i % 2), ignore_eos=True), group=i)
    rollouts.resume()
    assert {group.group for group in rollouts.collect(groups=2)} == {0, 2}
    assert {group.group for group in rollouts.collect(groups=2)} == {1, 3}
    with pytest.raises(ValueError, match="groups=1, and 0 are under way: submit more"):
        rollouts.collect(groups=1)
    with pytest.raises(TimeoutError, match=r"0 of groups=1 ended in 0\.01 seconds"):
        rollouts.collect(groups=1, timeout_s=0.01)
    with pytest.raises(ValueError, match="groups=0"):
        rollouts.collect(groups=0)


def set_weights_soon(rollouts, gate, *args, **kwargs):
    """Between the step that stands at the gate and the next one; returns what `Engine.set_weights` does."""
    changing = rollouts._thread.call(lambda engine: engine.set_weights(*args, **kwargs))
    gate.open()
    return changing.result(LONG_S)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("same", "same", "same"), (None, None, None)], ids=str)
def test_lag_is_seen_and_too_much_of_it_is_left_out(rollouts, gate, names):
    """By changes, whatever they are called."""
    gate.close()
    old = rollouts.submit(PROMPTS[0], GREEDY, group="old")
    gate.wait_until_held()
    set_weights_soon(rollouts, gate, 1, names[0])
    versions = old.result(LONG_S).outputs[0].weight_versions
    assert (versions[0], versions[-1]) == (0, names[0] or 1)
    rollouts.set_weights(2, names[1])
    new = rollouts.submit(PROMPTS[1], GREEDY, group="new").result(LONG_S)
    assert set(new.outputs[0].weight_versions) == {rollouts.version} == {names[1] or 2}
    (group,) = rollouts.collect(groups=1, max_lag=1)
    assert (group.group, group.lag, rollouts.num_stale) == ("new", 0, 1)
    with pytest.raises(ValueError, match=r"0 are under way \(1 were left out for their lag\)"):
        rollouts.collect(groups=1)
    rollouts.submit(PROMPTS[1], GREEDY, group="kept").result(LONG_S)
    rollouts.set_weights(3, names[2])
    (group,) = rollouts.collect(groups=1, max_lag=1)
    assert (group.group, group.lag) == ("kept", 1)
    with pytest.raises(ValueError, match="max_lag=-1"):
        rollouts.collect(groups=1, max_lag=-1)


def test_a_call_without_a_name_is_its_future_alone(rollouts):
    """An evaluation beside the training leaves nothing behind, and is not handed to the trainer."""
    rollouts.submit(PROMPTS[0], GREEDY).result(LONG_S)
    rollouts.submit(PROMPTS[1], GREEDY, group="named").result(LONG_S)
    assert rollouts.num_finished == 1
    assert [group.group for group in rollouts.collect(groups=1)] == ["named"]


def test_many_threads_and_many_weights_lose_nothing(rollouts):
    """32 requests from 8 threads while weights are set 10 times."""
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=0)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(rollouts.submit, [PROMPTS[i % 3]] * 2, params, group=i) for i in range(32)]
        for version in range(1, 11):
            rollouts.set_weights(version, running=("keep", "recompute")[version % 2])
        answers = [future.result(LONG_S).result(LONG_S) for future in futures]
    groups = list(rollouts)
    assert sorted(group.group for group in groups) == list(range(32))
    for outputs in answers:
        for sample in (sample for output in outputs for sample in output.outputs):
            assert len(sample.token_ids) == len(sample.weight_versions) == len(sample.logprobs) == 30
            assert sample.weight_versions == sorted(sample.weight_versions)
            assert sample.finish_reason == "length"


def test_short_ones_do_not_wait_for_long_ones():
    with Rollouts.from_factory(lambda: tiny_llm(tiny_config(eos_ids=()), max_rounds=4)) as rollouts:
        start, ends = time.monotonic(), {}

        def submit(name, length):
            future = rollouts.submit([1, 2, 3], SamplingParams(max_tokens=length), group=name)
            future.add_done_callback(lambda _: ends.setdefault(name, rollouts.llm.engine.stats().steps))

        rollouts.pause()
        submit("long", 200)
        submit("short", 8)
        rollouts.resume()
        assert [group.group for group in rollouts] == ["short", "long"]
        assert ends["short"] < 0.2 * ends["long"], (ends, time.monotonic() - start)


def test_after_recompute_every_suffix_is_that_of_a_fresh_run_on_the_new_weights():
    config = tiny_config(eos_ids=())
    changed = {name: array * np.float32(1.5) for name, array in tiny_tensors(config).items()}
    gate = Gate()
    params = SamplingParams(temperature=0, max_tokens=24)
    with Rollouts.from_factory(lambda: gated(tiny_llm(config, max_rounds=1), gate)) as rollouts:
        gate.let(9)
        future = rollouts.submit(PROMPTS, params)
        gate.wait_until_held()
        set_weights_soon(rollouts, gate, changed, running="recompute")
        outputs = future.result(LONG_S)
    with tiny_llm(config, max_rounds=1) as llm:
        llm.engine.set_weights(changed)
        for output in outputs:
            (sample,) = output.outputs
            num_old = sample.weight_versions.count(0)
            prefix = output.prompt_token_ids + sample.token_ids[:num_old]
            fresh = llm.generate([prefix], SamplingParams(temperature=0, max_tokens=24 - num_old))[0]
            assert fresh.outputs[0].token_ids == sample.token_ids[num_old:]


def test_paused_rollouts_stand_still_and_take_more(rollouts):
    rollouts.pause()
    futures = [rollouts.submit(prompt, GREEDY) for prompt in PROMPTS]
    steps = rollouts.call(lambda engine: engine.stats().steps)
    assert rollouts.set_weights(1) == 0
    assert rollouts.call(lambda engine: engine.stats().steps) == steps
    assert not any(future.done() for future in futures)
    rollouts.resume()
    versions = [future.result(LONG_S).outputs[0].weight_versions for future in futures]
    assert versions == [[1] * 6] * 3


def test_pausing_tells_of_what_has_been_drawn(rollouts, gate):
    """The tokens of a step are handed on while the next one is computed, and there is no next one."""
    gate.close()
    future = rollouts.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=1), group="one")
    other = rollouts.submit(PROMPTS[1], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), group="other")
    gate.wait_until_held()
    pausing = rollouts._thread.pause()
    gate.open()
    pausing.result(LONG_S)
    assert future.done()
    assert not other.done()
    assert rollouts.abort("other") == 1
    assert other.result(LONG_S).outputs[0].finish_reason == "abort"
    rollouts.resume()


def test_what_is_aborted_is_not_handed_out(rollouts, gate):
    gate.close()
    ended = rollouts.submit([PROMPTS[0]] * 3, GREEDY, group="ended")
    kept = rollouts.submit(PROMPTS[1], GREEDY, group="kept")
    assert rollouts.abort("ended") == 1
    assert rollouts.abort("nobody") == 0
    gate.open()
    assert [sample.finish_reason for output in ended.result(LONG_S) for sample in output.outputs] == ["abort"] * 3
    assert [group.group for group in rollouts] == ["kept"]
    assert rollouts.num_aborted == 1
    assert kept.result(LONG_S).outputs[0].finish_reason == "length"
    gate.close()
    futures = [rollouts.submit(prompt, GREEDY) for prompt in PROMPTS]
    assert rollouts.abort_all() == 3
    gate.open()
    assert {future.result(LONG_S).outputs[0].finish_reason for future in futures} == {"abort"}
    assert list(rollouts) == []


def test_weights_may_abort_what_runs(rollouts, gate):
    gate.close()
    future = rollouts.submit(PROMPTS[0], SamplingParams(n=4, max_tokens=50, ignore_eos=True), group="running")
    gate.wait_until_held()
    assert len(set_weights_soon(rollouts, gate, 1, running="abort")) == 4
    assert {sample.finish_reason for sample in future.result(LONG_S).outputs} == {"abort"}
    assert rollouts.num_aborted == 1


def test_a_full_queue_makes_submit_wait():
    gate = Gate()
    with Rollouts.from_factory(lambda: fake_llm(gate), max_pending=2) as rollouts:
        gate.close()
        first = [rollouts.submit(prompt, GREEDY, group=len(prompt)) for prompt in PROMPTS[:2]]
        for bad in ({"group": [1, 2]}, {"priority": "high"}):
            with pytest.raises((TypeError, ValueError)):  # before any room is taken
                rollouts.submit(PROMPTS[2], GREEDY, **bad)
        with pytest.raises(OverloadError, match="max_pending=2"):
            rollouts.submit(PROMPTS[2], GREEDY, wait_s=0.01)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(rollouts.submit, PROMPTS[2], GREEDY, group="third")
            gate.open()
            third = waiting.result(LONG_S)
        assert all(future.result(LONG_S) for future in (*first, third))
        assert len(rollouts.collect(groups=3)) == 3


def test_closing_ends_what_waits():
    gate = Gate()
    rollouts = Rollouts.from_factory(lambda: fake_llm(gate), max_pending=1)
    rollouts.pause()
    future = rollouts.submit(PROMPTS[0], GREEDY, group="one")
    with ThreadPoolExecutor(3) as pool:
        submitting = pool.submit(rollouts.submit, PROMPTS[1], GREEDY)
        iterating = pool.submit(list, rollouts)
        collecting = pool.submit(rollouts.collect, groups=2, timeout_s=LONG_S)
        rollouts.close()
        for ending in (submitting, future):
            with pytest.raises(UnavailableError):
                ending.result(LONG_S)
        for ending in (iterating, collecting):  # one of them may be told that the group has failed
            assert isinstance(ending.exception(LONG_S) or UnavailableError(""), UnavailableError)
    with pytest.raises(UnavailableError, match="closed"):
        rollouts.submit(PROMPTS[0], GREEDY)


def test_a_failure_is_raised_once_and_the_others_stay(rollouts, gate):
    gate.close()
    bad = rollouts.submit(PROMPTS[0], GREEDY, group="bad")
    gate.wait_until_held()
    pack = rollouts.llm.engine._packer.pack

    def break_once(plan):
        rollouts.llm.engine._packer.pack = pack
        raise InjectedError("does not fit")

    rollouts.llm.engine._packer.pack = break_once
    gate.open()
    with pytest.raises(GenerationError):
        bad.result(LONG_S)
    good = rollouts.submit(PROMPTS[1], GREEDY, group="good")
    assert good.result(LONG_S)
    with pytest.raises(GenerationError):
        rollouts.collect(groups=1)
    assert [group.group for group in rollouts] == ["good"]


def test_mistakes_name_what_was_expected(rollouts):
    with pytest.raises(ValueError, match="prompts is empty"):
        rollouts.submit([], GREEDY)
    with pytest.raises(RequestError, match="token"):
        rollouts.submit([10**6], GREEDY)
    with pytest.raises(ValueError, match=r"group=\[5\] is no name"):
        rollouts.submit(PROMPTS[0], GREEDY, group=[5])  # pyright: ignore
    with pytest.raises(ValueError, match="max_pending=0"):
        Rollouts.from_factory(fake_llm, max_pending=0)


def test_a_callback_cannot_wait_for_the_thread_it_runs_on(rollouts, gate):
    errors = []

    def wait(_):
        for what in (rollouts.pause, lambda: rollouts.collect(groups=1), lambda: next(iter(rollouts))):
            try:
                what()
            except RuntimeError as error:
                errors.append(str(error))

    gate.close()
    rollouts.submit(PROMPTS[0], GREEDY, group="one").add_done_callback(wait)
    gate.open()
    assert [group.outputs[0].outputs[0].finish_reason for group in rollouts] == ["length"]
    rollouts.call(lambda _: None)  # behind the callback
    assert errors == ["a callback of a future runs on the engine's thread, which cannot wait for itself"] * 3


def test_what_loading_raises_is_raised_here():
    def open_llm():
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        Rollouts.from_factory(open_llm)


def test_weights_of_this_program():
    config = tiny_config()
    knobs = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    with tiny_llm(config) as llm:
        expected = llm.generate(PROMPTS, GREEDY)
    with Rollouts.from_params(config, tiny_params(config), quiet=True, **knobs) as rollouts:
        assert rollouts.submit(PROMPTS, GREEDY).result(LONG_S) == expected
