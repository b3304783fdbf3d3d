"""Web pages and names that may use the server: CORS, preflights before the key, the Host header without one."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from quire.cli import build_parser, knobs_of
from quire.server.config import ServerConfig
from quire.server.http.application import guarded
from quire.server.http.guard import PUBLIC
from quire.server.keys import Keys
from quire.server.serve import check_exposure

KEY, PAGE = "a-key-of-somebody", "https://chat.example"
KEYS, NO_KEYS = Keys(given=[KEY]), Keys([])
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def ask(config: ServerConfig, keys: Keys, method: str, path: str = "/v1/models", **headers: str):
    """What the guard before a route of one's own answers: status and headers."""

    async def route(request: Request) -> PlainTextResponse:
        request.state.ignored_fields = ["colour"]
        return PlainTextResponse("in")

    routes = [Route("/v1/models", route), Route("/v1/completions", route, methods=["POST"])]
    app = guarded(routes, keys, config, public=PUBLIC, origins=config.allow_origin)
    named = {"host": "127.0.0.1:8000", "content-type": "application/json"} | headers
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()],
    }  # fmt: skip
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["keys", "no keys"])
def test_a_preflight_of_an_allowed_page_is_answered_without_a_key(keys):
    config = ServerConfig(allow_origin=(PAGE, "http://localhost:3000"))
    status, headers = ask(config, keys, "OPTIONS", "/v1/completions", **ASKS)
    assert status == 204
    assert headers["access-control-allow-origin"] == PAGE
    assert "authorization" in headers["access-control-allow-headers"]
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://chat.example.evil.example", "null", "http://chat.example", ""]
)
@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["keys", "no keys"])
@pytest.mark.parametrize("allowed", [(PAGE,), ()], ids=["one", "none"])
def test_no_other_page_is_let_in(origin, keys, allowed):
    config = ServerConfig(allow_origin=allowed)
    for method, more in (("OPTIONS", ASKS), ("GET", {})):
        status, headers = ask(config, keys, method, **(more | {"origin": origin}))
        assert status == (401 if len(keys) else 403)
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
def test_an_origin_is_no_key(method):
    config = ServerConfig(allow_origin=(PAGE,))
    status, headers = ask(config, KEYS, method, origin=PAGE)
    assert status == 401
    assert headers["access-control-allow-origin"] == PAGE, "so that the page can read what is wrong"


@pytest.mark.parametrize("keys", [KEYS, NO_KEYS], ids=["keys", "no keys"])
def test_an_allowed_page_reads_the_answer_and_what_was_ignored(keys):
    config = ServerConfig(allow_origin=(PAGE,))
    status, headers = ask(config, keys, "GET", origin=PAGE, authorization=f"Bearer {KEY}")
    assert status == 200
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["x-quire-ignored-fields"] == "colour"
    assert "x-quire-ignored-fields" in headers["access-control-expose-headers"]


def test_any_page_only_with_keys():
    config = ServerConfig(allow_origin=("*",))
    with pytest.raises(ValueError, match=r"--allow-origin \* without an API key lets every web page"):
        check_exposure(config, NO_KEYS, NO_KEYS)
    check_exposure(config, KEYS, NO_KEYS)
    check_exposure(ServerConfig(allow_origin=(PAGE,)), NO_KEYS, NO_KEYS)
    status, headers = ask(config, KEYS, "GET", origin="https://any.example", authorization=f"Bearer {KEY}")
    assert (status, headers["access-control-allow-origin"]) == (200, "*")
    assert ask(config, KEYS, "GET", origin="https://any.example")[0] == 401


def test_without_keys_it_is_used_under_names_of_its_own():
    docker = "host.docker.internal"
    for config, allowed in ((ServerConfig(), False), (ServerConfig(allow_host=(docker,)), True)):
        assert ask(config, NO_KEYS, "GET", host="localhost:8000")[0] == 200
        assert ask(config, NO_KEYS, "GET", host=f"{docker}:8000")[0] == (200 if allowed else 403)
        assert ask(config, NO_KEYS, "GET", host=docker.upper())[0] == (200 if allowed else 403)
        for host in ("evil.example", f"{docker}.evil.example", "", f"evil.example#{docker}", f"{docker}@evil.example"):
            assert ask(config, NO_KEYS, "GET", host=host)[0] == 403, host
    assert ask(ServerConfig(), KEYS, "GET", host="any.example", authorization=f"Bearer {KEY}")[0] == 200


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("allow_origin", "https://chat.example/", "no path, no / at the end"),
        ("allow_origin", "chat.example", r"must be \* or SCHEME://HOST\[:PORT\]"),
        ("allow_origin", "https://*.example", "must be"),
        ("allow_origin", "https://chat.example:443", "browsers leave the default port out"),
        ("allow_origin", "null", "must be"),
        ("allow_host", "host.docker.internal:8000", "without a port"),
        ("allow_host", "http://host", "without http://"),
        ("allow_host", "", "must be a name"),
    ],
)
def test_what_can_never_match_is_refused_at_start(field, value, says):
    with pytest.raises(ValueError, match=says):
        ServerConfig(**{field: (value,)})


def test_flags_that_may_be_repeated_become_a_tuple():
    flags = ["serve", "m", "--allow-origin", "app://obsidian.md", "--allow-origin", "http://[::1]:3000", "--no-page"]
    config = ServerConfig(**knobs_of(ServerConfig, build_parser().parse_args(flags)))
    assert config.allow_origin == ("app://obsidian.md", "http://[::1]:3000")
    assert (config.allow_host, config.page, config.strict_fields) == ((), False, False)
    assert ServerConfig(**knobs_of(ServerConfig, build_parser().parse_args(["serve", "m"]))) == ServerConfig()
