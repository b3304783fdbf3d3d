"""What one connection may cost the event loop: requests in many small parts, for which others would have to wait."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import pytest

from quire.cli import main
from quire.server.access import AccessLog
from quire.server.config import ServerConfig
from quire.server.http import connections
from quire.server.http.application import json_response
from quire.server.http.connections import FREE_CHUNKS, MAX_EVENTS, MAX_HEADERS
from quire.server.http.guard import Guard
from quire.server.http.origins import AllowedOrigins
from quire.server.keys import Caller, Keys
from quire.server.observe.metrics import CONNECTION_REASONS, Metrics
from quire.server.serve import _listen, _Server, _serving
from tests.server.attack import head, post

KEY = "a-key-for-the-tests"
LONG_S = 600.0
CHUNKS = ("Content-Type: application/json", "Transfer-Encoding: chunked")
SMALL_CHUNK = b"1\r\nx\r\n"
Exchange = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def count_body(scope: Any, receive: Any, send: Any) -> None:
    """Respond with the number of bytes of the body."""
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    await json_response(num_bytes)(scope, receive, send)


class EventCounter:
    """Counts the events that are parsed in one turn of the event loop, and in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_events = self.most_in_a_turn = self._num_in_turn = 0
        next_event = h11.Connection.next_event

        def counted(connection: h11.Connection) -> Any:
            event = next_event(connection)
            if connection.our_role is h11.SERVER and event is not h11.NEED_DATA and event is not h11.PAUSED:
                if not self._num_in_turn:
                    asyncio.get_running_loop().call_soon(self._end_turn)
                self.num_events += 1
                self._num_in_turn += 1
            return event

        monkeypatch.setattr(h11.Connection, "next_event", counted)

    def _end_turn(self) -> None:
        self.most_in_a_turn, self._num_in_turn = max(self.most_in_a_turn, self._num_in_turn), 0


def with_server(exchange: Exchange, app: Any = count_body, **limits: Any) -> dict[str, float]:
    """Talk to a real port of the server; returns how many connections were refused, or ended, by reason."""

    async def run() -> None:
        config = ServerConfig(port=0, **limits)
        guard = Guard(app, Keys([KEY]), config, frozenset(), AllowedOrigins(()), {}, frozenset())
        listener = _listen("127.0.0.1", 0)
        async with asyncio.timeout(LONG_S), _serving(guard, config, listener, metrics):
            reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1 << 16)
            await exchange(reader, writer)
            writer.close()

    metrics = Metrics()
    asyncio.run(run())
    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    refused = [sample for sample in samples if sample.name == "quire_refused_connections_total"]
    assert {sample.labels["reason"] for sample in refused} == set(CONNECTION_REASONS)
    return {sample.labels["reason"]: sample.value for sample in refused if sample.value}


async def read_reply(reader: asyncio.StreamReader) -> tuple[int, Any]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
    (length,) = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length")]
    return int(lines[0].split()[1]), json.loads(await reader.readexactly(length))


def test_chunks_of_one_byte_are_parsed_in_many_turns(monkeypatch):
    counter, num_chunks = EventCounter(monkeypatch), FREE_CHUNKS - 1

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key=KEY) + SMALL_CHUNK * num_chunks + b"0\r\n\r\n")
        assert await read_reply(reader) == (200, num_chunks)
        writer.write(post("/", b"123", key=KEY))
        assert await read_reply(reader) == (200, 3), "the connection is as good as new"

    with_server(exchange)
    assert counter.num_events == num_chunks + 2 + 3
    assert 1 < counter.most_in_a_turn <= MAX_EVENTS


def test_after_a_refusal_the_rest_of_a_body_is_not_parsed(monkeypatch):
    counter = EventCounter(monkeypatch)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key="not-the-key"))
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                writer.write(SMALL_CHUNK * 10_000)
                await writer.drain()
        status, body = await read_reply(reader)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    with_server(exchange)
    assert 1 < counter.num_events <= 4 * MAX_EVENTS


def test_after_a_refusal_the_rest_of_a_body_is_still_received(monkeypatch):
    """Reading was paused when the refusal was sent: the client had sent more parts than are parsed in one turn."""
    monkeypatch.setattr(connections, "LINGER_S", 30.0)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key="not-the-key") + SMALL_CHUNK * 1000)
        assert (await read_reply(reader))[0] == 401
        for _ in range(32):  # more than the buffers of both sockets hold
            writer.write(b"x" * (1 << 20))
            await writer.drain()

    with_server(exchange)


def test_after_a_refusal_a_short_body_leaves_the_connection_open():
    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):
            whole = post("/", b"123456", key="not-the-key")
            writer.write(whole[:-6])
            assert (await read_reply(reader))[0] == 401
            writer.write(whole[-6:])
        writer.write(post("/", b"1234", key=KEY) * 3)  # the next ones do not wait for the responses
        assert [await read_reply(reader) for _ in range(3)] == [(200, 4)] * 3

    with_server(exchange)


@pytest.mark.parametrize("num_headers", [MAX_HEADERS - 4, MAX_HEADERS + 1, 8000])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_headers_are_counted_before_they_are_parsed(monkeypatch, num_headers, end):
    parsed = []
    next_event = h11.Connection.next_event

    def recorded(connection: h11.Connection) -> Any:
        event = next_event(connection)
        if isinstance(event, h11.Request):
            parsed.append(len(list(event.headers)))
        return event

    monkeypatch.setattr(h11.Connection, "next_event", recorded)
    lines = ["POST / HTTP/1.1", "Host: x", "Content-Type: application/json", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Length: 300", *["a:"] * num_headers, "", ""]

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(end.join(lines).encode() + b"\n" * 300)
        status, body = await read_reply(reader)
        if num_headers < MAX_HEADERS:
            assert (status, body) == (200, 300)
        else:
            assert (status, body["error"]["code"]) == (400, "invalid_http")

    with_server(exchange)
    assert parsed == ([num_headers + 4] if num_headers < MAX_HEADERS else [])


@pytest.mark.parametrize("num_trailers", [0, MAX_HEADERS - 1, MAX_HEADERS + 2, 7500])
@pytest.mark.parametrize("key", [KEY, "not-the-key"])
def test_trailers_are_counted_before_they_are_parsed(monkeypatch, num_trailers, key):
    """Of a body that is read, and of one whose request has been refused."""
    parsed = []
    next_event = h11.Connection.next_event

    def recorded(connection: h11.Connection) -> Any:
        event = next_event(connection)
        if connection.our_role is h11.SERVER and isinstance(event, h11.EndOfMessage):
            parsed.append(len(list(event.headers)))
        return event

    monkeypatch.setattr(h11.Connection, "next_event", recorded)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key=key) + SMALL_CHUNK)
        if key != KEY:
            assert (await read_reply(reader))[0] == 401
        writer.write(b"0\r\n")
        writer.write(b"a:\r\n" * num_trailers + b"\r\n")
        if num_trailers < MAX_HEADERS:
            writer.write(post("/", b"123", *["a:"] * (MAX_HEADERS - 4), key=KEY))
        replies = [await read_reply(reader)] if key == KEY else []
        if num_trailers < MAX_HEADERS:
            assert [*replies, (await read_reply(reader))] == [(200, 1)] * len(replies) + [(200, 3)]
        elif key == KEY:
            assert (replies[0][0], replies[0][1]["error"]["code"]) == (400, "invalid_http")
        else:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""

    with_server(exchange)
    assert parsed == ([num_trailers, 0] if num_trailers < MAX_HEADERS else [])


def test_a_body_of_too_many_chunks_is_refused_whoever_sends_it():
    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key=KEY))
        with contextlib.suppress(ConnectionError):
            for _ in range(FREE_CHUNKS // 1000 + 1):
                writer.write(SMALL_CHUNK * 1000)
                await writer.drain()
        status, body = await read_reply(reader)
        assert status == 400
        assert "too many chunks" in body["error"]["message"]

    with_server(exchange)


def test_a_large_body_may_come_in_as_many_parts_as_a_network_makes_of_it():
    num_parts = FREE_CHUNKS + 4000

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key=KEY))
        for _ in range(num_parts):
            writer.write(b"200\r\n" + b"x" * 512 + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert await read_reply(reader) == (200, 512 * num_parts)

    with_server(exchange)


# -- connections that the server ends are counted ----------------------------------------------------------------------


async def send_much(scope: Any, receive: Any, send: Any) -> None:
    """Respond with more than a socket holds."""
    await json_response(b"x" * (32 << 20))(scope, receive, send)


@pytest.mark.parametrize("before", [b"", head("/", key=KEY)], ids=["first", "second"])
@pytest.mark.parametrize("part", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "part"])
def test_a_head_that_does_not_come_in_time_is_counted(before, part):
    """On a connection that had a request before, only a head that has begun: between two it may rest."""

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if before:
            writer.write(before)
            assert await read_reply(reader) == (200, 0)
        writer.write(part)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    counts = with_server(exchange, read_timeout_s=1, keep_alive_timeout_s=2)
    assert counts == ({} if before and not part else {"slow_head": 1})


def test_a_client_that_goes_on_with_a_refused_body_is_counted(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.05)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", "Content-Type: application/json", "Content-Length: 9", method="POST", key="not-the-key"))
        assert (await read_reply(reader))[0] == 401
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    assert with_server(exchange) == {"unread_body": 1}


def test_a_client_that_leaves_after_its_refusal_is_not_counted(monkeypatch):
    """The client ended the connection, not the server."""
    monkeypatch.setattr(connections, "LINGER_S", 0.05)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", "Content-Type: application/json", "Content-Length: 9", method="POST", key="not-the-key"))
        assert (await read_reply(reader))[0] == 401
        writer.close()
        await asyncio.sleep(0.3)

    assert with_server(exchange) == {}


def test_a_connection_is_counted_once(monkeypatch):
    """After its refusal it sends what is no body, and does not read the rest of what it gets."""
    monkeypatch.setattr(connections, "LINGER_S", 0.3)

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", *CHUNKS, method="POST", key="not-the-key"))
        assert (await read_reply(reader))[0] == 401
        writer.write(b"no chunk\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        await asyncio.sleep(0.6)

    assert with_server(exchange) == {"invalid_http": 1}


def test_a_client_that_does_not_read_its_response_is_counted():
    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", key=KEY))
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(2.5)  # the first look is after a second, and the second one ends it
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                num_bytes += len(data)
        assert num_bytes < 32 << 20

    assert with_server(exchange, send_much, write_timeout_s=1) == {"slow_reader": 1}


def test_a_client_that_reads_slowly_is_not_ended():
    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("/", key=KEY))
        await reader.readuntil(b"\r\n\r\n")
        num_bytes, start = 0, asyncio.get_running_loop().time()
        while num_bytes < 32 << 20:
            num_bytes += len(await reader.read(1 << 20))
            if asyncio.get_running_loop().time() < start + 3:
                await asyncio.sleep(0.1)

    assert with_server(exchange, send_much, write_timeout_s=1) == {}


def test_what_is_no_http_is_counted_once():
    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no HTTP at all\r\n\r\n")
        assert (await read_reply(reader))[0] == 400
        assert await reader.read() == b""

    assert with_server(exchange) == {"invalid_http": 1}


def test_a_connection_is_kept_for_75_seconds(capsys):
    """As long as the flag says, and longer than load balancers keep theirs."""
    assert ServerConfig().keep_alive_timeout_s == 75
    assert _Server(count_body, ServerConfig(), Metrics()).config.timeout_keep_alive == 75
    assert _Server(count_body, ServerConfig(keep_alive_timeout_s=9), Metrics()).config.timeout_keep_alive == 9
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    (text,) = [part for part in capsys.readouterr().out.split("  --") if part.startswith("keep-alive-timeout-s N")]
    assert "(75)" in text


@pytest.mark.parametrize(
    ("level", "logged"), [("all", [None, "invalid_value"]), ("errors", ["invalid_value"]), ("off", [])]
)
def test_the_access_log_has_the_lines_of_its_level_and_counts_all(level, logged, caplog):
    counts: list[Any] = []
    access = AccessLog(level, lambda *ended: counts.append(ended))
    with caplog.at_level("INFO", "quire.access"):
        for status, reason in ((200, None), (400, "invalid_value")):
            access.end("http", 0.0, "/v1/models", status, reason, Caller("t", "alice", request_id="r"))
    assert [vars(record)["reason"] for record in caplog.records] == logged
    assert counts == [
        ("http", "/v1/models", status, reason, "alice") for status, reason in (("200", None), ("400", "invalid_value"))
    ]
    with pytest.raises(ValueError, match="access_log='quiet' must be all, errors or off"):
        ServerConfig(access_log="quiet")
