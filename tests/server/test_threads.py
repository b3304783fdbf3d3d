"""Slow work off the event loop: no tenant keeps all threads busy, and what waits is bounded."""

import asyncio
import threading

import pytest

from quire.async_llm.errors import OverloadError
from quire.server.threads import FairThreads, SlowJobError

LONG_S = 600.0


def fair_threads(**changes) -> FairThreads:
    knobs = {"num_threads": 2, "max_running_each": 1, "max_jobs": 8, "max_jobs_each": 4, "timeout_s": LONG_S}
    return FairThreads("test", **knobs | changes)


async def until(condition) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.001)


class Blocking:
    """A job that does not end before it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(LONG_S)
        return "done"


def test_a_tenant_with_many_jobs_leaves_a_thread_to_the_others():
    async def run() -> None:
        threads, jobs = fair_threads(), [Blocking() for _ in range(4)]
        tasks = [asyncio.create_task(threads.run("greedy", job)) for job in jobs]
        await until(jobs[0].has_begun.is_set)
        for i in range(20):
            assert await threads.run("other", lambda i=i: i) == i
        assert [job.has_begun.is_set() for job in jobs] == [True, False, False, False]
        for job in jobs:
            job.may_end.set()
        assert await asyncio.gather(*tasks) == ["done"] * 4
        threads.close()

    asyncio.run(run())


def test_what_waits_is_bounded_for_each_tenant_and_in_all():
    async def run() -> None:
        threads, block = fair_threads(), Blocking()
        tasks = [asyncio.create_task(threads.run("a", block)) for _ in range(4)]
        await until(block.has_begun.is_set)
        with pytest.raises(OverloadError):
            await threads.run("a", print)
        tasks += [asyncio.create_task(threads.run("b", block)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadError):
            await threads.run("c", print)
        block.may_end.set()
        await asyncio.gather(*tasks)
        assert await threads.run("a", lambda: 5) == 5
        threads.close()

    asyncio.run(run())


@pytest.mark.alone
def test_a_job_that_nobody_waits_for_any_more_keeps_its_turn_until_it_ends():
    async def run() -> None:
        threads, block, next_ = fair_threads(timeout_s=0.0), Blocking(), Blocking()
        submit = threads._threads.submit

        def submit_and_begin(job):
            running = submit(job)
            assert job.has_begun.wait(LONG_S)  # before the time is over, whatever the machine does
            return running

        threads._threads.submit = submit_and_begin
        with pytest.raises(SlowJobError):
            await threads.run("a", block)
        with pytest.raises(OverloadError):  # its turn does not come
            await threads.run("a", next_)
        assert not next_.has_begun.is_set()
        threads._threads.submit, threads._timeout_s = submit, LONG_S
        assert await threads.run("b", lambda: 5) == 5
        block.may_end.set()
        await until(lambda: not threads._tenants)  # nothing is left of a tenant without a job
        assert await threads.run("a", lambda: 6) == 6
        threads.close()

    asyncio.run(run())


def test_an_error_of_a_job_is_its_own_and_a_cancelled_wait_gives_its_place_back():
    async def run() -> None:
        threads, block = fair_threads(max_jobs_each=2), Blocking()
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 / 0)
        first = asyncio.create_task(threads.run("a", block))
        await until(block.has_begun.is_set)
        waiting = asyncio.create_task(threads.run("a", print))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        second = asyncio.create_task(threads.run("a", lambda: 5))
        block.may_end.set()
        assert await asyncio.gather(first, second) == ["done", 5]
        threads.close()

    asyncio.run(run())
