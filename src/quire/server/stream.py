"""One request under way, as its client's coroutine sees it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from quire.core.request import Request
from quire.core.sequence import Sequence, TokenLogprob


class StreamError(Exception):
    """A request that began cannot be finished; the message is for its client."""

    def __init__(self, message: str, reason: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        """"deadline", "cancelled", "invalid", "unavailable" or "error"."""
        self.field = field
        """The field of the request that has to change, of an invalid one."""
        self.code = code or reason
        """What programs tell errors apart by."""


@dataclass(slots=True)
class Update:
    """What is new of one sequence."""

    index: int
    """Which sequence of the request."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class UpdateBuffer:
    """Updates that have not been read, merged to one for each sequence. Its cost is linear in what it is given."""

    def __init__(self) -> None:
        self._merged: dict[int, Update] = {}
        """By sequence, all but their texts."""
        self._texts: dict[int, list[str]] = {}
        """By sequence: joined when they are read, because joining at each update would copy the whole text again."""

    def __bool__(self) -> bool:
        return bool(self._merged)

    def add(self, update: Update) -> None:
        """Put an update to those before it."""
        merged = self._merged.setdefault(update.index, Update(update.index))
        self._texts.setdefault(update.index, []).append(update.text)
        merged.token_ids += update.token_ids
        merged.logprobs += update.logprobs
        merged.finish_reason = update.finish_reason

    def take(self) -> list[Update]:
        """What has been added since the last call: one update for each sequence, in their order."""
        updates = [update for _, update in sorted(self._merged.items())]
        for update in updates:
            update.text = "".join(self._texts[update.index])
        self._merged, self._texts = {}, {}
        return updates


@dataclass(slots=True)
class Times:
    """When things happened to a request, on the monotonic clock; 0 for not yet."""

    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0


class Stream:
    """One request under way, as its client's coroutine sees it: batches of updates until every sequence has ended."""

    def __init__(self, request: Request, cancel: Callable[["Stream"], None]) -> None:
        self.request = request
        self.timer: asyncio.TimerHandle | None = None
        """Ends it when its time is over."""
        self.times = Times(time.monotonic())
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.num_output_tokens = 0
        self.sequences: list[Sequence] = []
        """The sequences of the request. Like the next two, this belongs to the engine's thread."""
        self.has_prompt_results = False
        """Whether what is known once the prompt is computed is there: `num_cached_tokens` and `prompt_logprobs`."""
        self.num_delivered: dict[int, int] = {}
        """Tokens of each sequence, by index, that have been handed over; for the engine's thread too."""
        self.num_unfinished = request.params.n
        """Sequences whose end has not been handed over."""
        self.is_cancelled = False
        self.traceparent: str | None = None
        """What the client calls the trace that this is a part of."""
        self.token_times: dict[int, float] = {}
        """When the last tokens of each sequence came."""
        self.finish_reasons: dict[int, str] = {}
        """How the sequences that have ended did, by index."""
        self._cancel = cancel
        self._unread = UpdateBuffer()
        self._news = asyncio.Event()
        self._error: StreamError | None = None

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

    def cancel(self) -> None:
        """The client is gone, or wants no more: its pages are back before the next step."""
        self._cancel(self)

    # -- for AsyncEngine ----------------------------------------------------------------------------------------------

    def receive(self, update: Update) -> None:
        """Add what is new to what has not been read."""
        self._unread.add(update)
        self.num_output_tokens += len(update.token_ids)
        if update.finish_reason:
            self.finish_reasons[update.index] = update.finish_reason
        self._news.set()

    def fail(self, error: StreamError) -> None:
        """End the stream with an error, after what has not been read."""
        self._error = self._error or error
        self._news.set()
