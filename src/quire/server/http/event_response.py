"""Responses of server-sent events: they end when their client goes, or stops reading."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

HEARTBEAT = b": waiting\n\n"
"""A comment, which clients skip: it keeps proxies from ending a stream that has nothing to send yet."""


class EventResponse(Response):
    """A response of server-sent events."""

    def __init__(self, write_timeout_s: float, heartbeat_s: float | None = None) -> None:
        """A comment is sent when nothing else was for `heartbeat_s` to twice as many seconds; None for never."""
        super().__init__(media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._write_timeout_s = write_timeout_s
        self._heartbeat_s = heartbeat_s
        self._is_silent, self._is_sending = False, True  # nothing may come before the head
        self.reason: str | None = None
        """Code of the error that ended the stream after its head was sent, for the log."""

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """What is sent, piece by piece, to the end."""

    @abstractmethod
    def close(self) -> None:
        """All has been sent, or the client is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the response is complete, or its client is gone."""
        gone = asyncio.create_task(until_gone(receive))
        sent = asyncio.create_task(self._send_all(send))
        beats = asyncio.create_task(self._beat(send, self._heartbeat_s)) if self._heartbeat_s else None
        try:
            await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                self.reason = "cancelled"
            if sent.done() and (error := sent.exception()) and not isinstance(error, OSError | TimeoutError):
                raise error
        finally:
            gone.cancel()
            sent.cancel()
            if beats:
                beats.cancel()
            self.close()
            scope["state"]["reason"] = self.reason

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._is_sending = False
        async for event in self.events():
            await self._send(send, event, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        self._is_silent, self._is_sending = False, True
        await asyncio.wait_for(send(message), self._write_timeout_s)
        self._is_sending = not more  # nothing may follow the end

    async def _beat(self, send: Send, every_s: float) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(every_s)
            if self._is_silent and not self._is_sending:
                await self._send(send, HEARTBEAT, more=True)


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
