"""`GET /v1/kv_events`: which pages the engines have cached, by their names, for routers of replicas.

    event: snapshot   all full pages of an engine, in pieces; `more` says that another one follows
    event: pages      those that were published and evicted since, numbered: one more than before
    event: load       what an engine has to do, whenever that has changed
    event: cut        the reader was too slow, and what it has not read is dropped: it may come again for a snapshot

Names are hashes over tokens, salt and weights: no text, no token and no id of a request is in them.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import batched
from typing import Any

import msgspec

from quire.async_llm import AsyncLLM
from quire.async_llm.page_feed import PageBatch
from quire.server.errors import ApiError
from quire.server.http.event_response import EventResponse
from quire.server.service import Service

MAX_READERS = 16
MAX_UNREAD = 1 << 16
"""Names that may wait for one reader; those of its snapshots do not count."""
NAMES_PER_EVENT = 4096
LOOK_EVERY_S = 1.0
"""How often it is looked whether the load has changed."""
ALIVE_EVERY_S = 15.0
"""How long a connection is silent at most: proxies take what says nothing for dead."""


class KVEvents:
    """Hands out streams of what is cached, to so many readers at most."""

    def __init__(self, service: Service, write_timeout_s: float) -> None:
        self._service = service
        self._write_timeout_s = write_timeout_s
        self._num_readers = 0

    def response(self) -> EventResponse:
        """A stream for one reader; ApiError if there are too many."""
        if self._num_readers >= MAX_READERS:
            message = f"{MAX_READERS} read the events already"
            raise ApiError(429, message, code="overloaded", headers={"Retry-After": "5"})
        self._num_readers += 1
        return _KVEventResponse(self._service.engine, self._write_timeout_s, self._leave)

    def _leave(self) -> None:
        self._num_readers -= 1


class _Unread:
    """What a reader has not been sent. `put` is for the engines' threads, the rest for the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, PageBatch]] = deque()
        self._num_names = 0
        self.news = asyncio.Event()
        self.is_cut = False
        """There was too much: what was there is dropped."""

    def put(self, engine: int, batch: PageBatch) -> None:
        with self._lock:
            if self.is_cut:
                return
            self._batches.append((engine, batch))
            self._num_names += _num_counted(batch)
            if self._num_names > MAX_UNREAD:
                self.is_cut = True
                self._batches.clear()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.news.set)

    def take(self) -> tuple[int, PageBatch] | None:
        with self._lock:
            if not self._batches:
                return None
            engine, batch = self._batches.popleft()
            self._num_names -= _num_counted(batch)
            return engine, batch


class _KVEventResponse(EventResponse):
    def __init__(self, engine: AsyncLLM, write_timeout_s: float, on_close: Callable[[], None]) -> None:
        super().__init__(write_timeout_s)
        self._engine = engine
        self._page_size = engine.llm.engine.config.page_size
        self._on_close = on_close
        self._unread = _Unread(asyncio.get_running_loop())
        self._stop = engine.engines.listen(self._unread.put)

    def close(self) -> None:
        self._stop()
        self._on_close()

    async def events(self) -> AsyncIterator[bytes]:
        unread, loop = self._unread, asyncio.get_running_loop()
        loads: dict[int, dict[str, Any]] = {}
        spoke_at = loop.time()
        while not unread.is_cut and not self._is_over:
            unread.news.clear()
            for event in self._new_events(loads):
                yield event
                spoke_at = loop.time()
            if loop.time() - spoke_at >= ALIVE_EVERY_S:
                yield b": \n\n"
                spoke_at = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(unread.news.wait(), LOOK_EVERY_S)
        if unread.is_cut:
            reason = f"more than {MAX_UNREAD:,} names waited to be read: come again for a snapshot"
            yield _event("cut", {"reason": reason})

    @property
    def _is_over(self) -> bool:
        """Whether the server stops and nothing runs any more: it need not wait for those who only look on."""
        return self._engine.is_draining and not self._engine.num_streams

    def _new_events(self, loads: dict[int, dict[str, Any]]) -> Iterator[bytes]:
        yield from self._new_loads(loads)
        while (taken := self._unread.take()) is not None:
            yield from _events_of(*taken, self._page_size)

    def _new_loads(self, told: dict[int, dict[str, Any]]) -> Iterator[bytes]:
        """The load of each engine of which something else was told before."""
        has_room = self._engine.admission.room > 0
        is_open = self._engine.is_ready
        for i, state in enumerate(self._engine.engines.states):
            is_draining = not is_open or not state.is_healthy or state.refusal is not None
            load = {"queued_tokens": state.queued_tokens, "has_room": has_room, "is_draining": is_draining}
            if told.get(i) != load:
                told[i] = load
                yield _event("load", {"engine": i, **load})


def _num_counted(batch: PageBatch) -> int:
    return 0 if batch.is_snapshot else 1 + len(batch.published) + len(batch.removed)


def _events_of(engine: int, batch: PageBatch, page_size: int) -> Iterator[bytes]:
    common = {"engine": engine, "number": batch.number, "weights": batch.weights._asdict()}
    if not batch.is_snapshot:
        yield _event("pages", common | {"published": _hex(batch.published), "removed": _hex(batch.removed)})
        return
    pieces = [*batched(batch.published, NAMES_PER_EVENT)] or [()]
    for i, names in enumerate(pieces, 1):
        yield _event("snapshot", common | {"page_size": page_size, "hashes": _hex(names), "more": i < len(pieces)})


def _hex(names: Sequence[bytes]) -> list[str]:
    return [name.hex() for name in names]


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
