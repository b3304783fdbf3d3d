"""OpenTelemetry: a span and three measurements for each request, by OTLP over HTTP. Never a prompt or a text.

Names are those of the semantic conventions for generative AI. What the environment tells OpenTelemetry's SDK (headers,
certificates, sampling) holds here too. Spans are made when a request ends, and sent by threads of the SDK's own.
"""

import threading
import time
from typing import Any

from quire import __version__
from quire.async_llm.stream import Stream, Times
from quire.engine.engine import Engine

DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Buckets that the conventions ask for."""
METRICS_EVERY_MS = 15_000
FLUSH_TIMEOUT_S = 5


class Telemetry:
    """Sends a span and measurements for each request when it ends."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise ValueError(
                f"{error.name} is missing: --otlp-endpoint needs `pip install 'quire-llm[otel]'`"
            ) from None
        base = endpoint.rstrip("/")
        resource = Resource.create({"service.name": "quire", "service.version": __version__})
        self._spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{base}/v1/traces")))
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(f"{base}/v1/metrics"), export_interval_millis=METRICS_EVERY_MS
        )
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._tracer = self._spans.get_tracer("quire", __version__)
        meter = self._metrics.get_meter("quire", __version__)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}", unit="s", description=text, explicit_bucket_boundaries_advisory=buckets
            )

        self._duration = histogram("request.duration", "from arrival to the end", DURATION_S)
        self._first_token = histogram("time_to_first_token", "from arrival to the first token", FIRST_TOKEN_S)
        self._per_token = histogram("time_per_output_token", "for each token after the first", PER_TOKEN_S)
        self._kind, self._failed, self._status = SpanKind.SERVER, StatusCode.ERROR, Status
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._common = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
        }

    def on_tokens(self, stream: Stream, index: int, now: float, count: int) -> None:
        """Does nothing: a request's span is made when it ends."""

    def on_step(self, engine: Engine, start: float, end: float, is_failed: bool) -> None:
        """Does nothing: steps are for `/debug/trace`."""

    def on_end(self, stream: Stream, failure: str | None) -> None:
        """Make the span of a request, and measure it."""
        self._measure(stream, failure)
        times, attributes, origin = stream.times, self._attributes(stream), stream.origin
        parent = self._propagator.extract({"traceparent": origin.traceparent}) if origin.traceparent else None
        span = self._tracer.start_span(
            f"text_completion {self._model_name}",
            context=parent,
            kind=self._kind,
            attributes=attributes,
            start_time=_unix_ns(times.arrived),
        )
        for name, moment in (("started", times.started), ("first token", times.first_token)):
            if moment:
                span.add_event(name, timestamp=_unix_ns(moment))
        if failure:
            span.set_attribute("error.type", failure)
            span.set_status(self._status(self._failed))
        else:
            span.set_attribute(
                "gen_ai.response.finish_reasons", [reason for _, reason in sorted(stream.finish_reasons.items())]
            )
        span.end(_unix_ns(times.finished))

    def _measure(self, stream: Stream, failure: str | None) -> None:
        times = stream.times
        self._duration.record(
            times.finished - times.arrived, self._common | ({"error.type": failure} if failure else {})
        )
        if times.first_token:
            self._first_token.record(times.first_token - times.arrived, self._common)
        per_token = _seconds_per_token(times, stream)
        if per_token is not None and not failure:
            self._per_token.record(per_token, self._common)

    def _attributes(self, stream: Stream) -> dict[str, Any]:
        request, params = stream.request, stream.request.params
        limits = {} if params.max_tokens is None else {"gen_ai.request.max_tokens": params.max_tokens}
        key = {"quire.key": stream.origin.key} if stream.origin.key else {}
        return (
            self._common
            | limits
            | key
            | {
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.choice.count": params.n,
                "gen_ai.response.id": request.id,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "gen_ai.usage.output_tokens": stream.num_output_tokens,
                "quire.request_id": stream.origin.request_id,
                "quire.cached_tokens": stream.num_cached_tokens,
            }
        )

    def close(self) -> None:
        """Send what has not been sent, for a few seconds at most, in case the collector is away."""

        def flush() -> None:
            self._spans.force_flush(FLUSH_TIMEOUT_S * 1000)
            self._metrics.shutdown(FLUSH_TIMEOUT_S * 1000)
            self._spans.shutdown()

        thread = threading.Thread(target=flush, daemon=True)  # the SDK tries again for longer than its timeout
        thread.start()
        thread.join(FLUSH_TIMEOUT_S)


def _seconds_per_token(times: Times, stream: Stream) -> float | None:
    """Seconds for each token after the first, of one sequence; None if there was no second token."""
    num_each = stream.num_output_tokens / stream.request.params.n
    return (times.last_token - times.first_token) / (num_each - 1) if num_each > 1 else None


def _unix_ns(moment: float) -> int:
    """A moment of the monotonic clock as time of day."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
