"""OpenTelemetry, received: one span a request and three histograms, over real HTTP, without a word of the prompt."""

import gzip
import http.server
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire import SamplingParams
from quire.async_llm.origin import Origin
from quire.server.observe.telemetry import Telemetry
from tests.server.process import SMALL, serving

pytestmark = pytest.mark.own_server

SECRET = "the lighthouse keeper's secret"
KEY = "a-key-of-alice"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.BaseHTTPRequestHandler):
    received: list[tuple[str, bytes]]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append((self.path, body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def received(tiny_folder, tmp_path_factory):
    """What a collector was sent by a server that answered one request, refused to finish another, and stopped."""
    handler = type("Handler", (Collector,), {"received": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        keys = tmp_path_factory.mktemp("keys") / "api-keys"
        keys.write_text(f"{KEY} name=alice\n")
        keys.chmod(0o600)
        with serving(tiny_folder, *SMALL, "--otlp-endpoint", endpoint, "--api-key-file", str(keys)) as server:
            headers = {"authorization": f"Bearer {KEY}"}
            body = {"model": "tiny", "prompt": SECRET, "max_tokens": 9, "ignore_eos": True, "request_id": "mine"}
            parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
            assert server.post("/v1/completions", body, **headers, traceparent=parent)[0] == 200
            late = body | {"max_tokens": 3900, "timeout": 0.05, "request_id": "of-the-body"}
            headers["x_request_id"] = "late"
            assert server.post("/v1/completions", late, **headers)[0] == 408
            assert server.terminate() == 0
            lines = "".join(server.lines)
        collector.shutdown()
    return handler.received, lines


def attributes(one) -> dict:
    def plain(value):
        kind = value.WhichOneof("value")
        return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in one.attributes}


def spans(received) -> dict:
    requests = [ExportTraceServiceRequest.FromString(body) for path, body in received if path == "/v1/traces"]
    found = [
        span for one in requests for part in one.resource_spans for scope in part.scope_spans for span in scope.spans
    ]
    return {attributes(span)["gen_ai.response.id"].partition("-")[0]: span for span in found}


def test_a_request_is_one_span_with_the_conventions_names(received):
    found = spans(received[0])
    assert set(found) == {"mine", "late"}
    span, shown = found["mine"], attributes(found["mine"])
    assert shown["gen_ai.operation.name"] == "text_completion"
    assert shown["gen_ai.request.model"] == "tiny"
    assert shown["gen_ai.request.max_tokens"] == 9
    assert shown["gen_ai.usage.input_tokens"] == len(SECRET)
    assert shown["gen_ai.usage.output_tokens"] == 9
    assert shown["gen_ai.response.finish_reasons"] == ["length"]
    assert [event.name for event in span.events] == ["started", "first token"]
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.events[1].time_unix_nano
    assert span.events[1].time_unix_nano <= span.end_time_unix_nano + 1_000_000


def test_a_request_is_part_of_its_clients_trace(received):
    span = spans(received[0])["mine"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)


def test_a_span_has_the_requests_id_and_the_label_of_its_key(received):
    """The header's id comes before the body's. The key itself leaves nowhere."""
    shown = {name: attributes(span) for name, span in spans(received[0]).items()}
    assert {name: one["quire.request_id"] for name, one in shown.items()} == {"mine": "mine", "late": "late"}
    assert {name: one["quire.key"] for name, one in shown.items()} == {"mine": "alice", "late": "alice"}
    assert all(KEY.encode() not in body for _, body in received[0])


def test_without_keys_a_span_has_no_label():
    params = SamplingParams(max_tokens=3)
    stream = SimpleNamespace(
        request=SimpleNamespace(id="r", params=params, prompt_token_ids=(1, 2)), origin=Origin("mine", "")
    )
    stream.num_output_tokens, stream.num_cached_tokens = 3, 1
    telemetry = Telemetry("http://127.0.0.1:9", "tiny")
    try:
        shown = telemetry._attributes(cast(Any, stream))
    finally:
        telemetry.close()
    assert "quire.key" not in shown
    assert (shown["quire.request_id"], shown["quire.cached_tokens"]) == ("mine", 1)


def test_a_request_that_failed_says_how(received):
    span = spans(received[0])["late"]
    assert attributes(span)["error.type"] == "deadline"
    assert span.status.code == 2
    assert not span.parent_span_id


def test_the_three_measurements_arrive(received):
    requests = [ExportMetricsServiceRequest.FromString(body) for path, body in received[0] if path == "/v1/metrics"]
    metrics = {
        metric.name: metric
        for one in requests
        for part in one.resource_metrics
        for scope in part.scope_metrics
        for metric in scope.metrics
    }
    counts = {name: sum(point.count for point in metric.histogram.data_points) for name, metric in metrics.items()}
    assert counts["gen_ai.server.request.duration"] == 2
    assert counts["gen_ai.server.time_to_first_token"] in (1, 2)
    assert counts["gen_ai.server.time_per_output_token"] == 1
    assert all(metrics[name].unit == "s" for name in counts if name.startswith("gen_ai."))


def test_nothing_of_what_was_said_leaves(received):
    for _, body in received[0]:
        assert SECRET.encode() not in body
        assert b"lighthouse" not in body
    assert "lighthouse" not in received[1]


@pytest.mark.slow
def test_a_collector_that_is_not_there_disturbs_nobody(tiny_folder):
    with serving(tiny_folder, *SMALL, "--otlp-endpoint", "http://127.0.0.1:9") as server:
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 3})[0] == 200
        assert server.terminate() == 0


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", ""])
def test_an_endpoint_must_be_a_url(endpoint):
    from quire.server.config import ServerConfig

    with pytest.raises(ValueError, match="otlp_endpoint"):
        ServerConfig(otlp_endpoint=endpoint)


def test_without_the_package_the_error_names_it(tmp_path):
    """In a process where OpenTelemetry cannot be imported."""
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from quire.cli import main\n"
        "sys.exit(main(['serve', 'nowhere', '--port', '0', '--otlp-endpoint', 'http://127.0.0.1:4318']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "pip install 'quire-llm[otel]'" in done.stderr
