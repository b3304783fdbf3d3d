"""Which request, and which key: one id and one label in headers, log lines, the debug page, traces and metrics."""

import concurrent.futures
import json
import time
import urllib.error
import urllib.request
import uuid

import msgspec
import pytest

from quire.server.logs import LogLine, read_line
from quire.server.openai.schema import CompletionRequest
from tests.server.process import LONGEST_S, SMALL, serving

pytestmark = pytest.mark.own_server

ALICE, NAMELESS, ADMIN_KEY = "a-key-of-alice", "a-key-without-a-name", "a-key-of-an-admin"
LONG = {"model": "tiny", "prompt": "a long one", "max_tokens": 3500, "ignore_eos": True}
SHORT = {"model": "tiny", "prompt": "a short one", "max_tokens": 3}


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "api-keys"
    keys.write_text(f"{ALICE} name=alice\n{NAMELESS}\n")
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--admin-port", "0", "--admin-key", ADMIN_KEY)
    with serving(tiny_folder, *SMALL, *flags) as running:
        yield running


def ask(server, path: str, body: object = None, key: str = ALICE, port: int | None = None, **headers: str):
    """Send a request; returns its status, the id that its response has, and the body."""
    base = server.url if port is None else f"http://127.0.0.1:{port}"
    named = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, named)
    try:
        with urllib.request.urlopen(request, timeout=LONGEST_S) as response:
            return response.status, response.headers["x-request-id"], response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["x-request-id"], error.read()


def line_of(server, request_id: str, event: str = "request") -> LogLine:
    """The line of the log with this event and this id."""
    server.wait_for_line(f'"event": "{event}"', f'"request_id": {json.dumps(request_id)}')
    found = (read_line(line) for line in server.lines if line.startswith("{"))
    return next(one for one in found if (one.event, one.request_id) == (event, request_id))


def test_a_request_gets_an_id_that_the_log_has_with_its_key(server):
    status, request_id, _ = ask(server, "/v1/completions", SHORT)
    assert status == 200
    assert uuid.UUID(request_id)
    line = line_of(server, request_id)
    assert (line.key, line.route, line.status, line.reason) == ("alice", "/v1/completions", 200, None)
    _, other_id, _ = ask(server, "/v1/models", key=NAMELESS)
    assert line_of(server, other_id).key.startswith("key-")  # type: ignore[union-attr]


@pytest.mark.parametrize("given", ["x", "Root=1-67891233-abcdef012345678912345678", '"quoted"', "z" * 128])
def test_an_id_that_the_client_gave_is_echoed(server, given):
    assert ask(server, "/v1/models", x_request_id=given)[:2] == (200, given)
    assert line_of(server, given).key == "alice"


@pytest.mark.parametrize("given", ["z" * 129, "two words", "tab\there", "\x7f", "\u00e9"])
def test_an_id_that_cannot_be_one_is_refused_and_not_repeated(server, given):
    status, request_id, body = ask(server, "/v1/models", x_request_id=given)
    assert status == 400
    assert json.loads(body)["error"]["param"] == "x-request-id"
    assert uuid.UUID(request_id)
    assert line_of(server, request_id).reason == "invalid_request_id"


@pytest.mark.parametrize(
    ("how", "status", "reason", "route"),
    [
        ({"key": "not-a-valid-key"}, 401, "invalid_api_key", "/v1/completions"),
        ({"content_type": "text/plain"}, 415, "unsupported_media_type", "/v1/completions"),
        ({"body": {"model": "other", "prompt": "x"}}, 404, "model_not_found", "/v1/completions"),
        ({"body": {"model": "tiny", "prompt": "x", "n": 0}}, 400, "invalid_value", "/v1/completions"),
        ({"path": "/secret-place"}, 404, "not_found_error", "none"),
    ],
)
def test_refusals_have_an_id_a_reason_and_a_route(server, how, status, reason, route):
    given = uuid.uuid4().hex
    body = how.get("body", SHORT)
    headers = {name: how[name] for name in ("key", "content_type") if name in how}
    assert ask(server, how.get("path", "/v1/completions"), body, x_request_id=given, **headers)[:2] == (status, given)
    line = line_of(server, given)
    assert (line.status, line.reason, line.route) == (status, reason, route)
    assert line.key == (None if status == 401 else "alice")
    assert "secret-place" not in "".join(server.lines)


def test_the_bodys_id_is_used_if_there_is_no_header(server):
    body = SHORT | {"request_id": "of-the-body"}
    assert ask(server, "/v1/completions", body)[1] == "of-the-body"
    assert line_of(server, "of-the-body").status == 200
    assert ask(server, "/v1/completions", body, x_request_id="of-the-header")[1] == "of-the-header"


@pytest.mark.parametrize("given", ["z" * 129, "two words", "ends-in-a-line\n", "two\nlines", ""])
def test_a_bodys_id_that_no_header_can_carry_is_refused(given):
    """The response repeats it in a header, when all tokens have been generated."""
    decode = msgspec.json.Decoder(CompletionRequest).decode
    assert decode(json.dumps(SHORT | {"request_id": "z" * 128})).request_id == "z" * 128
    with pytest.raises(msgspec.ValidationError, match=r"request_id"):
        decode(json.dumps(SHORT | {"request_id": given}))


def test_lines_within_a_request_name_it(server):
    ask(server, "/v1/completions", SHORT | {"colour": 1}, x_request_id="with-a-colour")
    line = line_of(server, "with-a-colour", "unknown field ignored")
    assert (line.key, line.field) == ("alice", "colour")


def test_a_request_is_found_and_aborted_by_the_clients_id(server):
    """In the debug view, the trace and the admin's call; all parts of it end, and others of the same key go on."""
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        body = LONG | {"prompt": ["one", "two"]}
        mine = threads.submit(ask, server, "/v1/completions", body, x_request_id="id/of=mine")
        other = threads.submit(ask, server, "/v1/completions", LONG | {"max_tokens": 300}, x_request_id="other")
        admin = {"key": ADMIN_KEY, "port": server.admin_port}
        deadline = time.monotonic() + LONGEST_S
        while True:
            seen = json.loads(ask(server, "/debug/pages", **admin)[2])["sequences"]
            found = [one for one in seen if one["request_id"] == "id/of=mine"]
            if len(found) == 2:
                break
            assert time.monotonic() < deadline
        assert {one["key"] for one in found} == {"alice"}
        assert all(one["request"].startswith("id/of=mine-") for one in found)
        status, _, answer = ask(server, "/admin/abort", {"request_id": "id/of=mine"}, **admin)
        assert (status, json.loads(answer)) == (200, {"aborted_requests": 2})
        assert mine.result()[:2] == (499, "id/of=mine")
        assert other.result()[0] == 200
    assert line_of(server, "id/of=mine").reason == "cancelled"
    assert ask(server, "/admin/abort", {"request_id": "id/of=mine"}, **admin)[0] == 404
    events = json.loads(ask(server, "/debug/trace?seconds=60", **admin)[2])["traceEvents"]
    args = [one["args"] for one in events if one["ph"] == "b" and one.get("args", {}).get("request_id") == "id/of=mine"]
    assert [(one["key"], one["ended"]) for one in args] == [("alice", "cancelled")] * 2


def test_no_key_is_in_the_log_or_the_metrics(server):
    shown = "".join(server.lines) + server.get("/metrics")[1].decode()
    for key in (ALICE, NAMELESS, ADMIN_KEY):
        assert key not in shown
    assert "alice" not in server.get("/metrics")[1].decode(), "anybody may read the metrics"
