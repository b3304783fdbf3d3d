"""The thread that owns the engine: it steps it, and turns what the steps bring into updates for the event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.core.errors import RequestError
from quire.core.sequence import TokenEvent
from quire.core.stopping import FinishReason, Grammar
from quire.engine.engine import Engine
from quire.llm import LLM, new_text
from quire.server.heartbeat import Heartbeat
from quire.server.logs import error_location
from quire.server.observer import Observer
from quire.server.stream import Stream, StreamError, Update

IDLE_BEAT_S = 1.0
"""How often an idle thread shows itself."""
MAX_FAILED_IN_A_ROW = 3
FAILING_S = 5.0
"""After so many failed steps in a row, so long nothing is taken."""

_log = logging.getLogger("quire.server")


class Receiver(Protocol):
    """Gets what the engine's thread brings; its methods are called on the event loop."""

    def on_started(self, request_ids: Sequence[str], /) -> None:
        """These requests have a row."""
        ...

    def on_updates(self, batch: Sequence[tuple[Stream, Update, bool]], /) -> None:
        """What is new of some streams, and for each whether it was the last of its request."""
        ...

    def on_failed(self, stream: Stream, error: StreamError, /) -> None:
        """A stream cannot go on."""
        ...


class EngineThread:
    """Runs the engine on a thread of its own. Methods without an underscore are for the event loop's thread."""

    def __init__(self, open_llm: Callable[[], LLM], receiver: Receiver, observers: Sequence[Observer]) -> None:
        """`open_llm` is called on the new thread, which owns what it returns."""
        self.llm: LLM
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the model is loaded; has the error if it cannot be."""
        self.heartbeat = Heartbeat()
        self.num_failed_steps = 0
        self._open_llm = open_llm
        self._receiver = receiver
        self._observers = observers
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failing_until = 0.0
        # What follows belongs to the engine's thread.
        self._streams: dict[str, Stream] = {}
        """Streams that have not ended, by request id."""
        self._unstarted: set[str] = set()
        """Requests of which no sequence has had a row."""
        self._events: list[TokenEvent] = []
        """What the last step returned, to be delivered while the next one is computed."""
        self._updates: list[tuple[Stream, Update, bool]] = []
        """What events mean to clients, until it has been handed over: an error in between loses none."""
        self._num_failed_in_a_row = 0

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Close the model and wait for the thread to end; one that hangs is left behind."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine steps, or waits for something to do."""
        is_late = self.ready.done() and self.heartbeat.is_late
        return self._thread.is_alive() and not is_late and time.monotonic() >= self._failing_until

    def add(self, stream: Stream, grammar: Grammar | None) -> None:
        """Hand a request to the engine."""
        self._inbox.put(lambda engine: self._add(engine, stream, grammar))

    def drop(self, stream: Stream) -> None:
        """End a request before the next step is planned."""
        self._inbox.put(lambda engine: self._drop(engine, stream))

    async def call[T](self, function: Callable[[Engine], T], timeout_s: float) -> T:
        """Run a function on the engine's thread between two steps; TimeoutError if it does not come to that."""
        future: asyncio.Future[T] = self._loop.create_future()

        def set_result(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_exception(error) if error else future.set_result(result)

        def run(engine: Engine) -> None:
            try:
                result, error = function(engine), None
            except Exception as caught:
                result, error = None, caught
            self._post(set_result, result, error)

        self._inbox.put(run)
        return await asyncio.wait_for(future, timeout_s)

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _post(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            self.llm = self._open_llm()
        except BaseException as error:
            self._post(self.ready.set_exception, error)
            return
        self.heartbeat.beat()
        engine = self.llm.engine
        self._post(self.ready.set_result, None)
        try:
            while self._take_inbox(engine):
                self._step(engine)
        except BaseException as error:
            _log.critical("the engine's thread ends", extra=_described(error))
            raise

    def _take_inbox(self, engine: Engine) -> bool:
        """Run the commands of the event loop; waits when there is nothing else to do. False to end."""
        while True:
            self.heartbeat.beat()
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

    def _step(self, engine: Engine) -> None:
        start, is_failed = time.monotonic(), False
        try:
            self._events = engine.step(meanwhile=self._deliver)
            self._num_failed_in_a_row = 0
        except Exception as error:
            is_failed = True
            self._survive(engine, error)
        end = time.monotonic()
        self.heartbeat.end_step(end - start)
        for observer in self._observers:
            observer.on_step(engine, start, end, is_failed)
        if not engine.has_work:
            self._deliver()  # no other step will come to do it

    def _survive(self, engine: Engine, error: Exception) -> None:
        """A step failed. When that goes on, everything ends, and for a while nothing is taken."""
        self.num_failed_steps += 1
        self._num_failed_in_a_row += 1
        _log.error("a step failed", extra=_described(error))
        self._deliver()
        self._find_silent_ends(engine)
        if self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            self._num_failed_in_a_row = 0
            self._failing_until = time.monotonic() + FAILING_S
            for stream in list(self._streams.values()):
                self._fail(engine, stream)
            engine.reset()

    def _find_silent_ends(self, engine: Engine) -> None:
        """Sequences that a failed step ended come without an event: their streams fail."""
        for stream in list(self._streams.values()):
            if any(sequence.finish_reason is FinishReason.ABORT for sequence in stream.sequences):
                self._fail(engine, stream)

    def _fail(self, engine: Engine, stream: Stream) -> None:
        self._drop(engine, stream)
        self._post(self._receiver.on_failed, stream, _failure())

    def _add(self, engine: Engine, stream: Stream, grammar: Grammar | None) -> None:
        if stream.is_cancelled:
            return
        try:
            stream.sequences = engine.add(stream.request, grammar)
        except RequestError as error:
            failure = StreamError(error.message, "invalid", field=error.field, code=error.code)
            self._post(self._receiver.on_failed, stream, failure)
            return
        except Exception as error:  # its message may tell of the inside
            _log.error("a request was not added", extra=_described(error))
            self._post(self._receiver.on_failed, stream, _failure())
            return
        self._streams[stream.request.id] = stream
        self._unstarted.add(stream.request.id)

    def _drop(self, engine: Engine, stream: Stream) -> None:
        engine.abort(stream.request.id)
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.request.id, None)
        self._unstarted.discard(stream.request.id)

    # -- delivering ---------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Hand over who has begun in this step, and the last step's tokens, as text.

        What this costs follows the rows and the events of a step, not the requests that wait.
        """
        events, self._events = self._events, []
        broken: list[Stream] = []
        for event in events:
            stream = self._streams.get(event.sequence.request.id)
            if stream is None:
                continue
            try:
                self._updates.append((stream, *self._update(stream, event)))
            except Exception as error:  # a bug of ours with one stream is not the others'
                _log.error("an update failed", extra=_described(error))
                broken.append(stream)
        self._deliver_started(events)
        if self._updates:
            self._post(self._receiver.on_updates, self._updates)
            self._updates = []
        for stream in broken:
            self._forget(stream)
            self.llm.engine.abort_soon(stream.request.id)  # the step that is under way may have it
            self._post(self._receiver.on_failed, stream, _failure())

    def _deliver_started(self, events: Sequence[TokenEvent]) -> None:
        if not self._unstarted:
            return
        moving = [event.sequence for event in events] + self.llm.engine.scheduler.running
        started = {sequence.request.id for sequence in moving} & self._unstarted
        if started:
            self._unstarted -= started
            self._post(self._receiver.on_started, list(started))

    def _update(self, stream: Stream, event: TokenEvent) -> tuple[Update, bool]:
        """What an event means to the client, and whether it was the request's last."""
        sequence, num_new = event.sequence, len(event.token_ids)
        update = Update(sequence.index, new_text(sequence), list(event.token_ids))
        num_before = stream.num_delivered.get(sequence.index, 0)
        stream.num_delivered[sequence.index] = num_before + num_new
        if sequence.params.logprobs is not None:  # by position: the sequence may have gone on since the event
            update.logprobs = sequence.logprobs[num_before : num_before + num_new]
        first, reason = stream.sequences[0], event.finish_reason
        if not stream.has_prompt_results:
            stream.has_prompt_results = True
            stream.num_cached_tokens = first.num_cached_tokens
            stream.prompt_logprobs = first.prompt_logprobs if first.params.prompt_logprobs else None
        if reason is FinishReason.ABORT:
            raise ValueError("the grammar allows no token that could follow")
        update.finish_reason = reason and str(reason)
        if not reason:
            return update, False
        stream.num_unfinished -= 1
        is_last = stream.num_unfinished == 0
        if is_last:
            self._forget(stream)
        return update, is_last


def _failure() -> StreamError:
    return StreamError("the request failed inside the engine; it may be sent again", "error")


def _described(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "at": error_location(error)}
