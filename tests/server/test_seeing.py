"""What an administrator sees, and nobody else: pages, traces, and the calls that end what others do."""

import concurrent.futures
import copy
import json
import re
import time
import urllib.request
from urllib.parse import quote

import numpy as np
import pytest

from quire import SamplingParams
from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream, Times
from quire.cli import main
from quire.core.page_map import snapshot
from quire.core.request import Request
from quire.server.http.debug import _pool
from quire.server.observe import trace_log
from quire.server.observe.trace_log import TraceLog
from quire.testing import fake_engine
from tests.server.process import LONGEST_S, SMALL, serving
from tests.test_page_map import engine_with_everything

pytestmark = pytest.mark.own_server

API_KEY, ADMIN_KEY = "a-key-of-a-client", "a-key-of-an-admin"
SECRET = "the harbour master's secret"
ADMIN_ROUTES = {
    "/debug/pages": "GET",
    "/debug/trace": "GET",
    "/admin/clear_prefix_cache": "POST",
    "/admin/abort_all": "POST",
    "/admin/abort": "POST",
    "/admin/audit": "POST",
    "/admin/engines": "GET",
    "/admin/drain_engine": "POST",
    "/admin/resume_engine": "POST",
}


def as_client() -> dict[str, str]:
    return {"authorization": f"Bearer {API_KEY}"}


def as_admin() -> dict[str, str]:
    return {"authorization": f"Bearer {ADMIN_KEY}"}


@pytest.fixture(scope="module")
def server(tiny_folder):
    flags = ("--api-key", API_KEY, "--admin-port", "0", "--admin-key", ADMIN_KEY)
    with serving(tiny_folder, *SMALL, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def admin(server):
    """The same process by its other port."""
    other = copy.copy(server)
    other.url = next(found[1] for line in server.lines if (found := re.search(r"(http://\S+)/debug", line)))
    return other


def complete(server, prompt=SECRET, **fields):
    return server.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields}, **as_client())


def pages(admin) -> dict:
    status, body = admin.get("/debug/pages", **as_admin())
    assert status == 200, body
    return json.loads(body)


class Running:
    """Requests that would not end by themselves during a test."""

    def __init__(self, server, count, **fields):
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        fields = {"max_tokens": 3500, "ignore_eos": True} | fields
        self.answers = [self._pool.submit(complete, server, f"{SECRET} {i}", **fields) for i in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._pool.shutdown()


def wait_for(condition, timeout_s=LONGEST_S):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


# -- who may look -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ADMIN_ROUTES)
def test_nothing_is_told_or_done_without_the_admin_key(server, admin, path):
    method = ADMIN_ROUTES[path]
    body = b"{}" if method == "POST" else None
    for headers in ({}, as_client(), {"authorization": "Bearer "}, {"authorization": "Basic YTpi"}):
        status, answer = admin.ask(method, path, body, **headers)
        assert status == 401, answer
        assert set(json.loads(answer)) == {"error"}
    assert server.ask(method, path, body, **as_client())[0] == 404, "not on the public port, with whatever key"
    assert server.ask(method, path, body, **as_admin())[0] == 401


def test_an_admin_is_no_client(server, admin):
    assert server.get("/v1/models", **as_admin())[0] == 401
    assert admin.get("/v1/models", **as_admin())[0] == 404
    assert admin.get("/metrics")[0] == 401, "the public routes of the other port are not public here"


@pytest.mark.parametrize("path", ["/debug/", "//debug", "/debug/..;/admin/audit", "/debug%2fpages", "/DEBUG"])
def test_only_the_shell_itself_needs_no_key(admin, path):
    assert admin.get(path)[0] == 401


def test_the_shell_holds_no_data_and_may_run_nothing_else(admin):
    with urllib.request.urlopen(admin.url + "/debug") as response:
        html, headers = response.read().decode(), response.headers
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", policy["script-src"])
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "tiny" not in html
    assert re.findall(r"(?:src|href)=\S+", html.partition("<script>")[0]) == ['href="data:,">']
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|https?://", html)


def test_an_admin_port_needs_a_key(tiny_folder):
    assert main(["serve", str(tiny_folder), "--admin-port", "0"]) == 2


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("windows", "number"), [((None,), 0), ((None, 3), 0), ((None, 3), 1)])
def test_the_columns_say_what_the_page_map_says(windows, number):
    engine = engine_with_everything(windows)
    taken = snapshot(engine.scheduler, 10)
    names = [f"{one.request_id}/{one.index}" for one in taken.sequences]
    pool = _pool(taken, number, {"pair": 3.0})
    assert (len(taken.pools), pool["window"]) == (len(windows), windows[number])
    device = pool["device"]
    for name in ("device", "host"):
        tier = pool[name]
        of_pool = [page for page in engine.page_map() if (page.tier, page.window) == (name, windows[number])]
        assert tier["num_pages"] == len(of_pool)
        expected = [page for page in of_pool if page.refcount]
        assert tier["page"] == [page.page for page in expected]
        assert [[names[i] for i in owners] for owners in tier["owners"]] == [list(page.owners) for page in expected]
        assert tier["refcount"] == [page.refcount for page in expected]
        assert tier["fill"] == [page.fill for page in expected]
        assert tier["is_complete"]
    idle = list(engine.scheduler.tables.pools[number].prefix_cache.idle_pages)
    by_place = sorted(zip(device["eviction"], device["page"], strict=True), key=lambda pair: (pair[0] is None, pair))
    assert [page for place, page in by_place if place is not None] == idle
    assert all(
        (place is None) == bool(owners) for place, owners in zip(device["eviction"], device["owners"], strict=True)
    )
    assert {age for age, owners in zip(device["age_s"], device["owners"], strict=True) if owners} == {3.0}


def test_a_long_queue_is_counted_and_not_listed():
    engine = fake_engine(num_pages=16, page_size=4, vocab_size=50)
    for i in range(40):
        engine.add(Request(id=f"r{i}", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=4)))
    pool = snapshot(engine.scheduler, 5)
    assert (len(pool.sequences), pool.num_waiting) == (5, 40)


def test_running_and_waiting_requests_are_seen_but_not_what_they_say(server, admin):
    with Running(server, 12, request_id="mine", n=1) as running:
        view = wait_for(lambda: (now := pages(admin))["stats"]["running"] == 8 and now["num_waiting"] and now)
        status, trace = admin.get("/debug/trace?seconds=300", **as_admin())
        assert status == 200
        shown = json.dumps(view) + trace.decode()
        states = [one["state"] for one in view["sequences"]]
        assert states.count("running") == 8
        assert "waiting" in states
        assert all(one["age_s"] >= 0 and one["prompt_tokens"] for one in view["sequences"])
        tier = view["pools"][0]["device"]
        held = [owners for owners in tier["owners"] if owners]
        assert len(held) == view["stats"]["held_pages"]
        assert len(tier["page"]) == view["stats"]["held_pages"] + view["stats"]["cached_pages"]
        assert sum(view["history"]["generated_tokens"]) > 0
        assert SECRET not in shown
        assert not re.search(r"[0-9a-f]{64}", shown), "no hash of a page"
        assert not re.search(rf"\b{API_KEY}|{ADMIN_KEY}\b", shown + "".join(server.lines))
        assert "token_ids" not in shown
        admin.post("/admin/abort_all", {}, **as_admin())
        for answer in running.answers:
            assert answer.result()[0] == 499
    server.wait_idle()


# -- the trace --------------------------------------------------------------------------------------------------------


def test_a_trace_has_steps_with_their_parts_and_requests_with_theirs(server, admin):
    complete(server, max_tokens=40, ignore_eos=True, request_id="traced")
    events = json.loads(admin.get("/debug/trace?seconds=60", **as_admin())[1])["traceEvents"]
    steps = [one for one in events if one["ph"] == "X" and one["name"] == "step"]
    parts = [one for one in events if one["ph"] == "X" and one["name"] in trace_log.PARTS]
    assert {one["name"] for one in parts} == set(trace_log.PARTS)
    assert sum(one["args"]["generated"] for one in steps) >= 40
    for part in parts:  # inside a step, or Perfetto draws nonsense
        assert any(
            step["ts"] - 1 <= part["ts"] and part["ts"] + part["dur"] <= step["ts"] + step["dur"] + 1 for step in steps
        )
    begins = [one for one in events if one["ph"] == "b" and one["name"].startswith("request traced")]
    assert begins[-1]["args"]["output_tokens"] == 40
    mine = [one for one in events if one.get("id") == begins[-1]["id"] and one.get("cat") == "request"]
    assert [one["name"] for one in mine if one["ph"] == "b"][1:] == ["queue", "prefill", "decode"]
    assert sorted(one["name"] for one in mine if one["ph"] == "b") == sorted(
        one["name"] for one in mine if one["ph"] == "e"
    )


@pytest.mark.parametrize("seconds", ["0", "301", "-1", "1e9", "NaN", "", "9" * 99, "٣"])
def test_a_trace_is_of_so_many_seconds(admin, seconds):
    assert admin.get(f"/debug/trace?seconds={quote(seconds)}", **as_admin())[0] == 400


def test_the_memory_of_steps_is_bounded_and_in_order(monkeypatch):
    monkeypatch.setattr(trace_log, "MAX_STEPS", 32)
    engine, log = fake_engine(num_pages=64, page_size=4, vocab_size=50), TraceLog()
    engine.add(Request(id="a", prompt_token_ids=(1,), params=SamplingParams(max_tokens=60, ignore_eos=True)))
    num_steps = 0
    while engine.has_work:
        engine.step()
        log.on_step(engine, num_steps, num_steps + 0.5, False)
        num_steps += 1
    log.on_step(engine, 1e6, 1e6, False)  # nothing was done: nothing is noted
    steps = log.steps(since=-1)
    assert num_steps > 32
    assert len(steps) == 31, "all but the row that the next step may be writing"
    assert np.array_equal(steps[:, 0], np.arange(num_steps - 31, num_steps))
    assert log.steps(since=num_steps - 3)[:, 0].tolist() == [num_steps - 3, num_steps - 2, num_steps - 1]
    assert len(log.history(now=num_steps)["steps"]) == trace_log.HISTORY_S
    assert sum(log.history(now=num_steps)["generated_tokens"]) == steps[:, trace_log.COLUMNS.index("generated")].sum()


def test_the_memory_of_requests_is_bounded():
    log = TraceLog()
    request = Request(id="a", prompt_token_ids=(1,), params=SamplingParams())
    stream = object.__new__(Stream)
    stream.request, stream.times = request, Times(1.0, 2.0, 3.0, 4.0, 5.0)
    stream.num_cached_tokens, stream.num_output_tokens, stream.origin = 0, 3, Origin()
    for _ in range(trace_log.MAX_REQUESTS + 10):
        log.on_end(stream, None)
    assert len(log._requests) == trace_log.MAX_REQUESTS


@pytest.mark.alone
def test_noting_a_step_costs_next_to_nothing():
    engine, log = fake_engine(num_pages=64, page_size=4, vocab_size=50), TraceLog()
    start = time.perf_counter()
    for i in range(2000):
        log.on_step(engine, i, i + 1, True)
    assert (time.perf_counter() - start) / 2000 < 200e-6


# -- administration ---------------------------------------------------------------------------------------------------


def test_the_prefix_cache_can_be_cleared(server, admin):
    complete(server, prompt="a prompt of several pages " * 8, max_tokens=4)
    server.wait_idle()
    cached = server.metric("quire_pages_cached")
    assert cached > 0
    status, body = admin.post("/admin/clear_prefix_cache", {}, **as_admin())
    assert (status, json.loads(body)) == (200, {"freed_pages": cached})
    assert server.metric("quire_pages_cached") == 0


def test_one_request_can_be_aborted_and_others_go_on(server, admin):
    with Running(server, 2, request_id="abortable", n=8) as running:
        ids = lambda: [one["request"] for one in pages(admin)["sequences"]]  # noqa: E731
        names = wait_for(lambda: [name for name in ids() if name.startswith("abortable")])
        status, body = admin.post("/admin/abort", {"request_id": names[0]}, **as_admin())
        assert (status, json.loads(body)) == (200, {"aborted_requests": 1})
        assert sorted(answer.result()[0] for answer in running.answers) == [200, 499]
    assert admin.post("/admin/abort", {"request_id": names[0]}, **as_admin())[0] == 404
    assert admin.post("/admin/abort", {}, **as_admin())[0] == 400
    assert complete(server, max_tokens=3)[0] == 200


def test_an_audit_can_be_asked_for_while_requests_run(server, admin):
    with Running(server, 3, n=8):
        wait_for(lambda: pages(admin)["stats"]["running"])
        assert json.loads(admin.post("/admin/audit", {}, **as_admin())[1]) == {"is_sound": True, "finding": None}
        admin.post("/admin/abort_all", {}, **as_admin())
    server.wait_idle()
    assert server.metric("quire_pages_leaked") == 0


def test_what_an_admin_does_is_logged(server, admin):
    admin.post("/admin/abort_all", {}, **as_admin())
    wait_for(lambda: any('"quire.admin"' in line and "aborted" in line for line in server.lines))
