"""The requests that have not ended, of every event loop: counted when they arrive, and closed once."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from quire.async_llm.admission import Admission, Work
from quire.async_llm.engine_thread import EngineThread
from quire.async_llm.engines import Engines
from quire.async_llm.errors import DeadlineError, GenerationError, UnavailableError, notify
from quire.async_llm.loop_mailbox import LoopMailbox
from quire.async_llm.observer import Observer
from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.stopping import Grammar

CHECK_EVERY_S = 1.0
"""How often somebody who waits looks whether the engine's thread is alive."""


class OpenStreams:
    """Streams that have not ended. Any thread may call; what is read and closed, is so on the stream's own loop."""

    def __init__(self, engines: Engines, admission: Admission, observers: Sequence[Observer]) -> None:
        self.admission = admission
        self._engines = engines
        self._observers = observers
        self._lock = threading.Lock()
        self._streams: dict[str, Stream] = {}
        """By request id."""
        self._mailboxes: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}
        """Of the loops that have a stream."""
        self._refusal: str | None = None
        self._num_turns = 0
        """Clients of which more requests follow."""
        self._waiting_for_idle: list[tuple[int | None, Future[None]]] = []
        """Who waits until an engine, or every one, has no stream."""

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, request_id: str) -> Stream | None:
        """The stream of a request; None if there is none, or it has ended."""
        with self._lock:
            return self._streams.get(request_id)

    def all(self) -> list[Stream]:
        """Every stream, oldest first."""
        with self._lock:
            return list(self._streams.values())

    @property
    def is_open(self) -> bool:
        """Whether new ones are taken."""
        return self._refusal is None

    def check_open(self) -> None:
        """Raise UnavailableError if nothing new is taken."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)

    def refuse(self, message: str) -> None:
        """From now on, take nothing new: UnavailableError with this message."""
        with self._lock:
            self._refusal = message

    # -- opening ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def turns(self) -> Iterator[None]:
        """Of a client with many requests: while this is entered, those that are admitted may be opened in turns."""
        with self._lock:
            self.check_open()
            self._num_turns += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_turns -= 1
            self._tell_if_empty()

    def open(
        self,
        requests: Sequence[Request],
        works: Sequence[Work],
        timeout_s: float | None,
        grammar: Grammar | None,
        *,
        is_admitted: bool = False,
        in_turns: bool = False,
    ) -> list[Stream]:
        """Take requests for the loop that runs here, all or none; those that are admitted even while draining.

        Those that take turns are the first of more requests of one client.
        """
        if not requests:
            return []
        loop = asyncio.get_running_loop()
        chosen = self._engines.choose(requests, works)
        try:
            streams = self._open(loop, requests, works, chosen, grammar, is_admitted=is_admitted, in_turns=in_turns)
        except BaseException:
            for engine, work in zip(chosen, works, strict=True):
                self._engines.leave(engine, work)
            self._tell_if_empty()
            raise
        if timeout_s is not None:
            for stream in streams:
                stream.timer = loop.call_later(timeout_s, self.end, stream, DeadlineError())
        return streams

    def _open(
        self,
        loop: asyncio.AbstractEventLoop,
        requests: Sequence[Request],
        works: Sequence[Work],
        chosen: Sequence[int],
        grammar: Grammar | None,
        *,
        is_admitted: bool,
        in_turns: bool,
    ) -> list[Stream]:
        with self._lock:
            if not is_admitted:
                self.check_open()
            self._check_ids(requests)
            self.admission.arrive(works, is_admitted=is_admitted, in_turns=in_turns)
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                mailbox = self._mailboxes[loop] = LoopMailbox(loop, self._lose)
                loop.call_later(CHECK_EVERY_S, self._watch, mailbox)
            streams = [
                Stream(request, mailbox, grammar and grammar.copy(), self, engine, work)
                for request, engine, work in zip(requests, chosen, works, strict=True)
            ]
            mailbox.num_streams += len(streams)
            self._streams |= {stream.request.id: stream for stream in streams}
            for stream in streams:
                self._thread(stream).add(stream)  # in here: who finds it to abort finds it in the engine's inbox before
        return streams

    def _check_ids(self, requests: Sequence[Request]) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.id in self._streams or request.id in seen:
                message = f"request id {request.id!r} is in use; give each request its own"
                raise RequestError(message, field="request_id")
            seen.add(request.id)

    def _watch(self, mailbox: LoopMailbox) -> None:
        """Once a second, while a loop has streams, end those of an engine that does not respond.

        A dispatch in flight may be slow, however long it takes: it is reported, and its streams stay.
        """
        if self._mailboxes.get(mailbox.loop) is not mailbox:
            return
        for engine in self._engines.silent:
            thread = self._engines.threads[engine]
            if thread.dispatch or thread.is_moving:  # or it has ended since the engine was found to be silent
                continue
            self.end_all(lambda: UnavailableError("the engine does not respond"), mailbox, engine)
        mailbox.loop.call_later(CHECK_EVERY_S, self._watch, mailbox)

    # -- ending -------------------------------------------------------------------------------------------------------

    def cancel(self, stream: Stream) -> None:
        """End a stream early. What it has not handed out is dropped."""
        self.end(stream, GenerationError("the request was cancelled", "cancelled"))

    def end(self, stream: Stream, error: Exception) -> None:
        """End a stream with an error, before the engine does."""
        if self._streams.get(stream.request.id) is not stream:
            return
        stream.is_cancelled = True
        self._thread(stream).drop(stream)
        if stream.loop_mailbox.is_here:
            self.close(stream, error)
        else:
            stream.loop_mailbox.post([partial(self.close, stream, error)])

    def end_all(
        self, error: Callable[[], Exception], mailbox: LoopMailbox | None = None, engine: int | None = None
    ) -> None:
        """End every stream, or every one of a loop or an engine, with an error of its own: raising one adds to it."""
        for stream in self.all():
            if mailbox in (None, stream.mailbox) and engine in (None, stream.engine):
                self.end(stream, error())

    def abort(self, stream: Stream) -> None:
        """End a stream before the next step, with what it has."""
        self._thread(stream).abort(stream)

    async def wait_until_empty(self, engine: int | None = None) -> None:
        """Wait until every stream of an engine has ended; or of all of them, and none follows in turn."""
        with self._lock:
            if self._is_empty(engine):
                return
            empty: Future[None] = Future()
            self._waiting_for_idle.append((engine, empty))
        await asyncio.wrap_future(empty)

    def _thread(self, stream: Stream) -> EngineThread:
        return self._engines.threads[stream.engine]

    def _lose(self, mailbox: LoopMailbox) -> None:
        """A loop was closed while it had streams: nobody will read them."""
        for stream in self.all():
            if stream.mailbox is mailbox and self._remove(stream):
                stream.is_cancelled = True
                self._thread(stream).drop(stream)
                self._tell_of_end(stream, "cancelled")

    def _remove(self, stream: Stream) -> bool:
        """Forget a stream; False if that has been done."""
        mailbox = stream.loop_mailbox
        with self._lock:
            if self._streams.get(stream.request.id) is not stream:
                return False
            del self._streams[stream.request.id]
            num_computed = len(stream.request.prompt_token_ids) + stream.num_output_tokens
            self.admission.leave(stream.request.id, num_computed)
            self._engines.leave(stream.engine, stream.work)
            mailbox.num_streams -= 1
            if not mailbox.num_streams:
                del self._mailboxes[mailbox.loop]
        self._tell_if_empty()
        return True

    def _is_empty(self, engine: int | None) -> bool:
        if engine is not None:
            return not self._engines.states[engine].num_requests
        return not self._streams and not self._num_turns

    def _tell_if_empty(self) -> None:
        if not self._waiting_for_idle:
            return
        with self._lock:
            told = [one for one in self._waiting_for_idle if self._is_empty(one[0])]
            self._waiting_for_idle = [one for one in self._waiting_for_idle if one not in told]
        for _, empty in told:
            if empty.set_running_or_notify_cancel():
                empty.set_result(None)

    def _tell_of_end(self, stream: Stream, failure: str | None) -> None:
        for observer in self._observers:
            notify(observer.on_end, stream, failure)

    # -- called by a stream, on its loop ------------------------------------------------------------------------------

    def on_started(self, stream: Stream) -> None:
        """A stream's request has a row."""
        with self._lock:
            if self._streams.get(stream.request.id) is stream:  # else the id may be another request's by now
                self.admission.start(stream.request.id)

    def on_tokens(self, stream: Stream, update: Update, now: float) -> None:
        """Tokens have come; the stream's times are still those of the tokens before."""
        for observer in self._observers:
            notify(observer.on_tokens, stream, update.index, now, len(update.token_ids))

    def close(self, stream: Stream, error: Exception | None) -> None:
        """A stream has ended, by itself or with an error."""
        if self._remove(stream):
            stream.finish(error)
            self._tell_of_end(stream, error and _reason(error))


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, GenerationError) else "invalid"
