"""Prometheus metrics: ours, and those of vLLM's that gateways and dashboards read, from the same numbers."""

import asyncio
import contextlib
import platform
from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.async_llm.engines import EngineState
from quire.async_llm.errors import UnavailableError
from quire.async_llm.stream import Stream
from quire.engine.engine import Engine
from quire.engine.stats import EngineStats, add_up
from quire.machine import read_memory, resident_bytes
from quire.server.observe.shared_reading import SharedReading

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.batches.store import Store

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
READ_TIMEOUT_S = 2.0
READ_EVERY_S = 0.1
"""Anybody may read the metrics: however many do, they are worked out ten times a second at most."""
VLLM_REASONS = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "deadline": "abort",
    "not_finite": "error",
    "unavailable": "abort",
    "invalid": "error",
    "error": "error",
}
"""How a sequence ends -> what vLLM calls it."""

STATUSES = ("validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled")
OVERLOAD_REASONS = (
    "max_queued_requests", "max_queued_tokens", "reading", "key_requests", "key_queued_tokens", "key_tokens_per_minute",
)  # fmt: skip
REJECTION_REASONS = {*OVERLOAD_REASONS, "request_too_large"}
CONNECTION_REASONS = ("max_connections", "slow_head", "unread_body", "slow_reader", "invalid_http")

VLLM_NAMES = {
    "quire_requests_waiting": "num_requests_waiting",
    "quire_sequences_running": "num_requests_running",
    "quire_pages_usage_ratio": "kv_cache_usage_perc",
    "quire_preemptions": "num_preemptions",
    "quire_prompt_tokens": "prompt_tokens",
    "quire_generated_tokens": "generation_tokens",
    "quire_drafted_tokens": "spec_decode_num_draft_tokens",
    "quire_accepted_drafts": "spec_decode_num_accepted_tokens",
    "quire_prefix_query_tokens": "prefix_cache_queries",
    "quire_prefix_hit_tokens": "prefix_cache_hits",
    "quire_time_to_first_token_seconds": "time_to_first_token_seconds",
    "quire_inter_token_seconds": "inter_token_latency_seconds",
    "quire_request_seconds": "e2e_request_latency_seconds",
    "quire_queue_seconds": "request_queue_time_seconds",
    "quire_prefill_seconds": "request_prefill_time_seconds",
    "quire_decode_seconds": "request_decode_time_seconds",
}
"""Ours -> what vLLM calls the same."""


class Metrics:
    """The metrics of a server: some are counted as things happen, others are read from the engine on demand."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._engine: AsyncLLM | None = None
        self._page: Collector = self.registry
        self._shared = SharedReading(self._read, READ_EVERY_S)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"quire_{name}_seconds", text, registry=self.registry, buckets=buckets)

        self._first_token = histogram("time_to_first_token", "from arrival to the first token")
        self._per_token = histogram("inter_token", "between two tokens of a sequence", STEP_SECONDS)
        self._total = histogram("request", "from arrival to the end")
        self._queued = histogram("queue", "from arrival to the first step")
        self._prefill = histogram("prefill", "from the first step to the first token")
        self._decode = histogram("decode", "from the first token to the last")
        self._step = histogram("step", "one step: plan, dispatch, wait, output", STEP_SECONDS)
        text = "sequences that ended, by how"
        self._ends = Counter("quire_sequences_ended", text, ["finish_reason"], registry=self.registry)
        for reason in VLLM_REASONS:  # there from the start: the first one of a kind is a rise from 0
            self._ends.labels(reason)
        text = "HTTP requests, by route and status"
        self._http = Counter("quire_http_requests", text, ["route", "status"], registry=self.registry)
        text = "gRPC calls, by method and status"
        self._grpc = Counter("quire_grpc_calls", text, ["method", "status"], registry=self.registry)
        text = "requests and calls that failed or were refused, by the code of the error"
        self._errors = Counter("quire_request_errors", text, ["reason"], registry=self.registry)
        for reason in OVERLOAD_REASONS:
            self._errors.labels(reason)
        text = "requests refused because the queue is full, a key has its limit, or they are larger than either"
        self._rejections = Counter("quire_rejections", text, registry=self.registry)
        text = "connections that were refused, or ended because of the client, by reason"
        self._refused = Counter("quire_refused_connections", text, ["reason"], registry=self.registry)
        for reason in CONNECTION_REASONS:
            self._refused.labels(reason)
        self._of_keys = CollectorRegistry()
        """Metrics with the labels of keys, which are not for everybody."""
        text = "requests and calls, by key and status"
        self._key_requests = Counter("quire_key_requests", text, ["key", "status"], registry=self._of_keys)
        text = "tokens of requests that ended, by key and kind: prompt or generated"
        self._key_tokens = Counter("quire_key_tokens", text, ["key", "kind"], registry=self._of_keys)
        text = "versions of what runs, as labels"
        self._build = Gauge("quire_build_info", text, ["version", "python", "jax"], registry=self.registry)
        self._build.labels(__version__, platform.python_version(), version("jax")).set(1)
        ProcessCollector(registry=self.registry)

    def watch(self, engine: "AsyncLLM", model_name: str) -> None:
        """Read this engine from now on."""
        self._engine = engine
        self._collector = _EngineCollector(engine)
        self.registry.register(self._collector)
        self._page = _Page(self.registry, model_name, [thread.llm.engine for thread in engine.engines.threads])

    def on_tokens(self, stream: Stream, index: int, now: float, count: int) -> None:
        """Count tokens: `count` rounds of one dispatch, as far apart as they were computed."""
        times, before = stream.times, stream.token_times.get(index)
        if before is not None:
            for _ in range(count):
                self._per_token.observe((now - before) / count)
        if not times.first_token:
            self._first_token.observe(now - times.arrived)
            if times.started:
                self._queued.observe(times.started - times.arrived)
                self._prefill.observe(now - times.started)

    def on_end(self, stream: Stream, failure: str | None) -> None:
        """Count a stream that is over."""
        times = stream.times
        self._total.observe(times.finished - times.arrived)
        if times.first_token:
            self._decode.observe(times.last_token - times.first_token)
        if key := stream.origin.key:
            self._key_tokens.labels(key, "prompt").inc(len(stream.request.prompt_token_ids))
            self._key_tokens.labels(key, "generated").inc(stream.num_output_tokens)
        for reason in stream.finish_reasons.values():
            self._ends.labels(reason).inc()
        if failure:
            self._ends.labels(failure).inc(stream.request.params.n - len(stream.finish_reasons))

    def on_step(self, engine: Engine, start: float, end: float, is_failed: bool) -> None:
        """Count a step."""
        self._step.observe(end - start)

    def count_request(self, kind: str, route: str, status: str, reason: str | None, key: str) -> None:
        """Count a request over HTTP ("http") or a call over gRPC ("grpc") that has ended."""
        (self._http if kind == "http" else self._grpc).labels(route, status).inc()
        if reason:
            self._errors.labels(reason).inc()
        if reason in REJECTION_REASONS:
            self._rejections.inc()
        if key:
            self._key_requests.labels(key, status).inc()

    def count_refused_connection(self, reason: str) -> None:
        """Count a connection that was refused, or ended because of the client."""
        self._refused.labels(reason).inc()

    async def read(self, *, with_keys: bool = False) -> tuple[bytes, str]:
        """The page that Prometheus reads, and its type. If the engine does not respond, its last figures stand."""
        page = await self._shared.get()
        return page + generate_latest(self._of_keys) if with_keys else page, CONTENT_TYPE_LATEST

    def watch_batches(self, store: "Store") -> None:
        """Read the batches of this store from now on."""
        self.registry.register(_BatchCollector(store))

    async def _read(self) -> bytes:
        if self._engine is not None:
            await asyncio.gather(*(self._read_engine(self._engine, i) for i in range(len(self._engine.engines))))
        return await asyncio.to_thread(generate_latest, self._page)  # the event loop has streams to serve

    async def _read_engine(self, engine: "AsyncLLM", i: int) -> None:
        with contextlib.suppress(TimeoutError, UnavailableError):
            self._collector.stats[i] = await engine.call(lambda engine: engine.stats(), READ_TIMEOUT_S, engine=i)


class _EngineCollector(Collector):
    """Collects the state of the engine, or of all together, as gauges and counters."""

    def __init__(self, engine: "AsyncLLM") -> None:
        self._engine = engine
        self.stats: dict[int, EngineStats] = {}
        """The last reading of each engine."""
        growth = sum(thread.llm.engine.growth_bytes for thread in engine.engines.threads)
        self._most_memory = resident_bytes() + growth
        """Bytes that this process can come to occupy."""

    def collect(self) -> Iterator[Metric]:
        engine, admission = self._engine, self._engine.admission
        stats = add_up(list(self.stats.values())) if self.stats else None
        yield _gauge("quire_last_step_age_seconds", "since the engine last showed itself", engine.beat_age_s)
        yield _gauge("quire_healthy", "1 while the engine steps", float(engine.is_healthy))
        yield _gauge("quire_ready", "1 while requests are taken", float(engine.is_ready))
        yield _gauge("quire_requests_open", "requests that have not ended", engine.num_streams)
        yield _gauge("quire_requests_waiting", "requests that wait for a row", admission.num_waiting)
        yield _gauge("quire_requests_waiting_limit", "requests that may wait", admission.max_requests)
        yield _gauge("quire_waiting_tokens", "tokens that waiting requests may come to", admission.num_waiting_tokens)
        yield _gauge("quire_waiting_tokens_limit", "tokens that may wait", admission.max_tokens)
        yield _counter("quire_failed_steps", "steps that raised an error", engine.num_failed_steps)
        host, growth = read_memory(), max(self._most_memory - resident_bytes(), 0)
        yield _gauge("quire_memory_limit_bytes", "memory of the host that this process may use", host.limit)
        yield _gauge("quire_memory_available_bytes", "memory that is free within that limit", host.available)
        yield _gauge("quire_memory_growth_bytes", "memory that pages and steps can still take", growth)
        if len(engine.engines) > 1:
            yield from _each_engine(engine.engines.states)
        if stats is None:
            return
        yield _gauge("quire_pages", "pages of all pools", stats.num_pages)
        yield _gauge("quire_pages_free", "pages nobody holds", stats.free_pages)
        yield _gauge("quire_pages_cached", "pages that only the prefix cache holds", stats.cached_pages)
        yield _gauge("quire_pages_held", "pages that sequences hold", stats.held_pages)
        yield _gauge("quire_pages_shared", "pages that more than one sequence holds", stats.shared_pages)
        usage = "of the fullest pool, the share of pages that sequences hold"
        yield _gauge("quire_pages_usage_ratio", usage, stats.usage_ratio)
        yield _gauge("quire_pages_largest_refcount", "holders of the most shared page", stats.max_refcount)
        yield _gauge("quire_pages_leaked", "pages that count as held and are in no table: 0", stats.leaked_pages)
        yield _gauge("quire_host_pages", "pages in host memory", stats.num_host_pages)
        yield _gauge("quire_host_pages_free", "pages in host memory that nobody holds", stats.free_host_pages)
        yield _gauge("quire_sequences_running", "sequences with a row", stats.running)
        yield _gauge("quire_sequences_waiting", "sequences without a row", stats.waiting)
        yield _gauge("quire_sequences_swapped", "sequences in host memory", stats.swapped)
        yield _counter("quire_steps", "dispatches", stats.steps)
        yield _counter("quire_rounds", "rounds of all dispatches", stats.rounds)
        yield _counter("quire_preemptions", "sequences that lost their row", stats.preemptions)
        yield _counter("quire_swaps", "preempted sequences whose pages went to host memory", stats.swaps)
        yield _counter("quire_prefix_evictions", "cached pages given up", stats.evictions)
        yield _counter("quire_prompt_tokens", "prompt tokens of all requests", stats.prompt_tokens)
        yield _counter("quire_prefix_query_tokens", "prompt tokens looked up in the prefix cache", stats.prompt_tokens)
        yield _counter("quire_prefix_hit_tokens", "prompt tokens found in the prefix cache", stats.cached_tokens)
        yield _counter("quire_computed_tokens", "tokens put through the model", stats.computed_tokens)
        yield _counter("quire_generated_tokens", "tokens drawn", stats.generated_tokens)
        yield _counter("quire_drafted_tokens", "tokens guessed and computed ahead", stats.drafted_tokens)
        yield _counter("quire_accepted_drafts", "drafted tokens that came next", stats.accepted_drafts)
        yield _gauge("quire_programs", "compiled programs", stats.programs)
        yield _counter("quire_compiles_after_warmup", "programs compiled while serving", stats.compiles_after_warmup)
        for part in ("plan", "dispatch", "wait", "output"):
            seconds = getattr(stats.timing, f"{part}_s")
            yield _counter(f"quire_step_{part}_seconds", "where the time of steps goes", seconds)


class _BatchCollector(Collector):
    """Collects the state of the batches that the server keeps."""

    def __init__(self, store: "Store") -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        tenants = self._store.tenants
        batches = [batch for tenant in tenants for batch in list(tenant.batches.values())]
        statuses = dict.fromkeys(STATUSES, 0) | Tally(batch.status for batch in batches)
        yield _labelled("quire_batches", "batches that are kept, by status", "status", statuses)
        open_batches = [batch for batch in batches if not batch.has_ended]
        lines = {
            "completed": sum(batch.completed for batch in open_batches),
            "failed": sum(batch.failed for batch in open_batches),
            "left": sum(max(batch.total - batch.completed - batch.failed, 0) for batch in open_batches),
        }
        yield _labelled("quire_batch_lines", "lines of batches that have not ended, by state", "state", lines)
        yield _gauge(
            "quire_batch_bytes", "bytes of files and answers of batches", sum(one.num_bytes for one in tenants)
        )


class _Page(Collector):
    """Collects all metrics, and those that vLLM has too under its names, with the label `model_name`."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engines: Sequence[Engine]) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name}
        num_pages = sum(engine.scheduler.tables.pool.allocator.num_pages for engine in engines)
        pool = [str(engines[0].config.page_size), str(num_pages)]
        labels, text = ["block_size", "num_gpu_blocks"], "the pool of layers that see every position"
        self._pool = GaugeMetricFamily("vllm:cache_config_info", text, labels=labels)
        self._pool.add_metric(pool, 1)

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            if name := VLLM_NAMES.get(metric.name):
                yield self._renamed(metric, f"vllm:{name}")
            elif metric.name == "quire_sequences_ended":
                yield self._successes(metric)
        yield self._pool

    def _renamed(self, metric: Metric, name: str) -> Metric:
        other = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            if suffix != "_created":
                other.add_sample(name + suffix, sample.labels | self._labels, sample.value)
        return other

    def _successes(self, metric: Metric) -> Metric:
        successes = CounterMetricFamily("vllm:request_success", metric.documentation)
        counts: dict[str, float] = {}
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                reason = VLLM_REASONS.get(sample.labels["finish_reason"], "error")
                counts[reason] = counts.get(reason, 0) + sample.value
        for reason, count in counts.items():
            successes.add_sample("vllm:request_success_total", {"finished_reason": reason} | self._labels, count)
        return successes


def _each_engine(states: Sequence[EngineState]) -> Iterator[Metric]:
    columns = {
        "healthy": ("1 while this engine steps", [state.is_healthy for state in states]),
        "draining": ("1 while this engine gets no requests", [state.refusal is not None for state in states]),
        "requests_open": ("requests of this engine that have not ended", [state.num_requests for state in states]),
        "queued_tokens": ("tokens that these may come to", [state.queued_tokens for state in states]),
    }
    for name, (text, values) in columns.items():
        gauge = GaugeMetricFamily(f"quire_engine_{name}", text, labels=["engine"])
        for i, value in enumerate(values):
            gauge.add_metric([str(i)], float(value))
        yield gauge


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        gauge.add_metric([value], count)
    return gauge


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
