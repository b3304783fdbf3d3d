"""The engine's thread: what it costs, what it forgets, and that nothing is lost on the way."""

import asyncio
import statistics
import sys
import threading
from pathlib import Path

import pytest

import quire.engine.engine as engine_module
from quire import Request, SamplingParams
from quire.async_llm import AsyncLLM, GenerationError, engine_thread, heartbeat
from quire.async_llm.admission import Admission
from quire.async_llm.engine_thread import EngineThread, RequestState
from quire.async_llm.heartbeat import STALLED_AFTER_S, STALLED_DISPATCHES, Heartbeat
from quire.async_llm.loop_mailbox import LoopMailbox
from quire.async_llm.updates import Update, UpdateBuffer
from quire.core.errors import AuditError
from quire.core.plan import Row, StepPlan
from quire.engine.pace import NUM_RECENT, Pace
from quire.testing import InjectedError, fake_engine
from tests.fake_llm import LONG_S, Gate, fake_llm
from tests.tiny import tiny_llm

ROOM = str(Path(heartbeat.__file__).parent)


class CallCounter:
    """Counts calls of this room's functions on the engine's thread, step by step."""

    def __init__(self) -> None:
        self.calls = 0
        self.calls_of_steps: list[int] = []

    def profile(self, frame, event: str, _) -> None:
        self.calls += event == "call" and frame.f_code.co_filename.startswith(ROOM)

    def on_step(self, engine, start, end, is_failed) -> None:
        self.calls_of_steps.append(self.calls)
        self.calls = 0

    def on_tokens(self, stream, index, now, count) -> None: ...

    def on_end(self, stream, failure) -> None: ...


def requests(num: int, **params) -> list[Request]:
    params = SamplingParams(temperature=0, ignore_eos=True, **params)
    return [Request(id=f"r{i}", prompt_token_ids=(5, 6, 7 + i % 80), params=params, stream=True) for i in range(num)]


async def calls_of_a_step(num_waiting: int) -> float:
    """This room's function calls in a step of two rows, while so many requests wait."""
    counter = CallCounter()
    admission = Admission(max_requests=1000, max_tokens=1 << 30)
    engine = AsyncLLM.from_factory(lambda: tiny_llm(max_num_seqs=2), admission=admission, observers=[counter])
    await engine.start()
    try:
        await asyncio.wrap_future(engine.engines.threads[0].pause())
        streams = engine.submit(requests(2 + num_waiting, max_tokens=100))
        await engine.call(lambda _: sys.setprofile(counter.profile))
        await asyncio.wrap_future(engine.engines.threads[0].resume())
        async for _ in streams[0]:  # it runs with the next one, and the others wait
            pass
        await engine.call(lambda _: sys.setprofile(None))
        return statistics.median(counter.calls_of_steps)
    finally:
        await engine.close()


def test_a_step_does_not_look_at_every_request_that_waits():
    assert asyncio.run(calls_of_a_step(200)) == asyncio.run(calls_of_a_step(3))


def test_every_request_is_told_to_have_started_once_and_ends():
    async def run() -> None:
        admission = Admission(max_requests=1000, max_tokens=1 << 30)
        engine = AsyncLLM.from_factory(lambda: tiny_llm(max_num_seqs=2), admission=admission)
        await engine.start()
        streams = engine.submit(requests(9, max_tokens=1)) + engine.submit(
            [Request(id="scored", prompt_token_ids=(5, 6), params=SamplingParams(max_tokens=0, prompt_logprobs=True))]
        )
        for stream in streams:
            async for _ in stream:
                pass
        assert all(stream.times.started for stream in streams)
        assert admission.num_waiting == 0
        await engine.drain()
        await engine.close()

    asyncio.run(run())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan_of(*rows: tuple[int, int, int]) -> StepPlan:
    """A plan with rows of (first position, tokens, rounds)."""
    return StepPlan([Row(None, *row) for row in rows], num_tokens=sum(num_tokens for _, num_tokens, _ in rows))


def paced(clock: Clock) -> tuple[Pace, Heartbeat]:
    beat = Heartbeat(clock)
    beat.pace = Pace(clock)
    return beat.pace, beat


def dispatch(pace: Pace, clock: Clock, plan: StepPlan, seconds: float) -> float:
    """Play a dispatch; returns how long it was expected to take."""
    pace.begin(plan)
    expected_s = pace.in_flight.expected_s
    clock.now += seconds
    pace.end(max(row.max_rounds for row in plan.rows))
    return expected_s


def test_a_dispatch_may_take_as_long_as_its_tokens_at_the_measured_speed():
    """A 7B model on a slow CPU: 0.2 s for a token of a prompt, 1.5 s for a decode step."""
    clock = Clock()
    pace, beat = paced(clock)
    prompt, decode = plan_of((0, 2048, 1)), plan_of((2048, 1, 16))
    for seconds, plan in ((400.0, prompt), (24.0, decode), (400.0, prompt), (48.0, plan_of(*[(2048, 1, 16)] * 8))):
        pace.begin(plan)
        clock.now += seconds
        assert not beat.is_late
        pace.end(plan.rows[0].max_rounds)
        assert not beat.is_late, "the thread has not beaten yet"
        beat.beat()
    assert dispatch(pace, clock, prompt, 400.0) == 400.0
    assert dispatch(pace, clock, decode, 24.0) == 24.0
    assert dispatch(pace, clock, plan_of((0, 8192, 1)), 1600.0) >= 1600.0, "four times as many tokens"
    assert dispatch(pace, clock, plan_of((120_000, 2048, 1)), 1600.0) >= 1600.0, "each attends to many others"
    pace.begin(decode)
    clock.now += STALLED_DISPATCHES * 24.0
    assert beat.is_late, "a hang is one all the same"


def test_a_hang_is_found_at_the_speed_that_was_measured_last():
    clock = Clock()
    pace, beat = paced(clock)
    decode = plan_of((5, 1, 1))
    dispatch(pace, clock, decode, 1000.0)
    pace.begin(decode)
    clock.now += 3999
    assert not beat.is_late
    clock.now += 1
    assert beat.is_late
    pace.end()
    assert not beat.is_late
    for _ in range(NUM_RECENT):  # a slow dispatch is forgotten; one that failed teaches nothing
        dispatch(pace, clock, decode, 0.1)
    pace.begin(decode)
    clock.now += STALLED_AFTER_S - 0.1
    assert not beat.is_late
    clock.now += 0.2
    assert beat.is_late


@pytest.mark.parametrize(("is_cpu", "first_s", "second_s"), [(True, 2400, 983.04), (False, 480, 480)])
def test_a_hang_in_a_dispatch_of_a_size_that_was_not_measured_is_found_within_minutes(is_cpu, first_s, second_s):
    """One token takes nearly as long as a hundred: times its tokens, a prompt would be expected to take hours."""
    clock = Clock()
    pace = Pace(clock, is_cpu=is_cpu)
    beat = Heartbeat(clock)
    beat.pace = pace
    prompt = plan_of(*[(0, 1024, 1)] * 8)
    for late_s in (first_s, second_s):
        pace.begin(prompt)
        began = clock.now
        clock.now = began + late_s - 1
        assert not beat.is_late
        clock.now = began + late_s + 1
        assert beat.is_late
        pace.end()
        dispatch(pace, clock, plan_of((5, 1, 1)), 0.03)
    clock.now += 1
    dispatch(pace, clock, prompt, 40.0)
    expected_s = dispatch(pace, clock, plan_of(*[(0, 1024, 1)] * 12), 60.0)
    assert expected_s == 60.0, "half as many tokens more"


def test_the_first_long_prompt_of_a_large_model_on_a_slow_cpu_is_no_hang():
    """8,192 tokens at 0.2 s each, and then a decode step of 16 rounds."""
    clock = Clock()
    pace, beat = paced(clock)
    for plan, seconds in ((plan_of(*[(0, 1024, 1)] * 8), 1638.0), (plan_of(*[(1024, 1, 16)] * 8), 160.0)):
        pace.begin(plan)
        clock.now += seconds
        assert not beat.is_late
        pace.end(plan.rows[0].max_rounds)
        beat.beat()
    pace.begin(plan_of((1024, 1, 16)))
    clock.now += 3600
    assert beat.is_late


def test_the_rounds_of_a_dispatch_with_an_aborted_row_are_not_known():
    """It ran for sixteen rounds, and no token says so: one round would seem to take sixteen times as long."""
    engine = fake_engine(eos_ids=(), max_rounds=16, num_pages=64)
    clock, expected = Clock(), []
    engine.pace = Pace(clock)

    def wait() -> None:
        dispatch = engine.pace.in_flight
        clock.now += dispatch.rounds
        expected.append((dispatch.rounds, dispatch.expected_s))

    for name in ("a", "b"):
        params = SamplingParams(temperature=0, max_tokens=50)
        engine.add(Request(id=name, prompt_token_ids=(1, 2, 3), params=params))
        engine.step(wait)
        engine.step(lambda name=name: (wait(), engine.abort(name)))
    assert expected[-1] == (16, 16.0)


def test_a_thread_that_is_silent_between_two_dispatches_hangs():
    clock = Clock()
    pace, beat = paced(clock)
    dispatch(pace, clock, plan_of((0, 64, 1)), 100.0)
    clock.now += STALLED_AFTER_S - 1
    assert not beat.is_late
    clock.now += 1
    assert beat.is_late
    beat.beat()
    assert (beat.age_s, beat.is_late) == (0.0, False)
    beat.rest()
    clock.now += 1000
    assert (beat.age_s, beat.is_late) == (0.0, False)


class Text(str):
    """Text that may be joined once, and not be added to another: that would copy what is there for each update."""

    __slots__ = ()

    def __add__(self, other):
        raise AssertionError("text was copied to add to it")

    __radd__ = __add__


def test_updates_are_merged_in_linear_time_and_in_order():
    buffer = UpdateBuffer()
    assert not buffer
    for i in range(100):
        buffer.add(Update(1 - i % 2, Text(f"{i} "), [i], [], "stop" if i > 97 else None))
    assert buffer
    even, odd = [i for i in range(100) if i % 2 == 0], [i for i in range(100) if i % 2]
    assert buffer.take() == [
        Update(0, "".join(f"{i} " for i in odd), odd, [], "stop"),
        Update(1, "".join(f"{i} " for i in even), even, [], "stop"),
    ]
    assert not buffer
    assert buffer.take() == []


class Collecting(RequestState):
    """A request whose news are called on the engine's thread."""

    def __init__(self, request, mailbox) -> None:
        super().__init__(request, mailbox)
        self.news: list[object] = []
        self.over = threading.Event()
        self.when_over = self.over.set

    def on_started(self) -> None:
        self.news.append("started")

    def on_update(self, update, is_last) -> None:
        self.news.append(update)
        if is_last:
            self.over.set()

    def on_failed(self, error) -> None:
        self.news.append(error)
        self.when_over()


class Failing:
    """A mailbox that makes calls at once, and fails when it is told to."""

    def __init__(self, *fails_at: int) -> None:
        self.fails_at, self.num_posts = fails_at, 0

    def post(self, calls) -> None:
        self.num_posts += 1
        if self.num_posts in self.fails_at:
            raise InjectedError("posting")
        for call in calls:
            call()


def test_the_id_of_a_request_that_failed_is_free_and_its_end_is_not_the_next_ones():
    """What is left of a failed request is aborted by its id: whoever comes next under that id must not be."""
    for num_tokens in (1, 9):  # it has ended by then, or runs
        thread = EngineThread(fake_llm)
        thread.start()
        failed, following = (Collecting(requests(1, max_tokens=num_tokens)[0], Failing()) for _ in range(2))
        failed.num_delivered = None  # a bug of ours
        failed.when_over = lambda thread=thread, following=following: thread.add(following)
        thread.add(failed)
        assert following.over.wait(LONG_S)
        thread.stop(LONG_S)
        assert isinstance(failed.news[-1], GenerationError)
        assert following.news[-1].finish_reason == "length"


def test_an_error_while_news_are_handed_over_loses_none():
    """Text that was taken from a sequence cannot be taken again: until it has been posted, it is kept."""

    def outcome(mailbox) -> tuple[object, list[int], str, int]:
        thread = EngineThread(fake_llm)
        thread.start()
        state = Collecting(requests(1, max_tokens=9)[0], mailbox)
        thread.add(state)
        assert state.over.wait(LONG_S)
        thread.stop(LONG_S)
        started, *updates = state.news
        token_ids = [token_id for update in updates for token_id in update.token_ids]
        return started, token_ids, "".join(update.text for update in updates), thread.num_failed_steps

    started, token_ids, text, num_failed = outcome(Failing())
    assert (started, len(token_ids), num_failed) == ("started", 9, 0)
    assert text
    assert outcome(Failing(1, 3)) == (started, token_ids, text, 2)


def streamed(request_id: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(id=request_id, prompt_token_ids=prompt, params=params, stream=True)


async def read(stream) -> list[int]:
    return [token_id for update in await stream.read_all() for token_id in update.token_ids]


def test_a_reused_id_gets_none_of_the_tokens_of_the_request_before():
    """The last step's events are delivered during the next step: by then their request may have ended."""

    async def main() -> None:
        gate = Gate()
        async with AsyncLLM.from_factory(lambda: fake_llm(gate)) as llm:
            (alone,) = llm.submit([streamed("alone", (7, 7, 7), 8)])
            expected = await read(alone)
            gate.let(3)
            (first,) = llm.submit([streamed("same", (1, 2, 3), 30)])
            await asyncio.to_thread(gate.wait_until_held)
            first.cancel()
            (second,) = llm.submit([streamed("same", (7, 7, 7), 8)])
            assert llm.admission.num_waiting == 1
            gate.open()
            assert await read(second) == expected
            assert second.sequences[0].output_token_ids == expected

    asyncio.run(asyncio.wait_for(main(), LONG_S))


class Panic(BaseException):
    """What a panic of a Rust library is in Python: not an Exception."""


@pytest.mark.parametrize("kind", [AuditError, Panic])
@pytest.mark.parametrize("at_commit", [True, False])
def test_a_request_that_ended_in_a_step_that_failed_afterwards_gets_its_end(kind, at_commit, monkeypatch):
    """Two requests take part in the step: one ends there, one would go on and fails. The engine goes on."""
    has_failed = threading.Event()

    def fail_once(real):
        def failing(*args):
            result = real(*args)
            if any(sequence.num_output == 3 for sequence in ended) and not has_failed.is_set():
                has_failed.set()
                raise kind("a bug")
            return result

        return failing

    ended = []

    def open_llm():
        llm = fake_llm()
        if at_commit:  # everything is committed, and then commit fails
            scheduler = llm.engine.scheduler
            monkeypatch.setattr(scheduler, "commit", fail_once(scheduler.commit))
        else:
            monkeypatch.setattr(engine_module, "audit", fail_once(engine_module.audit))
        return llm

    async def main() -> None:
        async with AsyncLLM.from_factory(open_llm) as llm:
            thread = llm.engines.threads[0]
            await asyncio.wrap_future(thread.pause())
            ends, goes_on = llm.submit([streamed("ends", (1, 2, 3), 3), streamed("goes on", (4, 5, 6), 9)])
            await llm.call(lambda engine: ended.extend(ends.sequences))
            await asyncio.wrap_future(thread.resume())
            assert await read(ends) == ends.sequences[0].output_token_ids
            assert (len(ends.sequences[0].output_token_ids), ends.finish_reasons) == (3, {0: "length"})
            with pytest.raises(GenerationError) as caught:
                await read(goes_on)
            assert isinstance(caught.value.__cause__, kind)
            (after,) = llm.submit([streamed("after", (1, 2, 3), 3)])
            assert await read(after) == ends.sequences[0].output_token_ids
            assert (llm.num_streams, llm.num_failed_steps, llm.is_healthy) == (0, 1, True)

    asyncio.run(asyncio.wait_for(main(), LONG_S))
    assert has_failed.is_set()


@pytest.mark.parametrize("place", ["add", "decode"])
def test_a_panic_ends_one_request_and_not_the_engine(place, monkeypatch):
    panics = threading.Event()

    def panicking(real):
        def call(*args, **kwargs):
            if panics.is_set():
                panics.clear()
                raise Panic
            return real(*args, **kwargs)

        return call

    async def main() -> None:
        async with AsyncLLM.from_factory(fake_llm) as llm:
            if place == "add":
                monkeypatch.setattr(llm.llm.engine, "add", panicking(llm.llm.engine.add))
            else:
                monkeypatch.setattr(engine_thread, "new_text", panicking(engine_thread.new_text))
            panics.set()
            (failed,) = llm.submit([streamed("a", (1, 2, 3), 3)])
            with pytest.raises(GenerationError):
                await read(failed)
            (after,) = llm.submit([streamed("a", (1, 2, 3), 3)])
            assert len(await read(after)) == 3
            assert (llm.num_streams, llm.is_healthy) == (0, True)

    asyncio.run(asyncio.wait_for(main(), LONG_S))
    assert not panics.is_set()


def test_a_panic_in_one_call_of_a_mailbox_loses_no_other():
    def panic() -> None:
        raise Panic

    async def main() -> list[str]:
        loop, made, is_over = asyncio.get_running_loop(), [], asyncio.Event()
        loop.set_exception_handler(lambda _, context: made.append(type(context["exception"]).__name__))
        mailbox = LoopMailbox(loop, lambda _: None)
        mailbox.post([lambda: made.append("first"), panic, lambda: made.append("last"), is_over.set])
        await is_over.wait()
        return made

    assert asyncio.run(asyncio.wait_for(main(), LONG_S)) == ["first", "Panic", "last"]


def test_the_last_tokens_of_a_request_arrive_if_all_others_are_cancelled_before_the_next_step():
    """Tokens are delivered in the next step, and there is none if the engine has nothing left to do."""

    class Canceller:
        long = None

        def on_step(self, engine, start, end, is_failed) -> None:
            ended = not any(sequence.request.id == "short" for sequence in engine.scheduler.running)
            if self.long and ended and engine.has_work:
                llm.engines.threads[0].drop(self.long)
                self.long = None

        def on_tokens(self, stream, index, now, count) -> None: ...

        def on_end(self, stream, failure) -> None: ...

    canceller = Canceller()
    llm = AsyncLLM.from_factory(lambda: fake_llm(max_num_seqs=2, max_rounds=1), observers=[canceller])

    async def run() -> None:
        await llm.start()
        await asyncio.wrap_future(llm.engines.threads[0].pause())
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 50)]
        short, canceller.long = llm.submit(
            [
                Request(id=name, prompt_token_ids=(5, 6), params=one)
                for name, one in zip(("short", "long"), params, strict=True)
            ]
        )
        await asyncio.wrap_future(llm.engines.threads[0].resume())
        updates = await asyncio.wait_for(short.read_all(), 30)
        assert sum(len(update.token_ids) for update in updates) == 3
        await llm.close()

    asyncio.run(run())
