"""What one connection may cost the event loop: requests in many small parts, for which others would have to wait."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import pytest

from quire.server.config import ServerConfig
from quire.server.http import connections
from quire.server.http.application import json_response
from quire.server.http.connections import FREE_CHUNKS, MAX_EVENTS, MAX_HEADERS
from quire.server.http.guard import Guard
from quire.server.http.origins import AllowedOrigins
from quire.server.keys import Keys
from quire.server.observe.metrics import Metrics
from quire.server.serve import _listen, _serving
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


def with_server(exchange: Exchange) -> None:
    """Talk to a real port of the server, with a route that reads the body."""

    async def run() -> None:
        config = ServerConfig(port=0)
        guard = Guard(count_body, Keys([KEY]), config, frozenset(), AllowedOrigins(()), {}, frozenset())
        listener = _listen("127.0.0.1", 0)
        async with asyncio.timeout(LONG_S), _serving(guard, config, listener, Metrics()):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await exchange(reader, writer)
            writer.close()

    asyncio.run(run())


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
