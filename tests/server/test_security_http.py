"""Attacks on the way in: connections, heads, bodies, keys, ports. A bystander's stream goes on all the while."""

import contextlib
import gzip
import json
import pickle
import socket
import subprocess
import time
from typing import Any, cast

import pytest

from quire.server import keys as keys_module
from quire.server.config import ServerConfig
from quire.server.http.debug import Admin
from quire.server.http.routes import Api
from quire.server.keys import Keys
from quire.server.serve import check_exposure
from tests.server.attack import (
    KEY,
    OTHER_KEY,
    Port,
    bystander,
    connect,
    exchange,
    head,
    listening,
    num_files,
    post,
    read_reply,
    wait_until_closed,
)
from tests.server.process import LONGEST_S, PYTHON, SMALL, serving

pytestmark = pytest.mark.own_server

READ_TIMEOUT_S = 2
WRITE_TIMEOUT_S = 2
MAX_CONNECTIONS = 200
MAX_BODY_BYTES = 1 << 20
ASK = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
ADMIN_KEY = "a-key-for-administrators"
NEEDS_NO_KEY = {"/health", "/livez", "/readyz", "/metrics", "/openapi.json", "/", "/docs"}
ADMIN_NEEDS_NO_KEY = {"/debug"}
"""A page without any data."""


@pytest.fixture(scope="module")
def locked(tiny_folder, tmp_path_factory):
    """A server with keys and small limits."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n{OTHER_KEY}\n")
    limits = {
        "--read-timeout-s": READ_TIMEOUT_S,
        "--write-timeout-s": WRITE_TIMEOUT_S,
        "--max-connections": MAX_CONNECTIONS,
        "--max-body-bytes": MAX_BODY_BYTES,
    }
    flags = [str(part) for item in limits.items() for part in item]
    flags += ["--grpc-port", "0", "--admin-port", "0", "--admin-key", ADMIN_KEY, "--api-key-file", str(file)]
    with serving(tiny_folder, *SMALL, *flags) as running:
        yield running


@pytest.fixture
def undisturbed(locked, offline):
    with bystander(locked, offline, KEY):
        yield


def serves(server) -> bool:
    return exchange(server, post("/v1/completions", ASK, key=KEY))[0] == 200


# -- T15: what a connection may cost ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [["X-Long: " + "x" * (4 << 20)], [f"X-{i}: y" for i in range(200_000)]],
    ids=["one long line", "many lines"],
)
def test_a_giant_head_is_refused_before_it_is_read(locked, undisturbed, lines):
    memory = locked.memory
    status, body = exchange(locked, head("/v1/models", *lines, key=KEY))
    assert status in (400, 0)  # 0: closed while this side was still sending
    assert status == 0 or json.loads(body)["error"]["code"] == "invalid_http"
    assert locked.memory - memory < 16 << 20


def test_a_giant_target_is_refused(locked, undisturbed):
    assert exchange(locked, head("/v1/models?" + "x" * (1 << 20), key=KEY))[0] in (400, 0)


@pytest.mark.parametrize("key", [KEY, "no-such-key"], ids=["good key", "bad key"])
def test_an_endless_body_is_cut_off(locked, undisturbed, key):
    """Refused when it is too long, or at once for want of a key; and then nobody listens to it for ever."""
    memory, begin = locked.memory, time.monotonic()
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with connect(locked) as client:
        client.sendall(
            head(
                "/v1/completions",
                "Content-Type: application/json",
                "Transfer-Encoding: chunked",
                method="POST",
                key=key,
            )
        )
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() - begin < LONGEST_S, "the server still listens"
                client.sendall(chunk)
    assert locked.memory - memory < 64 << 20
    assert serves(locked)


@pytest.mark.parametrize("key", [KEY, "no-such-key"], ids=["good key", "bad key"])
def test_an_unwanted_body_in_small_bytes_does_not_hold_its_connection(locked, undisturbed, key):
    """Its request is answered long before the body ends; every byte of it used to win another half minute."""
    with connect(locked) as client:
        lines = ("Content-Type: application/json", f"Content-Length: {MAX_BODY_BYTES + 1}")
        client.sendall(head("/v1/completions", *lines, method="POST", key=key))
        status, _ = read_reply(client)
        assert status == (413 if key == KEY else 401)
        send_until_cut_off(client, b" " * 2000)


def test_a_body_that_is_too_long_is_told_so(locked, undisturbed):
    """The client that sends all of it before it reads gets the answer, not a broken connection."""
    status, body = exchange(locked, post("/v1/completions", b" " * (8 * MAX_BODY_BYTES), key=KEY))
    assert status == 413
    assert json.loads(body)["error"]["code"] == "body_too_large"


def test_an_absurd_length_is_refused_at_once(locked, undisturbed):
    for length in ("1" + "0" * 18, "9" * 400, "-1", "0x10", "²"):
        lines = ("Content-Type: application/json", f"Content-Length: {length}")
        assert exchange(locked, head("/v1/completions", *lines, method="POST", key=KEY))[0] in (400, 413), length


def test_a_head_a_byte_at_a_time_is_cut_off(locked, undisturbed):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(locked)) for _ in range(50)]
        alive = set(clients)
        for byte in head("/v1/models", "X-Long: " + "x" * 500, key=KEY)[:-2]:
            for client in list(alive):
                try:
                    client.sendall(bytes([byte]))
                except ConnectionError:
                    alive.discard(client)
            time.sleep(0.1)
            if not alive:
                break
        assert not alive


def test_a_second_head_a_byte_at_a_time_is_cut_off_too(locked, undisturbed):
    with connect(locked) as client:
        client.sendall(head("/v1/models", key=KEY))
        assert read_reply(client)[0] == 200
        send_until_cut_off(client, head("/v1/models", "X-Long: " + "x" * 1000))


def send_until_cut_off(client: socket.socket, data: bytes) -> None:
    """A byte at a time: nobody takes all of them."""
    try:
        for byte in data:
            client.sendall(bytes([byte]))
            time.sleep(0.05)
    except ConnectionError:
        return
    pytest.fail("all of it was taken")


def test_a_connection_that_says_nothing_is_closed(locked, undisturbed):
    with connect(locked) as client:
        wait_until_closed(client)


def test_a_body_a_byte_a_second_is_told_that_it_is_too_slow(locked, undisturbed):
    with connect(locked) as client:
        begin = time.monotonic()
        lines = ("Content-Type: application/json", "Content-Length: 1000")
        client.sendall(head("/v1/completions", *lines, method="POST", key=KEY))
        client.settimeout(1)
        reply = b""
        while not reply and time.monotonic() - begin < LONGEST_S:
            client.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                reply = client.recv(65536)
        assert time.monotonic() - begin > READ_TIMEOUT_S - 0.5
        with contextlib.suppress(ConnectionError):
            client.settimeout(5)
            while more := client.recv(65536):
                reply += more
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b'"slow_body"' in reply


def test_a_promise_to_continue_is_not_waited_for_longer_than_a_body(locked, undisturbed):
    with connect(locked) as client:
        lines = ("Content-Type: application/json", "Content-Length: 10", "Expect: 100-continue")
        client.sendall(head("/v1/completions", *lines, method="POST", key=KEY))
        data = b""
        while b"408" not in data:
            more = client.recv(65536)
            assert more
            data += more


def test_a_compressed_body_is_not_unpacked(locked, undisturbed):
    bomb = gzip.compress(b" " * (64 << 20))
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, identity", "GZIP"):
        status, body = exchange(locked, post("/v1/completions", bomb, f"Content-Encoding: {encoding}", key=KEY))
        assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_encoding")
    lines = ("Content-Encoding: gzip", "Content-Encoding: identity")
    assert exchange(locked, post("/v1/completions", bomb, *lines, key=KEY))[0] == 400


AMBIGUOUS = [
    ("Content-Length: 4", "Content-Length: 40"),
    ("Content-Length: 4", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
    ("Transfer-Encoding:\x0bchunked",),
    ("Content-Length : 4",),
]


def test_a_request_that_can_be_read_in_two_ways_is_answered_once(locked, undisturbed):
    """What one reader takes for a body, another takes for a second request."""
    hidden = head("/v1/models", key=KEY)
    for lines in AMBIGUOUS:
        data = head("/v1/completions", "Content-Type: application/json", *lines, method="POST", key=KEY)
        with connect(locked) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data + b"0\r\n\r\n" + hidden)
            status, _ = read_reply(client)
            assert 400 <= status < 500 or status == 0, lines
            client.settimeout(0.3)
            with contextlib.suppress(TimeoutError, ConnectionError):
                assert b'"object"' not in client.recv(65536), lines


def test_what_is_not_http_is_told_so_or_cut_off(locked, undisturbed):
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,  # a TLS hello
        b"\x00" * 100_000,
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\x00y\r\n\r\n",
    ):
        with connect(locked) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
            assert read_reply(client)[0] in (0, 400, 401), data[:40]
    assert locked.get("/livez")[0] == 200


def test_a_broken_chunk_after_the_answer_ends_the_connection_quietly(locked, undisturbed):
    num_lines = len(locked.lines)
    with connect(locked) as client:
        client.sendall(head("/v1/completions", "Transfer-Encoding: chunked", method="POST"))
        assert read_reply(client)[0] == 401
        client.sendall(b"this is no chunk\r\n")
        wait_until_closed(client)
    assert not [line for line in locked.lines[num_lines:] if '"level": "error"' in line]


def test_a_client_that_leaves_before_its_body_is_complete_is_no_error_of_ours(locked, undisturbed):
    num_lines = len(locked.lines)
    with connect(locked) as client:
        lines = ("Content-Type: application/json", "Content-Length: 1000")
        client.sendall(head("/v1/completions", *lines, method="POST", key=KEY) + b"{")
        time.sleep(0.2)
    locked.wait_for_line('"route": "/v1/completions"', '"method": "POST"', start=num_lines)
    new = locked.lines[num_lines:]
    assert not [line for line in new if '"level": "error"' in line or '"status": 500' in line]


def wait_for_files(server, most: int) -> None:
    """Until a server has no more open files, but for a few."""
    deadline = time.monotonic() + LONGEST_S
    while num_files(server) > most + 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_thousand_connections_leave_room_for_those_who_ask(locked, undisturbed):
    """Those beyond the limit get a 503; those that say nothing are closed; then all is as before."""
    before, refused = num_files(locked), 0
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(2000):
            clients.append(stack.enter_context(connect(locked)))
        wait_for_files(locked, before + MAX_CONNECTIONS)  # the others have been closed
        for client in clients:
            client.settimeout(0.01)
            with contextlib.suppress(TimeoutError, ConnectionError):
                refused += client.recv(64).startswith(b"HTTP/1.1 503 ")
        assert refused > 1000  # not all but the limit: where this takes long, the first have been closed by now
        deadline = time.monotonic() + LONGEST_S
        while not serves(locked):  # although all of them are still open on this side
            assert time.monotonic() < deadline
    wait_for_files(locked, before)


def test_more_requests_at_once_than_anybody_reads_answers_to(locked, undisturbed):
    """Thousands on one connection: they are taken one by one, and the connection ends when nobody reads."""
    memory, before = locked.memory, num_files(locked)
    with connect(locked, receive_buffer=4096) as client:
        client.setblocking(False)
        data, begin = memoryview(head("/openapi.json", key=KEY) * 10_000), time.monotonic()
        with contextlib.suppress(ConnectionError):
            while data and time.monotonic() - begin < 2:
                with contextlib.suppress(BlockingIOError):
                    data = data[client.send(data) :]
        while num_files(locked) > before:
            assert time.monotonic() - begin < LONGEST_S, "the connection is still there"
            time.sleep(0.1)
    assert locked.memory - memory < 32 << 20


def test_a_client_that_never_reads_its_stream_is_cut_off(locked, offline):
    """Its sequence ends, its pages come back, and its connection does not stay behind."""
    with bystander(locked, offline, KEY):
        before = num_files(locked)
        body = {"model": "tiny", "prompt": "unread ", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 4,
                "return_token_ids": True, "logprobs": 20}  # fmt: skip
        with connect(locked, receive_buffer=4096) as client:
            client.sendall(post("/v1/completions", json.dumps(body).encode(), key=KEY))
            ended = 'quire_sequences_ended_total{finish_reason="cancelled"}'
            count = _labelled(locked, ended)
            deadline = time.monotonic() + LONGEST_S
            while _labelled(locked, ended) == count or num_files(locked) > before:
                assert time.monotonic() < deadline, "the stream, or its connection, is still there"
                time.sleep(0.1)
            read = b""
            with contextlib.suppress(ConnectionError):
                while more := client.recv(1 << 20):
                    read += more
            assert b"[DONE]" not in read
    locked.wait_idle()


def _labelled(server, name: str) -> float:
    text = server.get("/metrics")[1].decode()
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)), 0.0)


@pytest.mark.alone
def test_an_answer_is_not_held_back_for_an_acknowledgement(locked):
    """On a connection that is used again, Nagle's algorithm would wait 40 ms for the client's kernel."""
    with connect(locked) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        quickest = 1.0
        for i in range(30):
            begin = time.perf_counter()
            client.sendall(head("/livez"))
            assert read_reply(client) == (200, b"ok")
            quickest = min(quickest, time.perf_counter() - begin) if i > 10 else quickest
        assert quickest < 0.03


# -- T16, T17: nobody without a key -----------------------------------------------------------------------------------


def routes(api: type) -> list[tuple[str, str]]:
    """Of the application itself, so that one that is added is here too."""
    guard = api(cast(Any, None), ServerConfig(), cast(Any, None)).app(Keys([]))
    found = []
    for route in guard._app.routes:
        path = route.path.replace("{name:path}", "tiny").replace("{file_id}", "file-0").replace("{batch_id}", "batch_0")
        assert "{" not in path, "say here what to put for it"
        found += [(method, path) for method in sorted(route.methods)]
    assert len(found) > 5
    return found


def test_every_route_needs_a_key(locked, undisturbed):
    admin = Port(locked.admin_port)
    for server, api, public, others_key in (
        (locked, Api, NEEDS_NO_KEY, ADMIN_KEY),
        (admin, Admin, ADMIN_NEEDS_NO_KEY, KEY),
    ):
        for method, path in routes(api):
            for key in (None, "no-such-key", others_key):
                data = post(path, ASK, key=key) if method == "POST" else head(path, method=method, key=key)
                status, body = _exchange(server, data, method)
                if path in public:
                    assert status == 200, path
                else:
                    assert status == 401, path
                    assert method == "HEAD" or json.loads(body)["error"]["code"] == "invalid_api_key"


def test_administration_is_on_its_own_port(locked, undisturbed):
    """No route of the one port is on the other, with whichever key."""
    admin = Port(locked.admin_port)
    for server, api in ((admin, Api), (locked, Admin)):
        for method, path in routes(api):
            for key in (KEY, ADMIN_KEY):
                data = post(path, ASK, key=key) if method == "POST" else head(path, method=method, key=key)
                assert _exchange(server, data, method)[0] in (401, 404), path
    assert exchange(admin, head("/debug/pages", key=ADMIN_KEY))[0] == 200
    for target in SPELLINGS:
        assert exchange(admin, head(target))[0] in (400, 401, 404), target


def test_one_key_for_both_ports_is_refused():
    keys = Keys(given=[KEY, OTHER_KEY])
    with pytest.raises(ValueError, match="--admin-key"):
        check_exposure(ServerConfig(admin_port=0), keys, Keys(given=[ADMIN_KEY, OTHER_KEY]))
    with pytest.raises(ValueError, match="--admin-key"):
        check_exposure(ServerConfig(admin_port=0), keys, Keys([]))


def _exchange(server, data: bytes, method: str) -> tuple[int, bytes]:
    """An answer to HEAD has no body, whatever its length says."""
    if method != "HEAD":
        return exchange(server, data)
    with connect(server) as client:
        client.sendall(data)
        return int(client.recv(65536).split()[1]), b""


def test_no_other_method_gets_past_the_key(locked, undisturbed):
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"):
        for path in ("/v1/models", "/v1/completions", "/nothing"):
            assert exchange(locked, head(path, method=method))[0] in (400, 401), (method, path)


SPELLINGS = [
    "//v1/models", "/v1//models", "/./v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1/models", "/v1%2fmodels", "/v1/models/", "/V1/MODELS", "/v1/models%00", "/v1/models;/health",
    "/v1/models?/health", "/v1/models#/health", "/health;/v1/models", "\\v1\\models", "/%76%31/models",
    "http://localhost/v1/models", "http://localhost/health/../v1/models", "http:///v1/models", "*", "v1/models",
    "/metrics/../v1/models", "/metrics/", "//health", "/%2fhealth", "/Health", "/health/", "/health%20", "/health%00",
    "/v1/models/../../health", "/.%2e/v1/models", "/v1/models/%2e%2e/%2e%2e/health",
]  # fmt: skip
"""Some are a route under another name, most are none; without a key none is answered."""
HEADERS = [
    "Origin: http://localhost", "Origin: null", "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1",
    "X-Forwarded-Host: localhost", "X-Forwarded-Prefix: /health", "X-Original-URL: /health",
    "X-Rewrite-URL: /health", "X-Forwarded-Uri: /health", "X-HTTP-Method-Override: OPTIONS",
    "Forwarded: for=127.0.0.1;host=localhost", "Referer: http://localhost/health", "Cookie: key=x",
    f"X-Api-Key: {KEY}", f"Authorization: Basic {KEY}", f"Authorization: {KEY}", "Authorization: Bearer",
    "Authorization: Bearer  ", f"Authorization: Bearer {KEY[:-1]}", f"Authorization: Bearer {KEY}x",
    f"Authorization: Bearer {KEY.upper()}", f"Authorization: Bearer {KEY},{KEY}", "Authorization: Bearer \xff\xfe",
    f"Proxy-Authorization: Bearer {KEY}", "Upgrade: websocket\r\nConnection: Upgrade", "Connection: Authorization",
    f"Authorization: Bearer no\r\nAuthorization: Bearer {KEY}",
    f"Authorization: Bearer {KEY}\r\nAuthorization: Bearer no",
]  # fmt: skip


def test_no_spelling_of_a_path_gets_past_the_key(locked, undisturbed):
    for target in SPELLINGS:
        assert exchange(locked, head(target))[0] in (400, 401), target


def test_no_header_gets_past_the_key(locked, undisturbed):
    for line in HEADERS:
        for host in ("localhost", "127.0.0.1", "/health"):
            assert exchange(locked, head("/v1/models", line, host=host))[0] in (400, 401), line
        status, body = exchange(locked, head("/livez", line))
        assert (status, body) == (200, b"ok") or status == 400, line


def test_the_key_itself_does_get_past(locked, undisturbed):
    for key in (KEY, OTHER_KEY):
        assert exchange(locked, head("/v1/models", key=key))[0] == 200


ASKED_FROM = [
    ("localhost:8000", (), 200),
    ("[::1]:8000", (), 200),
    ("localhost", ("Origin: http://localhost:3000",), 200),
    ("evil.example", (), 403),
    ("localhost.evil.example", (), 403),
    ("127.0.0.1.evil.example", (), 403),
    ("localhost@evil.example", (), 403),
    ("", (), 403),
    ("[", (), 403),
    ("[::1", (), 403),
    ("localhost]", (), 403),
    ("localhost", ("Origin: http://evil.example",), 403),
    ("localhost", ("Origin: null",), 403),
    ("localhost", ("Origin: http://[",), 403),
    ("localhost", ("Origin: http://evil.example", "Origin: http://localhost"), 400),
]


def test_without_a_key_a_web_page_cannot_ask(server, offline):
    """DNS rebinding and cross-site requests, against a server that asks for no key."""
    with bystander(server, offline):
        for host, lines, status in ASKED_FROM:
            assert exchange(server, head("/v1/models", *lines, host=host))[0] == status, (host, lines)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            lines = (f"Content-Type: {kind}", f"Content-Length: {len(ASK)}")
            assert exchange(server, head("/v1/completions", *lines, method="POST") + ASK)[0] == 415, kind


# -- T18: keys --------------------------------------------------------------------------------------------------------


def test_keys_are_kept_hashed_and_all_are_compared(monkeypatch, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n{OTHER_KEY}\n")
    keys = Keys(given=["a-third-key-given"], file=file)
    kept = repr(vars(keys)) + pickle.dumps(vars(keys)).decode("latin-1")
    assert not [key for key in (KEY, OTHER_KEY, "a-third-key-given") if key in kept]
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    for key, is_good in ((KEY, True), (OTHER_KEY, True), ("a-third-key-given", True), ("nobody's", False), ("", False)):
        compared.clear()
        assert (keys.find(key) is not None) is is_good
        assert len(compared) == 3  # whichever fits, and none of them in the clear
        assert {len(part) for pair in compared for part in pair} == {32}


def test_tenants_differ_and_tell_nothing_of_their_keys():
    keys = Keys(given=[KEY, OTHER_KEY])
    shown = [
        (caller.tenant, caller.name.removeprefix("key-")) for key in (KEY, OTHER_KEY) if (caller := keys.find(key))
    ]
    assert len({name for names in shown for name in names}) == 4
    hashes = "".join(hashed.hex() for hashed in keys._callers)
    assert not [name for names in shown for name in names if name in hashes]


@pytest.mark.parametrize("key", ["short", "with space in it", "", "nön-ascii-key"])
def test_a_bad_key_is_refused_at_start(key):
    with pytest.raises(ValueError, match="at least 8 printable ASCII"):
        Keys(given=[key])


# -- T2, T3, T4: ports ------------------------------------------------------------------------------------------------


def test_it_listens_on_loopback_and_nowhere_else(server, locked):
    assert listening(server) == {("127.0.0.1", server.port)}
    assert listening(locked) == {("127.0.0.1", port) for port in (locked.port, locked.admin_port, locked.grpc_port)}


def test_it_does_not_listen_beyond_this_machine_without_a_key(tiny_folder):
    command = [*PYTHON, "-m", "quire", "serve", str(tiny_folder), "--host", "0.0.0.0", "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert run.returncode == 2
    assert "there is no API key" in run.stderr
    for host in ("::", "192.0.2.1", "example.org", "localhost.example.org", "0"):
        with pytest.raises(ValueError, match="there is no API key"):
            check_exposure(ServerConfig(host=host), Keys([]), Keys([]))


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_to_every_port_run_nothing(locked, undisturbed, tmp_path):
    canary = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Touch(str(canary)), protocol)
        for address in listening(locked):
            for sent in (data, len(data).to_bytes(4, "big") + data, len(data).to_bytes(8, "little") + data):
                with socket.create_connection(address) as client, contextlib.suppress(ConnectionError):
                    client.sendall(sent)
                    client.shutdown(socket.SHUT_WR)
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            assert exchange(locked, post(path, data, key=KEY))[0] == 400
            body = head(
                path, "Content-Type: application/x-pickle", f"Content-Length: {len(data)}", method="POST", key=KEY
            )
            assert exchange(locked, body + data)[0] == 415
    assert not canary.exists()
    assert serves(locked)


def test_metrics_and_probes_tell_no_prompt_and_no_token(locked, undisturbed):
    canary = "zanzibar"
    fields = {"model": "tiny", "prompt": f"{canary} {canary}", "max_tokens": 4, "user": canary, "cache_salt": canary,
             "request_id": canary, "return_token_ids": True}  # fmt: skip
    status, body = exchange(locked, post("/v1/completions", json.dumps(fields).encode(), key=KEY))
    assert status == 200
    ids = json.loads(body)["choices"][0]["prompt_token_ids"]
    caller = keys_module.Keys(given=[KEY]).find(KEY)
    assert caller
    for path in NEEDS_NO_KEY:
        text = exchange(locked, head(path))[1].decode()
        for secret in (canary, str(ids)[1:-1], KEY, caller.tenant):
            assert secret not in text
