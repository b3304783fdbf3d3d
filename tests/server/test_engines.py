"""A server of several engines: one address, one queue, one page of metrics; an engine drains, hangs, and is told of."""

import concurrent.futures
import contextlib
import http.client
import json
import sys
import threading
import time

import pytest

from quire import SamplingParams
from tests.server.process import LONGEST_S, SMALL, serving, write_whole

pytestmark = pytest.mark.own_server

TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
ADMIN = {"authorization": "Bearer a-key-of-an-admin"}
FLAGS = ("--drain-timeout-s", "1", "--mesh", "data=2", "--admin-port", "0", "--admin-key", "a-key-of-an-admin")


@pytest.fixture(scope="module")
def faulty(tiny_folder, tmp_path_factory):
    """A server of two engines, and the file that makes a step fail."""
    faults = tmp_path_factory.mktemp("faults") / "fault"
    launcher = [sys.executable, "-m", "tests.server.faulty", "serve"]
    environment = TWO_DEVICES | {"FAULT_FILE": str(faults)}
    with serving(tiny_folder, *SMALL, *FLAGS, env=environment, launcher=launcher) as server:
        server.faults = faults
        yield server


def complete(server, prompt: str, max_tokens: int = 8, **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | fields)


def text_of(response) -> str:
    status, body = response
    assert status == 200, body
    return json.loads(body)["choices"][0]["text"]


def admin(server, path: str, body: object = None):
    url, server.url = server.url, f"http://127.0.0.1:{server.admin_port}"
    try:
        status, content = server.get(path, **ADMIN) if body is None else server.post(path, body, **ADMIN)
    finally:
        server.url = url
    return status, json.loads(content)


def engines(server) -> list[dict]:
    return admin(server, "/admin/engines")[1]["engines"]


def labelled(server, name: str) -> list[float]:
    """A metric of each engine."""
    lines = server.get("/metrics")[1].decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{engine=")]


def test_texts_are_those_of_one_engine_and_both_are_used(faulty, offline):
    prompts = [f"prompt {i}, and so on" for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    want = [output.outputs[0].text for output in offline.generate(prompts, params, progress=False)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda prompt: text_of(complete(faulty, prompt)), prompts))
    assert texts == want
    assert labelled(faulty, "quire_engine_healthy") == [1, 1]
    assert faulty.metric("quire_pages") == 2 * 512
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1024"}' in faulty.get("/metrics")[1].decode()
    for number in (0, 1):
        status, view = admin(faulty, f"/debug/pages?engine={number}")
        assert (status, view["server"]["engine"], view["server"]["engines"]) == (200, number, 2)
        assert view["stats"]["generated_tokens"] > 0
    assert admin(faulty, "/debug/pages?engine=2")[0] == 400
    trace = admin(faulty, "/debug/trace")[1]["traceEvents"]
    assert {"engine 0", "engine 1"} <= {event["args"].get("name") for event in trace if event["ph"] == "M"}
    assert admin(faulty, "/admin/audit", {})[1] == {"is_sound": True, "finding": None}
    assert admin(faulty, "/admin/clear_prefix_cache", {})[1]["freed_pages"] > 0


def test_an_engine_drains_and_goes_on(faulty):
    status, body = admin(faulty, "/admin/drain_engine", {"engine": 0})
    assert (status, [one["refusal"] for one in body["engines"]]) == (200, ["draining", None])
    assert labelled(faulty, "quire_engine_draining") == [1, 0]
    before = admin(faulty, "/debug/pages?engine=0")[1]["stats"]["generated_tokens"]
    for i in range(4):
        text_of(complete(faulty, f"while it drains {i}"))
    assert admin(faulty, "/debug/pages?engine=0")[1]["stats"]["generated_tokens"] == before
    assert (faulty.get("/readyz")[0], faulty.get("/health")[0]) == (200, 200)
    assert admin(faulty, "/admin/drain_engine", {"engine": 1})[0] == 400, "the last one"
    assert admin(faulty, "/admin/drain_engine", {"engine": 2})[0] == 400
    assert admin(faulty, "/admin/resume_engine", {"engine": 0})[0] == 200
    assert [one["refusal"] for one in engines(faulty)] == [None, None]


def test_requests_with_one_key_stay_together(faulty):
    before = [admin(faulty, f"/debug/pages?engine={i}")[1]["stats"]["prompt_tokens"] for i in (0, 1)]
    for i in range(6):
        text_of(complete(faulty, f"{i} begins differently", prompt_cache_key="one session"))
    after = [admin(faulty, f"/debug/pages?engine={i}")[1]["stats"]["prompt_tokens"] for i in (0, 1)]
    assert sorted(new == old for old, new in zip(before, after, strict=True)) == [False, True]


@pytest.mark.slow
def test_a_hanging_engine_is_told_of_and_the_other_serves(faulty):
    write_whole(faulty.faults, "hang")

    def stuck() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # until the server is gone
            complete(faulty, "into the one that hangs")

    threading.Thread(target=stuck, daemon=True).start()
    begin = time.monotonic()
    while (answer := faulty.get("/health"))[0] == 200:
        assert time.monotonic() - begin < LONGEST_S
        time.sleep(0.1)
    status, body = answer
    assert status == 503
    (silent,) = [one["engine"] for one in engines(faulty) if not one["is_healthy"]]
    assert body.decode().startswith(f"engine {silent} of 2 (0 is the first) does not respond: a dispatch of")
    assert faulty.get("/readyz")[0] == 200
    for i in range(4):
        text_of(complete(faulty, f"the other one {i}"))
    assert sorted(labelled(faulty, "quire_engine_healthy")) == [0, 1]
    assert faulty.metric("quire_healthy") == 0
