"""What an attack on a server needs: raw bytes, and somebody else's stream that must not notice."""

import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from quire import SamplingParams
from tests.server.process import LONGEST_S, Server

KEY = "a-key-for-the-tests"
OTHER_KEY = "another-key-for-the-tests"
PROMPT = "The bystander speaks of other things: "
NUM_TOKENS = 300
LONGEST_GAP_S = 5.0
"""What nobody would call undisturbed any more; the machine that runs the tests is slow and busy at times."""


# -- the bystander ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class StreamRecord:
    """One stream as it was read."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    first_s: float = 0.0
    """Seconds until the first tokens came."""
    gaps: list[float] = dataclasses.field(default_factory=list)


def read_stream(connection: http.client.HTTPConnection, key: str | None, record: StreamRecord) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    begin, last = time.monotonic(), None
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.monotonic()
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        record.token_ids += chunk["choices"][0]["token_ids"]
        if last is None:
            record.first_s = now - begin
        else:
            record.gaps.append(now - last)
        last = now


@contextlib.contextmanager
def bystander(server: Server, offline, key: str | None = None) -> Iterator[None]:
    """Streams, one after another, while the body runs: every token as it is offline, and none of them late.

    All on one connection: that others can take all that are left is no secret, and has its own test.
    """
    expected = _expected(offline)
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=LONGEST_S)
    quiet, streams = StreamRecord(), list[StreamRecord]()
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            while not over.is_set():
                streams.append(StreamRecord())
                read_stream(connection, key, streams[-1])
        except BaseException as error:
            errors.append(error)

    with contextlib.closing(connection):
        read_stream(connection, key, quiet)
        assert quiet.token_ids == expected
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
    if errors:
        raise errors[0]
    assert [record.token_ids for record in streams] == [expected] * len(streams)
    gaps = [gap for record in streams for gap in record.gaps]
    longest = max([*gaps, *(record.first_s for record in streams)])
    assert longest < LONGEST_GAP_S, f"the bystander waited {longest:.2f} s; in quiet {max(quiet.gaps):.3f} s"
    if not gaps:  # the one stream there was time for came in one piece
        return
    usual, before = statistics.median(gaps), statistics.median(quiet.gaps)
    assert usual < 10 * before + 0.05, f"a token every {usual * 1e3:.1f} ms; in quiet every {before * 1e3:.1f} ms"


@functools.cache
def _expected(offline) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return list(offline.generate([PROMPT], params, progress=False)[0].outputs[0].token_ids)


# -- raw bytes --------------------------------------------------------------------------------------------------------


class Port(NamedTuple):
    """One of a server's ports on loopback."""

    port: int


def connect(server: Server | Port, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(LONGEST_S)
    try:
        client.connect(("127.0.0.1", server.port))
    except OSError:
        client.close()
        raise
    return client


def head(target: str, *headers: str, method: str = "GET", key: str | None = None, host: str = "localhost") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *headers]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def post(target: str, body: bytes, *headers: str, key: str | None = None) -> bytes:
    more = ("Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return head(target, *more, method="POST", key=key) + body


def read_reply(client: socket.socket) -> tuple[int, bytes]:
    """One answer: its status and its body. Status 0 if the other side closed without a word."""
    reply = http.client.HTTPResponse(client)
    try:
        reply.begin()
        return reply.status, reply.read()
    except (http.client.BadStatusLine, ConnectionError):
        return 0, b""
    finally:
        reply.close()


def exchange(server: Server | Port, data: bytes) -> tuple[int, bytes]:
    with connect(server) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(data)
        return read_reply(client)


def wait_until_closed(client: socket.socket) -> None:
    """Until the other side ends the connection; what it says before is dropped."""
    client.settimeout(LONGEST_S)
    with contextlib.suppress(ConnectionError):
        while client.recv(65536):
            pass


# -- the process ------------------------------------------------------------------------------------------------------


def listening(server: Server) -> set[tuple[str, int]]:
    """Addresses and ports on which the process takes connections or datagrams."""
    pid = server.process.pid
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for protocol, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/{pid}/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == listens and fields[9] in inodes:
                address, port = fields[1].split(":")
                packed = bytes.fromhex(address)
                words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
                shown = socket.inet_ntop(family, words).removeprefix("::ffff:")  # IPv4 on a socket of both kinds
                found.add((shown, int(port, 16)))
    return found


def num_files(server: Server) -> int:
    """Descriptors that the process has open: connections too."""
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
