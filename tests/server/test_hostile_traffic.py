"""Hostile clients with keys and without, for a while: another key is served, and every refusal is counted once.

Each request has an id of its own. At the end the access log has exactly these ids, each with its route, status, reason
and key; the counters have their sums. What the server ends without a request is counted by reason, exactly.
"""

import contextlib
import json
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from socket import socket
from typing import NamedTuple

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import SamplingParams
from quire.server.logs import LogLine, read_line
from quire.server.observe.metrics import CONNECTION_REASONS, OVERLOAD_REASONS
from tests.server.attack import connect, head, post, read_reply, wait_until_closed
from tests.server.process import LONGEST_S, SMALL, Server, serving

pytestmark = [pytest.mark.own_server, pytest.mark.slow]

LIMITS = {
    "good": "",
    "hostile": "",
    "slow": "",
    "flood": "",
    "requests": "requests=1",
    "queued": "queued_tokens=100",
    "minute": "tokens_per_minute=1",
}
"""The keys by their labels, with their limits."""
FLAGS = (
    "--max-queued-requests", "8", "--max-queued-tokens", "40000", "--read-timeout-s", "2", "--write-timeout-s", "2",
)  # fmt: skip
PROMPT, NUM_TOKENS = "The bystander speaks of other things: ", 100
ROUTE = "/v1/completions"
ASKED = {"model": "tiny", "prompt": "a", "max_tokens": 2}
NO_KEY, WRONG_KEY = None, "stranger"
WANTED = {*OVERLOAD_REASONS} - {"reading"}
"""Reasons of a 429. Threads that read requests cannot be filled on purpose."""


class Seen(NamedTuple):
    """A request as its client saw it, and as the log should have it."""

    route: str
    status: int
    reason: str | None
    key: str | None


def body(**fields) -> bytes:
    return json.dumps(ASKED | fields).encode()


def key_of(label: str | None) -> str | None:
    return label and f"a-key-of-{label}"


class Client:
    """Hostile clients of one server, and what they saw."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.seen: dict[str, Seen] = {}
        """By the request's id."""
        self.ended: Counter[str] = Counter()
        """Connections that the server ended, by reason."""

    @contextlib.contextmanager
    def sending(self, data: bytes, *, receive_buffer: int | None = None) -> Iterator[socket]:
        with connect(self.server, receive_buffer) as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
            yield client

    def see(self, status: int, reason: str | None, label: str | None, request_id: str, route: str = ROUTE) -> None:
        self.seen[request_id] = Seen(route, status, reason, label if label in LIMITS else None)

    def start_stream(self, label: str, clients: contextlib.ExitStack, **fields) -> str | None:
        """Ask for a stream that nothing reads; returns the reason if it was refused. It is left with `clients`."""
        request_id = uuid.uuid4().hex
        fields = {"stream": True, "ignore_eos": True} | fields
        data = post(ROUTE, body(**fields), f"X-Request-Id: {request_id}", key=key_of(label))
        client = clients.enter_context(self.sending(data))
        with HTTPResponse(client) as reply:
            reply.begin()
            reason = "cancelled" if reply.status == 200 else refusal(reply.read())
            self.see(reply.status, reason, label, request_id)
        return None if reply.status == 200 else reason

    def ask(
        self, label: str | None, data: Callable[[str, str | None], bytes], route: str = ROUTE
    ) -> tuple[int, str | None]:
        """Send a request and read the whole response; returns its status and the reason of a refusal."""
        request_id = uuid.uuid4().hex
        with self.sending(data(f"X-Request-Id: {request_id}", key_of(label))) as client:
            status, content = read_reply(client)
        reason = None if status == 200 else refusal(content)
        self.see(status, reason, label, request_id, route)
        return status, reason


def refusal(content: bytes) -> str:
    """The reason by which a refusal is counted."""
    error = json.loads(content)["error"]
    if error["code"] == "overloaded":
        return "max_queued_tokens" if "tokens wait" in error["message"] else "max_queued_requests"
    return error["code"] or error["type"]


# -- what they do ------------------------------------------------------------------------------------------------------


def is_refused(one: Client) -> None:
    """Requests that are refused for what they are."""

    def refused(status: int, reason: str, label: str | None, content: bytes, route: str = ROUTE) -> None:
        assert one.ask(label, lambda name, key: post(route, content, name, key=key), route) == (status, reason)

    refused(401, "invalid_api_key", NO_KEY, body())
    refused(401, "invalid_api_key", WRONG_KEY, body())
    refused(401, "invalid_api_key", WRONG_KEY, body(), "/v1/embeddings")
    refused(400, "invalid_json", "hostile", b'{"model": ' * 10)
    refused(400, "invalid_value", "hostile", body(n=0))
    refused(400, "context_length_exceeded", "hostile", body(prompt=[1] * 100_000))
    refused(400, "response_too_large", "hostile", body(prompt=[1] * 3000, n=128, echo=True, logprobs=20))
    refused(404, "model_not_found", "hostile", body(model="another"))
    nowhere = one.ask("hostile", lambda name, key: head("/v1/no-such-route", name, key=key), "none")
    assert nowhere == (404, "not_found_error")


def breaks_http(one: Client) -> None:
    """What is no HTTP, never comes to an end, or goes on after its refusal."""
    many = [f"X-{i}: y" for i in range(1000)]
    for data in (head("/v1/models", "X-Giant: " + "x" * 200_000), head("/v1/models", *many), b"no HTTP at all\r\n\r\n"):
        with one.sending(data) as client:
            assert read_reply(client)[0] in (0, 400)  # 0 if the connection was reset before the response was read
        one.ended["invalid_http"] += 1
    with one.sending(head("/v1/models")[:-2]) as client:
        wait_until_closed(client)
    one.ended["slow_head"] += 1
    chunked = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    large = ("Content-Type: application/json", "Content-Length: 99999999")
    for status, reason, label, headers, rest in (
        (401, "invalid_api_key", NO_KEY, chunked, b"1\r\nx\r\n" * 5000),
        (413, "body_too_large", "hostile", large, b"x"),
    ):
        request_id = uuid.uuid4().hex
        top = head(ROUTE, *headers, f"X-Request-Id: {request_id}", method="POST", key=key_of(label))
        with one.sending(top + rest) as client:
            assert read_reply(client)[0] == status
            wait_until_closed(client)
        one.see(status, reason, label, request_id)
        one.ended["unread_body"] += 1


def reads_nothing(one: Client) -> None:
    """A response of many megabytes that is not read."""
    request_id, fields = uuid.uuid4().hex, {"n": 32, "echo": True, "logprobs": 20}
    data = post(ROUTE, body(prompt=[1] * 3000, **fields), f"X-Request-Id: {request_id}", key=key_of("slow"))
    with one.sending(data, receive_buffer=4096) as client:
        one.see(200, "cancelled", "slow", request_id)
        one.server.wait_for_line(request_id)
        wait_until_closed(client)
    one.ended["slow_reader"] += 1


def exceeds_its_limits(one: Client) -> None:
    """More requests, waiting tokens and tokens per minute than three keys may have. What is seen is counted."""
    with contextlib.ExitStack() as clients:
        for _ in range(3):
            one.start_stream("requests", clients, max_tokens=3000)
        one.ask("minute", lambda name, key: post(ROUTE, body(), name, key=key))
        one.start_stream("queued", clients, n=16, max_tokens=2000)
        for _ in range(3):
            one.start_stream("queued", clients, max_tokens=1000)


def fills_the_queue(one: Client) -> None:
    """All rows are taken, then the tokens that may wait, then the requests."""
    with contextlib.ExitStack() as clients:
        one.start_stream("flood", clients, n=16, max_tokens=2000)
        for _ in range(2):
            one.start_stream("flood", clients, n=8, max_tokens=3000)
        for _ in range(10):
            one.start_stream("flood", clients, max_tokens=1500)


# -- what is left of it ------------------------------------------------------------------------------------------------


def counted(server: Server, name: str, *labels: str) -> Counter:
    """The values of a counter by its labels, without those that are 0."""
    families = text_string_to_metric_families(server.get("/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return Counter({tuple(one.labels[label] for label in labels): int(one.value) for one in samples if one.value})


def check_log(server: Server, seen: dict[str, Seen]) -> None:
    """Assert that the log has one valid line for each request, with its time, id and key."""
    deadline = time.monotonic() + LONGEST_S
    lines, found = list[LogLine](), dict[str, LogLine]()
    while len(found) < len(seen):
        assert time.monotonic() < deadline, set(seen) - set(found)
        time.sleep(0.1)
        lines = [read_line(line) for line in list(server.lines)]
        requests = [line for line in lines if line.event == "request" and line.route != "/metrics"]
        found = {str(line.request_id): line for line in requests}
        assert len(found) == len(requests), "a request has one line"
    logged = {name: Seen(str(line.route), int(line.status), line.reason, line.key) for name, line in found.items()}  # type: ignore[arg-type]
    assert logged == seen
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.time) for line in lines)
    times = [line.time for line in lines]
    assert times == sorted(times)
    assert not [line for line in lines if line.level in ("error", "critical")]
    assert not any(str(key_of(label)) in text for label in LIMITS for text in server.lines)


def check_counts(server: Server, seen: dict[str, Seen], ended: Counter[str]) -> None:
    """Assert that every request, refusal and connection is counted once."""
    routes = counted(server, "quire_http_requests_total", "route", "status")
    by_route = Counter((one.route, str(one.status)) for one in seen.values())
    assert Counter({key: n for key, n in routes.items() if key[0] != "/metrics"}) == by_route
    reasons = Counter((one.reason,) for one in seen.values() if one.reason)
    assert counted(server, "quire_request_errors_total", "reason") == reasons
    rejections = sum(n for (reason,), n in reasons.items() if reason in OVERLOAD_REASONS)
    assert counted(server, "quire_rejections_total") == Counter({(): rejections})
    assert counted(server, "quire_refused_connections_total", "reason") == Counter({(k,): n for k, n in ended.items()})


def test_a_key_is_served_beside_hostile_clients_and_every_refusal_is_counted(
    tiny_folder, offline, soak_seconds, tmp_path
):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    wanted = offline.generate([PROMPT], params, progress=False)[0].outputs[0].text
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key_of(label)} name={label} {limits}\n" for label, limits in LIMITS.items()))
    keys.chmod(0o600)
    errors: list[BaseException] = []
    over = threading.Event()

    with serving(tiny_folder, *SMALL, *FLAGS, "--api-key-file", str(keys)) as server:
        one, num_streams = Client(server), 0

        def repeat(work: Callable[[Client], None]) -> None:
            try:
                while not over.is_set():
                    work(one)
            except BaseException as error:
                errors.append(error)

        works = (is_refused, breaks_http, reads_nothing, exceeds_its_limits, fills_the_queue)
        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            until, expected = time.monotonic() + min(soak_seconds, 600), {*CONNECTION_REASONS} - {"max_connections"}
            url, key = f"{server.url}/v1", key_of("good")
            with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=LONGEST_S) as client:
                while (
                    time.monotonic() < until
                    or not num_streams
                    or set(one.ended) != expected
                    or not {seen.reason for seen in list(one.seen.values())} >= WANTED
                ):
                    assert not errors
                    request_id = uuid.uuid4().hex
                    chunks = client.completions.create(
                        model="tiny",
                        prompt=PROMPT,
                        max_tokens=NUM_TOKENS,
                        temperature=0,
                        stream=True,
                        extra_body={"ignore_eos": True},
                        extra_headers={"x-request-id": request_id},
                    )
                    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
                    one.see(200, None, "good", request_id)
                    num_streams += 1
        finally:
            over.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        server.wait_idle()
        check_log(server, one.seen)
        check_counts(server, one.seen, one.ended)
        print(f"{num_streams} streams beside {len(one.seen)} requests and {dict(one.ended)} connections")
        print(Counter((seen.status, seen.reason, seen.key) for seen in one.seen.values()))
