"""Runs lines: many at once, and their answers in the order of the lines."""

import asyncio
from collections.abc import Callable, Iterable

from quire.async_llm.errors import UnavailableError
from quire.server.batches.answer import Answer, Answerer, ParsedLine
from quire.server.batches.lines import Line

MAX_HELD_BYTES = 64 << 20
"""Of answers that wait for one before them; then no line starts until that one is there."""


class CostLimitError(Exception):
    """The next line may cost more than is left."""

    def __init__(self, cost: int, left: int) -> None:
        super().__init__(f"the next line may come to {cost:,} tokens and {left:,} are left")
        self.cost = cost


class LineRunner:
    """Answers lines, and hands the answers on in their order. For one event loop, and one `run`."""

    def __init__(
        self,
        answerer: Answerer,
        write: Callable[[Answer], None],
        turns: asyncio.Semaphore,
        *,
        max_cost: int | None = None,
    ) -> None:
        """A line has one of the `turns` while it is under way. `max_cost` is what all of them may come to, in tokens.

        `write` is called in the order of the lines; what it raises ends the run.
        """
        self._answerer = answerer
        self._write = write
        self._turns = turns
        self._max_cost = max_cost
        self._spent = self._reserved = 0
        """Tokens of lines that have ended, and what those under way may come to."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: dict[int, Answer] = {}
        self._held_bytes = 0
        self._num_written = 0
        self._has_ended = asyncio.Event()
        """A line has, since somebody looked."""
        self._error: Exception | None = None
        """What makes going on useless."""

    async def run(self, lines: Iterable[Line]) -> None:
        """Answer all lines. Raises what stops it, once all that had begun has ended: what is written is a beginning.

        CostLimitError if the next one does not fit into `max_cost`, UnavailableError if the engine takes nothing more.
        """
        try:
            for index, line in enumerate(lines):
                await self._turns.acquire()
                task = None
                try:
                    task = await self._begin(index, line)
                finally:
                    if task is None:
                        self._turns.release()
                if self._error:
                    break
            while self._tasks:
                await self._wait_for_end()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error:
            raise self._error

    async def _begin(self, index: int, line: Line) -> asyncio.Task[None] | None:
        """Start a line that has its turn; None if it has ended already, or none is to start any more."""
        while self._held_bytes > MAX_HELD_BYTES and not self._error:
            await self._wait_for_end()
        try:
            parsed = None if self._error else await self._answerer.parse(line)
        except UnavailableError as error:
            self._error = error
            return None
        if isinstance(parsed, Answer):
            self._put(index, parsed)
            await asyncio.sleep(0)  # a file of nothing but wrong lines lets others go on, too
            return None
        if parsed is None or not await self._reserve(parsed.max_cost):
            return None
        task = asyncio.create_task(self._finish(index, parsed))
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    async def _reserve(self, cost: int) -> bool:
        """Wait until a line's whole cost is left; False if it never will be."""
        while self._max_cost is not None and self._spent + self._reserved + cost > self._max_cost:
            if not self._tasks:
                self._error = self._error or CostLimitError(cost, self._max_cost - self._spent)
            if self._error:
                return False
            await self._wait_for_end()
        self._reserved += cost
        return True

    async def _finish(self, index: int, parsed: ParsedLine) -> None:
        try:
            answer = await self._answerer.answer(parsed)
            self._spent += answer.num_prompt_tokens + answer.num_generated_tokens
            self._put(index, answer)
        finally:
            self._reserved -= parsed.max_cost
            self._turns.release()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._error = self._error or error
        self._has_ended.set()

    def _put(self, index: int, answer: Answer) -> None:
        """Write an answer and those that waited for it, or let it wait."""
        self._held[index] = answer
        self._held_bytes += len(answer.content)
        try:
            while not self._error and (ready := self._held.pop(self._num_written, None)):
                self._held_bytes -= len(ready.content)
                self._write(ready)
                self._num_written += 1
        except Exception as error:
            self._error = error

    async def _wait_for_end(self) -> None:
        """Until a line has ended since this was last called."""
        await self._has_ended.wait()
        self._has_ended.clear()
