"""`AsyncLLM`: for tasks of any loop and thread, and whatever happens to one of them, every request ends."""

import asyncio
import gc
import random
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import asynccontextmanager

import pytest

from quire import LLM, AsyncLLM, Request, SamplingParams, Structured
from quire.async_llm import DeadlineError, GenerationError, OverloadError, UnavailableError, open_streams
from quire.async_llm.admission import Admission
from quire.core.errors import RequestError
from quire.field_error import FieldError
from quire.testing import InjectedError
from tests.fake_llm import LONG_S, Gate, fake_llm
from tests.tiny import tiny_llm
from tests.words import tiny_tokenizer

PROMPT = [1, 2, 3]


def tokens(num: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, **more)


@asynccontextmanager
async def opened(gate: Gate | None = None, **knobs):
    """An AsyncLLM over an engine without a model; when it is left, no page may be held."""
    async with AsyncLLM.from_factory(lambda: fake_llm(gate, **knobs)) as llm:
        yield llm
        await asyncio.wait_for(nothing_is_held(llm), LONG_S)


async def nothing_is_held(llm: AsyncLLM) -> None:
    """Until no page is held: what was aborted gives its pages back before the next step."""
    stats = await llm.call(lambda engine: (engine.audit(), engine.stats())[1])
    assert (stats.held_pages, stats.running, stats.waiting) == (0, 0, 0)
    assert llm.num_streams == 0
    assert (llm.admission.num_waiting, llm.admission.num_waiting_tokens) == (0, 0)


async def until(condition) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.001)


def run(function) -> None:
    asyncio.run(asyncio.wait_for(function(), LONG_S))


# -- the same as offline ----------------------------------------------------------------------------------------------


def cases() -> list[tuple[object, SamplingParams]]:
    return [
        ("ab a", SamplingParams(temperature=0, max_tokens=9)),
        ([1, 2, 3], SamplingParams(seed=5, n=3, max_tokens=12, logprobs=2)),
        ([3, 2, 1] * 9, SamplingParams(seed=6, max_tokens=20, stop=["ba"])),
        ([4, 4], SamplingParams(max_tokens=0, prompt_logprobs=True)),
        ([7], SamplingParams(seed=1, min_tokens=2, max_tokens=30)),
    ]


def test_outputs_are_those_of_an_llm():
    with fake_llm() as offline:
        expected = [offline.generate([prompt], params, progress=False)[0] for prompt, params in cases()]

    async def main() -> None:
        async with opened() as llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, params) for prompt, params in cases()))
            for output, one in zip(outputs, expected, strict=True):
                output.num_cached_tokens = one.num_cached_tokens  # it depends on who came before
            assert outputs == expected

    run(main)


def test_a_stream_is_the_same_in_chunks_and_says_which_sequence_they_are_of():
    params = SamplingParams(seed=5, n=3, max_tokens=25)

    async def main() -> None:
        async with opened() as llm:
            whole = await llm.generate(PROMPT, params)
            texts, ids, reasons = [""] * 3, [[], [], []], [None] * 3
            async for chunk in llm.stream(PROMPT, params):
                texts[chunk.index] += chunk.text
                ids[chunk.index] += chunk.token_ids
                reasons[chunk.index] = chunk.finish_reason
            assert (texts, ids, reasons) == (
                [one.text for one in whole.outputs],
                [one.token_ids for one in whole.outputs],
                [one.finish_reason for one in whole.outputs],
            )

    run(main)


@pytest.mark.slow
def test_ten_thousand_prompts_are_gathered():
    async def main() -> None:
        async with opened(max_num_seqs=64, num_pages=256, max_num_batched_tokens=256, debug=False) as llm:
            outputs = await asyncio.gather(*(llm.generate([1 + i % 9, i % 7], tokens(1)) for i in range(10_000)))
            assert len(outputs) == 10_000
            assert all(len(output.outputs[0].token_ids) == 1 for output in outputs)

    run(main)


def test_what_a_slow_reader_has_not_taken_is_merged():
    async def main() -> None:
        async with opened() as llm:
            stream = llm.stream(PROMPT, tokens(30, n=2))
            first = await anext(stream)
            await until(lambda: llm.num_streams == 0)
            rest = [chunk async for chunk in stream]
            assert len(rest) <= 3
            assert sum(len(chunk.token_ids) for chunk in [first, *rest]) == 60
            assert [chunk.finish_reason for chunk in rest[-2:]] == ["length"] * 2

    run(main)


def test_structured_output_is_compiled_off_the_loop_and_bad_forms_are_refused():
    params = SamplingParams(temperature=0, max_tokens=8, structured=Structured(choice=["ab", "ba"]))

    async def main() -> None:
        async with opened() as llm:
            compilers = set()
            compile_grammar = llm.llm.engine.compile_grammar

            def spy(*args, **options):
                compilers.add(threading.current_thread())
                return compile_grammar(*args, **options)

            llm.llm.engine.compile_grammar = spy
            output, chunks = await llm.generate(PROMPT, params), [chunk async for chunk in llm.stream(PROMPT, params)]
            assert output.outputs[0].text in ("ab", "ba")
            assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text
            assert compilers
            assert threading.current_thread() not in compilers
            with pytest.raises(RequestError, match="refused"):
                await llm.generate(PROMPT, SamplingParams(structured=Structured(regex="(")))
            nothing = SamplingParams(
                max_tokens=8, stop_token_ids=[1, 2, 3, 10], structured=params.structured, min_tokens=3
            )
            with pytest.raises(RequestError, match="no beginning"):  # only the engine can tell
                await llm.generate(PROMPT, nothing)

    run(main)


def test_a_grammar_that_was_compiled_is_not_compiled_again():
    async def main() -> None:
        async with opened() as llm:
            structured, engine = Structured(choice=["ab", "ba"]), llm.llm.engine
            grammar = engine.compile_grammar(structured)
            engine.compile_grammar = None  # it would be another one only after many others, and on the event loop
            params = SamplingParams(max_tokens=8, structured=structured)
            requests = [Request(id=name, prompt_token_ids=(1, 2), params=params) for name in "ab"]
            for stream in llm.submit(requests, grammar=grammar):
                assert (await stream.read_all())[0].text in ("ab", "ba")

    run(main)


def test_chat_is_rendered_by_the_template():
    class Chatting(LLM):
        def chat_prompt(self, messages, **options):
            return self.tokenizer.encode("".join(message["content"] for message in messages))

    def open_llm() -> LLM:
        llm = fake_llm()
        llm.__class__ = Chatting
        return llm

    async def main() -> None:
        async with AsyncLLM.from_factory(open_llm) as llm:
            answer = await llm.chat([{"role": "user", "content": "ab"}, {"role": "user", "content": "a"}], tokens(4))
            assert answer.prompt_token_ids == llm.tokenizer.encode("aba")
            assert len(answer.outputs[0].token_ids) == 4

    run(main)


# -- ending early -----------------------------------------------------------------------------------------------------


def test_leaving_the_loop_or_cancelling_the_task_aborts_the_request():
    gate = Gate()

    async def read(llm: AsyncLLM) -> None:
        async for _ in llm.stream(PROMPT, tokens(50)):
            gate.close()
        raise AssertionError("it ended")

    async def main() -> None:
        async with opened(gate) as llm:
            async for _ in llm.stream(PROMPT, tokens(50)):
                gate.close()
                break
            await until(lambda: llm.num_streams == 0)
            gate.open()
            await nothing_is_held(llm)
            kept = llm.stream(PROMPT, tokens(50))
            await anext(kept)
            await kept.aclose()
            assert [chunk async for chunk in kept] == []
            for coroutine in (read(llm), llm.generate(PROMPT, tokens(50))):
                gate.close()
                task = asyncio.create_task(coroutine)
                await until(lambda: llm.num_streams == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert llm.num_streams == 0
                gate.open()
                await nothing_is_held(llm)

    run(main)


def test_a_request_is_aborted_while_its_prompt_is_computed():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.close()
            task = asyncio.create_task(llm.generate([1] * 40, tokens(5), request_id="long"))  # three chunks
            await asyncio.to_thread(gate.wait_until_held)
            assert llm.abort("long")
            gate.open()
            output = await task
            assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "abort")
            assert (output.outputs[0].text, output.prompt_token_ids) == ("", [1] * 40)

    run(main)


def test_an_aborted_request_keeps_what_it_has_and_its_id_is_free_at_once():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            whole = await llm.generate(PROMPT, tokens(40, n=2))
            gate.close()
            task = asyncio.create_task(llm.generate(PROMPT, tokens(40, n=2), request_id="same"))
            stream = llm.stream(PROMPT, tokens(40), request_id="other")
            reading = asyncio.create_task(anext(stream))
            await until(lambda: llm.num_streams == 2)
            gate.let(9)
            await reading
            await asyncio.to_thread(gate.wait_until_held)
            assert await asyncio.to_thread(llm.abort, "same")  # from a thread
            assert not llm.abort("nobody")
            gate.let(1)  # what is aborted ends between two steps
            output = await task
            for one, full in zip(output.outputs, whole.outputs, strict=True):
                assert 0 < len(one.token_ids) < 40
                assert one.token_ids == full.token_ids[: len(one.token_ids)]
                assert full.text.startswith(one.text.rstrip("�"))
                assert one.finish_reason == "abort"
            again = asyncio.create_task(llm.generate(PROMPT, tokens(40, n=2), request_id="same"))
            await until(lambda: llm.num_streams == 2)
            assert llm.abort_all() == 2
            gate.open()
            assert {one.finish_reason for one in (await again).outputs} <= {"abort", "length"}
            last = [chunk async for chunk in stream][-1]
            assert last.finish_reason in ("abort", "length")
            assert (await llm.generate(PROMPT, tokens(2))).outputs[0].finish_reason == "length"

    run(main)


def test_a_deadline_is_a_timeout():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.close()
            with pytest.raises(TimeoutError) as caught:
                await llm.generate(PROMPT, tokens(9), timeout_s=0.01)
            assert isinstance(caught.value, DeadlineError)
            assert str(caught.value) == "the request's time is over"
            assert llm.num_streams == 0
            gate.open()

    run(main)


@pytest.mark.slow
def test_a_thousand_tasks_are_cancelled_at_random():
    async def main(seed: int) -> None:
        rng = random.Random(seed)

        async def one(llm: AsyncLLM, i: int) -> str:
            prompt, params = [rng.randrange(11) for _ in range(rng.randint(1, 30))], tokens(rng.randint(1, 20))
            if rng.random() < 0.5:
                return (
                    (await llm.generate(prompt, params, request_id=str(i), priority=rng.randint(0, 2))).outputs[0].text
                )
            async for _ in llm.stream(prompt, params, request_id=str(i)):
                if rng.random() < 0.05:
                    break
                await asyncio.sleep(0)
            return ""

        async with opened(num_pages=40, max_num_seqs=8) as llm:
            tasks = [asyncio.create_task(one(llm, i)) for i in range(1000)]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
                i = rng.randrange(1000)
                tasks[i].cancel() if rng.random() < 0.6 else llm.abort(str(i))
            results = await asyncio.gather(*tasks, return_exceptions=True)
            kinds = {type(result) for result in results}
            assert kinds == {str, asyncio.CancelledError}
            del tasks, results
            await until(lambda: llm.num_streams == 0)

    for seed in range(3):
        run(lambda seed=seed: main(seed))


# -- between two steps ------------------------------------------------------------------------------------------------


def test_weights_change_between_the_tokens_of_a_stream():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.let(9)
            stream = llm.stream(PROMPT, tokens(50), request_id="a")
            await anext(stream)
            task = asyncio.create_task(llm.generate(PROMPT, tokens(50)))
            await until(lambda: llm.num_streams == 2)
            await asyncio.to_thread(gate.wait_until_held)
            sequences = llm.streams[0].sequences
            changing = asyncio.create_task(llm.set_weights(None, version=7))
            await asyncio.sleep(0)
            gate.open()
            assert await changing == 0
            assert [chunk async for chunk in stream][-1].finish_reason == "length"
            assert sorted(set(sequences[0].weight_versions)) == [0, 7]
            output = (await task).outputs[0]
            assert len(output.weight_versions) == 50
            assert output.weight_versions[-1] == 7
            await llm.set_weights(None)
            assert await llm.call(lambda engine: engine.stats().weight_version) == 8, "the next number"

    run(main)


def test_what_a_call_aborts_ends_and_the_rest_goes_on():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.close()
            both = [asyncio.create_task(llm.generate(PROMPT, tokens(50, n=2), request_id=name)) for name in "ab"]
            await until(lambda: llm.num_streams == 2)
            gate.let(9)
            await until(lambda: llm.streams[1].num_output_tokens)
            await asyncio.to_thread(gate.wait_until_held)
            second = llm.streams[0].sequences[1]
            aborting = asyncio.create_task(llm.call(lambda engine: engine.abort(second)))
            await asyncio.sleep(0)
            gate.open()
            assert await aborting == 1
            assert [one.finish_reason for one in (await both[0]).outputs] == ["length", "abort"]
            assert [one.finish_reason for one in (await both[1]).outputs] == ["length", "length"]
            gate.let(9)
            task = asyncio.create_task(llm.generate(PROMPT, tokens(50)))
            await until(lambda: llm.num_streams == 1 and llm.streams[0].num_output_tokens)
            await asyncio.to_thread(gate.wait_until_held)
            changing = asyncio.create_task(llm.set_weights(None, version=1, running="abort"))
            await asyncio.sleep(0)
            gate.open()
            assert await changing == 1
            assert (await task).outputs[0].finish_reason == "abort"

    run(main)


def test_a_fork_is_not_part_of_the_request():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.let(9)
            task = asyncio.create_task(llm.generate(PROMPT, tokens(40), request_id="a"))
            await until(lambda: llm.num_streams == 1 and llm.streams[0].num_output_tokens)
            await asyncio.to_thread(gate.wait_until_held)
            forking = asyncio.create_task(llm.call(lambda engine: engine.fork(llm.streams[0].sequences[0])))
            await asyncio.sleep(0)
            gate.open()
            await forking
            output = await task
            assert [len(one.token_ids) for one in output.outputs] == [40]
            await llm.call(lambda engine: engine.reset())

    run(main)


def test_the_error_of_a_call_is_the_callers_and_a_slow_one_is_no_hang():
    has_begun, may_end = threading.Event(), threading.Event()

    def boom(engine):
        raise SystemExit(3)

    def wait(engine):
        has_begun.set()
        may_end.wait(LONG_S)

    async def main() -> None:
        async with opened() as llm:
            with pytest.raises(SystemExit):
                await llm.call(boom)
            while not has_begun.is_set():
                with pytest.raises(TimeoutError):
                    await llm.call(wait, timeout_s=0.01)
            llm.engines.threads[0].heartbeat.limit_s = 1e-9
            assert llm.is_healthy  # though it has been silent for longer than that
            with pytest.raises(TimeoutError):
                await llm.call(lambda engine: 1 / 0, timeout_s=0.01)  # never runs: nobody waits for it any more
            llm.engines.threads[0].heartbeat.limit_s = LONG_S
            may_end.set()
            assert await llm.call(lambda engine: engine.max_model_len) == 64

    run(main)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_wrong_requests_are_refused_at_once_and_name_the_field():
    async def main() -> None:
        async with opened() as llm:
            for prompt, options, field in [
                ([], {}, "prompt"),
                ([99], {}, "prompt"),
                ([1] * 100, {}, "prompt"),
                (["ab", "a"], {}, "prompt"),
                (3.5, {}, "prompt"),
                (b"\1\2\3", {}, "prompt"),
                (PROMPT, {"params": "temperature=1"}, "params"),
                (PROMPT, {"priority": 1.5}, "priority"),
                (PROMPT, {"cache_salt": 3}, "cache_salt"),
            ]:
                with pytest.raises(FieldError) as caught:
                    await llm.generate(prompt, **options)
                assert caught.value.field == field
                with pytest.raises(FieldError):
                    await anext(llm.stream(prompt, **options))
            await asyncio.wrap_future(llm.engines.threads[0].pause())  # or it may have ended before the other comes
            running = asyncio.ensure_future(llm.generate(PROMPT, tokens(5), request_id="a"))
            while not llm.num_streams:
                await asyncio.sleep(0)
            with pytest.raises(RequestError, match="'a' is in use"):
                await llm.generate(PROMPT, request_id="a")
            await asyncio.wrap_future(llm.engines.threads[0].resume())
            await running

    run(main)


def test_too_many_that_wait_are_refused_where_that_was_asked_for():
    gate = Gate()

    async def main() -> None:
        llm = AsyncLLM("a model", max_waiting=2)
        assert llm.admission.max_requests == 2
        async with AsyncLLM.from_factory(lambda: fake_llm(gate, max_num_seqs=1), admission=llm.admission) as llm:
            gate.close()
            first = asyncio.create_task(llm.generate(PROMPT, tokens(3)))
            await until(lambda: llm.num_streams == 1)
            others = [asyncio.create_task(llm.generate(PROMPT, tokens(3))) for _ in range(9)]
            await until(lambda: sum(task.done() for task in others) >= 7)
            gate.open()
            results = await asyncio.gather(*others, return_exceptions=True)
            assert 7 <= sum(isinstance(result, OverloadError) for result in results) <= 8
            assert (await first).outputs[0].finish_reason == "length"

    run(main)


@pytest.mark.parametrize("max_waiting", [0, -1, 2.5, "2", True])
def test_how_many_may_wait_is_a_number_from_one_on(max_waiting):
    """Somebody may always wait: else nothing would run that does not start at once."""
    with pytest.raises(FieldError, match=r"max_waiting=.* must be"):
        AsyncLLM("a model", max_waiting=max_waiting)


def test_before_it_is_loaded_and_after_it_is_closed_requests_are_refused():
    gate = Gate()

    async def main() -> None:
        llm = AsyncLLM.from_factory(lambda: fake_llm(gate))
        for coroutine in (llm.generate(PROMPT), llm.generate("ab"), llm.chat([])):
            with pytest.raises(UnavailableError, match="use `async with"):
                await coroutine
        assert not llm.is_ready
        await llm.start()
        await llm.start()
        assert llm.is_ready
        gate.close()
        task = asyncio.create_task(llm.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True)))
        await until(lambda: llm.num_streams == 1)
        await asyncio.to_thread(gate.wait_until_held)
        closing = asyncio.gather(llm.close(), llm.close())
        await asyncio.sleep(0)
        gate.open()
        await closing
        assert isinstance(task.exception(), UnavailableError)
        for coroutine in (llm.generate(PROMPT), llm.generate("ab"), llm.call(print), llm.start()):
            with pytest.raises(UnavailableError):
                await coroutine
        assert (llm.is_ready, llm.is_healthy, llm.abort("a"), llm.abort_all()) == (False, False, False, 0)
        await AsyncLLM.from_factory(fake_llm).close()  # never started

    run(main)


def test_a_model_that_cannot_be_loaded_says_why():
    def fail() -> LLM:
        raise ValueError("no such model")

    async def main() -> None:
        with pytest.raises(ValueError, match="no such model"):
            async with AsyncLLM.from_factory(fail):
                pass
        with pytest.raises(ValueError, match="page_size"):
            async with AsyncLLM("nowhere", page_size=-1):
                pass

    run(main)


def test_draining_waits_for_what_runs_and_takes_nothing_new():
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.close()
            task = asyncio.create_task(llm.generate(PROMPT, tokens(5)))
            await until(lambda: llm.num_streams == 1)
            draining = asyncio.create_task(llm.drain())
            await until(lambda: not llm.is_ready)
            with pytest.raises(UnavailableError):
                await llm.generate(PROMPT)
            assert not draining.done()
            gate.open()
            await draining
            assert len((await task).outputs[0].token_ids) == 5

    run(main)


def many(num: int) -> list[Request]:
    return [Request(id=f"r{i}", prompt_token_ids=(1 + i % 9, i % 7), params=tokens(2)) for i in range(num)]


def output_of(stream) -> tuple[str, list[int]]:
    return stream.request.id, list(stream.sequences[0].output_token_ids)


def test_many_requests_of_one_client_take_turns_and_leave_room_for_others():
    """Fifty, with rows for four and a queue of sixteen: they never fill it, and none is refused."""
    gate = Gate()

    async def main() -> None:
        admission = Admission(max_requests=16)
        async with AsyncLLM.from_factory(lambda: fake_llm(gate, max_num_seqs=4), admission=admission) as llm:
            expected = [(await llm.generate(r.prompt_token_ids, r.params)).outputs[0].token_ids for r in many(50)]
            gate.close()
            most = []

            def each(stream):
                most.append(llm.num_streams)
                return output_of(stream)

            task = asyncio.create_task(llm.run_in_turns(many(50), each))
            await until(lambda: llm.num_streams > 0)
            assert llm.num_streams <= 8
            gate.open()
            while not task.done():
                await llm.generate(PROMPT, tokens(1))  # OverloadError, if they all waited
            assert await task == [(f"r{i}", ids) for i, ids in enumerate(expected)]
            assert max(most) <= 8 + 1
            await nothing_is_held(llm)

    run(main)


def test_many_requests_take_turns_whatever_tokens_they_come_to_together():
    async def main() -> None:
        admission = Admission(max_requests=16, max_tokens=20)
        async with AsyncLLM.from_factory(lambda: fake_llm(Gate(), max_num_seqs=4), admission=admission) as llm:
            assert len(await llm.run_in_turns(many(50), output_of)) == 50
            await nothing_is_held(llm)

    run(main)


def test_many_requests_are_refused_at_once_if_the_queue_is_full():
    gate = Gate()

    async def main() -> None:
        admission = Admission(max_requests=1)
        async with AsyncLLM.from_factory(lambda: fake_llm(gate, max_num_seqs=1), admission=admission) as llm:
            gate.close()
            task = asyncio.create_task(llm.generate(PROMPT, tokens(3)))
            await until(lambda: llm.num_streams == 1)
            with pytest.raises(OverloadError):
                await llm.run_in_turns(many(9), output_of)
            with pytest.raises(RequestError, match="token id"):
                await llm.run_in_turns(
                    [*many(9), Request(id="bad", prompt_token_ids=(1 << 20,), params=tokens(1))], output_of
                )
            gate.open()
            await task
            await nothing_is_held(llm)

    run(main)


@pytest.mark.parametrize("how", ["drain", "cancel", "timeout", "close"])
def test_turns_end_with_the_rest(how):
    """Draining waits for those that follow, too; otherwise they end with the others, and nothing is held."""
    gate = Gate()

    async def main() -> None:
        async with AsyncLLM.from_factory(lambda: fake_llm(gate, max_num_seqs=1)) as llm:
            gate.close()
            timeout_s = 0.05 if how == "timeout" else None
            task = asyncio.create_task(llm.run_in_turns(many(9), output_of, timeout_s=timeout_s))
            await until(lambda: llm.num_streams == 2 or (how == "timeout" and task.done()))
            if how == "drain":
                draining = asyncio.create_task(llm.drain())
                await until(lambda: not llm.is_ready)
                gate.open()
                await draining
                assert len(await task) == 9
            elif how == "cancel":
                task.cancel()
                gate.open()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif how == "timeout":
                with pytest.raises(DeadlineError):
                    await task
                gate.open()
            else:
                gate.open()
                await llm.close()
                with pytest.raises(UnavailableError):
                    await task
                return
            await until(lambda: llm.num_streams == 0)
            await nothing_is_held(llm)

    run(main)


def test_no_turn_begins_when_the_time_is_over(monkeypatch):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen, now = [], loop.time

        def each(stream) -> None:
            seen.append(stream.request.id)
            monkeypatch.setattr(loop, "time", lambda: now() + 0.6 * LONG_S)

        async with AsyncLLM.from_factory(lambda: fake_llm(Gate(), max_num_seqs=1)) as llm:
            with pytest.raises(DeadlineError):
                await llm.run_in_turns(many(9), each, timeout_s=0.5 * LONG_S)
            assert len(seen) == 1
            await until(lambda: llm.num_streams == 0)
            await nothing_is_held(llm)

    run(main)


# -- when something breaks --------------------------------------------------------------------------------------------


def test_a_failed_step_fails_its_requests_with_its_error_and_the_engine_goes_on():
    async def main() -> None:
        async with opened() as llm:
            await llm.call(lambda engine: setattr(engine.runner, "fail_next", "before"))
            with pytest.raises(GenerationError, match="failed inside the engine") as caught:
                await llm.generate(PROMPT, tokens(5))
            assert isinstance(caught.value.__cause__, InjectedError)
            assert llm.num_failed_steps == 1
            expected = await llm.generate(PROMPT, tokens(5))
            await llm.call(lambda engine: setattr(engine.runner, "fail_next", "inside"))
            assert (await llm.generate(PROMPT, tokens(5))).outputs == expected.outputs  # computed again

    run(main)


def test_the_log_names_the_requests_of_a_failed_step(caplog):
    """Once each, by the id that the client knows, and not those that waited."""
    gate = Gate()

    async def main() -> None:
        async with opened(gate, max_num_seqs=20, max_num_batched_tokens=128, num_pages=400) as llm:
            gate.close()
            parts = [f"job-{i // 2}-{i % 2}-0123abcd" for i in range(24)]
            tasks = [asyncio.create_task(llm.generate(PROMPT, tokens(50), request_id=part)) for part in parts]
            await until(lambda: llm.num_streams == 24)
            await asyncio.to_thread(gate.wait_until_held)
            gate.let(1)  # from now on the step has as many rows as there are
            await asyncio.to_thread(gate.wait_until_held)
            llm.llm.engine.runner.fail_next = "before"
            gate.open()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(main)
    (line,) = (record for record in caplog.records if record.message == "a step failed")
    assert line.requests == 10
    assert line.request_ids == [f"job-{i}" for i in range(8)]
    assert line.error == "InjectedError"


class Panic(BaseException):
    """What a panic of a Rust library is in Python: not an Exception."""


class Breaking:
    """Raises, wherever it is called."""

    def on_step(self, engine, start, end, is_failed) -> None:
        raise Panic

    def on_tokens(self, stream, index, now, count) -> None:
        raise RuntimeError("tokens do not depend on observers")

    def on_end(self, stream, failure) -> None:
        raise Panic


def test_an_observer_that_raises_ends_no_request_and_not_the_engine():
    async def main() -> None:
        async with AsyncLLM.from_factory(fake_llm, observers=[Breaking()]) as llm:
            for _ in range(3):
                assert len((await llm.generate(PROMPT, tokens(3))).outputs[0].token_ids) == 3
            assert (llm.is_healthy, llm.num_failed_steps) == (True, 0)

    run(main)


def test_when_the_engines_thread_dies_everything_ends():
    gate = Gate()

    async def main() -> None:
        llm = AsyncLLM.from_factory(lambda: fake_llm(gate, max_num_seqs=1))
        await llm.start()
        assert len((await llm.generate(PROMPT, tokens(3))).outputs[0].token_ids) == 3
        gate.close()
        requests = [asyncio.create_task(llm.generate(PROMPT, tokens(50))) for _ in range(5)]
        await asyncio.to_thread(gate.wait_until_held)
        requests.append(asyncio.create_task(llm.call(lambda engine: engine.stats())))
        await until(lambda: llm.num_streams == 5)
        llm.llm.engine.runner.failure = ZeroDivisionError()
        gate.open()
        for error in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(error, UnavailableError)
            assert isinstance(error.__cause__, ZeroDivisionError)
        assert (llm.is_healthy, llm.is_ready, llm.num_streams) == (False, False, 0)
        for coroutine in (llm.generate(PROMPT), llm.call(print)):
            with pytest.raises(UnavailableError):
                await coroutine
        await llm.close()

    run(main)


def test_a_dispatch_that_takes_too_long_is_reported_and_its_requests_go_on():
    """It may be slow, or hang: health says so, nothing new is taken, and no stream is ended."""
    gate = Gate()

    async def main() -> None:
        async with opened(gate) as llm:
            gate.close()
            request = asyncio.create_task(llm.generate(PROMPT, tokens(5)))
            await asyncio.to_thread(gate.wait_until_held)
            assert (llm.is_healthy, llm.engines.describe_hang()) == (True, None)
            thread = llm.engines.threads[0]
            pace, thread.heartbeat.limit_s = thread.llm.engine.pace, 0.0
            pace.in_flight = pace.in_flight._replace(expected_s=1e-9)
            assert (llm.is_healthy, llm.is_ready) == (False, False)
            said = r"the engine does not respond: a dispatch of 3 tokens in 1 rounds has run for \d+ s, 0.0 s were"
            with pytest.raises(UnavailableError, match=said):
                await llm.generate(PROMPT, tokens(5))
            assert re.match(said, llm.engines.describe_hang())
            with pytest.raises(UnavailableError):
                await llm.call(lambda engine: engine.stats())
            await asyncio.sleep(2 * open_streams.CHECK_EVERY_S)  # it has been looked at
            assert not request.done()
            thread.heartbeat.limit_s = LONG_S
            gate.open()
            assert len((await request).outputs[0].token_ids) == 5
            assert llm.is_healthy

    run(main)


def test_nobody_waits_for_an_engine_that_hangs_outside_of_a_dispatch(monkeypatch):
    gate = Gate()

    async def main() -> None:
        async with opened() as llm:
            scheduler, heartbeat = llm.llm.engine.scheduler, llm.engines.threads[0].heartbeat
            schedule = scheduler.schedule
            monkeypatch.setattr(scheduler, "schedule", lambda: (gate.pass_through(), schedule())[1])
            gate.close()
            requests = [asyncio.create_task(llm.generate(PROMPT, tokens(5)))]
            await asyncio.to_thread(gate.wait_until_held)
            requests.append(asyncio.create_task(llm.call(lambda engine: engine.stats())))
            heartbeat.limit_s = 0.0
            for error in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(error, UnavailableError)
            assert llm.engines.describe_hang() == "the engine does not respond"
            heartbeat.limit_s = LONG_S
            gate.open()

    run(main)


def test_a_loop_that_is_closed_early_takes_its_requests_with_it():
    async def main() -> None:
        async with opened() as llm:

            def other_thread() -> None:
                loop = asyncio.new_event_loop()
                tasks = [loop.create_task(llm.generate(PROMPT, tokens(50))) for _ in range(3)]
                loop.run_until_complete(until_submitted())
                for task in tasks:
                    task._log_destroy_pending = False
                loop.close()
                for task in tasks:
                    with pytest.raises(RuntimeError):  # its `finally` finds the loop closed, and says so
                        task.get_coro().throw(RuntimeError)

            async def until_submitted() -> None:
                while llm.num_streams < 3:
                    await asyncio.sleep(0)

            await asyncio.to_thread(other_thread)
            await until(lambda: llm.num_streams == 0)
            assert (await llm.generate(PROMPT, tokens(2))).outputs[0].finish_reason == "length"

    run(main)


# -- loops, threads, processes ----------------------------------------------------------------------------------------


def test_loops_of_several_threads_share_an_engine():
    with fake_llm() as offline:
        expected = [offline.generate([[i, 2, 3]], tokens(12), progress=False)[0].outputs for i in range(10)]

    async def main() -> None:
        async with opened() as llm:

            async def ask() -> list[object]:
                outputs = await asyncio.gather(*(llm.generate([i, 2, 3], tokens(12)) for i in range(10)))
                streamed = [
                    [t async for chunk in llm.stream([i, 2, 3], tokens(12)) for t in chunk.token_ids] for i in (3, 4)
                ]
                assert streamed == [expected[3][0].token_ids, expected[4][0].token_ids]
                return [output.outputs for output in outputs]

            elsewhere = [asyncio.to_thread(asyncio.run, ask()) for _ in range(4)]
            for outputs in await asyncio.gather(ask(), *elsewhere):
                assert outputs == expected
            assert not llm._streams._mailboxes

    run(main)


def test_one_that_is_forgotten_ends_its_thread():
    async def main() -> threading.Thread:
        llm = AsyncLLM.from_factory(fake_llm)
        await llm.start()
        await llm.generate(PROMPT, tokens(2))
        return llm.engines.threads[0]._thread

    thread = asyncio.run(main())
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending", ["pass", "raise SystemExit(0)", "await asyncio.sleep(0); asyncio.current_task().cancel()"]
)
def test_a_program_may_end_in_the_middle_of_a_step(ending):
    program = f"""
        import asyncio, contextlib
        from quire import AsyncLLM, SamplingParams
        from tests.fake_llm import fake_llm

        async def main():
            global llm, tasks  # never closed
            llm = AsyncLLM.from_factory(lambda: fake_llm(max_model_len=4000, num_pages=2000))
            await llm.start()
            params = SamplingParams(max_tokens=3000, ignore_eos=True)
            tasks = [asyncio.create_task(llm.generate([1, 2], params)) for _ in range(3)]
            await anext(llm.stream([3], params))
            {ending}

        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(main())
        print("the end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=LONG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if "Exit" in ending else "the end\n")


# -- a real device, a real model --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_a_compiled_model():
    prompts = [f"{word} a no" for word in ("yes", "12", "ab", "tr")]
    with tiny_llm(tokenizer=tiny_tokenizer()) as offline:
        expected = [offline.generate(prompt, tokens(20), progress=False)[0] for prompt in prompts]

    async def main() -> None:
        async with AsyncLLM.from_factory(lambda: tiny_llm(tokenizer=tiny_tokenizer(), debug=True)) as llm:
            assert await asyncio.gather(*(llm.generate(prompt, tokens(20)) for prompt in prompts)) == expected
            assert (await llm.call(lambda engine: engine.stats())).compiles_after_warmup == 0

    run(main)


@pytest.mark.slow
def test_with_a_real_model(smollm2_gguf):
    small = {"dtype": "float32", "quiet": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    params = SamplingParams(temperature=0, max_tokens=12)

    async def main() -> None:
        async with AsyncLLM(smollm2_gguf, **small) as llm:
            france, once = await asyncio.gather(
                llm.generate("The capital of France is", params), llm.generate("Once upon a time", params)
            )
            assert france.outputs[0].text.startswith(" Paris.")
            text = "".join([chunk.text async for chunk in llm.stream("Once upon a time", params)])
            assert text == once.outputs[0].text
            answer = await llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
            assert "Paris" in answer.outputs[0].text
            stats = await llm.call(lambda engine: engine.stats())
            assert (stats.held_pages, stats.compiles_after_warmup) == (0, 0)

    run(main)
