"""Hostile clients with a key and without one, for a while: a stream of another key goes on, and every line is valid."""

import json
import socket
import threading
import time
from collections.abc import Callable

import openai
import pytest

from quire import SamplingParams
from quire.server.logs import read_line
from tests.server.attack import exchange, head, post
from tests.server.process import LONGEST_S, SMALL, Server, serving

pytestmark = [pytest.mark.own_server, pytest.mark.slow]

HOSTILE, GOOD = "a-key-of-a-hostile-client", "a-key-of-a-bystander"
PROMPT, NUM_TOKENS = "The bystander speaks of other things: ", 100
ROUTE = "/v1/completions"
ASKED = {"model": "tiny", "prompt": "a", "max_tokens": 2}


def body(**fields) -> bytes:
    return json.dumps(ASKED | fields).encode()


def send_and_leave(server: Server, data: bytes) -> None:
    """Send something, close the sending half of the connection, and go without reading."""
    with socket.create_connection(("127.0.0.1", server.port), LONGEST_S) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)


REFUSED: list[tuple[int, str | None, bytes]] = [
    (401, "invalid_api_key", post(ROUTE, body(), key="a-key-of-a-stranger")),
    (401, "invalid_api_key", post(ROUTE, body())),
    (400, "invalid_json", post(ROUTE, b'{"model": ' * 10, key=HOSTILE)),
    (404, "not_found_error", head("/v1/no-such-route", key=HOSTILE)),
    (413, "body_too_large", post(ROUTE, b"x", "X: y", key=HOSTILE).replace(b"Length: 1\r", b"Length: 99999999\r")),
    (400, "context_length_exceeded", post(ROUTE, body(prompt=[1] * 100_000), key=HOSTILE)),
    (400, "response_too_large", post(ROUTE, body(prompt=[1] * 3000, n=128, echo=True, logprobs=20), key=HOSTILE)),
]
"""Requests with the status and the reason by which each is counted."""
CLOSED: list[bytes] = [
    head("/v1/models", "X-Giant: " + "x" * 200_000),
    head("/v1/models", *(f"X-{i}: y" for i in range(1000))),
    b"no HTTP at all\r\n\r\n",
]
CHUNKS = (
    head(ROUTE, "Content-Type: application/json", "Transfer-Encoding: chunked", method="POST") + b"1\r\nx\r\n" * 5000
)


def metric(server: Server, name: str) -> float:
    text = server.get("/metrics")[1].decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_a_stream_goes_on_beside_hostile_clients(tiny_folder, offline, soak_seconds):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    wanted = offline.generate([PROMPT], params, progress=False)[0].outputs[0].text
    sent = [0] * len(REFUSED)
    errors: list[BaseException] = []
    over = threading.Event()

    with serving(tiny_folder, *SMALL, "--api-key", HOSTILE, "--api-key", GOOD) as server:

        def refuse() -> None:
            for i, (status, _, data) in enumerate(REFUSED):
                assert exchange(server, data)[0] == status, data[:200]
                sent[i] += 1

        def disturb() -> None:
            for data in CLOSED:
                assert exchange(server, data)[0] in (0, 400, 431)
            for data in (CHUNKS, post(ROUTE, body(max_tokens=3000, stream=True, ignore_eos=True), key=HOSTILE)):
                send_and_leave(server, data)

        def repeat(work: Callable[[], None]) -> None:
            try:
                while not over.is_set():
                    work()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=repeat, args=(work,)) for work in (refuse, disturb)]
        for thread in threads:
            thread.start()
        try:
            until, num_streams = time.monotonic() + min(soak_seconds, 600), 0
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=GOOD, max_retries=0, timeout=LONGEST_S) as client:
                while time.monotonic() < until or not num_streams or not min(sent):
                    assert not errors
                    extra = {"ignore_eos": True}
                    chunks = client.completions.create(
                        model="tiny", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True, extra_body=extra
                    )
                    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
                    num_streams += 1
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not errors
        server.wait_idle()
        reasons = [reason for _, reason, _ in REFUSED]
        for reason in set(reasons):
            count = sum(n for n, named in zip(sent, reasons, strict=True) if named == reason)
            found = metric(server, f'quire_request_errors_total{{reason="{reason}"}}')
            # Chunked bodies without a key are refused for the same reason.
            assert found == count or (reason == "invalid_api_key" and found > count), reason
        assert metric(server, 'quire_refused_connections_total{reason="invalid_http"}')
        for line in server.lines:
            read_line(line)
        print(f"{num_streams} streams beside {sum(sent)} refusals")
