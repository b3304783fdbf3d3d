"""A mailbox of an event loop: what other threads post is called there."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence


class LoopMailbox:
    """Makes calls on one event loop, in the order in which they were posted. `post` is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_loop_closed: Callable[["LoopMailbox"], None]) -> None:
        """`on_loop_closed` is called by a thread that posts too late, perhaps more than once."""
        self.loop = loop
        self.num_streams = 0
        """Streams of this loop that have not ended; their owner counts them."""
        self._on_loop_closed = on_loop_closed
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []

    @property
    def is_here(self) -> bool:
        """Whether this code runs on the loop."""
        with contextlib.suppress(RuntimeError):  # no loop runs on this thread
            return asyncio.get_running_loop() is self.loop
        return False

    def post(self, calls: Sequence[Callable[[], object]]) -> None:
        """Have calls made on the loop. However long it is busy, one of its turns makes all that have come by then."""
        with self._lock:
            is_first = not self._calls
            self._calls += calls
        try:
            if is_first:
                self.loop.call_soon_threadsafe(self._make_calls)
        except RuntimeError:
            assert self.loop.is_closed()
        if self.loop.is_closed():  # perhaps before it came to what was posted earlier
            self._on_loop_closed(self)

    def _make_calls(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a bug, or a panic of a Rust library, in one call does not lose the others
                self.loop.call_exception_handler({"message": "a call of the engine failed", "exception": error})
