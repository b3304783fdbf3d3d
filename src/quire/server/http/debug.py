"""The administrator's port: every page, a trace of the last minutes, and the calls that are not for everybody.

It listens on loopback, has keys of its own, and shows what runs, never its contents: no text, no token, no
hash. The page at `/debug` is only a shell without any data, so a browser may load it without a key; the key is typed
into it, and every number it shows is fetched with that key.
"""

import asyncio
import logging
import re
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream
from quire.core.errors import AuditError
from quire.core.page_map import PoolSnapshot, SequenceSnapshot, Snapshot, snapshot
from quire.engine.engine import Engine
from quire.engine.stats import EngineStats
from quire.server.access import AccessLog
from quire.server.config import ServerConfig
from quire.server.errors import ApiError
from quire.server.http.application import guarded, json_response
from quire.server.http.guard import Guard
from quire.server.http.pages import page_response
from quire.server.keys import Keys
from quire.server.observe.shared_reading import SharedReading
from quire.server.observe.trace_log import LONGEST_S, TraceLog
from quire.server.service import Service

SHELL = frozenset({"/debug"})
"""The one route of this port that needs no key."""
MAX_WAITING = 256
"""Sequences listed of those that wait."""
MAX_PAGES = 1 << 17
"""Pages listed of each tier."""
READ_EVERY_S = 0.2
"""However many watch, the engine is read five times a second at most."""
AUDIT_TIMEOUT_S = 60.0
ENGINE_TIMEOUT_S = 2.0

_log = logging.getLogger("quire.admin")


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /admin/abort`."""

    request_id: str


class EngineRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /admin/drain_engine` and `/admin/resume_engine`."""

    engine: int


class Admin:
    """The routes of the administrator's port."""

    def __init__(
        self, service: Service, config: ServerConfig, trace_log: TraceLog, access: AccessLog | None = None
    ) -> None:
        self._access = access
        self.service = service
        self.config = config
        self.trace_log = trace_log
        self._shared: dict[int, SharedReading[bytes]] = {}
        """Of each engine that somebody looks at."""

    def app(self, keys: Keys) -> Guard:
        """An ASGI application: the guard, then the routes."""
        routes = [
            Route("/debug", self.shell),
            Route("/debug/pages", self.pages),
            Route("/debug/trace", self.trace),
            Route("/admin/clear_prefix_cache", self.clear_prefix_cache, methods=["POST"]),
            Route("/admin/abort_all", self.abort_all, methods=["POST"]),
            Route("/admin/abort", self.abort, methods=["POST"]),
            Route("/admin/audit", self.audit, methods=["POST"]),
            Route("/admin/engines", self.engines),
            Route("/admin/drain_engine", self.drain_engine, methods=["POST"]),
            Route("/admin/resume_engine", self.resume_engine, methods=["POST"]),
        ]
        return guarded(routes, keys, self.config, public=SHELL, access=self._access)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def shell(self, request: HttpRequest) -> Response:
        """`/debug`: the page, without data."""
        return page_response("debug.html")

    async def pages(self, request: HttpRequest) -> Response:
        """`/debug/pages?engine=N`: every page that somebody holds, who runs and waits, and the last two minutes."""
        given, count = request.query_params.get("engine", "0"), len(self.service.engine.engines)
        if not re.fullmatch(r"[0-9]{1,9}", given) or int(given) >= count:
            raise ApiError(400, f"engine must be a whole number from 0 to {count - 1}", param="engine")
        number = int(given)
        shared = self._shared.setdefault(number, SharedReading(partial(self._read_pages, number), READ_EVERY_S))
        return json_response(await shared.get())

    async def _read_pages(self, number: int) -> bytes:
        def take(engine: Engine) -> tuple[EngineStats, Snapshot]:
            return engine.stats(), snapshot(engine.scheduler, MAX_WAITING)

        stats, taken = await self._call(take, number)
        engine, admission = self.service.engine, self.service.engine.admission
        server = {
            "model": self.service.model_name,
            "version": __version__,
            "is_ready": engine.is_ready,
            "last_step_age_s": round(engine.beat_age_s, 3),
            "requests": engine.num_streams,
            "requests_waiting": admission.num_waiting,
            "failed_steps": engine.num_failed_steps,
            "engine": number,
            "engines": len(engine.engines),
        }
        # Off the event loop: of a large pool this takes as long as a step.
        return await asyncio.to_thread(self._describe, server, stats, taken, engine.streams)

    def _describe(self, server: dict, stats: EngineStats, taken: Snapshot, streams: list[Stream]) -> bytes:
        now = time.monotonic()
        ages = {stream.request.id: now - stream.times.arrived for stream in streams}
        origins = {stream.request.id: stream.origin for stream in streams}
        view = {
            "time": round(time.time(), 3),
            "server": server,
            "stats": asdict(stats),
            "page_size": taken.page_size,
            "sequences": [
                _sequence(one, ages.get(one.request_id), origins.get(one.request_id, Origin()))
                for one in taken.sequences
            ],
            "num_waiting": taken.num_waiting,
            "pools": [_pool(taken, number, ages) for number in range(len(taken.pools))],
            "history": self.trace_log.history(now),
        }
        return msgspec.json.encode(view)

    async def trace(self, request: HttpRequest) -> Response:
        """`/debug/trace?seconds=N`: for ui.perfetto.dev."""
        seconds = request.query_params.get("seconds", "30")
        if not re.fullmatch(r"[0-9]{1,3}", seconds) or not 1 <= int(seconds) <= LONGEST_S:
            raise ApiError(400, f"seconds must be a whole number from 1 to {LONGEST_S}", param="seconds")
        streams = self.service.engine.streams

        def make() -> bytes:
            return msgspec.json.encode(self.trace_log.trace(int(seconds), streams))

        headers = {"Content-Disposition": 'attachment; filename="quire-trace.json"'}
        return json_response(await asyncio.to_thread(make), headers=headers)

    # -- administration -----------------------------------------------------------------------------------------------

    async def clear_prefix_cache(self, request: HttpRequest) -> Response:
        """`/admin/clear_prefix_cache`: cached pages that no sequence holds are free from now on."""
        freed = sum(await self._call_all(lambda engine: engine.clear_prefix_cache()))
        _log.info("prefix cache cleared", extra={"pages": freed})
        return json_response({"freed_pages": freed})

    async def abort_all(self, request: HttpRequest) -> Response:
        """`/admin/abort_all`: every request ends with an error; new ones are taken as before."""
        aborted = self.service.abort_all()
        _log.info("all requests aborted", extra={"requests": aborted})
        return json_response({"aborted_requests": aborted})

    async def abort(self, request: HttpRequest) -> Response:
        """`/admin/abort`: the request that a client knows by this `x-request-id` ends with an error."""
        body = msgspec.json.decode(await request.body(), type=AbortRequest)
        if not (aborted := self.service.abort(body.request_id)):
            raise ApiError(404, "there is no such request", param="request_id")
        _log.info("request aborted", extra={"requests": aborted})
        return json_response({"aborted_requests": aborted})

    async def audit(self, request: HttpRequest) -> Response:
        """`/admin/audit`: check every page and every sequence. The engines stand still meanwhile."""

        def run(engine: Engine) -> str | None:
            try:
                engine.audit()
            except AuditError as error:
                return str(error)
            return None

        finding = next(filter(None, await self._call_all(run, AUDIT_TIMEOUT_S)), None)
        _log.info("audit", extra={"is_sound": finding is None})
        return json_response({"is_sound": finding is None, "finding": finding})

    async def engines(self, request: HttpRequest) -> Response:
        """`/admin/engines`: how each engine does, and what it has to do."""
        return self._states()

    async def drain_engine(self, request: HttpRequest) -> Response:
        """`/admin/drain_engine`: one of several engines gets no more requests; those it has go on to their end."""
        engine = msgspec.json.decode(await request.body(), type=EngineRequest).engine
        self.service.engine.engines.drain(engine)
        _log.info("engine drains", extra={"engine": engine})
        return self._states()

    async def resume_engine(self, request: HttpRequest) -> Response:
        """`/admin/resume_engine`: an engine that drains, or has drained, gets requests again."""
        engine = msgspec.json.decode(await request.body(), type=EngineRequest).engine
        self.service.engine.engines.resume(engine)
        _log.info("engine goes on", extra={"engine": engine})
        return self._states()

    def _states(self) -> Response:
        states = self.service.engine.engines.states
        return json_response({"engines": [{"engine": i, **state._asdict()} for i, state in enumerate(states)]})

    async def _call(self, function: Any, engine: int, timeout_s: float = ENGINE_TIMEOUT_S) -> Any:
        try:
            return await self.service.engine.call(function, timeout_s, engine=engine)
        except TimeoutError:
            raise ApiError(503, "the engine does not respond", code="unavailable") from None

    async def _call_all(self, function: Any, timeout_s: float = ENGINE_TIMEOUT_S) -> list[Any]:
        """What a function returns of every engine that responds; an error if there is none."""
        engines = self.service.engine.engines
        numbers = [i for i in range(len(engines)) if i not in engines.silent] or [0]
        return await asyncio.gather(*(self._call(function, i, timeout_s) for i in numbers))


# -- formatting -------------------------------------------------------------------------------------------------------


def _sequence(one: SequenceSnapshot, age_s: float | None, origin: Origin) -> dict[str, Any]:
    return {
        "request": one.request_id,
        "request_id": origin.request_id,
        "key": origin.key,
        "index": one.index,
        "state": one.state,
        "age_s": None if age_s is None else round(age_s, 3),
        "prompt_tokens": one.prompt_len,
        "output_tokens": one.num_output,
        "max_tokens": one.max_tokens,
        "computed_tokens": one.num_computed,
        "cached_tokens": one.num_cached_tokens,
        "preemptions": one.preemptions,
        "pages": sum(len(pages) // 4 for _, pages in one.tables),
    }


def _pool(taken: Snapshot, number: int, ages: dict[str, float]) -> dict[str, Any]:
    pool: PoolSnapshot = taken.pools[number]
    return {
        "window": pool.window,
        "device": _tier(taken, number, pool.refcounts, "running", pool.idle, ages),
        "host": _tier(taken, number, pool.host_refcounts, "swapped", pool.idle[:0], ages),
    }


def _tier(
    taken: Snapshot, number: int, refcounts: np.ndarray, state: str, idle: np.ndarray, ages: dict[str, float]
) -> dict[str, Any]:
    """Columns of equal length, one entry for each page of a pool that is not free.

    The age of a page that is held is that of the request that has held it longest; one that only the prefix cache
    holds has a place in the order of eviction instead, 0 for the next to go.
    """
    size, listed = taken.page_size, np.flatnonzero(refcounts)[:MAX_PAGES]
    at = np.full(len(refcounts), -1, np.int64)
    at[listed] = np.arange(len(listed))
    owners: list[list[int]] = [[] for _ in listed]
    fill = np.zeros(len(listed), np.int64)
    age = np.full(len(listed), -1.0)
    for owner, one in enumerate(taken.sequences):
        if one.state != state:
            continue
        first, pages = one.tables[number]
        table = np.frombuffer(pages, np.int32)
        filled = np.clip(one.num_computed - size * np.arange(first, first + len(table)), 0, size)
        here = at[table]
        table_at, filled = here[here >= 0], filled[here >= 0]
        fill[table_at] = np.maximum(fill[table_at], filled)
        age[table_at] = np.maximum(age[table_at], ages.get(one.request_id, -1.0))
        for i in table_at.tolist():
            owners[i].append(owner)
    eviction = np.full(len(listed), -1, np.int64)
    idle_at = at[idle]
    eviction[idle_at[idle_at >= 0]] = np.flatnonzero(idle_at >= 0)
    fill[eviction >= 0] = size
    return {
        "num_pages": len(refcounts),
        "is_complete": len(listed) == int(np.count_nonzero(refcounts)),
        "page": listed.tolist(),
        "owners": owners,
        "refcount": refcounts[listed].tolist(),
        "fill": fill.tolist(),
        "age_s": [None if value < 0 else round(value, 2) for value in age.tolist()],
        "eviction": [None if value < 0 else value for value in eviction.tolist()],
    }
