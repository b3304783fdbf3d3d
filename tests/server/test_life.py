"""A server that has to stop, whose clients leave, whose steps fail or hang: what happens to whom."""

import concurrent.futures
import http.client
import json
import sys
import threading
import time

import openai
import pytest

from quire import SamplingParams
from tests.server.process import LONGEST_S, SMALL, serving, write_whole

pytestmark = pytest.mark.own_server

LONG = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def client_of(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


def offline_text(offline, prompt: str, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return offline.generate([prompt], params, progress=False)[0].outputs[0].text


def read_stream(server, prompt: str, max_tokens: int, started: threading.Event | None = None) -> str:
    with client_of(server) as client:
        text = ""
        for event in client.completions.create(prompt=prompt, max_tokens=max_tokens, stream=True, **LONG):
            text += event.choices[0].text
            if started:
                started.set()
        return text


@pytest.mark.slow
def test_sigterm_lets_streams_finish_and_takes_nothing_new(tiny_folder, offline):
    flags = (*SMALL, "--max-rounds", "1", "--num-pages", "1024")  # slow: more time to look than anybody needs
    with serving(tiny_folder, *flags) as server, concurrent.futures.ThreadPoolExecutor(6) as pool:
        starts = [threading.Event() for _ in range(4)]
        running = [pool.submit(read_stream, server, f"drain {i} ", 3000, starts[i]) for i in range(4)]
        assert all(start.wait(LONGEST_S) for start in starts)
        leaving = pool.submit(server.terminate)
        while server.get("/readyz")[0] == 200:
            assert not any(run.done() for run in running), "readiness must be false at once"
        assert server.get("/livez")[0] == 200
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 503
        assert [run.result() for run in running] == [offline_text(offline, f"drain {i} ", 3000) for i in range(4)]
        assert leaving.result() == 0


@pytest.mark.slow
def test_a_drain_that_takes_too_long_is_cut(tiny_folder):
    with serving(tiny_folder, *SMALL, "--drain-timeout-s", "1", "--max-rounds", "1", "--debug") as server:
        start = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            run = pool.submit(read_stream, server, "endless ", 4000, start)  # at most a round a dispatch: seconds
            assert start.wait(LONGEST_S)
            assert server.terminate() == 0
            with pytest.raises(openai.APIError):
                run.result()


def test_a_client_that_leaves_gives_its_pages_back(server):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    body = {"model": "tiny", "prompt": "leaving ", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert server.metric("quire_pages_held") > 0
    connection.close()
    response.close()
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_wherever_it_is(server, stream):
    body = {
        "model": "tiny",
        "prompt": "late ",
        "max_tokens": 4000,
        "ignore_eos": True,
        "n": 64,
        "timeout": 0.4,
        "stream": stream,
    }
    begin = time.monotonic()
    status, answer = server.post("/v1/completions", body)
    assert time.monotonic() - begin > 0.3
    if stream:
        *_, last, end = answer.decode().strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline"
        assert end == "data: [DONE]"
    else:
        assert (status, json.loads(answer)["error"]["code"]) == (408, "deadline")
    server.wait_idle()


@pytest.fixture(scope="module")
def faulty(tiny_folder, tmp_path_factory):
    """A server whose device fails when the file says so."""
    file = tmp_path_factory.mktemp("faults") / "fault"
    launcher = [sys.executable, "-m", "tests.server.faulty", "serve"]
    flags = (*SMALL, "--drain-timeout-s", "1")
    with serving(tiny_folder, *flags, launcher=launcher, env={"FAULT_FILE": str(file)}) as server:
        yield server, file


def test_a_step_that_fails_before_dispatch_fails_its_requests_and_nothing_else(faulty, offline):
    server, file = faulty
    file.write_text("raise")
    status, body = server.post("/v1/completions", {"model": "tiny", "prompt": "unlucky", "max_tokens": 8})
    assert status == 500
    assert "injected" not in body.decode()
    assert read_stream(server, "after ", 30) == offline_text(offline, "after ", 30)
    assert server.get("/health")[0] == 200
    assert server.metric("quire_failed_steps_total") >= 1
    server.wait_idle()


def test_a_step_that_fails_on_the_device_is_computed_again(faulty, offline):
    server, file = faulty
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        failed = server.metric("quire_failed_steps_total")
        starts = [threading.Event() for _ in range(3)]
        runs = [pool.submit(read_stream, server, f"again {i} ", 2500, starts[i]) for i in range(3)]
        assert starts[0].wait(LONGEST_S)
        write_whole(file, "lose")
        assert [run.result() for run in runs] == [offline_text(offline, f"again {i} ", 2500) for i in range(3)]
    assert server.metric("quire_failed_steps_total") == failed + 1
    server.wait_idle()


@pytest.mark.slow
def test_a_step_that_hangs_makes_health_false_and_life_stays(faulty):
    """Last of its module: nothing wakes this server again."""
    server, file = faulty
    file.write_text("hang")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(lambda: server.post("/v1/completions", {"model": "tiny", "prompt": "stuck"}))
        begin = time.monotonic()
        while server.get("/health")[0] == 200:
            assert time.monotonic() - begin < LONGEST_S
            time.sleep(0.1)
        assert [server.get(path)[0] for path in ("/livez", "/readyz", "/metrics")] == [200, 503, 200]
        assert server.post("/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 503
        assert b"a dispatch of" in server.get("/health")[1]
        assert not stuck.done(), "a dispatch in flight may be slow: its requests stay"
        assert server.terminate() == 0
        assert stuck.result(LONGEST_S)[0] == 503, "its time to drain is over"


def test_health_stays_true_while_every_row_is_busy(server):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        runs = [pool.submit(read_stream, server, f"busy {i} ", 1200) for i in range(16)]
        while not all(run.done() for run in runs):
            assert server.get("/health")[0] == 200
            time.sleep(0.05)
