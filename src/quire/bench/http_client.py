"""A light client: streams completions from any OpenAI-compatible server and says when each piece came.

It parses no more than it must, so that on a small machine the server is measured and not the client: of an event only
what is asked for is decoded.
"""

import asyncio
import contextlib
import json
import os
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LINE_LIMIT = 1 << 20
CONNECT_TIMEOUT_S = 10


class UnreachableError(ConnectionError):
    """A server that does not answer; the message has its address."""


@dataclass(slots=True)
class Reply:
    """What came of one request."""

    status: int = 0
    sent_at: float = 0.0
    times: list[float] = field(default_factory=list)
    """When each event with text came."""
    text: str = ""
    num_tokens: int = 0
    error: str | None = None
    retry_after: float | None = None
    is_complete: bool = False

    @property
    def seconds_to_first(self) -> float:
        """From sending to the first text."""
        return self.times[0] - self.sent_at

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens after the first event; None if nothing came after it."""
        if len(self.times) < 2 or self.num_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)


async def complete(url: str, body: dict[str, Any], *, key: str | None = None, leave_after: int | None = None) -> Reply:
    """Stream a completion to its end, or leave after so many events."""
    reply = Reply(sent_at=time.perf_counter())
    target = urlsplit(url)
    async with _connected(url) as (reader, writer):
        content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST {target.path.rstrip('/')}/completions HTTP/1.1\r\nHost: {target.netloc}\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        reply.status = int(_status(url, await reader.readline()))
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            if name.lower() == "retry-after":
                reply.retry_after = float(value)
        if reply.status != 200:
            reply.error = (await reader.read()).decode("utf-8", "replace")
            return reply
        async for event in _events(reader):
            _take(reply, event)
            if leave_after is not None and len(reply.times) >= leave_after:
                return reply
    return reply


async def at_once(url: str, bodies: Sequence[dict[str, Any]], num: int, key: str | None = None) -> list[Reply]:
    """All of them, so many at the same time."""
    waiting = iter(bodies)
    replies: list[Reply] = []

    async def worker() -> None:
        for body in waiting:
            replies.append(await complete(url, body, key=key))

    await asyncio.gather(*(worker() for _ in range(num)))
    return replies


async def at_times(url: str, bodies: Sequence[tuple[float, dict[str, Any]]], key: str | None = None) -> list[Reply]:
    """Each when its time has come, in seconds from now."""

    async def one(at: float, body: dict[str, Any]) -> Reply:
        await asyncio.sleep(at)
        return await complete(url, body, key=key)

    return await asyncio.gather(*(one(at, body) for at, body in bodies))


async def get(url: str, path: str, key: str | None = None) -> Any:
    """The JSON at a path below the URL."""
    target = urlsplit(url)
    async with _connected(url) as (reader, writer):
        head = f"GET {target.path.rstrip('/')}{path} HTTP/1.0\r\nHost: {target.netloc}\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"{head}\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        status = _status(url, head)
        if status != b"200":
            hint = "; --url ends in /v1 for most servers" if status == b"404" and not target.path.strip("/") else ""
            raise ValueError(f"{url}{path} answers {status.decode()}: {body.decode('utf-8', 'replace')[:200]}{hint}")
        try:
            return json.loads(body)
        except ValueError:
            raise ValueError(f"{url}{path} answers no JSON: is this the address of an OpenAI-compatible API?") from None


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect for the length of the block. A connection that the server breaks raises UnreachableError."""
    reader, writer = await _connect(url)
    try:
        yield reader, writer
    except UnreachableError:
        raise
    except OSError as error:
        raise UnreachableError(f"{url} broke the connection: {_reason(error)}") from None
    finally:
        writer.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    target = urlsplit(url)
    if target.scheme not in ("http", "https") or not target.hostname:
        raise ValueError(f"--url {url!r} must begin with http:// or https:// and name a server")
    secure = target.scheme == "https"
    port = target.port or (443 if secure else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return await asyncio.open_connection(target.hostname, port, limit=LINE_LIMIT, ssl=secure or None)
    except OSError as error:
        raise UnreachableError(f"{url} cannot be reached: {_reason(error)}; is the server running?") from None


def _reason(error: OSError) -> str:
    """Why there is no connection, in a few words."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return f"no response in {CONNECT_TIMEOUT_S} s"
    if isinstance(error, ssl.SSLError) or error.errno is None or error.errno < 0:  # their numbers are not the system's
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _status(url: str, head: bytes) -> bytes:
    """The status of a response, from its first line on."""
    parts = head.split(maxsplit=2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or not parts[1].isdigit():
        raise UnreachableError(f"{url} answers no HTTP, or closed the connection")
    return parts[1]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events; sizes of chunks and empty lines lie between."""
    while line := await reader.readline():
        if line.startswith(b"data: "):
            yield line[6:].strip()


def _take(reply: Reply, event: bytes) -> None:
    if event == b"[DONE]":
        reply.is_complete = reply.error is None
        return
    value = json.loads(event)
    if "error" in value:
        reply.error = value["error"].get("code") or value["error"]["message"]
    elif value["choices"]:
        text = value["choices"][0]["text"]
        if text:
            reply.text += text
            reply.times.append(time.perf_counter())
    elif value.get("usage"):
        reply.num_tokens = value["usage"]["completion_tokens"]
