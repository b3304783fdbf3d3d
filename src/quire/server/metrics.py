"""Prometheus metrics: ours, and the few of vLLM's that gateways and dashboards read."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from quire.server.bridge import Stream
from quire.stats import EngineStats

if TYPE_CHECKING:
    from quire.server.bridge import Bridge

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2)
READ_TIMEOUT_S = 2.0


class Metrics:
    """What is counted as it happens, and the engine's own readings when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._bridge: Bridge | None = None

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"quire_{name}_seconds", text, registry=self.registry, buckets=buckets)

        self._first_token = histogram("time_to_first_token", "from arrival to the first token")
        self._per_token = histogram("inter_token", "between two tokens of a stream", TOKEN_SECONDS)
        self._total = histogram("request", "from arrival to the end")
        self._queued = histogram("queue", "from arrival to the first step")
        self._prefill = histogram("prefill", "from the first step to the first token")
        self._decode = histogram("decode", "from the first token to the last")
        self._requests = Counter(
            "quire_requests", "requests that ended, by how", ["finish_reason"], registry=self.registry
        )

    def watch(self, bridge: "Bridge") -> None:
        """From now on this engine is read."""
        self._bridge = bridge
        self._readings = _Readings(bridge)
        self.registry.register(self._readings)

    def on_tokens(self, stream: Stream, now: float, count: int) -> None:
        """Tokens have come."""
        times = stream.times
        if times.first_token:
            self._per_token.observe((now - times.last_token) / count)
        else:
            self._first_token.observe(now - times.arrived)
            if times.started:
                self._queued.observe(times.started - times.arrived)
                self._prefill.observe(now - times.started)

    def on_end(self, stream: Stream, failure: str | None) -> None:
        """A stream is over."""
        times = stream.times
        self._total.observe(times.finished - times.arrived)
        if times.first_token:
            self._decode.observe(times.last_token - times.first_token)
        reasons = [failure] if failure else [str(one.finish_reason) for one in stream.sequences]
        for reason in reasons:
            self._requests.labels(reason).inc()

    async def read(self) -> tuple[bytes, str]:
        """The page that Prometheus reads. If the engine does not answer, its last readings stand."""
        if self._bridge is not None:
            with contextlib.suppress(TimeoutError):
                self._readings.stats = await self._bridge.call(lambda engine: engine.stats(), READ_TIMEOUT_S)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _Readings(Collector):
    """The engine's state as gauges and counters."""

    def __init__(self, bridge: "Bridge") -> None:
        self._bridge = bridge
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        bridge, stats = self._bridge, self.stats
        yield _gauge("quire_last_step_age_seconds", "since the engine last showed itself", bridge.beat_age)
        yield _gauge("quire_healthy", "1 while the engine steps", float(bridge.is_healthy))
        yield _gauge("quire_requests_waiting", "requests without a row", bridge.admission.num_waiting)
        yield _gauge("quire_waiting_tokens", "tokens they may come to", bridge.admission.num_waiting_tokens)
        yield _counter("quire_rejections", "requests told to come again", bridge.admission.num_rejected)
        yield _counter("quire_failed_steps", "steps that raised an error", bridge.num_failed_steps)
        yield _gauge("vllm:num_requests_waiting", "requests without a row", bridge.admission.num_waiting)
        if stats is None:
            return
        engine = bridge.llm.engine
        held = stats.held_pages
        yield _gauge("quire_pages_free", "pages nobody holds", stats.free_pages)
        yield _gauge("quire_pages_cached", "pages that only the prefix cache holds", stats.cached_pages)
        yield _gauge("quire_pages_held", "pages that sequences hold", held)
        yield _gauge("quire_pages_shared", "pages with more than one holder", stats.shared_pages)
        yield _gauge("quire_pages_largest_refcount", "holders of the most shared page", stats.max_refcount)
        yield _gauge("quire_sequences_running", "sequences with a row", stats.running)
        yield _gauge("quire_sequences_waiting", "sequences without one", stats.waiting)
        yield _gauge("quire_sequences_swapped", "sequences in host memory", stats.swapped)
        yield _counter("quire_steps", "dispatches", stats.steps)
        yield _counter("quire_rounds", "rounds in all of them", stats.rounds)
        yield _counter("quire_preemptions", "sequences that lost their row", stats.preemptions)
        yield _counter("quire_prefix_evictions", "cached pages given up", stats.evictions)
        yield _counter("quire_prompt_tokens", "prompt tokens of all requests", stats.prompt_tokens)
        yield _counter("quire_prefix_query_tokens", "prompt tokens looked up in the prefix cache", stats.prompt_tokens)
        yield _counter("quire_prefix_hit_tokens", "those found there", stats.cached_tokens)
        yield _counter("quire_generated_tokens", "tokens drawn", stats.generated_tokens)
        yield _counter("quire_compiles_after_warmup", "programs compiled while serving", stats.compiles_after_warmup)
        for part in ("plan", "dispatch", "wait", "output"):
            seconds = getattr(stats.timing, f"{part}_s")
            yield _counter(f"quire_step_{part}_seconds", "where the time of steps goes", seconds)
        yield _gauge("vllm:num_requests_running", "sequences with a row", stats.running)
        yield _gauge("vllm:kv_cache_usage_perc", "share of pages in use, 0 to 1", held / stats.num_pages)
        info = GaugeMetricFamily("vllm:cache_config_info", "the pool", labels=["block_size", "num_gpu_blocks"])
        info.add_metric([str(engine.config.page_size), str(stats.num_pages)], 1)
        yield info


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
