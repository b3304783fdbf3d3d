"""HTTP connections as uvicorn has them, with limits of ours: how many, and how long each may keep us waiting.

    a request's head     complete within `read_timeout_s` of its first byte, on a connection that was used before too
    its body             the guard's business: `read_timeout_s`, then 408
    an unread body       the response was sent before it was complete: dropped for `LINGER_S`, then the end
    what we send         some of it is taken every `write_timeout_s`, or the connection ends and what runs on it

A closed transport waits for ever for a client that does not read: those that keep us waiting are aborted.
"""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quire.server.config import ServerConfig
from quire.server.errors import ApiError

LINGER_S = 1.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """A connection of uvicorn's with our limits; `limited` makes a subclass for each port, as uvicorn wants a class."""

    limits: ServerConfig

    def connection_made(self, transport: Any) -> None:
        self._is_refused = len(self.connections) >= self.limits.max_connections
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        if self._is_refused:
            transport.write(FULL)
            transport.close()
            return
        # `pause_writing` is called for everything that is not sent at once, however little.
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_refused:
            return
        self._stop_waiting_for_head()
        self._stop_waiting_for_writes()
        super().connection_lost(exc)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait_for_head()
        else:
            self._stop_waiting_for_head()

    def eof_received(self) -> None:
        if not self._is_refused:
            super().eof_received()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.read_timeout_s, self.transport.abort)

    def _stop_waiting_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            # Not at once: a client that still sends would find a broken connection instead of its response.
            self.loop.call_later(LINGER_S, self._end_unread, self.cycle)

    def _end_unread(self, cycle: Any) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has too long a head."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # the response to its request has been sent: there cannot be another
            return
        body = json.dumps(ApiError(400, "this is not HTTP, or its head is too long", code="invalid_http").body)
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
            self.transport.abort()

    def _stop_waiting_for_writes(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def limited(config: ServerConfig) -> type[Connection]:
    """The class that uvicorn makes for each connection of one port."""
    return type("Limited", (Connection,), {"limits": config})
