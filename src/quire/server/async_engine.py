"""Between asyncio and the engine: one thread owns the engine and steps it, the event loop talks to it.

    event loop                                  engine thread
    submit(request) -> Stream    -- inbox -->   engine.add
    async for updates in stream  <-- batch --   engine.step(meanwhile=...): tokens become text while the device computes
    stream.cancel()              -- soon  -->   engine.abort, before the next step is planned

Every stream ends: with a finish reason for each of its sequences, or with an error. What a slow reader has not taken is
merged, so that a stream never holds more than its own request's tokens.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Protocol

from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.sequence import SequenceState, TokenEvent
from quire.core.stopping import FinishReason, Grammar
from quire.engine.engine import Engine
from quire.llm import LLM, new_text
from quire.server.admission import Admission, Work
from quire.server.stream import Stream, StreamError, Update

_log = logging.getLogger("quire.server")

STALLED_AFTER_S = 8.0
"""A thread that has not begun a step for so long hangs: a step of full rows and all rounds takes about a second."""
STALLED_STEPS = 4
"""Or so many times as long as the longest step so far, on a slow machine."""
IDLE_BEAT_S = 1.0
"""How often an idle thread shows itself."""
LOOK_S = 1.0
MAX_FAILED_IN_A_ROW = 3
FAILING_S = 5.0
"""After so many failed steps in a row, so long nothing is taken."""


class UnavailableError(Exception):
    """The server takes no requests: it starts, drains, or its engine is gone."""


class Observer(Protocol):
    """Who is told what happens, on the event loop but for steps."""

    def on_tokens(self, stream: Stream, index: int, now: float, count: int, /) -> None:
        """So many tokens of a stream's sequence have come; its times are still those of the tokens before."""
        ...

    def on_end(self, stream: Stream, failure: str | None, /) -> None:
        """A stream is over; None for by itself."""
        ...

    def on_step(self, engine: Engine, start: float, end: float, is_failed: bool, /) -> None:
        """A step is over, on the engine's thread: what is done here, every token waits for."""
        ...


class Bridge:
    """Owns the engine's thread. All methods are for the event loop's thread, but for those that say otherwise."""

    def __init__(self, open_llm: Callable[[], LLM], admission: Admission, *observers: Observer) -> None:
        """`open_llm` is called on the engine's thread, which owns what it returns."""
        self.admission = admission
        self.llm: LLM
        self.num_failed_steps = 0
        self._open_llm = open_llm
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._streams: dict[str, Stream] = {}
        """Those that have not ended, by request id."""
        self._is_draining = False
        self._stalled_after_s = STALLED_AFTER_S
        self._failing_until = 0.0
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # What follows belongs to the engine's thread.
        self._watched: dict[str, Stream] = {}
        self._unstarted: dict[str, Stream] = {}
        self._events: list[TokenEvent] = []
        self._num_failed_in_a_row = 0

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and be ready; raises what loading raises."""
        self._thread.start()
        await self._ready
        self._look()

    def _look(self) -> None:
        """Once a second: no stream waits for an engine that does not answer."""
        if not self.is_healthy:
            for stream in self.streams:
                self._end(stream, StreamError("the engine does not answer", "unavailable"))
        self._looking = self._loop.call_later(LOOK_S, self._look)

    async def drain(self) -> None:
        """Take nothing new and wait until every stream has ended."""
        self._is_draining = True
        await self._idle.wait()

    def end_all(self) -> None:
        """Take nothing new and end what runs."""
        self._is_draining = True
        for stream in self.streams:
            self._end(stream, StreamError("the server is stopping", "unavailable"))

    async def stop(self) -> None:
        """End what runs, and the thread."""
        self.end_all()
        self._looking.cancel()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STALLED_AFTER_S)  # one that hangs is left behind

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken."""
        return self._ready.done() and not self._is_draining and self.is_healthy

    @property
    def is_healthy(self) -> bool:
        """Whether the engine steps, or waits for something to do."""
        now = time.monotonic()
        return self._thread.is_alive() and self.beat_age < self._stalled_after_s and now >= self._failing_until

    @property
    def beat_age(self) -> float:
        """Seconds since the engine's thread last showed itself."""
        return time.monotonic() - self._beat if self._ready.done() else 0.0

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def streams(self) -> list[Stream]:
        """Those."""
        return list(self._streams.values())

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self, requests: SequenceOf[Request], *, timeout_s: float | None = None, grammar: Grammar | None = None
    ) -> list[Stream]:
        """Take and count what a client asks for at once; RequestError, OverloadError or UnavailableError if not."""
        if self._is_draining or not self._ready.done():
            raise UnavailableError("the server is draining" if self._is_draining else "the model is being loaded")
        if not self.is_healthy:
            raise UnavailableError("the engine does not answer")
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
        self._inbox.put(lambda engine: self._add(engine, stream, grammar))
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a request early. What it has not handed out is dropped."""
        self._end(stream, StreamError("the request was cancelled", "cancelled"))

    def abort(self, request_id: str) -> bool:
        """The same by id; False if there is no such request."""
        stream = self._streams.get(request_id)
        if stream:
            self.cancel(stream)
        return stream is not None

    def abort_all(self) -> int:
        """Cancel every request and go on; returns how many there were."""
        streams = self.streams
        for stream in streams:
            self.cancel(stream)
        return len(streams)

    async def call[T](self, function: Callable[[Engine], T], timeout_s: float = STALLED_AFTER_S) -> T:
        """Run a function on the engine's thread between two steps."""
        future: asyncio.Future[T] = self._loop.create_future()

        def answer(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error else future.set_result(result)

        def run(engine: Engine) -> None:
            try:
                result, error = function(engine), None
            except Exception as caught:
                result, error = None, caught
            self._post(answer, result, error)

        self._inbox.put(run)
        return await asyncio.wait_for(future, timeout_s)

    def _end(self, stream: Stream, error: StreamError) -> None:
        """Early, from the event loop's side."""
        if stream.request.id not in self._streams:
            return
        stream.is_cancelled = True
        self._inbox.put(lambda engine: self._drop(engine, stream))
        self._close(stream, error)

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

    # -- what the engine's thread sends, on the event loop ------------------------------------------------------------

    def _receive(self, batch: list[tuple[Stream, Update, bool]]) -> None:
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

    def _receive_started(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if stream := self._streams.get(request_id):
                stream.times.started = time.monotonic()
            self.admission.start(request_id)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _post(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            self.llm = self._open_llm()
        except BaseException as error:
            self._post(self._ready.set_exception, error)
            return
        self._beat = time.monotonic()
        engine = self.llm.engine
        self.admission.num_rows = engine.config.max_num_seqs
        self._post(self._ready.set_result, None)
        try:
            while self._take_inbox(engine):
                self._beat = time.monotonic()
                self._step(engine)
        except BaseException as error:
            _log.critical("the engine's thread ends", extra={"error": type(error).__name__, "at": place_of(error)})
            raise

    def _step(self, engine: Engine) -> None:
        start, is_failed = time.monotonic(), False
        try:
            self._events = engine.step(meanwhile=self._deliver)
            self._num_failed_in_a_row = 0
        except Exception as error:
            is_failed = True
            self._survive(engine, error)
        end = time.monotonic()
        self._stalled_after_s = max(self._stalled_after_s, STALLED_STEPS * (end - start))
        for observer in self._observers:
            observer.on_step(engine, start, end, is_failed)
        if not engine.has_work:
            self._deliver()  # no other step will come to do it

    def _survive(self, engine: Engine, error: Exception) -> None:
        """A step failed. When that goes on, everything ends, and for a while nothing is taken."""
        self.num_failed_steps += 1
        self._num_failed_in_a_row += 1
        _log.error("a step failed", extra={"error": type(error).__name__, "at": place_of(error)})
        self._deliver()
        self._find_silent_ends(engine)
        if self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            self._num_failed_in_a_row = 0
            self._failing_until = time.monotonic() + FAILING_S
            for stream in list(self._watched.values()):
                self._fail(engine, stream)
            engine.reset()

    def _take_inbox(self, engine: Engine) -> bool:
        """Do what the event loop asked for; waits when there is nothing else to do. False to end."""
        while True:
            self._beat = time.monotonic()
            try:
                command = self._inbox.get(block=not engine.has_work, timeout=IDLE_BEAT_S)
            except queue.Empty:
                if engine.has_work:
                    return True
                continue
            if command is None:
                self.llm.close()
                return False
            command(engine)

    def _add(self, engine: Engine, stream: Stream, grammar: Grammar | None) -> None:
        if stream.is_cancelled:
            return
        try:
            stream.sequences = engine.add(stream.request, grammar)
        except RequestError as error:
            failure = StreamError(error.message, "invalid", field=error.field, code=error.code)
            self._post(self._close, stream, failure)
            return
        except Exception as error:  # its message may tell of the inside
            _log.error("a request was not added", extra={"error": type(error).__name__, "at": place_of(error)})
            self._post(self._close, stream, _failure())
            return
        self._watched[stream.request.id] = self._unstarted[stream.request.id] = stream

    def _drop(self, engine: Engine, stream: Stream) -> None:
        engine.abort(stream.request.id)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._watched.pop(stream.request.id, None)
        self._unstarted.pop(stream.request.id, None)

    def _deliver(self) -> None:
        """Hand over the last step's tokens, as text; and who has begun in this one."""
        events, self._events = self._events, []
        batch: list[tuple[Stream, Update, bool]] = []
        broken: list[Stream] = []
        for event in events:
            stream = self._watched.get(event.sequence.request.id)
            if stream is None:
                continue
            try:
                batch.append((stream, *self._update(stream, event)))
            except Exception as error:  # a bug of ours with one stream is not the others'
                _log.error("an update failed", extra={"error": type(error).__name__, "at": place_of(error)})
                broken.append(stream)
        if batch:
            self._post(self._receive, batch)
        for stream in broken:
            self._forget(stream)
            self.llm.engine.abort_soon(stream.request.id)  # the step that is under way may have it
            self._post(self._close, stream, _failure())
        started = [i for i, stream in self._unstarted.items() if _has_started(stream)]
        for request_id in started:
            del self._unstarted[request_id]
        if started:
            self._post(self._receive_started, started)

    def _update(self, stream: Stream, event: TokenEvent) -> tuple[Update, bool]:
        """What an event means to the client, and whether it was the request's last."""
        sequence, num_new = event.sequence, len(event.token_ids)
        update = Update(sequence.index, new_text(sequence), list(event.token_ids))
        if sequence.params.logprobs is not None and num_new:
            update.logprobs = sequence.logprobs[-num_new:]
        first, reason = stream.sequences[0], sequence.finish_reason
        if not stream.is_told:
            stream.is_told = True
            stream.num_cached_tokens = first.num_cached_tokens
            stream.prompt_logprobs = first.prompt_logprobs if first.params.prompt_logprobs else None
        if reason is FinishReason.ABORT:
            raise ValueError("what the grammar allows cannot be gone on with")
        update.finish_reason = reason and str(reason)
        if not reason:
            return update, False
        stream.num_unfinished -= 1
        is_last = stream.num_unfinished == 0
        if is_last:
            self._forget(stream)
        return update, is_last

    def _find_silent_ends(self, engine: Engine) -> None:
        """Sequences that a failed step ended come without an event: their streams fail."""
        for stream in list(self._watched.values()):
            if any(str(one.finish_reason) == "abort" for one in stream.sequences):
                self._fail(engine, stream)

    def _fail(self, engine: Engine, stream: Stream) -> None:
        self._drop(engine, stream)
        self._post(self._close, stream, _failure())


def _failure() -> StreamError:
    return StreamError("the request failed inside the engine; it may be sent again", "error")


def place_of(error: BaseException) -> str:
    """Where an error was raised: its message may quote a request, and does not belong in a log."""
    frames = traceback.extract_tb(error.__traceback__)
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])


def _has_started(stream: Stream) -> bool:
    return any(one.state is not SequenceState.WAITING for one in stream.sequences)
