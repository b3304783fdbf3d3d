"""HTTP connections as uvicorn has them, with limits of ours: how many, and how long each may keep us waiting.

    a request's head     complete within `read_timeout_s` of its first byte, on a connection that was used before too
    its body             the guard's business: `read_timeout_s`, then 408
    an unread body       the response was sent before it was complete: dropped for `LINGER_S`, then the end
    what we send         some of it is taken every `write_timeout_s`, or the connection ends and what runs on it
    what is parsed       `MAX_EVENTS` parts in one turn of the event loop; of an unread body as many in all

A closed transport waits for ever for a client that does not read: those that keep us waiting are aborted.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.config import ServerConfig
from quire.server.errors import ApiError

LINGER_S = 1.0
MAX_EVENTS = 16
"""Parts of requests (heads, chunks, ends) that are parsed in one turn of the event loop: each takes about 40 us."""
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
"""Maximum lines of a head after its first one, and of a body's trailers: parsing one takes about 10 us."""
FREE_CHUNKS, CHUNK_BYTES = 8192, 256
"""A body may have so many chunks, and one more for each `CHUNK_BYTES` bytes: a chunk costs as much as a head."""
_END_OF_HEAD = re.compile(rb"\n\r?\n")
PROBES = frozenset({"/health", "/livez", "/readyz", "/metrics"})
"""Paths that are reachable when all connections are taken."""
NUM_SPARE = 8
"""Connections beyond `max_connections` that are open for one request to a probe."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class _Buffer(ReceiveBuffer):
    """Bytes that are not parsed yet."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a head or of trailers once all are there. h11.RemoteProtocolError if they are too many.

        They are counted here because h11 parses all of them as one event.
        """
        if self._data[:2].startswith((b"\n", b"\r\n")):  # there are none; the next request may follow
            return super().maybe_extract_lines()
        end = _END_OF_HEAD.search(self._data)
        if self._data.count(b"\n", 0, end.start() if end else len(self._data)) > MAX_HEADERS:
            raise h11.RemoteProtocolError("too many headers")
        return super().maybe_extract_lines()


class _Parser(h11.Connection):
    """Parser of one connection's requests. It returns `num_left` events, and then NEED_DATA until that is set again."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._receive_buffer = _Buffer()
        self.num_left = MAX_EVENTS
        self._num_chunks = self._num_bytes = 0

    @property
    def has_unread_body(self) -> bool:
        """True if the response was sent before all of the request's body was parsed."""
        return self.their_state is h11.SEND_BODY and self.our_state in (h11.DONE, h11.MUST_CLOSE)

    def next_event(self) -> Any:
        """Return the next event. h11.RemoteProtocolError if the request has too many headers or chunks."""
        if not self.num_left:
            return h11.NEED_DATA
        event = super().next_event()
        if event is h11.NEED_DATA or event is h11.PAUSED:
            return event
        self.num_left -= 1
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // CHUNK_BYTES:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class Connection(H11Protocol):
    """A connection of uvicorn's with our limits; `limited` makes a subclass for each port, as uvicorn wants a class."""

    limits: ServerConfig
    spares: list["Connection"]
    """Connections beyond `max_connections`, the oldest first."""
    count_refused: Callable[[str], None]
    """Called with the reason for each connection that the server ends or refuses."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        if len(self.connections) - len(self.spares) >= self.limits.max_connections:
            self.spares.append(self)
            if len(self.spares) > NUM_SPARE:
                # The oldest without a request: it may never send one, and a probe sends its request at once.
                next(one for one in self.spares if one.conn.our_state is h11.IDLE).refuse()
            if self._is_refused:
                return
            self.app = _ProbesOnly(self.app, self.count_refused)
        # `pause_writing` is called for everything that is not sent at once, however little.
        transport.set_write_buffer_limits(high=0)
        self.conn: _Parser = _Parser()
        self._catching_up: asyncio.Handle | None = None
        super().connection_made(transport)
        self._wait_for_head()

    def refuse(self) -> None:
        """Close a spare connection that has no request with a 503."""
        self.spares.remove(self)
        self._is_refused = True
        self._stop_waiting_for_head()
        self.connections.discard(self)
        self.count_refused("max_connections")
        self.transport.write(FULL)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.spares:
            self.spares.remove(self)
        self._stop_waiting_for_head()
        self._stop_waiting_for_writes()
        super().connection_lost(exc)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_refused or (self.conn.has_unread_body and not self.conn.num_left):
            return
        super().data_received(data)
        self._watch_head()

    def handle_events(self) -> None:
        """Handle `MAX_EVENTS` events now and the others in later turns of the loop: other connections come between."""
        if not self.conn.has_unread_body:
            self.conn.num_left = MAX_EVENTS
        super().handle_events()
        if self.transport.is_closing() or self._catching_up:
            return
        if self.conn.has_unread_body:
            self.transport.resume_reading()  # `data_received` drops the rest: unread, it would reset the connection
        elif not self.conn.num_left:
            self.transport.pause_reading()
            self._catching_up = self.loop.call_soon(self._catch_up)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _catch_up(self) -> None:
        self._catching_up = None
        if not self.transport.is_closing():
            self.handle_events()
            self._watch_head()

    def _watch_head(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting_for_head()

    def eof_received(self) -> None:
        if not self._is_refused:
            super().eof_received()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.read_timeout_s, self._abort, "slow_head")

    def _stop_waiting_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        self.conn.num_left = MAX_EVENTS
        super().on_response_complete()
        if self.conn.has_unread_body:
            # Not at once: a client that still sends would find a broken connection instead of its response.
            self.loop.call_later(LINGER_S, self._end_unread, self.cycle)

    def _end_unread(self, cycle: Any) -> None:
        is_open = not self.transport.is_closing()  # else the client has ended it
        if is_open and self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self._abort("unread_body")

    def _abort(self, reason: str) -> None:
        self.count_refused(reason)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has too long a head."""
        self.count_refused("invalid_http")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # the response to its request has been sent: there cannot be another
            return
        body = json.dumps(
            ApiError(
                400, "this is not HTTP, its head is too long, or its body has too many chunks", code="invalid_http"
            ).body
        )
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(body.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    # -- what goes out ------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_writes()

    def _wait_for_writes(self) -> None:
        num_unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self._check_writes, num_unsent)

    def _check_writes(self, num_unsent: int) -> None:
        if self.transport.get_write_buffer_size() < num_unsent:
            self._wait_for_writes()
        else:
            self._abort("slow_reader")

    def _stop_waiting_for_writes(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _ProbesOnly:
    """The application of a spare connection: it passes one request to a probe on, and refuses any other."""

    def __init__(self, app: ASGIApp, count_refused: Callable[[str], None]) -> None:
        self._app = app
        self._count_refused = count_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if scope["path"] in PROBES:
            await self._app(scope, receive, last)
            return
        self._count_refused("max_connections")
        headers = [(b"retry-after", b"1"), (b"content-length", b"0")]
        await last({"type": "http.response.start", "status": 503, "headers": headers})
        await last({"type": "http.response.body", "body": b""})


def limited(config: ServerConfig, count_refused: Callable[[str], None]) -> type[Connection]:
    """Return the class that uvicorn makes for each connection of one port."""
    fields = {"limits": config, "spares": [], "count_refused": staticmethod(count_refused)}
    return type("Limited", (Connection,), fields)
