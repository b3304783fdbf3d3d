"""Large responses in one piece: they are sent in bounded chunks, and what all choices share is never copied."""

import asyncio
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire import SamplingParams
from quire.async_llm.admission import Admission
from quire.async_llm.updates import Update
from quire.core.sequence import TokenLogprob
from quire.server.access import AccessLog
from quire.server.config import ServerConfig
from quire.server.http.routes import Api
from quire.server.keys import Keys
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.format import CompletionFormatter
from quire.server.openai.json_parts import CHUNK_BYTES, JsonBody, JsonParts, encode, parts_of
from quire.server.serve import _listen, _serving
from quire.server.service import Service
from tests.server.attack import post

KEY = "a-key-for-the-tests"
LONG_S = 600.0
LETTERS = "abcdefgh"
NUM_TOP = 5
READ_BYTES = 1 << 16


class FakeStream:
    """A stream that has already ended, with `n` sequences of one token each."""

    def __init__(self, request: Any) -> None:
        self.request, self.origin, self.sequences = request, None, []
        self.num_cached_tokens, self.num_output_tokens = 0, request.params.n
        first, *others = request.prompt_token_ids
        self.prompt_logprobs = [None, *(TokenLogprob(i, -0.5, _top(i)) for i in others)]
        self.grammar = None
        assert first in range(len(LETTERS))

    async def __aiter__(self):
        yield [
            Update(i, "ab"[i % 2], [i % 2], [TokenLogprob(i % 2, -0.25, _top(i % 2))], "length")
            for i in range(self.request.params.n)
        ]

    def cancel(self) -> None:
        pass


def _top(token_id: int) -> tuple[tuple[int, float], ...]:
    return tuple(((token_id + i) % len(LETTERS), -1.0 - i) for i in range(NUM_TOP))


def fake_service() -> Service:
    """A service whose engine generates at once."""

    def submit(requests: Any, *, timeout_s: float, grammar: Any) -> list[FakeStream]:
        return [FakeStream(request) for request in requests]

    tokenizer = SimpleNamespace(
        pieces=[letter.encode() for letter in LETTERS], decode=lambda ids: "".join(LETTERS[i] for i in ids)
    )
    llm = SimpleNamespace(
        engine=SimpleNamespace(tokenizer=tokenizer, max_request_len=8192), default_params=SamplingParams()
    )
    return Service(cast(Any, SimpleNamespace(llm=llm, admission=Admission(), submit=submit)), "m", 0)


def body_of(num_prompt: int, n: int) -> dict[str, Any]:
    prompt = [i % len(LETTERS) for i in range(num_prompt)]
    wanted = {"echo": True, "logprobs": NUM_TOP, "return_token_ids": True, "prompt_logprobs": True}
    return {"model": "m", "prompt": prompt, "n": n, "max_tokens": 1, "request_id": "r"} | wanted


def expected_choices(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of the response, worked out one by one."""
    prompt, choices = body["prompt"], []
    for i in range(body["n"]):
        ids = [*prompt, i % 2]
        values = [None, *[-0.5] * (len(prompt) - 1), -0.25]
        logprobs = {
            "tokens": [LETTERS[token_id] for token_id in ids],
            "token_logprobs": values,
            "top_logprobs": [
                None if value is None else {LETTERS[one]: logprob for one, logprob in _top(token_id)}
                for token_id, value in zip(ids, values, strict=True)
            ],
            "text_offset": list(range(len(ids))),
        }
        entries = [{"token_id": one, "token": LETTERS[one], "logprob": -0.5} for one in prompt[1:]]
        choice = {"index": i, "text": "".join(logprobs["tokens"]), "logprobs": logprobs, "finish_reason": "length"}
        more = {"token_ids": [i % 2], "prompt_token_ids": prompt, "prompt_logprobs": [None, *entries]}
        choices.append(choice | more)
    return choices


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "prompt": [[1], [2, 3]]},
        {"echo": True, "prompt": '"quoted" \\ \u00e9\n'},
        {"logprobs": 1, "return_token_ids": True},
        {"prompt_logprobs": True},
        {},
    ],
    ids=str,
)
def test_the_parts_of_a_response_are_what_encoding_it_at_once_makes(fields):
    body = schema.CompletionRequest(model="m", **{"prompt": [1, 2, 3], "n": 3, "max_tokens": 1} | fields)
    prompts = body.prompt if isinstance(body.prompt[0], list) else [[1, 2, 3]]
    params = SamplingParams(n=3)
    requests = [SimpleNamespace(id=f"r-{i}", prompt_token_ids=ids, params=params) for i, ids in enumerate(prompts)]
    streams: Any = [FakeStream(request) for request in requests]
    updates = [Update(i, f'"{i}"\n', [i], [TokenLogprob(i, -0.5, _top(i))], "stop") for i in range(3)]
    service = fake_service()
    formatters = [CompletionFormatter(service, body, cast(Any, prompts)) for _ in range(2)]
    for one in formatters:
        one.id, one.created = "r", 1
    first, second = formatters
    wholes = [updates for _ in streams]
    assert b"".join(first.parts(streams, wholes)) == encode(second.response(streams, wholes))
    service.close()


def test_a_body_keeps_long_parts_and_is_read_in_chunks():
    long, short = b"x" * (3 * CHUNK_BYTES + 1), b"0123456789" * 20
    body = JsonBody([short, long, *[short] * 1000, b"", long, long])
    text = short + long + short * 1000 + long + long
    chunks = list(body.chunks())
    assert b"".join(chunks) == text
    assert body.num_bytes == len(text)
    assert {len(chunk) for chunk in chunks[:-1]} == {CHUNK_BYTES}
    assert sum(part is long for part in body._parts) == 3
    assert max(len(part) for part in body._parts if part is not long) < CHUNK_BYTES + len(short)
    assert list(JsonBody([]).chunks()) == []


def test_json_parts_are_joined_wherever_they_are_encoded():
    parts = JsonParts([b"[1,", b"2]"])
    value = {"a": [parts], "b": JsonParts.of_object({"\u00e9": parts, "c": None}), "d": JsonParts.of_object({})}
    assert encode(value) == '{"a":[[1,2]],"b":{"\u00e9":[1,2],"c":null},"d":{}}'.encode()
    assert b"".join(parts_of(value)) == encode(value)
    with pytest.raises(NotImplementedError, match="object has no JSON"):
        encode({"a": object()})


class Client:
    """A connection to a port of the server, on which one request has been sent; it reads when a test has it read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.num_bytes = 0

    async def read_head(self) -> int:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        (self.num_bytes,) = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length")]
        assert not any(line.startswith("transfer-encoding") for line in lines)
        return int(lines[0].split()[1])

    async def read_body(self) -> bytes:
        return await self.reader.readexactly(self.num_bytes)


async def with_client(talk: Any, request: bytes, *, counts: list[Any] | None = None, **limits: Any) -> None:
    """Send a request to a real port of the server, and do something with the connection."""
    config, metrics, service = ServerConfig(port=0, page=False, **limits), Metrics(), fake_service()
    access = AccessLog("off", lambda *ended: counts.append(ended) if counts is not None else None)
    app = Api(service, config, metrics, access=access).app(Keys([KEY]))
    listener = _listen("127.0.0.1", 0)
    async with asyncio.timeout(LONG_S), _serving(app, config, listener, metrics):
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=READ_BYTES)
        writer.write(request)
        await talk(Client(reader, writer))
        writer.close()
    service.close()


def completion(body: dict[str, Any]) -> bytes:
    return post("/v1/completions", json.dumps(body).encode(), key=KEY)


@pytest.mark.parametrize(("num_prompt", "n"), [(4, 1), (300, 2), (1000, 40)])
def test_a_response_has_the_same_json_however_large_it_is(num_prompt, n):
    body = body_of(num_prompt, n)

    async def talk(client: Client) -> None:
        for _ in range(2):  # the connection stays open
            assert await client.read_head() == 200
            response = json.loads(await client.read_body())
            assert response["choices"] == expected_choices(body)
            assert (response["id"], response["usage"]["completion_tokens"]) == ("r", n)
            client.writer.write(completion(body))

    asyncio.run(with_client(talk, completion(body)))


def test_a_client_of_http_1_0_gets_the_length_of_a_large_response():
    body = body_of(1000, 20)

    async def talk(client: Client) -> None:
        assert await client.read_head() == 200
        assert len(json.loads(await client.read_body())["choices"]) == 20
        assert await client.reader.read() == b""

    asyncio.run(with_client(talk, completion(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)))


def test_a_slow_reader_makes_the_server_hold_what_choices_share_once():
    body = body_of(3000, 76)
    request = completion(body)

    async def talk(client: Client) -> None:
        assert await client.read_head() == 200
        assert client.num_bytes > 20 << 20
        for _ in range(20):  # it does not read for a while
            await asyncio.sleep(0.05)
        held, peak = tracemalloc.get_traced_memory()
        assert held - before < client.num_bytes // 16, f"{held - before:,} bytes are held of {client.num_bytes:,}"
        assert peak - before < client.num_bytes // 3, f"{peak - before:,} bytes for {client.num_bytes:,}"
        tracemalloc.reset_peak()
        num_left = client.num_bytes
        while num_left:
            num_left -= len(await client.reader.readexactly(min(num_left, READ_BYTES)))
        peak = tracemalloc.get_traced_memory()[1]
        assert peak - before < client.num_bytes // 16, f"{peak - before:,} bytes while {client.num_bytes:,} were sent"

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        asyncio.run(with_client(talk, request))
    finally:
        tracemalloc.stop()


def test_a_client_that_leaves_in_the_middle_of_a_response_is_noticed():
    counts: list[Any] = []

    async def talk(client: Client) -> None:
        assert await client.read_head() == 200
        client.writer.transport.abort()
        while not counts:
            await asyncio.sleep(0.01)

    asyncio.run(with_client(talk, completion(body_of(3000, 76)), counts=counts))
    ((_, route, status, reason, _),) = counts
    assert (route, status, reason) == ("/v1/completions", "200", "cancelled")


def test_a_response_is_sent_in_chunks_one_after_another():
    """No message of the application to the connection has more than a bounded part of the body."""
    body = body_of(1000, 40)
    sent: list[Any] = []

    async def run() -> None:
        service = fake_service()
        app = Api(service, ServerConfig(page=False), Metrics()).app(Keys([KEY]))
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        headers = [(b"authorization", f"Bearer {KEY}".encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        service.close()

    asyncio.run(run())
    head, *rest = sent
    chunks = [message["body"] for message in rest]
    assert int(dict(head["headers"])[b"content-length"]) == sum(map(len, chunks))
    assert max(map(len, chunks)) <= CHUNK_BYTES
    assert [message["more_body"] for message in rest] == [True] * (len(rest) - 1) + [False]
    assert json.loads(b"".join(chunks))["choices"] == expected_choices(body)
