"""The engines of one `AsyncLLM`, each on a thread of its own, and which of them gets a request.

One engine gets all. Several share the requests by `quire.routing`: each tells of the pages that it has cached, and is
told apart by how many tokens are under way on it. One that does not respond, or drains, gets no more.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from quire.async_llm.admission import Work
from quire.async_llm.engine_thread import EngineThread
from quire.async_llm.errors import UnavailableError
from quire.async_llm.page_feed import PageBatch
from quire.config import check_whole
from quire.core.request import Request
from quire.routing import Load, Router, prompt_hashes


class EngineState(NamedTuple):
    """How one of the engines does."""

    is_healthy: bool
    """Whether it steps, or waits for something to do."""
    refusal: str | None
    """Why it gets no requests, if it was told not to take any."""
    num_requests: int
    """That have not ended."""
    queued_tokens: int
    """Tokens of these requests, prompts and what may be generated."""


class _Busy:
    """What is under way on an engine."""

    def __init__(self) -> None:
        self.num_requests = self.queued_tokens = 0


class Engines:
    """One engine or several. Any thread may call."""

    def __init__(self, threads: Sequence[EngineThread]) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._router = Router()
        self._refusals: dict[int, str] = {}
        self._busy = [_Busy() for _ in threads]

    def __len__(self) -> int:
        return len(self.threads)

    def listen(self, listener: Callable[[int, PageBatch], object]) -> Callable[[], None]:
        """Once all are loaded: have each tell of its pages, now and whenever they change; returns what ends that.

        The listener gets the engine's number and a batch on the engine's thread: it returns at once and does not raise.
        """
        listeners = [(thread, partial(listener, i)) for i, thread in enumerate(self.threads)]

        def stop() -> None:
            for thread, each in listeners:
                thread.call(partial(thread.pages.remove, listener=each))

        for thread, each in listeners:
            thread.call(partial(thread.pages.add, listener=each))
        return stop

    def watch_pages(self) -> None:
        """Once all are loaded: know who has which pages, where that decides anything."""
        if len(self) > 1:
            self.listen(self._on_pages)

    def _on_pages(self, engine: int, batch: PageBatch) -> None:
        with self._lock:
            if batch.is_snapshot:
                self._router.pages.clear(str(engine))
            self._router.pages.add(str(engine), batch.published)
            self._router.pages.remove(str(engine), batch.removed)

    # -- requests -----------------------------------------------------------------------------------------------------

    def choose(self, requests: Sequence[Request], works: Sequence[Work]) -> list[int]:
        """The engine for each request, which counts as its own until `leave`; UnavailableError if none takes any."""
        hashes = [self._hashes(request) for request in requests] if len(self) > 1 else []
        with self._lock:
            chosen = self._route(requests, works, hashes) if len(self) > 1 else [0] * len(requests)
            for engine, work in zip(chosen, works, strict=True):
                self._busy[engine].num_requests += 1
                self._busy[engine].queued_tokens += work.num_tokens
        return chosen

    def leave(self, engine: int, work: Work) -> None:
        """A request of an engine has ended, or was not taken."""
        with self._lock:
            self._busy[engine].num_requests -= 1
            self._busy[engine].queued_tokens -= work.num_tokens

    def _route(
        self, requests: Sequence[Request], works: Sequence[Work], hashes: Sequence[Sequence[bytes]]
    ) -> list[int]:
        chosen: list[int] = []
        for i in range(len(self)):
            is_draining = i in self._refusals or not self.threads[i].is_healthy
            self._router.report(str(i), Load(self._busy[i].queued_tokens, is_draining=is_draining))
        for request, work, names in zip(requests, works, hashes, strict=True):
            group = f"{request.cache_salt}\0{request.group}" if request.group else None
            choice = self._router.choose(names, num_tokens=work.num_tokens, group=group)
            if choice is None:
                raise UnavailableError("no engine takes requests: those that respond are draining")
            chosen.append(int(choice.engine))
        return chosen

    def _hashes(self, request: Request) -> list[bytes]:
        serving = (i for i, thread in enumerate(self.threads) if thread.is_healthy and i not in self._refusals)
        engine = self.threads[next(serving, 0)].llm.engine
        if not engine.config.prefix_cache:
            return []
        version, change = engine.scheduler.tables.weights
        return prompt_hashes(
            request.prompt_token_ids,
            page_size=engine.config.page_size,
            cache_salt=request.cache_salt,
            version=version,
            change=change,
        )

    def describe_hang(self) -> str | None:
        """Text that says which engines do not respond, and what their dispatches do; None if all do."""
        silent = self.silent
        if not silent:
            return None
        names = ", ".join(map(str, silent))
        which = "the engine does" if len(self) == 1 else f"engine {names} of {len(self)} (0 is the first) does"
        hangs = [hang for i in silent if (hang := self.threads[i].hang)]
        return ": ".join([f"{which} not respond", "; ".join(hangs)] if hangs else [f"{which} not respond"])

    # -- who takes requests -------------------------------------------------------------------------------------------

    @property
    def states(self) -> list[EngineState]:
        """How each of them does."""
        with self._lock:
            return [
                EngineState(thread.is_healthy, self._refusals.get(i), busy.num_requests, busy.queued_tokens)
                for i, (thread, busy) in enumerate(zip(self.threads, self._busy, strict=True))
            ]

    @property
    def silent(self) -> list[int]:
        """Those that do not respond."""
        return [i for i, thread in enumerate(self.threads) if not thread.is_healthy]

    @property
    def is_any_open(self) -> bool:
        """Whether a request would find an engine."""
        return any(state.is_healthy and state.refusal is None for state in self.states)

    def refuse(self, engine: int, why: str) -> None:
        """From now on, give an engine nothing new."""
        with self._lock:
            self._refusals[engine] = why

    def drain(self, engine: int) -> None:
        """From now on, give an engine nothing new; ValueError if no other would take it."""
        self.check_index(engine)
        if not any(i != engine and state.is_healthy and not state.refusal for i, state in enumerate(self.states)):
            message = (
                f"engine={engine} is the last one that takes requests: SIGTERM drains a server, drain() an AsyncLLM"
            )
            raise ValueError(message)
        self.refuse(engine, "draining")

    def resume(self, engine: int) -> None:
        """Give an engine requests again, after `drain`."""
        self.check_index(engine)
        with self._lock:
            if self._refusals.get(engine) not in (None, "draining"):
                raise ValueError(f"engine={engine} cannot go on: {self._refusals[engine]}")
            self._refusals.pop(engine, None)

    def check_index(self, engine: int) -> None:
        """Raise FieldError unless there is such an engine."""
        check_whole("engine", engine, 0, len(self) - 1)
