"""The thread that owns an engine: it takes commands from any thread, steps, and posts what the steps bring.

It knows no event loop. Each request names a mailbox, and what happens to it is posted there: calls to be made, in
order, wherever the mailbox makes them.
"""

import atexit
import logging
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

from quire.async_llm.errors import GenerationError, UnavailableError, described, notify
from quire.async_llm.heartbeat import STALLED_AFTER_S, Heartbeat
from quire.async_llm.page_feed import PageFeed
from quire.async_llm.updates import Update
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.request_id import client_id
from quire.core.sequence import Sequence as TokenSequence
from quire.core.sequence import TokenEvent, TokenLogprob
from quire.core.stopping import FinishReason, Grammar
from quire.engine.engine import Engine
from quire.engine.ownership import check_process
from quire.engine.pace import Dispatch
from quire.llm import LLM
from quire.outputs import new_text

IDLE_BEAT_S = 1.0
"""How often an idle thread shows itself."""
MAX_LOGGED_IDS = 8
"""Maximum number of requests that one line of the log names."""
MAX_FAILED_IN_A_ROW = 3
FAILING_S = 5.0
"""After so many failed steps in a row, so long nothing is taken."""

_log = logging.getLogger("quire.async_llm")


def _opened(open_llm: Callable[[], LLM]) -> LLM:
    """The LLM that a function returns; ValueError if it is none."""
    if not callable(open_llm):
        raise ValueError(f"{open_llm!r} must be a function that returns an LLM: the engine's thread calls it")
    llm = open_llm()
    if not isinstance(llm, LLM):
        raise ValueError(f"{open_llm!r} must return an LLM, it returned {llm!r}")
    return llm


class Mailbox(Protocol):
    """Where calls are posted, to be made in their order."""

    def post(self, calls: Sequence[Callable[[], object]], /) -> None:
        """Make these calls soon. Any thread may post; the engine's does, so this returns at once and does not raise."""
        ...


class RequestState(ABC):
    """One request, as the engine's thread knows it. Its `on_` methods are called wherever its mailbox makes calls."""

    def __init__(self, request: Request, mailbox: Mailbox, grammar: Grammar | None = None) -> None:
        self.request = request
        self.mailbox = mailbox
        self.grammar = grammar
        """What `Engine.compile_grammar` made of the form that the text must have; it is not to be used again."""
        self.is_cancelled = False
        """Nobody wants it any more. Any thread may set this, and then calls `EngineThread.drop`."""
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        """Like the one before, this is there with the first update."""
        self.sequences: list[TokenSequence] = []
        """Once the last update is there these are complete; until then they belong, like the rest, to the engine."""
        self.has_prompt_results = False
        self.num_delivered: dict[int, int] = {}
        """Tokens of each sequence, by index, that have been posted."""
        self.ended: set[int] = set()
        """Sequences whose end has been posted."""

    @abstractmethod
    def on_started(self) -> None:
        """The request has a row."""

    @abstractmethod
    def on_update(self, update: Update, is_last: bool) -> None:
        """Something is new of one sequence; `is_last` if nothing follows for the request."""

    @abstractmethod
    def on_failed(self, error: Exception) -> None:
        """The request has ended with this error; nothing follows."""


class _Command(NamedTuple):
    run: Callable[[Engine], None]
    fail: Callable[[UnavailableError], None]
    """Called instead of `run` when the thread has ended."""


class EngineThread:
    """Runs an engine on a thread of its own. Methods without an underscore are for any thread."""

    def __init__(
        self, open_llm: Callable[[], LLM], on_step: Sequence[Callable[[Engine, float, float, bool], None]] = ()
    ) -> None:
        """`open_llm` is called on the new thread, which owns what it returns; `on_step` there, after every step."""
        self.llm: LLM
        self.ready: Future[None] = Future()
        """Done when the model is loaded; has the error if it cannot be."""
        self.ready.set_running_or_notify_cancel()  # somebody who stops waiting for it does not cancel it
        self.heartbeat = Heartbeat()
        self.num_failed_steps = 0
        self.pages = PageFeed()
        """For functions that are run on the thread (`call`)."""
        self._open_llm = open_llm
        self._on_step = on_step
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._pid: int | None = None
        """The process in which the thread was started."""
        self._failing_until = 0.0
        self._lock = threading.Lock()
        self._is_over = False
        """No command will be run any more."""
        self._cause: BaseException | None = None
        """What ended the thread, if nobody asked for it."""
        self._engine: Engine | None = None
        # What follows belongs to the engine's thread.
        self._states: dict[str, RequestState] = {}
        """Requests that have not ended, by id."""
        self._unstarted: set[str] = set()
        """Those of which no sequence has had a row."""
        self._events: deque[TokenEvent] = deque()
        """What the last step returned, to be delivered while the next one is computed."""
        self._calls: dict[Mailbox, list[Callable[[], object]]] = {}
        """What mailboxes will get, until it has been posted: an error in between loses none."""
        self._num_failed_in_a_row = 0
        self._is_paused = False
        """No step is taken."""

    def start(self) -> None:
        """Begin to load the model, if that has not begun."""
        with self._lock:
            if self._thread.ident is None:
                self._pid = os.getpid()
                self._thread.start()
                atexit.register(self.stop, STALLED_AFTER_S)  # Python must not end in the middle of a step

    def ask_to_stop(self) -> None:
        """Have the model closed, and the thread ended, soon."""
        self._inbox.put(None)

    def stop(self, timeout_s: float) -> None:
        """Close the model and wait for the thread to end; one that hangs is left behind."""
        if self._pid != os.getpid():  # not started, or forked since
            return
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def check_process(self) -> None:
        """Raise RuntimeError in a process that was forked from the one in which the thread runs."""
        if self._pid is not None:
            check_process(self._pid)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_moving(self) -> bool:
        """Whether the thread takes commands: it is there, and does not hang."""
        return self._is_alive and not (self.ready.done() and self.heartbeat.is_late)

    @property
    def _is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_over and self.failure is None

    @property
    def dispatch(self) -> Dispatch | None:
        """What the device computes now, if the engine has not failed: its requests go on once it is done."""
        return self._engine and self._engine.pace.in_flight if self._is_alive else None

    @property
    def hang(self) -> str:
        """Text that describes a dispatch which takes too long; empty if there is none."""
        dispatch = self.dispatch
        if dispatch is None or not self.heartbeat.is_late:
            return ""
        what = f"a dispatch of {dispatch.num_tokens:,} tokens in {dispatch.rounds} rounds has run for"
        seconds = time.monotonic() - dispatch.began
        return f"{what} {seconds:.0f} s, {dispatch.expected_s:.1f} s were expected"

    @property
    def failure(self) -> Exception | None:
        """Why the engine will never step again, as `Engine.failure` says it."""
        return self._engine and self._engine.failure

    @property
    def is_healthy(self) -> bool:
        """Whether the engine steps, or waits for something to do."""
        return self.is_moving and time.monotonic() >= self._failing_until

    def add(self, state: RequestState) -> None:
        """Hand a request to the engine."""
        self._put(partial(self._add, state=state), lambda error: state.mailbox.post([partial(state.on_failed, error)]))

    def drop(self, state: RequestState) -> None:
        """End a request before the next step is planned. Nothing more is posted for it."""
        self._put(partial(self._drop, state=state), lambda error: None)

    def abort(self, state: RequestState) -> None:
        """End a request before the next step is planned. What it has generated, and its end, are posted."""
        self._put(partial(self._abort, state=state), lambda error: None)

    def pause(self) -> Future[None]:
        """Take no step after the one under way, until `resume`. Commands are taken."""
        return self.call(lambda _: setattr(self, "_is_paused", True))

    def resume(self) -> Future[None]:
        """Go on."""
        return self.call(lambda _: setattr(self, "_is_paused", False))

    def call[T](self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function on the thread between two steps.

        What was drawn before is posted before it, and what it aborts is posted as such before it is done.
        """
        if not callable(function):
            raise ValueError(f"{function!r} must be a function of the engine")
        future: Future[T] = Future()

        def run(engine: Engine) -> None:
            if not future.set_running_or_notify_cancel():
                return
            self.heartbeat.rest()
            try:
                self._deliver()
                result, error = function(engine), None
            except BaseException as caught:
                result, error = None, caught
            self.heartbeat.beat()
            self._tell_of_ends()
            self.pages.tell(engine)
            future.set_exception(error) if error else future.set_result(result)  # pyright: ignore

        def fail(error: UnavailableError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._put(run, fail)
        return future

    def _put(self, run: Callable[[Engine], None], fail: Callable[[UnavailableError], None]) -> None:
        self.check_process()
        with self._lock:
            if not self._is_over:
                self._inbox.put(_Command(run, fail))
                return
        fail(self._stopped())

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.llm = _opened(self._open_llm)
        except BaseException as error:
            self._cause = error
            self._end()
            self.ready.set_exception(error)
            return
        self.heartbeat.beat()
        engine = self._engine = self.llm.engine
        self.heartbeat.pace = engine.pace
        self.ready.set_result(None)
        try:
            while self._take_inbox(engine):
                self._step(engine)
        except BaseException as error:
            _log.critical("the engine's thread ends", extra=described(error))
            self._cause = error
        self._end()

    def _end(self) -> None:
        """Fail what has not ended, and what comes later."""
        atexit.unregister(self.stop)
        with self._lock:
            self._is_over = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if command:
                command.fail(self._stopped())
        for state in self._states.values():
            self._post(state, state.on_failed, self._stopped())
        self._states.clear()
        self._flush()

    def _stopped(self) -> UnavailableError:
        return _caused(UnavailableError("the engine has stopped"), self._cause)

    def _take_inbox(self, engine: Engine) -> bool:
        """Run the commands that have come; waits when there is nothing else to do. False to end."""
        while True:
            self.heartbeat.beat()
            self._check(engine)
            may_step = engine.has_work and not self._is_paused
            if not may_step:
                self._deliver()  # no other step will come to do it
            try:
                command = self._inbox.get(block=not may_step, timeout=IDLE_BEAT_S)
            except queue.Empty:
                if may_step:
                    return True
                continue
            if command is None:
                self.llm.close()
                return False
            command.run(engine)

    def _check(self, engine: Engine) -> None:
        """Raise, which ends the thread, if no step will ever run again."""
        if engine.failure:
            raise engine.failure

    def _step(self, engine: Engine) -> None:
        start, is_failed = time.monotonic(), False
        try:
            self._events.extend(engine.step(meanwhile=self._deliver))
            self._num_failed_in_a_row = 0
        except BaseException as error:  # a panic of a Rust library is not an Exception
            is_failed = True
            self._check(engine)
            self._survive(engine, error)
        end = time.monotonic()
        self.heartbeat.beat()
        for on_step in self._on_step:
            notify(on_step, engine, start, end, is_failed)
        self.pages.tell(engine)

    def _survive(self, engine: Engine, error: BaseException) -> None:
        """A step failed. When that goes on, everything ends, and for a while nothing is taken."""
        self.num_failed_steps += 1
        self._num_failed_in_a_row += 1
        held = dict.fromkeys(map(client_id, engine.failed_requests))
        named = {"request_ids": list(held)[:MAX_LOGGED_IDS], "requests": len(held)}
        _log.error("a step failed", extra=described(error) | named)
        self._deliver()
        is_over = self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW
        for state in list(self._states.values()):
            # Sequences that a failed step ended come without an event.
            if is_over or any(sequence.finish_reason is FinishReason.ABORT for sequence in state.sequences):
                self._drop(engine, state)
                self._post(state, state.on_failed, _failure(error))
        if is_over:
            self._num_failed_in_a_row = 0
            self._failing_until = time.monotonic() + FAILING_S
            engine.reset()
        self._tell_of_ends()  # sequences that ended before the step failed come without an event, too

    def _add(self, engine: Engine, state: RequestState) -> None:
        if state.is_cancelled:
            return
        try:
            state.sequences = engine.add(state.request, state.grammar)
        except RequestError as error:
            self._post(state, state.on_failed, error)
        except BaseException as error:  # its message may tell of the inside
            _log.error("a request was not added", extra=described(error))
            self._post(state, state.on_failed, _failure(error))
        else:
            self._states[state.request.id] = state
            self._unstarted.add(state.request.id)
        self._flush()

    def _drop(self, engine: Engine, state: RequestState) -> None:
        if self._states.get(state.request.id) is state:
            engine.abort(state.request.id)
            self._forget(state)

    def _abort(self, engine: Engine, state: RequestState) -> None:
        if self._states.get(state.request.id) is state:
            engine.abort(state.request.id)
            self._tell_of_ends_of(state)
            self._flush()

    def _forget(self, state: RequestState) -> None:
        self._states.pop(state.request.id, None)
        self._unstarted.discard(state.request.id)

    # -- delivering ---------------------------------------------------------------------------------------------------

    def _post(self, state: RequestState, function: Callable[..., object], *args: object) -> None:
        self._calls.setdefault(state.mailbox, []).append(partial(function, *args))

    def _flush(self) -> None:
        while self._calls:
            mailbox, calls = next(iter(self._calls.items()))
            mailbox.post(calls)
            del self._calls[mailbox]

    def _deliver(self) -> None:
        """Post who has begun in this step, and the last step's tokens, as text.

        What this costs follows the rows and the events of a step, not the requests that wait.
        """
        self._deliver_started()
        while self._events:
            event = self._events[0]
            state = self._state_of(event.sequence)
            if state and event.sequence.index not in state.ended:
                self._deliver_event(state, event)
            self._events.popleft()
        self._flush()

    def _deliver_started(self) -> None:
        if not self._unstarted:
            return
        moving = [event.sequence for event in self._events] + self.llm.engine.scheduler.running
        for sequence in moving:
            if sequence.request.id in self._unstarted and (state := self._state_of(sequence)):
                self._unstarted.discard(sequence.request.id)
                self._post(state, state.on_started)

    def _state_of(self, sequence: TokenSequence) -> RequestState | None:
        """Return the request of a sequence; None for a fork, and for a request that has ended.

        An id is free once its request has ended, so events of the last step may belong to an earlier request with the
        same id: sequences are compared by identity.
        """
        state = self._states.get(sequence.request.id)
        is_own = state and sequence.index < len(state.sequences) and state.sequences[sequence.index] is sequence
        return state if is_own else None

    def _deliver_event(self, state: RequestState, event: TokenEvent) -> None:
        if event.finish_reason is FinishReason.ABORT:
            self._fail(state, ValueError("the grammar allows no token that could follow"))
        elif event.finish_reason is FinishReason.NOT_FINITE:
            self._fail(state, _not_finite(event.sequence))
        else:
            self._deliver_tokens(state, event.sequence, event.token_ids, event.finish_reason)

    def _fail(self, state: RequestState, error: BaseException) -> None:
        _log.error("an update failed", extra=described(error))
        self._forget(state)
        self.llm.engine.abort_soon(state.request.id)  # the step that is under way may have it
        self._post(state, state.on_failed, error if isinstance(error, GenerationError) else _failure(error))

    def _deliver_tokens(
        self, state: RequestState, sequence: TokenSequence, token_ids: Sequence[int], reason: FinishReason | None
    ) -> None:
        try:
            self._post_update(state, sequence, token_ids, reason)
        except BaseException as error:  # a bug, or a panic of the tokenizer, with one request does not end others
            self._fail(state, error)

    def _post_update(
        self, state: RequestState, sequence: TokenSequence, token_ids: Sequence[int], reason: FinishReason | None
    ) -> None:
        update = Update(sequence.index, new_text(sequence), list(token_ids), finish_reason=reason and str(reason))
        num_before = state.num_delivered.get(sequence.index, 0)
        num_now = state.num_delivered[sequence.index] = num_before + len(token_ids)
        if sequence.params.logprobs is not None:  # by position: the sequence may have gone on since the event
            update.logprobs = sequence.logprobs[num_before:num_now]
        if not state.has_prompt_results:
            state.has_prompt_results = True
            first = state.sequences[0]
            state.num_cached_tokens = first.num_cached_tokens
            state.prompt_logprobs = first.prompt_logprobs if first.params.prompt_logprobs else None
        if reason:
            state.ended.add(sequence.index)
        is_last = len(state.ended) == len(state.sequences)
        if is_last:
            self._forget(state)
        self._post(state, state.on_update, update, is_last)

    def _tell_of_ends(self) -> None:
        """Deliver the ends of sequences that were aborted behind our back: these come without an event."""
        expected = {event.sequence for event in self._events if event.finish_reason}
        for state in list(self._states.values()):
            self._tell_of_ends_of(state, expected)
        self._flush()

    def _tell_of_ends_of(self, state: RequestState, expected: AbstractSet[TokenSequence] = frozenset()) -> None:
        for sequence in state.sequences:
            if sequence.finish_reason and sequence.index not in state.ended and sequence not in expected:
                if sequence.finish_reason is FinishReason.NOT_FINITE:
                    self._fail(state, _not_finite(sequence))
                    return
                rest = sequence.output_token_ids[state.num_delivered.get(sequence.index, 0) :]
                self._deliver_tokens(state, sequence, rest, sequence.finish_reason)


def _failure(cause: BaseException) -> GenerationError:
    return _caused(GenerationError("the request failed inside the engine; it may be sent again"), cause)


def _not_finite(sequence: TokenSequence) -> GenerationError:
    message = (
        f"the model's logits are NaN or infinite after {sequence.num_tokens} tokens, so that no token can be drawn; "
        "check the weights, and the dtype for overflow"
    )
    return GenerationError(message, "not_finite")


def _caused[E: Exception](error: E, cause: BaseException | None) -> E:
    error.__cause__ = cause
    return error
