"""Who may call an engine, and when: its own thread, and for some calls only between two steps."""

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any


def check_process(pid: int) -> None:
    """Raise RuntimeError in any process but the one with this id: a forked child has no thread of its parent's."""
    if os.getpid() != pid:
        raise RuntimeError(
            "this process was forked from the one that made the LLM, and the LLM would wait for threads that are not "
            "here: start processes with multiprocessing.get_context('spawn'), and make an LLM in the one that uses it"
        )


def owner_only(method: Callable) -> Callable:
    """Refuse a call of an engine's method from any thread but the one that made the engine."""

    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check_process(self.pid)
        if not self.is_owned_here:
            raise RuntimeError(
                f"the engine was called from thread {threading.current_thread().name!r} (Engine.{method.__name__}) and "
                "belongs to the thread that made it: use quire.AsyncLLM, or quire.Rollouts for training, whose methods "
                "any thread may call"
            )
        was_busy = self.is_busy
        try:
            self.is_busy = True
            return method(self, *args, **kwargs)
        finally:
            self.is_busy = was_busy

    return checked


def between_steps(method: Callable) -> Callable:
    """Refuse the call while a step is in flight, before it has changed anything."""

    @owner_only
    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.scheduler.in_flight is not None:
            raise RuntimeError(
                f"Engine.{method.__name__} was called while a step is in flight: call it between two steps"
            )
        return method(self, *args, **kwargs)

    return checked
