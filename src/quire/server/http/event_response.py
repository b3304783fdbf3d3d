"""Responses of server-sent events: they end when their client goes, or stops reading."""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send


class EventResponse(Response):
    """A response of server-sent events."""

    def __init__(self, write_timeout_s: float) -> None:
        super().__init__(media_type="text/event-stream")
        self.headers["cache-control"] = "no-cache"
        del self.headers["content-length"]
        self._write_timeout_s = write_timeout_s
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
        try:
            await asyncio.wait((gone, sent), return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                self.reason = "cancelled"
            if sent.done() and (error := sent.exception()) and not isinstance(error, OSError | TimeoutError):
                raise error
        finally:
            gone.cancel()
            sent.cancel()
            self.close()
            scope["state"]["reason"] = self.reason

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self.events():
            await self._send(send, event, more=True)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": body, "more_body": more}
        await asyncio.wait_for(send(message), self._write_timeout_s)


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
