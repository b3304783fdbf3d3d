"""One expensive reading for all who want it."""

import asyncio
import time
from collections.abc import Awaitable, Callable


class SharedReading[T]:
    """A value that is worked out at most every so often, and never before somebody wants it.

    A reader that comes while one is being worked out, or too soon after, waits for the next together with all others:
    many readers cost as much as one, and what a reader gets was read after it came.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._next: asyncio.Task[T] | None = None
        """A reading that has not begun."""
        self._began = 0.0
        self._reading = asyncio.Lock()

    async def get(self) -> T:
        """The value of a reading that begins after this call; raises what it raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._wait_and_read())
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left
        return await asyncio.shield(self._next)

    async def _wait_and_read(self) -> T:
        async with self._reading:
            await asyncio.sleep(max(self._began + self._every_s - time.monotonic(), 0))
            self._next, self._began = None, time.monotonic()
            return await self._read()
