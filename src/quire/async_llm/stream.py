"""One request under way, as its client's coroutine sees it."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from quire.async_llm.admission import Work
from quire.async_llm.engine_thread import RequestState
from quire.async_llm.loop_mailbox import LoopMailbox
from quire.async_llm.origin import Origin
from quire.async_llm.updates import Update, UpdateBuffer
from quire.core.request import Request
from quire.core.stopping import Grammar


@dataclass(slots=True)
class Times:
    """When things happened to a request, on the monotonic clock; 0 for not yet."""

    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0


class StreamOwner(Protocol):
    """Who keeps count of streams. All but `cancel` are called on the stream's event loop."""

    def on_started(self, stream: "Stream", /) -> None:
        """A stream's request has a row."""
        ...

    def on_tokens(self, stream: "Stream", update: Update, now: float, /) -> None:
        """Tokens have come; the stream's times are still those of the tokens before."""
        ...

    def close(self, stream: "Stream", error: Exception | None, /) -> None:
        """A stream has ended, by itself or with an error."""
        ...

    def cancel(self, stream: "Stream", /) -> None:
        """End a stream that nobody wants any more; any thread may call this."""
        ...


class Stream(RequestState):
    """One request under way, as its client's coroutine sees it: batches of updates until every sequence has ended.

    It is for the event loop on which it was submitted, and one reader; `cancel` is for any thread.
    """

    def __init__(
        self,
        request: Request,
        mailbox: LoopMailbox,
        grammar: Grammar | None,
        owner: StreamOwner,
        engine: int,
        work: Work,
    ) -> None:
        super().__init__(request, mailbox, grammar)
        self.loop_mailbox = mailbox
        self.engine = engine
        """Which engine has it."""
        self.work = work
        self.timer: asyncio.TimerHandle | None = None
        """Ends it when its time is over."""
        self.times = Times(time.monotonic())
        self.num_output_tokens = 0
        self.origin = Origin()
        self.token_times: dict[int, float] = {}
        """When the last tokens of each sequence came."""
        self.finish_reasons: dict[int, str] = {}
        """How the sequences that have ended did, by index."""
        self._owner = owner
        self._unread = UpdateBuffer()
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[list[Update]]:
        return self

    async def __anext__(self) -> list[Update]:
        if not self._unread and not self._error:
            if len(self.finish_reasons) == self.request.params.n:
                raise StopAsyncIteration
            await self._news.wait()
        self._news.clear()
        if self._unread:
            return self._unread.take()
        assert self._error is not None
        raise self._error

    async def read_all(self) -> list[Update]:
        """Wait for the end; returns what has not been read, one update for each sequence, or raises the error."""
        await self._over.wait()
        if self._error:
            raise self._error
        return self._unread.take()

    def cancel(self) -> None:
        """The client is gone, or wants no more: its pages are back before the next step."""
        self._owner.cancel(self)

    def finish(self, error: Exception | None) -> None:
        """Nothing follows. An error is raised once what has not been read is read."""
        self.times.finished = time.monotonic()
        if self.timer:
            self.timer.cancel()
        self._error = error
        self._news.set()
        self._over.set()

    # -- what the engine's thread posts -------------------------------------------------------------------------------

    def on_started(self) -> None:
        """The request has a row."""
        self.times.started = time.monotonic()
        self._owner.on_started(self)

    def on_update(self, update: Update, is_last: bool) -> None:
        """Add what is new to what has not been read."""
        if self.is_cancelled:
            return
        if update.token_ids:
            now = time.monotonic()
            self._owner.on_tokens(self, update, now)
            self.token_times[update.index] = now
            self.times.first_token = self.times.first_token or now
            self.times.last_token = now
        self._unread.add(update)
        self.num_output_tokens += len(update.token_ids)
        if update.finish_reason:
            self.finish_reasons[update.index] = update.finish_reason
        self._news.set()
        if is_last:
            self._owner.close(self, None)

    def on_failed(self, error: Exception) -> None:
        """The request cannot go on."""
        self._owner.close(self, error)
