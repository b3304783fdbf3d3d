"""What the last minutes looked like: a bounded memory of steps and requests, as a trace that Perfetto opens.

Steps are rows of one array that is written round and round by the engines' threads; requests are a bounded queue of the
event loop's. Both take a fixed amount of memory, and a step costs a few microseconds to note.
"""

import os
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream
from quire.engine.engine import Engine
from quire.engine.stats import Progress

MAX_STEPS = 1 << 16
"""Steps that are remembered: 5 minutes, if they take 4.6 ms or more."""
MAX_REQUESTS = 1 << 13
LONGEST_S = 300
HISTORY_S = 120

PARTS = ("plan", "dispatch", "wait", "output")
COLUMNS = ("start", "end", *PARTS, "rows", "rounds", "computed", "generated", "is_failed", "running", "engine")
_AT = {name: i for i, name in enumerate(COLUMNS)}
REQUEST_TRACK = 2
ENGINE_TRACK = 3
"""Of the first engine; the others follow."""


class RequestSpan(NamedTuple):
    """When things happened to a request; 0 for never. Nothing of its prompt or its text."""

    id: str
    arrived: float
    started: float
    first_token: float
    finished: float
    num_sequences: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reason: str
    origin: Origin

    @classmethod
    def of(cls, stream: Stream, reason: str) -> "RequestSpan":
        """The span of a request, ended or not."""
        times, request = stream.times, stream.request
        return cls(
            request.id,
            times.arrived,
            times.started,
            times.first_token,
            times.finished,
            request.params.n,
            len(request.prompt_token_ids),
            stream.num_cached_tokens,
            stream.num_output_tokens,
            reason,
            stream.origin,
        )


class TraceLog:
    """Remembers the last steps and requests, in a fixed amount of memory."""

    def __init__(self) -> None:
        self._steps = np.zeros((MAX_STEPS, len(COLUMNS)))
        self._num_steps = 0
        self._lock = threading.Lock()
        """One engine's thread writes at a time."""
        self._engines: dict[Engine, int] = {}
        """Their numbers, in the order of their first steps."""
        self._before: dict[Engine, Progress] = {}
        self._requests: deque[RequestSpan] = deque(maxlen=MAX_REQUESTS)

    # -- what happens -------------------------------------------------------------------------------------------------

    def on_step(self, engine: Engine, start: float, end: float, is_failed: bool) -> None:
        """Note a step, on the engine's thread."""
        progress, before = engine.progress, self._before.get(engine, Progress())
        if progress.steps == before.steps and not is_failed:
            return  # there was nothing to do
        step, self._before[engine] = progress - before, progress
        timing, running = step.timing, len(engine.scheduler.running)
        with self._lock:
            number = self._engines.setdefault(engine, len(self._engines))
            self._steps[self._num_steps % MAX_STEPS] = (
                start, end, timing.plan_s, timing.dispatch_s, timing.wait_s, timing.output_s, step.rows, step.rounds,
                step.computed_tokens, step.generated_tokens, is_failed, running, number,
            )  # fmt: skip
            self._num_steps += 1  # after the row is whole

    def on_tokens(self, stream: Stream, index: int, now: float, count: int) -> None:
        """Does nothing: a request is noted when it ends."""

    def on_end(self, stream: Stream, failure: str | None) -> None:
        """Note a request that has ended."""
        self._requests.append(RequestSpan.of(stream, failure or "finished"))

    # -- what happened ------------------------------------------------------------------------------------------------

    def steps(self, since: float) -> np.ndarray:
        """Steps that ended after a moment of the monotonic clock, in order; any thread may ask."""
        before = self._num_steps
        copy = self._steps.copy()
        # What was written while copying may be half old, half new: the rows it went over are left out.
        first = max(self._num_steps + 1 - MAX_STEPS, 0)
        rows = copy[np.arange(min(first, before), before) % MAX_STEPS]
        return rows[rows[:, _AT["end"]] > since]

    def history(self, now: float) -> dict[str, list[Any]]:
        """The last minutes, second by second, oldest first: None for the time of steps where there was none."""
        steps = self.steps(now - HISTORY_S)
        second = np.clip((steps[:, _AT["end"]] - (now - HISTORY_S)).astype(int), 0, HISTORY_S - 1)
        counts = np.bincount(second, minlength=HISTORY_S)
        seconds = steps[:, _AT["end"]] - steps[:, _AT["start"]]
        slowest = np.zeros(HISTORY_S)
        np.maximum.at(slowest, second, seconds)

        def total(column: str) -> list[float]:
            return np.bincount(second, steps[:, _AT[column]], HISTORY_S).tolist()

        def where_any(values: np.ndarray) -> list[float | None]:
            return [round(value, 3) if count else None for value, count in zip(values.tolist(), counts, strict=True)]

        mean = np.bincount(second, seconds, HISTORY_S) / np.maximum(counts, 1)
        rows = np.bincount(second, steps[:, _AT["rows"]], HISTORY_S) / np.maximum(counts, 1)
        return {
            "steps": counts.tolist(),
            "step_ms": where_any(1e3 * mean),
            "slowest_step_ms": where_any(1e3 * slowest),
            "rows": where_any(rows),
            "generated_tokens": total("generated"),
            "computed_tokens": total("computed"),
        }

    def trace(self, seconds: float, unfinished: list[Stream]) -> dict[str, Any]:
        """The last seconds in the trace event format of Chrome, which ui.perfetto.dev opens.

        One track has the steps and their parts, counters stand beside it, every request has a track of its own.
        """
        now = time.monotonic()
        since = now - min(seconds, LONGEST_S)
        pid = os.getpid()
        events: list[dict[str, Any]] = [
            _name("process_name", pid, 0, "quire"),
            *(_name("thread_name", pid, ENGINE_TRACK + i, f"engine {i}") for i in range(len(self._engines))),
        ]
        for row in self.steps(since).tolist():
            events += _step_events(dict(zip(COLUMNS, row, strict=True)), pid)
        open_spans = [RequestSpan.of(stream, "running") for stream in unfinished]
        ended = [span for span in list(self._requests) if span.finished > since]
        for number, span in enumerate(ended + open_spans):
            events += _request_events(span, number, pid, now)
        wall = time.time() - now  # what to add to the trace's clock for the time of day
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"unix_time_at_0": wall}}


def _us(moment: float) -> float:
    return round(moment * 1e6, 1)


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _step_events(step: dict[str, float], pid: int) -> list[dict[str, Any]]:
    def span(name: str, start: float, seconds: float, **args: Any) -> dict[str, Any]:
        where = {"pid": pid, "tid": ENGINE_TRACK + int(step["engine"])}
        return {"ph": "X", "cat": "step", "name": name, "ts": _us(start), "dur": _us(seconds), "args": args} | where

    counts = {name: int(step[name]) for name in ("rows", "rounds", "computed", "generated")}
    start, end = step["start"], step["end"]
    events = [span("failed step" if step["is_failed"] else "step", start, end - start, **counts)]
    for part in PARTS:
        seconds = min(step[part], end - start)
        if seconds > 0:
            events.append(span(part, start, seconds))
            start += seconds
    which = f", engine {int(step['engine'])}" if step["engine"] else ""
    for name, value in ((f"running{which}", step["running"]), (f"tokens in a step{which}", step["computed"])):
        events.append({"ph": "C", "name": name, "pid": pid, "ts": _us(step["start"]), "args": {name: int(value)}})
    return events


def _request_events(span: RequestSpan, number: int, pid: int, now: float) -> list[dict[str, Any]]:
    """Nested spans on a track of the request's own: queue, prefill, decode inside the whole."""
    end = span.finished or now
    edges = [("queue", span.arrived), ("prefill", span.started), ("decode", span.first_token)]
    reached = [(name, moment) for name, moment in edges if moment]
    where = {"cat": "request", "id": f"{number:x}", "pid": pid, "tid": REQUEST_TRACK}
    args = {
        "request": span.id,
        "request_id": span.origin.request_id,
        "key": span.origin.key,
        "sequences": span.num_sequences,
        "prompt_tokens": span.prompt_tokens,
        "cached_tokens": span.cached_tokens,
        "output_tokens": span.output_tokens,
        "ended": span.reason,
    }
    events = [{"ph": "b", "name": f"request {span.id}", "ts": _us(span.arrived), "args": args} | where]
    for (name, moment), later in zip(reached, [*(moment for _, moment in reached[1:]), end], strict=True):
        events.append({"ph": "b", "name": name, "ts": _us(moment)} | where)
        events.append({"ph": "e", "name": name, "ts": _us(max(later, moment))} | where)
    return [*events, {"ph": "e", "name": f"request {span.id}", "ts": _us(end)} | where]
