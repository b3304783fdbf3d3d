"""Sampling for a trainer in the same program: `Rollouts`, which any thread may use while weights change.

    any thread                                       engine thread (async_llm/engine_thread.py)
    submit(prompts, group=...) -> Future  -- inbox ->  engine.add
    collect(groups), for group in rollouts  <- ends -  engine.step
    set_weights, pause, resume, abort     -- inbox ->  between two steps

It is the thread that `AsyncLLM` runs on, without an event loop: what ends is put into futures, and groups into a queue,
in the order in which they end.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from jax.sharding import Mesh

from quire.async_llm.engine_thread import EngineThread
from quire.async_llm.errors import OverloadError, UnavailableError
from quire.async_llm.heartbeat import STALLED_AFTER_S
from quire.config import EngineKnobs, ModelConfig, check_seconds, check_whole
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Version
from quire.engine.engine import Engine
from quire.field_error import refuse_unknown_arguments
from quire.llm import LLM, Prompt, is_one_prompt, plain
from quire.outputs import RequestOutput
from quire.rollouts.calls import Call, FoldedRequest, Group, fold
from quire.rollouts.session import Session
from quire.short_repr import short_repr
from quire.text.tokenizer import Tokenizer

MAX_GROUPS = 1 << 31


@dataclass(slots=True)
class RolloutGroup:
    """What was submitted under one name, when all of it has ended."""

    group: Hashable
    """The name it was submitted under."""
    outputs: list[RequestOutput]
    """One for each prompt, in the order in which they were submitted."""
    lag: int
    """How often weights had been set since its oldest token was drawn, when the group was handed out."""

    __repr__ = short_repr


class Rollouts:
    """A model that samples for a trainer in the same program: submit from any thread, take groups as they end.

        with Rollouts("Qwen/Qwen3-0.6B", max_num_seqs=64) as rollouts:
            for i, prompt in enumerate(prompts):
                rollouts.submit([prompt] * 8, params, group=i)
            batch = rollouts.collect(groups=4)  # the first four that are whole; the rest goes on
            rollouts.set_weights(train(batch), version=1)

    Every token carries the version of the weights it was drawn under (`CompletionOutput.weight_versions`). All methods
    are for any thread. Callbacks of futures run on the engine's thread, where nothing can wait for the engine.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        mesh: Mesh | str | None = None,
        quiet: bool = False,
        max_pending: int | None = None,
        **knobs: Unpack[EngineKnobs],
    ) -> None:
        """Load a model; the arguments are those of `LLM`.

        With `max_pending`, `submit` waits while so many of its calls have not ended.
        """
        self._set_up(partial(LLM, model, revision=revision, mesh=mesh, quiet=quiet, **knobs), max_pending)

    @classmethod
    def from_params(
        cls,
        model_config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | str | None = None,
        quiet: bool = False,
        max_pending: int | None = None,
        **knobs: Unpack[EngineKnobs],
    ) -> "Rollouts":
        """Use weights that are already in this program, as `LLM.from_params` does."""
        open_llm = partial(LLM.from_params, model_config, params, tokenizer, mesh=mesh, quiet=quiet, **knobs)
        return cls.from_factory(open_llm, max_pending=max_pending)

    @classmethod
    def from_factory(cls, open_llm: Callable[[], LLM], *, max_pending: int | None = None) -> "Rollouts":
        """Use the LLM that `open_llm` returns. It is called on the engine's thread, which an engine belongs to."""
        rollouts = cls.__new__(cls)
        rollouts._set_up(open_llm, max_pending)
        return rollouts

    def _set_up(self, open_llm: Callable[[], LLM], max_pending: int | None) -> None:
        if max_pending is not None:
            check_whole("max_pending", max_pending, 1, MAX_GROUPS)
        self._max_pending = max_pending
        self._thread = EngineThread(open_llm)
        self._changed = threading.Condition()
        """Held for everything that follows; notified when something of it has changed."""
        self._calls: set[Call] = set()
        """Those of `submit` that have not ended."""
        self._groups: dict[Hashable, Group] = {}
        """Those that have not ended, by name."""
        self._finished: deque[Group] = deque()
        """Those that have ended and were not handed out."""
        self._on_change: set[Callable[[], None]] = set()
        """Called, too, when something has changed: they wake event loops."""
        self._num_stale, self._num_aborted = 0, 0
        self._is_closed = False
        self._thread.start()
        self._thread.ready.result()
        self._tables = self.llm.engine.scheduler.tables
        """To read which weights there are, after `close` too."""

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what runs with UnavailableError, give weights and pages back, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._notify()
        self._thread.stop(STALLED_AFTER_S)

    def __enter__(self) -> "Rollouts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def llm(self) -> LLM:
        """The LLM underneath, to read from; its methods belong to the engine's thread (see `call`)."""
        return self._thread.llm

    @property
    def version(self) -> Version:
        """The version of the weights that the next token is drawn under."""
        return self._tables.weights.version

    @property
    def num_under_way(self) -> int:
        """Groups that have not ended."""
        with self._changed:
            return len(self._groups)

    @property
    def num_finished(self) -> int:
        """Groups that have ended and were not handed out."""
        with self._changed:
            return len(self._finished)

    @property
    def num_stale(self) -> int:
        """Groups that `collect` left out because of their lag."""
        with self._changed:
            return self._num_stale

    @property
    def num_aborted(self) -> int:
        """Groups of which something was aborted; their futures have what there was."""
        with self._changed:
            return self._num_aborted

    # -- sampling -----------------------------------------------------------------------------------------------------

    @refuse_unknown_arguments
    def submit(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        group: Hashable = None,
        cache_salt: str = "",
        tenant: str | None = None,
        priority: int = 0,
        wait_s: float | None = None,
        keeps_end: bool = False,
    ) -> Future[Any]:
        """Have a prompt, or a list of prompts, continued, and do not wait for it.

        The future's result is a RequestOutput for one prompt and a list of them for a list. Equal prompts of a list
        become one request of n samples: the prompt is computed once, and every sample is its own, with one seed too.

        With a `group`, all that is under way under that name is handed out together when it has ended, by `collect` and
        by iterating. Without one, only the future has it. `keeps_end` is for prompts that go on from one another's
        answers, as those of a `session` do. Tenants that wait are served in proportion to their weights; `tenant`
        defaults to `cache_salt`.

        RequestError if a prompt can never run. Where `max_pending` is reached this waits for room, at most `wait_s`
        seconds, then raises OverloadError.
        """
        given = plain(prompts)
        try:
            fields = {"cache_salt": cache_salt, "tenant": tenant, "priority": priority, "keeps_end": keeps_end}
            ready = self.llm.checked(given, params, **fields)
        except RuntimeError:
            self._check_open()
            raise
        if not ready:
            raise ValueError("prompts is empty: give a prompt, or a list of prompts")
        call = Call(is_one_prompt(given), len(ready))
        folds = [
            FoldedRequest(request, copies, call, lambda: self._change, self._on_end) for request, copies in fold(ready)
        ]
        call.states, call.num_left = folds, len(folds)
        if not isinstance(group, Hashable):
            raise ValueError(f"group={group!r} is no name: give a number, a string or a tuple of them")
        with self._changed:
            self._wait_for_room(wait_s)
            self._calls.add(call)
            if group is not None:
                call.group = self._groups.setdefault(group, Group(group))
                call.group.calls.append(call)
            for state in folds:  # with the lock held: `abort` does not come before
                self._thread.add(state)
        return call.future

    def session(self, token_ids: Sequence[int] = (), *, cache_salt: str = "", tenant: str | None = None) -> Session:
        """Begin a sequence of many turns, with these tokens: `send` appends tokens and has them answered."""
        return Session(self.submit, token_ids, cache_salt, tenant)

    def _wait_for_room(self, wait_s: float | None) -> None:
        """Until there is room for one more call. (Lock held.)"""

        def may_go_on() -> bool:
            return self._is_closed or self._max_pending is None or len(self._calls) < self._max_pending

        # The engine's thread makes the room: it cannot wait for it.
        if not self._changed.wait_for(may_go_on, 0.0 if self._thread.is_current else wait_s):
            message = f"max_pending={self._max_pending} calls of submit have not ended: wait with wait_s, or give more"
            raise OverloadError(message, retry_after_s=1)
        self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("the rollouts are closed")

    def _check_thread(self) -> None:
        self._thread.check_process()
        if self._thread.is_current:
            raise RuntimeError("a callback of a future runs on the engine's thread, which cannot wait for itself")

    def __iter__(self) -> Iterator[RolloutGroup]:
        """Hand out groups as they end, until none is under way. A group that failed raises its error."""
        while True:
            self._check_thread()
            with self._changed:
                self._changed.wait_for(self._has_news)
                if not self._finished:
                    return
                (group,) = self._take(1)
            yield group

    async def __aiter__(self) -> AsyncIterator[RolloutGroup]:
        """Hand out groups as they end, until none is under way. A group that failed raises its error."""
        self._thread.check_process()
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._on_change.add(wake)
        try:
            while True:
                changed.clear()
                with self._changed:
                    if self._finished:
                        (group,) = self._take(1)
                    elif self._has_news():
                        return
                    else:
                        group = None
                if group:
                    yield group
                else:
                    await changed.wait()
        finally:
            with self._changed:
                self._on_change.discard(wake)

    def _has_news(self) -> bool:
        """Whether a group has ended, or none will. (Lock held.)"""
        return bool(self._finished) or not self._groups or self._is_closed

    def collect(self, groups: int, *, max_lag: int | None = None, timeout_s: float | None = None) -> list[RolloutGroup]:
        """The first so many groups that are whole, in the order in which they ended; the rest goes on.

        Groups of which a token was drawn more than `max_lag` changes of weights ago are left out and counted in
        `num_stale`; their futures have them. A group that failed raises its error, and the others stay.

        ValueError if fewer groups are left under way; with `timeout_s` this waits for other threads to submit them.
        When the time is over, TimeoutError, and what has ended stays for the next call.
        """
        check_whole("groups", groups, 1, MAX_GROUPS)
        if max_lag is not None:
            check_whole("max_lag", max_lag, 0, MAX_GROUPS)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        self._check_thread()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._drop_stale(max_lag)
                if len(self._finished) >= groups or any(one.error for one in self._finished):
                    return self._take(groups)
                self._check_open()
                num_there = len(self._finished) + len(self._groups)
                if deadline is None and num_there < groups:
                    stale = f" ({self._num_stale} were left out for their lag)" if self._num_stale else ""
                    raise ValueError(
                        f"groups={groups}, and {num_there} are under way{stale}: submit more, or wait for other "
                        "threads to do so with timeout_s"
                    )
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{len(self._finished)} of groups={groups} ended in {timeout_s} seconds")
                self._changed.wait(left)

    def _drop_stale(self, max_lag: int | None) -> None:
        if max_lag is not None:
            fresh = [one for one in self._finished if one.error or self._lag(one) <= max_lag]
            self._num_stale += len(self._finished) - len(fresh)
            self._finished = deque(fresh)

    def _take(self, count: int) -> list[RolloutGroup]:
        """The first groups that have ended; if one has failed, its error instead. (Lock held.)"""
        failed = next((one for one in self._finished if one.error), None)
        if failed and failed.error:
            self._finished.remove(failed)
            raise failed.error
        taken = [RolloutGroup(one.name, one.outputs, self._lag(one)) for one in itertools.islice(self._finished, count)]
        for _ in taken:
            self._finished.popleft()
        return taken

    def _lag(self, group: Group) -> int:
        return 0 if group.oldest is None else self._change - group.oldest

    @property
    def _change(self) -> int:
        """Which change of weights it is that tokens are drawn under."""
        return self._tables.weights.change

    # -- between two steps --------------------------------------------------------------------------------------------

    def call[T](self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` on the engine's thread between two steps, and return what it returns.

        All of the engine's methods may be used there but `add` and `step`, and those of `llm` that answer at once:
        `call(lambda engine: engine.params)`, `call(lambda _: rollouts.llm.score(token_ids))`. Requests under way stand
        still meanwhile, or advance with what is asked for.
        """
        return self._wait(lambda: self._thread.call(function))

    def _wait[T](self, command: Callable[[], Future[T]]) -> T:
        self._check_thread()
        return command().result()

    def set_weights(
        self,
        params: Any,
        version: Version | None = None,
        running: Literal["keep", "recompute", "abort"] = "keep",
        *,
        copy: bool = True,
    ) -> int:
        """Compute with other weights of the same shape from the next step on, as `Engine.set_weights` does.

        What runs keeps the KV it has, has it computed again, or is aborted; returns how many sequences were.
        """
        return len(self.call(lambda engine: engine.set_weights(params, version, running, copy=copy)))

    def sleep(self) -> None:
        """Give the memory of weights and pages back and keep the programs, until `wake`: a training step has it.

        What runs stands still and keeps its tokens; more may be submitted. `collect` and futures wait for `wake`.
        """
        self.call(lambda engine: engine.sleep())

    def wake(self, params: Any = None, version: Version | None = None, *, copy: bool = True) -> None:
        """Go on after `sleep` with these weights, as `set_weights` takes them; None for those of the model's file."""
        self.call(lambda _: self.llm.wake(params, version, copy=copy))

    def pause(self) -> None:
        """Stand still after the step under way, until `resume`; what runs keeps its pages. More may be submitted."""
        self._wait(self._thread.pause)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._wait(self._thread.resume)

    def abort(self, group: Hashable) -> int:
        """End what is under way under a name, before the next step; returns how many requests that were.

        Their futures get what was generated, with finish reason "abort"; the group is not handed out.
        """
        if not isinstance(group, Hashable):
            raise ValueError(f"group={group!r} is no name: give a number, a string or a tuple of them")
        with self._changed:
            return self._abort(self._groups[group].calls if group in self._groups else [])

    def abort_all(self) -> int:
        """End everything that is under way, with a name or without; returns how many requests that were."""
        with self._changed:
            return self._abort(self._calls)

    def _abort(self, calls: Iterable[Call]) -> int:
        states = [state for call in calls for state in call.states if not state.is_ended]
        for state in states:
            self._thread.abort(state)
        return len(states)

    # -- on the engine's thread ---------------------------------------------------------------------------------------

    def _on_end(self, state: FoldedRequest, error: Exception | None) -> None:
        """A request has ended. (While the engine stops this may be another thread.)"""
        call = state.call
        with self._changed:
            if state.is_ended:
                return
            call.settle(state, error)
            if call.num_left:
                return
            self._calls.discard(call)
            if call.group and not any(one.num_left for one in call.group.calls):
                self._end_group(call.group)
            self._notify()
        call.finish()

    def _end_group(self, group: Group) -> None:
        del self._groups[group.name]
        if group.is_aborted and not group.error:
            self._num_aborted += 1
        else:
            self._finished.append(group)

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in self._on_change:
            wake()
