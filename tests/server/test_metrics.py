"""What Prometheus reads: every number there is, under our names and under those that gateways already know."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.server.observe.metrics import VLLM_NAMES

DEPLOY = Path(__file__).parents[2] / "deploy"
OURS = (
    "time_to_first_token_seconds_bucket", "inter_token_seconds_bucket", "request_seconds_bucket",
    "queue_seconds_bucket", "prefill_seconds_bucket", "decode_seconds_bucket", "step_seconds_bucket",
    "preemptions_total", "prefix_query_tokens_total", "prefix_hit_tokens_total", "prompt_tokens_total",
    "generated_tokens_total", "sequences_ended_total", "rejections_total", "compiles_after_warmup_total",
    "pages_free", "pages_held", "pages_cached", "pages_shared", "pages_largest_refcount", "pages_leaked",
    "last_step_age_seconds", "failed_steps_total", "ready", "healthy",
)  # fmt: skip
SAMPLE = re.compile(r"\b((?:quire|process|vllm)[a-z0-9_:]*)(?=[{\s\[)]|$)")


def samples(server) -> dict[tuple[str, frozenset], float]:
    status, body = server.get("/metrics")
    assert status == 200
    families = text_string_to_metric_families(body.decode())
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def names(server) -> set[str]:
    return {name for name, _ in samples(server)}


@pytest.fixture(scope="module", autouse=True)
def _some_traffic(server):
    body = {"model": "tiny", "prompt": "metrics of a harbour", "max_tokens": 20, "n": 3, "ignore_eos": True}
    assert server.post("/v1/completions", body)[0] == 200


def test_everything_that_people_chart_is_there(server):
    assert {f"quire_{name}" for name in OURS} <= names(server)


def test_gateways_find_what_they_read(server):
    found = samples(server)
    model = frozenset({("model_name", "tiny")})
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert (f"vllm:{name}", model) in found
    (pool,) = [dict(labels) for name, labels in found if name == "vllm:cache_config_info"]
    assert pool == {"block_size": "16", "num_gpu_blocks": "512"}
    assert ("vllm:request_success_total", model | {("finished_reason", "length")}) in found


def test_both_names_tell_the_same(server):
    found = samples(server)
    model = frozenset({("model_name", "tiny")})
    compared = 0
    for (name, labels), value in found.items():
        for ours, theirs in VLLM_NAMES.items():
            suffix = name.removeprefix(ours)
            if name.startswith(ours) and suffix in ("", "_total", "_bucket", "_sum", "_count"):
                assert found[f"vllm:{theirs}{suffix}", labels | model] == value
                compared += 1
    assert compared > 80


def test_every_gap_between_two_tokens_is_counted_once(server):
    """Of each sequence of a request too: three that advance side by side do not make each other look fast."""
    before = {
        name: server.metric(name) for name in ("quire_inter_token_seconds_count", "quire_inter_token_seconds_sum")
    }
    decode_before = server.metric("quire_decode_seconds_sum")
    body = {"model": "tiny", "prompt": "three at once", "max_tokens": 30, "n": 3, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", body)[0] == 200
    server.wait_idle()
    assert server.metric("quire_inter_token_seconds_count") - before["quire_inter_token_seconds_count"] == 3 * 29
    gaps = server.metric("quire_inter_token_seconds_sum") - before["quire_inter_token_seconds_sum"]
    decode = server.metric("quire_decode_seconds_sum") - decode_before
    assert decode <= gaps <= 3 * decode + 1e-3


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"max_tokens": 5}, "length"),
        pytest.param({"timeout": 0.2, "n": 64}, "deadline", marks=pytest.mark.alone),  # it must have begun by then
    ],
)
def test_every_sequence_ends_once(server, wanted, reason):
    """A request of several counts as many, however it ends."""
    name = "quire_sequences_ended_total"

    def ends() -> dict[frozenset, float]:
        return {labels: value for (found, labels), value in samples(server).items() if found == name}

    before = ends()
    body = {"model": "tiny", "prompt": "three ends", "n": 3, "max_tokens": 3500, "ignore_eos": True} | wanted
    server.post("/v1/completions", body)
    server.wait_idle()
    grown = {labels: value - before[labels] for labels, value in ends().items() if value != before[labels]}
    assert grown == {frozenset({("finish_reason", reason)}): body["n"]}


def test_the_rules_and_the_dashboard_ask_for_what_exists(server):
    known = names(server)
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    wanted = {name for expression in expressions for name in SAMPLE.findall(expression)}
    assert len(wanted) > 30
    assert wanted <= known, wanted - known


@pytest.mark.parametrize("name", ["limit", "available", "growth"])
def test_the_gauges_of_memory_are_on_the_dashboard_and_in_the_docs(name):
    assert f"quire_memory_{name}_bytes" in (DEPLOY / "grafana.json").read_text()
    assert f"`memory_{name}_bytes`" in (DEPLOY.parent / "docs" / "seeing.md").read_text()


def test_alerts_say_what_to_do_and_panels_do_not_overlap():
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    assert all(rule["labels"]["severity"] in ("critical", "warning", "info") for rule in alerts)
    assert all("summary" in rule["annotations"] for rule in alerts)
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
