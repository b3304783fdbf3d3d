"""Good and bad traffic at once: every line of the log is valid and has an id and a key; every refusal is counted."""

import collections
import concurrent.futures
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request

import pytest

from quire.server.logs import UNSET, read_line
from tests.server.process import LONGEST_S, SMALL, Server, serving

pytestmark = [pytest.mark.own_server, pytest.mark.slow]

KEYS = {"alice": "a-key-of-alice", "bob": "a-key-of-bob"}
ADMIN_KEY = "a-key-of-an-admin"
SECRET = "the pilot's secret"
LONG = {"model": "tiny", "prompt": SECRET, "max_tokens": 3500, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": SECRET, "max_tokens": 2}
ROUNDS = 3


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixed")
    keys = folder / "api-keys"
    keys.write_text("".join(f"{key} name={name}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--admin-port", "0", "--admin-key", ADMIN_KEY)
    flags += ("--max-num-seqs", "1", "--max-queued-requests", "1", "--max-body-bytes", "4096")
    with serving(tiny_folder, *SMALL, *flags, "--batch-folder", str(folder / "batches")) as running:
        yield running


def send(server: Server, body: object, name: str, request_id: str, *, key: str | None = None, path="/v1/completions"):
    """Send a request; returns its status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {
        "authorization": f"Bearer {key or KEYS[name]}",
        "content-type": "application/json",
        "x-request-id": request_id,
    }
    try:
        request = urllib.request.Request(server.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=LONGEST_S) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def admin(server: Server, path: str, body: dict | None = None) -> dict:
    headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.admin_port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=LONGEST_S) as response:
        return json.loads(response.read())


def wait_for(condition) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def counts(text: str, name: str) -> dict[str, float]:
    """The values of a metric by what is between its braces."""
    rows = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name + "{"))
    return {labels[len(name) + 1 : -1]: float(value) for labels, _, value in rows}


def test_every_line_is_valid_and_every_refusal_is_counted(server):
    sent: dict[str, tuple[str | None, int, str | None]] = {}
    """Of each request id: the key, the status and the reason that the log must have."""

    def note(request_id: str, name: str | None, status: int, reason: str | None, got: int) -> None:
        assert got == status, request_id
        sent[request_id] = (name, status, reason)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for i in range(ROUNDS):
            note(f"good-{i}", "alice", 200, None, send(server, SHORT, "alice", f"good-{i}"))
            got = send(server, SHORT, "bob", f"key-{i}", key="a-key-of-a-stranger")
            note(f"key-{i}", None, 401, "invalid_api_key", got)
            got = send(server, SHORT | {"prompt": SECRET * 1000}, "bob", f"large-{i}")
            note(f"large-{i}", "bob", 413, "body_too_large", got)
            note(f"json-{i}", "alice", 400, "invalid_json", send(server, b"{" + SECRET.encode(), "alice", f"json-{i}"))
            note(f"model-{i}", "bob", 404, "model_not_found", send(server, LONG | {"model": "x"}, "bob", f"model-{i}"))
            running = threads.submit(send, server, LONG, "alice", f"running-{i}")
            wait_for(lambda: server.metric("quire_sequences_running") == 1)
            waiting = threads.submit(send, server, LONG, "bob", f"waiting-{i}")
            wait_for(lambda: server.metric("quire_requests_waiting") == 1)
            note(f"full-{i}", "bob", 429, "max_queued_requests", send(server, SHORT, "bob", f"full-{i}"))
            for request_id, name, one in ((f"waiting-{i}", "bob", waiting), (f"running-{i}", "alice", running)):
                assert admin(server, "/admin/abort", {"request_id": request_id}) == {"aborted_requests": 1}
                note(request_id, name, 499, "cancelled", one.result())
            leave(server, f"left-{i}")
            sent[f"left-{i}"] = ("alice", 200, "cancelled")
            server.wait_for_line(f'"request_id": "left-{i}"')
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    client.recv(100)
            server.wait_idle()

    lines = [read_line(line) for line in server.lines]
    requests = {line.request_id: line for line in lines if line.event == "request"}
    assert None not in requests
    assert UNSET not in requests
    for request_id, wanted in sent.items():
        line = requests[request_id]
        assert (line.key, line.status, line.reason) == wanted, request_id
        assert line.route == "/v1/completions"
    assert SECRET not in "".join(server.lines)
    assert not any(key in "".join(server.lines) for key in (*KEYS.values(), ADMIN_KEY))

    public = server.get("/metrics")[1].decode()
    shown = server.get("/metrics", authorization=f"Bearer {ADMIN_KEY}")[1].decode()
    by_status = collections.Counter(status for _, status, _ in sent.values())
    routes = counts(shown, "quire_http_requests_total")
    for status, count in by_status.items():
        assert routes[f'route="/v1/completions",status="{status}"'] == count
    by_reason = collections.Counter(reason for _, _, reason in sent.values() if reason)
    errors = counts(shown, "quire_request_errors_total")
    assert {name: errors[f'reason="{name}"'] for name in by_reason} == by_reason
    assert counts(shown, "quire_refused_connections_total")['reason="invalid_http"'] == ROUNDS
    by_key = collections.Counter((name, status) for name, status, _ in sent.values() if name)
    of_keys = counts(shown, "quire_key_requests_total")
    assert {(n, s): of_keys[f'key="{n}",status="{s}"'] for n, s in by_key} == by_key
    assert counts(shown, "quire_key_tokens_total")['key="alice",kind="prompt"'] >= ROUNDS * len(SECRET)
    assert counts(shown, "quire_batches")['status="completed"'] == 0
    assert "alice" not in public


def leave(server: Server, request_id: str) -> None:
    """Read the head of a stream, and go."""
    body = json.dumps(LONG | {"stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"Authorization: Bearer {KEYS['alice']}\r\nX-Request-Id: {request_id}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), LONGEST_S) as client:
        client.sendall(head.encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
