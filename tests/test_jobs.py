"""Batch jobs: results as they end, bounded memory, Ctrl-C at any moment, and what else uses the engine meanwhile."""

import gc
import itertools
import linecache
import os
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quire.interrupts
import quire.job
import quire.llm
import quire.progress
from quire import LLM, GenerationInterrupted, Request, SamplingParams, Structured
from quire.progress import JobProgress
from quire.testing import InjectedError, fake_engine
from tests.words import toy_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def fake_llm(**knobs) -> LLM:
    """An LLM without a model."""
    return LLM.from_engine(fake_engine(**({"num_pages": 40, "debug": True} | knobs)), quiet=True)


def prompt(i: int) -> list[int]:
    return [i % 11, i // 11 % 11, 3, 7][: 2 + i % 3]


def params_of(i: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=1 + 7 * i % 13, ignore_eos=True)


def tokens(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def assert_clean(llm: LLM) -> None:
    llm.engine.audit()
    stats = llm.engine.stats()
    assert (stats.held_pages, stats.running, stats.waiting) == (0, 0, 0)
    assert not llm.engine.has_work


@pytest.fixture
def llm():
    llm = fake_llm()
    yield llm
    assert_clean(llm)
    llm.close()


# -- results as they end -------------------------------------------------------------------------------------------


def test_outputs_come_as_they_end_with_the_index_of_their_prompt(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5)]
    prompts = [[1, 2], [3, 4], [5, 6]]
    outputs = list(llm.generate_iter(prompts, params))
    assert [output.index for output in outputs] == [1, 2, 0]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9]
    assert [output.prompt_token_ids for output in outputs] == [prompts[output.index] for output in outputs]
    whole = llm.generate(prompts, params)
    assert [output.index for output in whole] == [0, 1, 2]
    assert [tokens(o) for o in whole] == [tokens(o) for o in sorted(outputs, key=lambda o: o.index)]


def test_an_output_has_the_text_of_its_prompt_if_it_was_text():
    llm = fake_llm(tokenizer=toy_tokenizer())
    first, second = llm.generate(["ab", [1, 2]], GREEDY)
    assert (first.prompt, first.prompt_token_ids) == ("ab", [1, 2])
    assert (second.prompt, second.prompt_token_ids) == (None, [1, 2])
    assert_clean(llm)


def test_prompts_and_params_are_read_only_as_rows_come_free(llm):
    read = []

    def prompts():
        for i in itertools.count():
            read.append(i)
            yield prompt(i)

    seen = set()
    for output in llm.generate_iter(prompts(), map(params_of, itertools.count())):
        seen.add(output.index)
        assert len(read) - len(seen) <= 2 * llm.engine.config.max_num_seqs
        assert llm.engine.stats().waiting <= 2 * llm.engine.config.max_num_seqs
        if len(seen) == 200:
            break
    assert seen >= set(range(150))


def test_rows_stay_busy_though_one_sample_of_each_prompt_is_slow(llm):
    """Sequences that ended no longer count, though their prompt is not finished."""
    params = SamplingParams(temperature=1, seed=3, n=4, max_tokens=30)
    busy = []
    for _ in llm.generate_iter(map(prompt, range(60)), params):
        if llm.engine.stats().waiting:
            busy.append(llm.engine.stats().running)
    assert sum(busy) / len(busy) > 2.5


def test_memory_does_not_grow_with_the_number_of_prompts():
    llm, params = fake_llm(debug=False, max_num_batched_tokens=256), SamplingParams(max_tokens=1)

    def peak(num_prompts: int) -> int:
        tracemalloc.reset_peak()
        for _ in llm.generate_iter(([i % 11] * 60 for i in range(num_prompts)), params):
            pass
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        peak(20)
        small, large = peak(20), peak(300)
    finally:
        tracemalloc.stop()
    assert large - small < 100_000, "300 outputs would be more than 300 KB"


def test_nothing_runs_but_while_an_output_is_asked_for(llm):
    outputs = llm.generate_iter(map(prompt, range(100)), GREEDY)
    assert llm.engine.stats().steps == 0
    next(outputs)
    before = llm.engine.stats().steps
    assert before < 20
    assert llm.engine.stats().steps == before
    outputs.close()


# -- leaving early -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["break", "error", "close", "collected", "cycle"])
def test_leaving_the_loop_aborts_what_runs(llm, how):
    outputs = llm.generate_iter(map(prompt, range(100)), GREEDY)
    if how == "break":
        for _ in outputs:
            break
        del outputs
    elif how == "error":

        def consume(outputs):
            for _ in outputs:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            consume(llm.generate_iter(map(prompt, range(100)), GREEDY))
    elif how == "close":
        next(outputs)
        outputs.close()
        assert list(outputs) == []
    elif how == "collected":
        next(outputs)
        del outputs
    else:
        next(outputs)
        cycle = [outputs]
        cycle.append(cycle)
        del cycle, outputs
        gc.collect()
    assert_clean(llm)
    assert len(llm.generate(map(prompt, range(5)), GREEDY)) == 5


def test_an_iterator_collected_by_another_thread_ends_before_the_next_step(llm):
    box = [llm.generate_iter(map(prompt, range(100)), GREEDY)]
    next(box[0])
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    llm.engine.audit()
    llm.engine.step()


def test_another_thread_may_not_ask_and_leaves_nothing_behind(llm):
    outputs, errors = llm.generate_iter(map(prompt, range(100)), GREEDY), []
    next(outputs)

    def ask():
        try:
            list(outputs)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "belongs to the thread that made it" in errors[0]
    llm.engine.step()


def test_an_iterator_that_is_collected_inside_a_step_does_not_tear_it(llm, monkeypatch):
    """Garbage is collected wherever memory is allocated: in the middle of planning, too."""
    box = [llm.generate_iter(map(prompt, range(100)), map(params_of, itertools.count()))]
    next(box[0])
    assert len(llm.engine.scheduler.running) > 1
    inner = type(llm.engine.scheduler)._plan_running

    def plan_and_collect(self, planner):
        planned = inner(self, planner)
        box.clear()
        return planned

    monkeypatch.setattr(type(llm.engine.scheduler), "_plan_running", plan_and_collect)
    llm.engine.step()
    llm.engine.audit()
    llm.engine.step()
    assert_clean(llm)


def test_closing_the_llm_ends_its_iterators(llm):
    other = fake_llm()
    outputs = other.generate_iter(map(prompt, range(100)), GREEDY)
    next(outputs)
    other.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(outputs)
    with pytest.raises(RuntimeError, match="closed"):
        other.generate_iter([[1]])


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_bad_prompt_is_named_once_all_before_it_are_handed_out(llm):
    prompts = [prompt(i) for i in range(20)]
    prompts[13] = [1] * 65
    seen = []
    with pytest.raises(ValueError, match=r"^prompts\[13\]: a prompt of 65 tokens .*max_model_len=64") as caught:
        seen.extend(output.index for output in llm.generate_iter(iter(prompts), map(params_of, itertools.count())))
    assert caught.value.code == "context_length_exceeded"
    assert sorted(seen) == list(range(13))


def test_generate_checks_every_prompt_before_the_first_runs(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*prompt is empty"):
        llm.generate([[1, 2], []], GREEDY)
    with pytest.raises(ValueError, match=r"prompts\[2\]=7 must be text or a list"):
        llm.generate([[1, 2], [3], 7], GREEDY)
    assert llm.engine.stats().steps == 0


def test_an_error_of_the_generator_of_prompts_comes_after_what_it_gave(llm):
    def prompts():
        yield from map(prompt, range(6))
        raise OSError("the disk is gone")

    seen = []
    with pytest.raises(OSError, match="the disk is gone"):
        seen.extend(output.index for output in llm.generate_iter(prompts(), GREEDY))
    assert sorted(seen) == list(range(6))


def test_what_is_no_prompt_or_no_params_is_refused(llm):
    for wrong in (7, b"ab", {"a": 1}, {1, 2}, None):
        with pytest.raises(ValueError, match="must be text, a list of token ids"):
            llm.generate_iter(wrong)
    with pytest.raises(ValueError, match="3 params for 2 prompts"):
        llm.generate_iter([[1], [2]], [GREEDY] * 3)
    with pytest.raises(ValueError, match=r"params\[2\]=None must be SamplingParams"):
        list(llm.generate_iter(map(prompt, range(5)), [GREEDY] * 2))
    assert llm.generate([]) == list(llm.generate_iter([])) == []
    assert len(llm.generate([1, 2, 3], GREEDY)) == len(list(llm.generate_iter([1, 2, 3], GREEDY))) == 1


def test_a_failed_step_has_what_had_finished(llm):
    calls = itertools.count()
    run = llm.engine.runner.run

    def fail_once(inputs):
        if next(calls) == 12:
            llm.engine.runner.fail_next = "before"
        return run(inputs)

    llm.engine.runner.run = fail_once
    with pytest.raises(InjectedError) as caught:
        llm.generate([prompt(i) for i in range(30)], [params_of(i) for i in range(30)])
    outputs = caught.value.outputs
    assert 0 < len(outputs) < 30
    assert [output.index for output in outputs] == sorted({output.index for output in outputs})
    for output in outputs:
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == params_of(output.index).max_tokens
    assert f"{len(outputs)} prompts had finished" in caught.value.__notes__[0]
    assert_clean(llm)


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_hands_out_what_had_finished_and_leaves_the_engine_clean(llm, times):
    calls = itertools.count()

    def interrupt():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    run = llm.engine.runner.run

    def run_and_interrupt(inputs):
        if next(calls) == 11:
            llm.engine.runner.during_run = interrupt
        return run(inputs)

    llm.engine.runner.run = run_and_interrupt
    with pytest.raises(GenerationInterrupted) as caught:
        llm.generate([prompt(i) for i in range(30)], [params_of(i) for i in range(30)])
    outputs = caught.value.outputs
    assert 0 < len(outputs) < 30
    assert f"{len(outputs)} prompts had finished" in str(caught.value)
    assert_clean(llm)
    llm.engine.runner.run = run
    whole = llm.generate([prompt(i) for i in range(30)], [params_of(i) for i in range(30)])
    assert [tokens(output) for output in outputs] == [tokens(whole[output.index]) for output in outputs]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_prompts_are_read_comes_at_once(llm):
    def prompts():
        yield from map(prompt, range(5))
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it is not interrupted")

    with pytest.raises(GenerationInterrupted) as caught:
        list(llm.generate_iter(prompts(), GREEDY))
    assert caught.value.outputs == []
    assert_clean(llm)
    with pytest.raises(GenerationInterrupted):
        llm.generate(prompts(), GREEDY)


def test_ctrl_c_in_the_loop_that_consumes_is_the_loops_own(llm):
    def consume():
        for _ in llm.generate_iter(map(prompt, range(30)), GREEDY):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        consume()
    assert not isinstance(caught.value, GenerationInterrupted)


def test_a_program_with_a_handler_of_its_own_is_asked_and_goes_on(llm):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        llm.engine.runner.during_run = lambda: signal.raise_signal(signal.SIGINT)
        assert len(llm.generate(map(prompt, range(9)), GREEDY)) == 9
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


# -- with everything else ------------------------------------------------------------------------------------------


def alone(llm: LLM, token_ids, params) -> list[list[int]]:
    return tokens(llm.generate([token_ids], params)[0])


def test_many_samples_stop_strings_and_structured_output_are_as_alone():
    llm = fake_llm(tokenizer=toy_tokenizer(), vocab_size=11)
    many = [
        SamplingParams(temperature=1, seed=4, n=5, max_tokens=9),
        SamplingParams(temperature=0, stop=["ab"], max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, structured=Structured(regex="(ab|ba){1,3}")),
    ]
    params = [many[i % 3] for i in range(30)]
    wanted = [llm.generate([prompt(i)], params[i])[0] for i in range(30)]
    got = sorted(llm.generate_iter(map(prompt, range(30)), params), key=lambda output: output.index)
    assert [tokens(output) for output in got] == [tokens(output) for output in wanted]
    assert [o.outputs[-1].text for o in got] == [o.outputs[-1].text for o in wanted]
    assert_clean(llm)


def test_a_small_pool_preempts_and_changes_nothing():
    ample, small = fake_llm(num_pages=200), fake_llm(num_pages=16, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = ample.generate([prompt(i) for i in range(20)], params)
    got = sorted(small.generate_iter([prompt(i) for i in range(20)], params), key=lambda output: output.index)
    assert [tokens(output) for output in got] == [tokens(output) for output in wanted]
    assert small.engine.stats().preemptions > 0
    assert_clean(small)


def test_weights_change_between_two_outputs(llm):
    versions = []
    for output in llm.generate_iter(map(prompt, range(12)), GREEDY):
        versions.append(output.outputs[0].weight_versions)
        if len(versions) == 5:
            llm.engine.set_weights(7, "new")
    assert set(versions[0]) == {0}
    assert set(versions[-1]) == {"new"}


def test_what_somebody_else_aborts_is_handed_out_as_aborted(llm):
    outputs = llm.generate_iter(map(prompt, range(12)), params=map(params_of, itertools.count()))
    seen = [next(outputs)]
    llm.engine.set_weights(7, "new", running="abort")
    seen += outputs
    assert sorted(output.index for output in seen) == list(range(12))
    reasons = [output.outputs[0].finish_reason for output in seen]
    assert set(reasons) == {"length", "abort"}
    outputs = llm.generate_iter(map(prompt, range(12)), GREEDY)
    next(outputs)
    llm.engine.reset()
    assert len(list(outputs)) == 11


def test_two_iterators_and_a_generate_and_requests_by_hand_share_the_engine(llm):
    wanted = [alone(llm, prompt(i), params_of(i)) for i in range(40)]
    first = llm.generate_iter([prompt(i) for i in range(20)], [params_of(i) for i in range(20)])
    second = llm.generate_iter([prompt(i) for i in range(20, 40)], [params_of(i) for i in range(20, 40)])
    (by_hand,) = llm.engine.add(Request(id="mine", prompt_token_ids=(1, 2, 3), params=GREEDY))
    got: dict[int, list[list[int]]] = {}
    for i, pair in enumerate(zip(first, second, strict=True)):
        for offset, output in zip((0, 20), pair, strict=True):
            got[offset + output.index] = tokens(output)
        if i == 7:
            assert tokens(llm.generate([prompt(3)], params_of(3))[0]) == wanted[3]
    assert [got[i] for i in range(40)] == wanted
    assert by_hand.finish_reason == "length"


def test_a_fork_by_hand_lives_on_when_its_job_is_done(llm):
    outputs = llm.generate_iter([[1, 2], [3, 4]], [GREEDY, SamplingParams(temperature=0, max_tokens=1)])
    next(outputs)
    (running,) = llm.engine.scheduler.running
    child = llm.engine.fork(running)
    assert len(list(outputs)) == 1
    while llm.engine.has_work:
        llm.engine.step()
    assert child.output_token_ids == running.output_token_ids


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["open", "next", "next", "next", "close", "add", "step", "weights", "fork", "drop"]),
              st.integers(0, 50)),
    max_size=40,
)  # fmt: skip


@settings(deadline=None)
@given(OPERATIONS)
def test_any_mix_of_iterators_and_calls_by_hand_gives_every_output_once(operations):
    llm = fake_llm(num_pages=24)
    names = itertools.count()
    iterators: list[tuple[object, int, set[int]]] = []
    for name, number in operations:
        which = number % len(iterators) if iterators else None
        if name == "open":
            size = number % 9
            params = [SamplingParams(seed=i, n=1 + i % 3, max_tokens=1 + i % 6) for i in range(size)]
            iterators.append((llm.generate_iter([prompt(i) for i in range(size)], params), size, set()))
        elif name == "next" and which is not None:
            outputs, size, seen = iterators[which]
            output = next(outputs, None)
            if output is None:
                assert seen == set(range(size))
                del iterators[which]
            else:
                assert output.index not in seen
                assert len(output.outputs) == 1 + output.index % 3
                seen.add(output.index)
        elif name in ("close", "drop") and which is not None:
            outputs, *_ = iterators.pop(which)
            outputs.close() if name == "close" else None
            del outputs
        elif name == "add":
            llm.engine.add(Request(id=f"hand-{next(names)}", prompt_token_ids=(1, 2, number % 11), params=GREEDY))
        elif name == "step":
            llm.engine.step()
        elif name == "weights":
            llm.engine.set_weights(number, number, running=("keep", "recompute", "abort")[number % 3])
        elif name == "fork" and llm.engine.scheduler.running:
            llm.engine.fork(llm.engine.scheduler.running[number % len(llm.engine.scheduler.running)])
        llm.engine.audit()
    iterators.clear()
    while llm.engine.has_work:
        llm.engine.step()
    assert_clean(llm)


# -- Ctrl-C at every moment ----------------------------------------------------------------------------------------


class Ended:
    """The prompts whose sequences have all ended by themselves, as the scheduler saw it."""

    def __init__(self, llm: LLM) -> None:
        self.indices: list[int] = []
        commit = llm.engine.scheduler.commit

        def commit_and_note(plan, result):
            events = commit(plan, result)
            self.indices += [int(e.sequence.request.id.split("-")[1]) for e in events if e.finish_reason]
            return events

        llm.engine.scheduler.commit = commit_and_note


def interrupted_at(line_number: int, call) -> tuple[object, bool]:
    """Call something with Ctrl-C just before the n-th line of Quire's offline files; whether there are so many."""
    files = {module.__file__ for module in (quire.llm, quire.job, quire.interrupts, quire.progress)}
    lines = itertools.count()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(lines) == line_number:
            sys.settrace(None)
            # Python looks for signals only where it calls or jumps back: not between this line and the one before.
            if "yield output" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                signal.raise_signal(signal.SIGINT)
        return trace

    gc.disable()  # Hypothesis has a callback in it: where Ctrl-C meets that, nobody hears of it
    sys.settrace(trace)
    try:
        return call(), next(lines) > line_number
    except KeyboardInterrupt as error:
        return error, True
    finally:
        sys.settrace(None)
        gc.enable()


@pytest.mark.parametrize("how", ["generate", "generate_iter"])
def test_ctrl_c_before_any_line_loses_nothing_and_leaves_the_engine_clean(how):
    llm = fake_llm(max_num_seqs=1)
    ended = Ended(llm)
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 2, ignore_eos=True) for i in range(2)]
    handed: list[int] = []

    def iterate():
        for output in llm.generate_iter(map(prompt, range(2)), params):
            handed.append(output.index)

    for line_number in itertools.count():
        ended.indices.clear(), handed.clear()
        call = iterate if how == "generate_iter" else lambda: llm.generate([prompt(i) for i in range(2)], params)
        result, more = interrupted_at(line_number, call)
        if isinstance(result, list):
            handed += [output.index for output in result]
        elif isinstance(result, GenerationInterrupted):
            handed += [output.index for output in result.outputs]
        del result
        assert sorted(handed) == sorted(ended.indices), f"line {line_number}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert_clean(llm)
        if not more:
            break
    assert line_number > 200
    assert len(llm.generate([prompt(i) for i in range(2)], params)) == 2


INTERRUPT_AT_RANDOM = """
    import os, random, signal, sys, threading
    from tests.test_jobs import Ended, assert_clean, fake_llm, params_of, prompt, tokens
    from quire import GenerationInterrupted
    llm = fake_llm(debug=False, max_rounds=4, max_num_seqs=16, num_pages=200, max_num_batched_tokens=64)
    ended, rng, kinds = Ended(llm), random.Random(int(sys.argv[1])), []
    prompts, params = [prompt(i) for i in range(10_000)], [params_of(i) for i in range(10_000)]
    print("ready", flush=True)
    for _ in range(6):
        ended.indices.clear()
        timer = threading.Timer(rng.uniform(0, 4), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(prompts, params)
            timer.join(), os.kill(os.getpid(), signal.SIGINT)  # it was too fast
        except GenerationInterrupted as error:
            assert [output.index for output in error.outputs] == sorted(ended.indices)
            for output in error.outputs[:: len(error.outputs) // 10 + 1]:
                assert tokens(llm.generate([prompts[output.index]], params[output.index])[0]) == tokens(output)
            kinds.append(len(error.outputs))
        except KeyboardInterrupt:
            assert len(ended.indices) in (0, 10_000)
        assert_clean(llm)
    assert len(llm.generate(prompts[:100], params[:100])) == 100
    print(kinds)
"""


@pytest.mark.slow
def test_ctrl_c_at_a_random_moment_of_ten_thousand_prompts():
    seed = str(int.from_bytes(os.urandom(4)))
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERRUPT_AT_RANDOM), seed],
        capture_output=True, text=True, timeout=600, check=False, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    print(f"seed {seed}:", out.stdout)
    assert out.returncode == 0, f"seed {seed}: {out.stderr}"


# -- chat and score ------------------------------------------------------------------------------------------------


def test_score_takes_one_sequence_or_a_list_of_them(llm):
    sequences = [[1, 2, 3], [4, 5], [6]]
    scores = llm.score(sequences)
    assert [len(one) for one in scores] == [2, 1, 0]
    assert {(one.dtype, one.ndim) for one in scores} == {(np.dtype(np.float32), 1)}
    assert_same(scores, [llm.score(one) for one in sequences])
    assert_same(llm.score(np.array([[1, 2, 3], [4, 5, 6]])), [llm.score([1, 2, 3]), llm.score([4, 5, 6])])
    with pytest.raises(ValueError, match=r"prompts\[0\]: .*prompt is empty"):
        llm.score([])


def assert_same(got, expected) -> None:
    assert [one.tolist() for one in got] == [one.tolist() for one in expected]


def test_score_begins_where_it_is_told_and_reads_what_is_before_from_the_prefix_cache():
    with fake_llm(num_pages=100, max_num_seqs=4) as llm:
        prompt = [i * i % 9 + 1 for i in range(50)]
        completions = [[*prompt, 1 + i, 7, 8] for i in range(4)]
        whole = llm.score(completions)
        llm.engine.clear_prefix_cache()
        llm.generate([prompt], SamplingParams(max_tokens=1))
        before = llm.engine.stats()
        assert_same(llm.score(completions, start=50), [one[49:] for one in whole])
        after = llm.engine.stats()
        page_size = llm.engine.config.page_size
        assert after.cached_tokens - before.cached_tokens == 4 * (49 // page_size * page_size)
        assert_same(llm.score(completions, start=[1, 7, 52, 99]), [whole[0], whole[1][6:], whole[2][51:], whole[3][:0]])
        assert_same([llm.score(completions[0], start=np.int64(51))], [whole[0][50:]])
        assert llm.engine.stats().held_pages == 0
        with pytest.raises(ValueError, match="start has 2 numbers for 4 sequences: give one for each, or one"):
            llm.score(completions, start=[1, 2])
        for wrong in (0, [1, 2, 3, -1], "2"):
            with pytest.raises(ValueError, match="start"):
                llm.score(completions, start=wrong)
        with pytest.raises(ValueError, match="params=None must be SamplingParams"):
            llm.score_drawn(completions, None)


def test_chat_takes_one_conversation_or_a_list_of_them():
    llm = fake_llm(tokenizer=toy_tokenizer(), num_pages=100)
    llm.tokenizer._chat_template_source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    one, other = [{"role": "user", "content": "ab"}], [{"role": "user", "content": "ba"}]
    answers = llm.chat([one, other], GREEDY)
    assert [tokens(answer) for answer in answers] == [tokens(llm.chat(one, GREEDY)), tokens(llm.chat(other, GREEDY))]
    assert [answer.index for answer in answers] == [0, 1]
    with pytest.raises(ValueError, match=r"^messages\[1\]: "):
        llm.chat([one, [{"role": "user", "content": "\ud800"}]], GREEDY)
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])
    with pytest.raises(ValueError, match="messages is a string: give messages, such as"):
        llm.chat("Hello")
    assert_clean(llm)


def test_tokens_of_running_and_finished_sequences_are_counted(llm):
    counts = []

    class Seen(JobProgress):
        def update(self, done, count_tokens):
            counts.append((done, *count_tokens()))

    prompts = [[1, 2, 3], [4, 5]]
    job = quire.job.Job(llm._ready(prompts, itertools.repeat(GREEDY)), Seen(2))
    assert len(list(llm._run(job, quire.interrupts.Interrupts()))) == 2
    assert counts[0] == (0, 5, 2)
    assert counts[-1] == (0, 5, 12)
