"""Ctrl-C, held back while a step must stay whole."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Holds Ctrl-C back inside a `with` block, so that code there is interrupted only where it says so.

    What came is handed to the program's own handler (KeyboardInterrupt, unless it has set another) by `deliver`, and
    when the block ends. Blocks of the same object may be nested: the outermost counts. It does nothing in threads
    other than the main one, where Python never raises KeyboardInterrupt.

    No generator-based context manager, on purpose: Ctrl-C inside `contextlib` would skip its cleanup.
    """

    def __init__(self) -> None:
        self._program: Any = None
        """The program's own handler, while it is replaced."""
        self._came = False
        self._depth = 0

    def __enter__(self) -> Self:
        if self._depth == 0 and threading.current_thread() is threading.main_thread():
            self._program = signal.getsignal(signal.SIGINT)  # None if it is not Python's: left alone
            if self._program is not None:
                signal.signal(signal.SIGINT, self._note)
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._depth -= 1
        if self._depth or self._program is None:
            return
        came, self._came = self._came, False
        program, self._program = self._program, None
        signal.signal(signal.SIGINT, program)
        if came and not isinstance(error, KeyboardInterrupt):  # a second Ctrl-C asks for what happens already
            signal.raise_signal(signal.SIGINT)

    def deliver(self) -> None:
        """Hand over what came until now: here, and in `let_through`, the program may be interrupted."""
        if self._came:
            self.let_through(lambda: None)

    def let_through[T](self, call: Callable[[], T]) -> T:
        """Call something that Ctrl-C may interrupt at any moment, such as a read that waits."""
        if self._program is None:
            return call()
        try:
            signal.signal(signal.SIGINT, self._program)
            if self._came:
                self._came = False
                signal.raise_signal(signal.SIGINT)
            return call()
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True
