"""A reading that many share."""

import asyncio

import pytest

from quire.server.observe.shared_reading import SharedReading


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
