"""The engine's thread: what it costs, what it forgets, and that nothing is lost on the way."""

import asyncio
import statistics
import sys
import threading
from pathlib import Path

from quire import Request, SamplingParams
from quire.async_llm import AsyncLLM, GenerationError, heartbeat
from quire.async_llm.admission import Admission
from quire.async_llm.engine_thread import EngineThread, RequestState
from quire.async_llm.heartbeat import NUM_RECENT_STEPS, STALLED_AFTER_S, STALLED_STEPS, Heartbeat
from quire.async_llm.updates import Update, UpdateBuffer
from quire.testing import InjectedError
from tests.fake_llm import LONG_S, fake_llm
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
