"""Between asyncio and the engine: what it costs, what it forgets, and that nothing is lost on the way."""

import asyncio
import statistics
import sys
from pathlib import Path

import pytest

from quire import Request, SamplingParams
from quire.server import heartbeat
from quire.server.admission import Admission
from quire.server.async_engine import AsyncEngine
from quire.server.heartbeat import NUM_RECENT_STEPS, STALLED_AFTER_S, STALLED_STEPS, Heartbeat
from quire.server.observe.shared_reading import SharedReading
from quire.server.stream import Update, UpdateBuffer
from tests.tiny import tiny_llm

SERVER = str(Path(heartbeat.__file__).parent)


class CallCounter:
    """Counts calls of the server's functions on the engine's thread, step by step."""

    def __init__(self) -> None:
        self.calls = 0
        self.calls_of_steps: list[int] = []

    def profile(self, frame, event: str, _) -> None:
        self.calls += event == "call" and frame.f_code.co_filename.startswith(SERVER)

    def on_step(self, engine, start, end, is_failed) -> None:
        self.calls_of_steps.append(self.calls)
        self.calls = 0

    def on_tokens(self, stream, index, now, count) -> None: ...

    def on_end(self, stream, failure) -> None: ...


def requests(num: int, **params) -> list[Request]:
    params = SamplingParams(temperature=0, ignore_eos=True, **params)
    return [Request(id=f"r{i}", prompt_token_ids=(5, 6, 7 + i % 80), params=params, stream=True) for i in range(num)]


async def calls_of_a_step(num_waiting: int) -> float:
    """The server's function calls in a step of two rows, while so many requests wait."""
    counter = CallCounter()
    admission = Admission(max_requests=1000, max_tokens=1 << 30)
    engine = AsyncEngine(lambda: tiny_llm(max_num_seqs=2), admission, counter)
    await engine.start()
    try:
        streams = engine.submit(requests(2 + num_waiting, max_tokens=100))
        async for _ in streams[0]:  # it runs, and the others wait
            break
        await engine.call(lambda _: sys.setprofile(counter.profile))
        counter.calls_of_steps.clear()
        async for _ in streams[0]:
            pass
        await engine.call(lambda _: sys.setprofile(None))
        assert admission.num_waiting >= num_waiting - 2
        return statistics.median(counter.calls_of_steps)
    finally:
        await engine.stop()


def test_a_step_does_not_look_at_every_request_that_waits():
    assert asyncio.run(calls_of_a_step(200)) == asyncio.run(calls_of_a_step(3))


def test_every_request_is_told_to_have_started_once_and_ends():
    async def run() -> None:
        admission = Admission(max_requests=1000, max_tokens=1 << 30)
        engine = AsyncEngine(lambda: tiny_llm(max_num_seqs=2), admission)
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
        await engine.stop()

    asyncio.run(run())


def test_a_slow_step_is_forgotten():
    now = 0.0
    beat = Heartbeat(lambda: now)
    assert not beat.is_late
    beat.end_step(100.0)
    assert beat.limit_s == STALLED_STEPS * 100.0  # a machine that is slow is not taken to hang
    now = STALLED_AFTER_S + 1
    assert not beat.is_late
    for _ in range(NUM_RECENT_STEPS):
        beat.end_step(0.1)
    assert beat.limit_s == STALLED_AFTER_S
    assert beat.is_late
    beat.beat()
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


def test_many_readers_cost_as_much_as_one_and_none_reads_what_is_older_than_its_question():
    async def run() -> None:
        world, num_read = 0, 0
        may_end = asyncio.Event()

        async def read() -> int:
            nonlocal num_read
            num_read += 1
            seen = world
            await may_end.wait()
            return seen

        shared = SharedReading(read, every_s=0.0)
        first = [asyncio.create_task(shared.get()) for _ in range(50)]
        while not num_read:
            await asyncio.sleep(0)
        world = 1
        second = [asyncio.create_task(shared.get()) for _ in range(50)]
        await asyncio.sleep(0)
        first[3].cancel()  # one that leaves takes nothing from the others
        may_end.set()
        results = await asyncio.gather(*first, *second, return_exceptions=True)
        assert isinstance(results.pop(3), asyncio.CancelledError)
        assert results == [0] * 49 + [1] * 50
        assert num_read == 2

    asyncio.run(run())


def test_a_reading_that_fails_fails_for_those_who_waited_and_not_for_the_next():
    async def run() -> None:
        values = iter([ZeroDivisionError(), 5])

        async def read() -> object:
            value = next(values)
            if isinstance(value, Exception):
                raise value
            return value

        shared = SharedReading(read, every_s=0.0)
        with pytest.raises(ZeroDivisionError):
            await shared.get()
        assert await shared.get() == 5

    asyncio.run(run())
