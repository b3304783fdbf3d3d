"""Threads for slow work off the event loop, shared fairly: no tenant's jobs keep all of them busy."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.async_llm.errors import OverloadError


class SlowJobError(Exception):
    """A job that was begun has not ended in time; its thread goes on with it."""


@dataclass(slots=True)
class _Tenant:
    turns: asyncio.Semaphore
    num_jobs: int = 0
    """Running and waiting."""


class FairThreads:
    """A thread pool in which each tenant runs a bounded number of jobs at once, and its other jobs wait their turn.

    A tenant has so few jobs in the pool's own queue, which is first come, first served, that tenants take turns there.
    All methods are for the event loop's thread.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int,
        max_running_each: int,
        max_jobs: int,
        max_jobs_each: int,
        timeout_s: float,
        niceness: int = 0,
    ) -> None:
        """`max_jobs` counts running and waiting jobs; `niceness` is how far its threads let others go first."""
        self._threads = ThreadPoolExecutor(num_threads, name, _be_nice, (niceness,))
        self._max_running_each = max_running_each
        self._max_jobs = max_jobs
        self._max_jobs_each = max_jobs_each
        self._timeout_s = timeout_s
        self._tenants: dict[str, _Tenant] = {}
        """Those that have a job."""
        self._num_jobs = 0

    async def run[T](self, tenant_name: str, function: Callable[..., T], *args: Any) -> T:
        """Run a function on a thread. OverloadError if its turn does not come, SlowJobError if it takes too long."""
        tenant = self._tenants.get(tenant_name) or _Tenant(asyncio.Semaphore(self._max_running_each))
        if self._num_jobs >= self._max_jobs or tenant.num_jobs >= self._max_jobs_each:
            raise OverloadError("too many requests are being read", retry_after_s=1, reason="reading")
        self._tenants[tenant_name] = tenant
        tenant.num_jobs += 1
        self._num_jobs += 1
        job: Future[T] | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await tenant.turns.acquire()
                job = self._threads.submit(function, *args)
                loop = asyncio.get_running_loop()
                job.add_done_callback(lambda _: self._post_end(loop, tenant_name))
                return await asyncio.wrap_future(job)
        except TimeoutError:
            if job is None or job.cancelled():  # it never began
                raise OverloadError("too many requests are being read", retry_after_s=5, reason="reading") from None
            raise SlowJobError(f"it takes more than {self._timeout_s:g} s") from None
        finally:
            if job is None:
                self._leave(tenant_name)

    def _post_end(self, loop: asyncio.AbstractEventLoop, tenant_name: str) -> None:
        """Give a job's turn back, from whatever thread ended it: not before, even if nobody waits for it any more."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._end, tenant_name)

    def _end(self, tenant_name: str) -> None:
        self._tenants[tenant_name].turns.release()
        self._leave(tenant_name)

    def _leave(self, tenant_name: str) -> None:
        tenant = self._tenants[tenant_name]
        tenant.num_jobs -= 1
        self._num_jobs -= 1
        if not tenant.num_jobs:
            del self._tenants[tenant_name]

    def close(self) -> None:
        """Take nothing more and drop what waits; what runs is left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _be_nice(niceness: int) -> None:
    """Lower the priority of this thread, and of processes that it starts, where threads have one of their own."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
