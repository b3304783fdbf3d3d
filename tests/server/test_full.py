"""A small server that is full, told to reload its keys, and silent: what is reachable, counted and logged."""

import contextlib
import http.client
import json
import os
import signal
import time

import openai
import pytest

from quire.server.http.connections import NUM_SPARE
from quire.server.logs import read_line
from tests.server.process import LONGEST_S, SMALL, serving

pytestmark = [pytest.mark.own_server, pytest.mark.slow]

ALICE, BOB = "a-key-of-alice", "a-key-of-bob"
MAX_CONNECTIONS = 4


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"{ALICE} name=alice\n")
    keys.chmod(0o600)
    return keys


@pytest.fixture(scope="module")
def server(tiny_folder, key_file):
    flags = (
        "--max-connections",
        str(MAX_CONNECTIONS),
        "--keep-alive-timeout-s",
        "2",
        "--heartbeat-s",
        "1",
        "--max-num-seqs",
        "1",
        "--access-log",
        "errors",
    )
    flags += ("--read-timeout-s", "300", "--admin-port", "0", "--admin-key", "a-key-of-an-admin")
    with serving(tiny_folder, *SMALL, *flags, "--api-key-file", str(key_file)) as running:
        yield running


def refused(server, reason: str) -> float:
    text = server.get("/metrics")[1].decode()
    name = f'quire_refused_connections_total{{reason="{reason}"}}'
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))


def models(server, key: str) -> int:
    return server.get("/v1/models", authorization=f"Bearer {key}")[0]


def test_start_and_stop_are_lines_of_the_schema(server):
    events = {line.event: line for line in map(read_line, server.lines) if line.logger == "quire.server"}
    assert {"loading", "admin", "ready"} <= events.keys()
    assert (events["ready"].url, events["ready"].model) == (server.url, "tiny")


def test_probes_are_reachable_when_all_connections_are_taken(server):
    """By silent ones too, and however many come after; each that is refused is counted."""
    before = refused(server, "max_connections")
    held = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S) for _ in range(MAX_CONNECTIONS)]
    silent = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S) for _ in range(2 * NUM_SPARE)]
    try:
        for one in held:
            one.connect()
        for path in ("/health", "/livez", "/readyz", "/metrics"):
            assert server.get(path)[0] == 200
        assert models(server, ALICE) == 503
        for one in silent:
            one.connect()
        assert server.get("/health")[0] == 200
        assert refused(server, "max_connections") - before in (1 + NUM_SPARE + 1, 1 + NUM_SPARE + 2)
    finally:
        for one in [*held, *silent]:
            one.close()
    deadline = time.monotonic() + LONGEST_S
    while models(server, ALICE) != 200:
        assert time.monotonic() < deadline


def test_a_connection_stays_open_between_requests_for_so_long(server):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)) as connection:
        connection.request("GET", "/health")
        start = time.monotonic()
        assert connection.getresponse().read() == b"ok"
        assert connection.sock.recv(1) == b"", "the server closed it"
        assert time.monotonic() - start > 1


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_a_stream_that_waits_gets_comments_which_clients_skip(server, api):
    """Beside a request that has the only row for long."""
    headers = {"authorization": f"Bearer {ALICE}", "content-type": "application/json"}
    long = {"model": "tiny", "prompt": "x", "max_tokens": 3500, "n": 64, "ignore_eos": True, "stream": True}
    bodies = {
        "completions": ("/v1/completions", {"prompt": "y", "max_tokens": 4}),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "y"}], "max_tokens": 4}),
        "responses": ("/v1/responses", {"input": "y", "max_output_tokens": 4}),
    }
    path, body = bodies[api]
    body |= {"model": "tiny", "stream": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)) as first:
        first.request("POST", "/v1/completions", json.dumps(long), headers)
        first.getresponse().readline()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)) as raw:
            raw.request("POST", path, json.dumps(body), headers)
            response = raw.getresponse()
            while not (line := response.readline()).startswith(b": "):
                assert line, "the stream ended without a comment"
            client = openai.OpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0)
            with client:
                kinds = {"completions": client.completions, "chat": client.chat.completions}
                asking = kinds.get(api, client.responses)
                stream = asking.create(**body)  # type: ignore[arg-type]
                time.sleep(2.5)  # two comments, at one a second
                first.sock.shutdown(2)
                assert list(stream)
            assert b"data: " in response.read()


def test_sighup_reloads_keys_and_a_bad_file_changes_nothing(server, key_file):
    assert (models(server, ALICE), models(server, BOB)) == (200, 401)
    with openai.OpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(stream)
        key_file.write_text(f"{BOB} name=bob\n")
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for_line('"event": "keys reloaded"')
        assert (models(server, ALICE), models(server, BOB)) == (401, 200)
        assert first.choices
        assert [one.choices[0].finish_reason for one in stream][-1] == "length", "a request that runs goes on"
    for wrong in ("short\n", "a-key-of-an-admin\n", "", f"{ALICE} colour=red\n"):
        key_file.write_text(wrong)
        num_lines = len(server.lines)
        os.kill(server.process.pid, signal.SIGHUP)
        server.wait_for_line('"event": "keys not reloaded"', '"level": "error"', start=num_lines)
        assert (models(server, ALICE), models(server, BOB)) == (401, 200)
    assert ALICE not in "".join(server.lines)


def test_the_access_log_has_errors_only_and_all_are_counted(server):
    lines = [read_line(line) for line in server.lines]
    routes = [line for line in lines if line.event == "request"]
    assert routes
    assert all(line.reason for line in routes)
    text = server.get("/metrics")[1].decode()
    assert 'quire_http_requests_total{route="/health",status="200"}' in text
    assert 'quire_build_info{jax="' in text
    assert json.loads(server.lines[-1])["time"]
