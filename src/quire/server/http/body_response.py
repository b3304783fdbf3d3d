"""Responses whose body is in parts: a large one is sent chunk by chunk, as fast as its client reads."""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.http.application import json_response
from quire.server.http.event_response import until_gone
from quire.server.openai.json_parts import CHUNK_BYTES, JsonBody


def body_response(body: JsonBody) -> Response:
    """Return a response of JSON. A body of one chunk is sent at once."""
    return json_response(b"".join(body.chunks())) if body.num_bytes <= CHUNK_BYTES else _ChunkedResponse(body)


class _ChunkedResponse(Response):
    """A response with a known length, of which one chunk at a time is made and handed to the connection.

    The connection takes the next chunk when its socket has the last one, and ends if its client does not read for
    `write_timeout_s`.
    """

    def __init__(self, body: JsonBody) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(body.num_bytes)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the body to its end, or until the client is gone."""
        gone = asyncio.create_task(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for chunk in self._body.chunks():
                await asyncio.sleep(0)  # a client that reads fast does not stop the event loop
                if gone.done():
                    scope["state"]["reason"] = "cancelled"
                    return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
