"""The engine for asyncio: requests go in on the event loop, updates come out there; a thread of its own does the work.

    event loop                                  engine thread (engine_thread.py)
    submit(request) -> Stream    -- inbox -->   engine.add
    async for updates in stream  <-- batch --   engine.step(meanwhile=...): tokens become text while the device computes
    stream.cancel()              -- inbox -->   engine.abort, before the next step is planned

Every stream ends: with a finish reason for each of its sequences, or with an error. What a slow reader has not taken is
merged, so that a stream never holds more than its own request's tokens.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from quire.core.request import Request
from quire.core.stopping import Grammar
from quire.engine.engine import Engine
from quire.llm import LLM
from quire.server.admission import Admission, UnavailableError, Work
from quire.server.engine_thread import EngineThread
from quire.server.heartbeat import STALLED_AFTER_S
from quire.server.observer import Observer
from quire.server.stream import Stream, StreamError, Update

CHECK_EVERY_S = 1.0
"""How often the engine's thread is checked for being alive."""


class AsyncEngine:
    """An engine for coroutines. All methods are for the event loop's thread."""

    def __init__(self, open_llm: Callable[[], LLM], admission: Admission, *observers: Observer) -> None:
        """`open_llm` is called on the engine's thread, which owns what it returns."""
        self.admission = admission
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(open_llm, self, observers)
        self._idle = asyncio.Event()
        self._idle.set()
        self._streams: dict[str, Stream] = {}
        """Streams that have not ended, by request id."""
        self._is_draining = False
        self._next_check: asyncio.TimerHandle | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and be ready; raises what loading raises."""
        self._thread.start()
        await self._thread.ready
        self.admission.num_rows = self.llm.engine.config.max_num_seqs
        self._check_thread()

    def _check_thread(self) -> None:
        """Once a second, end all streams if the engine does not respond."""
        if not self.is_healthy:
            self._end_all(StreamError("the engine does not respond", "unavailable"))
        self._next_check = self._loop.call_later(CHECK_EVERY_S, self._check_thread)

    async def drain(self) -> None:
        """Take nothing new and wait until every stream has ended."""
        self._is_draining = True
        await self._idle.wait()

    def end_all(self) -> None:
        """Take nothing new and end what runs."""
        self._is_draining = True
        self._end_all(StreamError("the server is stopping", "unavailable"))

    async def stop(self) -> None:
        """End what runs, and the thread."""
        self.end_all()
        if self._next_check:
            self._next_check.cancel()
        await asyncio.to_thread(self._thread.stop, STALLED_AFTER_S)

    @property
    def llm(self) -> LLM:
        """The model, its tokenizer and its engine; there from `start` on."""
        return self._thread.llm

    @property
    def num_failed_steps(self) -> int:
        """Steps that raised an error."""
        return self._thread.num_failed_steps

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken."""
        return self._thread.ready.done() and not self._is_draining and self.is_healthy

    @property
    def is_healthy(self) -> bool:
        """Whether the engine steps, or waits for something to do."""
        return self._thread.is_healthy

    @property
    def beat_age_s(self) -> float:
        """Seconds since the engine's thread last showed itself; 0 while the model is being loaded."""
        return self._thread.heartbeat.age_s if self._thread.ready.done() else 0.0

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def streams(self) -> list[Stream]:
        """Streams of the requests that have not ended."""
        return list(self._streams.values())

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], *, timeout_s: float | None = None, grammar: Grammar | None = None
    ) -> list[Stream]:
        """Take the requests that a client makes at once; RequestError, OverloadError or UnavailableError if not."""
        if self._is_draining or not self._thread.ready.done():
            raise UnavailableError("the server is draining" if self._is_draining else "the model is being loaded")
        if not self.is_healthy:
            raise UnavailableError("the engine does not respond")
        works = []
        for request in requests:
            max_tokens, n = self.llm.engine.check(request), request.params.n
            works.append(Work(request.id, n, len(request.prompt_token_ids) + n * max_tokens))
        self.admission.arrive(works)
        return [self._submit(request, timeout_s, grammar and grammar.copy()) for request in requests]

    def _submit(self, request: Request, timeout_s: float | None, grammar: Grammar | None) -> Stream:
        stream = self._streams[request.id] = Stream(request, self.cancel)
        self._idle.clear()
        if timeout_s is not None:
            late = StreamError("the request's time is over", "deadline")
            stream.timer = self._loop.call_later(timeout_s, self._end, stream, late)
        self._thread.add(stream, grammar)
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a request early. What it has not handed out is dropped."""
        self._end(stream, StreamError("the request was cancelled", "cancelled"))

    def abort(self, request_id: str) -> bool:
        """Cancel the request of this id; False if there is no such request."""
        stream = self._streams.get(request_id)
        if stream:
            self.cancel(stream)
        return stream is not None

    def abort_all(self) -> int:
        """Cancel every request and go on; returns how many there were."""
        return self._end_all(StreamError("the request was cancelled", "cancelled"))

    async def call[T](self, function: Callable[[Engine], T], timeout_s: float = STALLED_AFTER_S) -> T:
        """Run a function on the engine's thread between two steps; TimeoutError if it does not come to that."""
        return await self._thread.call(function, timeout_s)

    def _end(self, stream: Stream, error: StreamError) -> None:
        """End a stream before the engine does."""
        if stream.request.id in self._streams:
            stream.is_cancelled = True
            self._thread.drop(stream)
            self._close(stream, error)

    def _end_all(self, error: StreamError) -> int:
        streams = self.streams
        for stream in streams:
            self._end(stream, error)
        return len(streams)

    def _close(self, stream: Stream, error: StreamError | None) -> None:
        if self._streams.pop(stream.request.id, None) is None:
            return
        stream.times.finished = time.monotonic()
        if stream.timer:
            stream.timer.cancel()
        self.admission.leave(stream.request.id)
        if error:
            stream.fail(error)
        if not self._streams:
            self._idle.set()
        for observer in self._observers:
            observer.on_end(stream, error.reason if error else None)

    # -- called by the engine's thread --------------------------------------------------------------------------------

    def on_started(self, request_ids: Sequence[str]) -> None:
        """These requests have a row."""
        for request_id in request_ids:
            if stream := self._streams.get(request_id):
                stream.times.started = time.monotonic()
            self.admission.start(request_id)

    def on_updates(self, batch: Sequence[tuple[Stream, Update, bool]]) -> None:
        """Some streams have something new; each comes with whether that was its last."""
        now = time.monotonic()
        for stream, update, is_last in batch:
            if stream.is_cancelled:
                continue
            if update.token_ids:
                for observer in self._observers:
                    observer.on_tokens(stream, update.index, now, len(update.token_ids))
                stream.token_times[update.index] = now
                stream.times.first_token = stream.times.first_token or now
                stream.times.last_token = now
            stream.receive(update)
            if is_last:
                self._close(stream, None)

    def on_failed(self, stream: Stream, error: StreamError) -> None:
        """A stream cannot go on."""
        self._close(stream, error)
