"""The text of one request as it is generated."""

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.async_llm.stream import Stream
from quire.outputs import TextChunk


class TextStream:
    """The chunks of one request, for one `async for`. It begins with the first chunk that is asked for.

    The request is aborted when this is closed (`aclose`), when the task that waits for a chunk is cancelled, and when
    nobody has a reference any more, as after leaving `async for chunk in llm.stream(...)`.
    """

    def __init__(self, request_id: str, submit: Callable[[], Awaitable[Stream]]) -> None:
        self.request_id = request_id
        """What `AsyncLLM.abort` takes."""
        self._submit = submit
        self._stream: Stream | None = None
        self._chunks: deque[TextChunk] = deque()
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        if not self._chunks:
            if self._is_closed:
                raise StopAsyncIteration
            try:
                if self._stream is None:
                    self._stream = await self._submit()
                updates = await anext(self._stream)
            except BaseException:
                await self.aclose()
                raise
            self._chunks += [TextChunk(one.index, one.text, one.token_ids, one.finish_reason) for one in updates]
        return self._chunks.popleft()

    async def aclose(self) -> None:
        """Abort the request, if it has not ended. Nothing more comes."""
        self._is_closed = True
        self._chunks.clear()
        if self._stream:
            self._stream.cancel()

    def __del__(self) -> None:
        if self._stream and not self._is_closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                # Not at once: this may run in the middle of anything.
                self._stream.loop_mailbox.loop.call_soon_threadsafe(self._stream.cancel)
