"""Limits of keys, from the key file and the server's flags to the error that a client reads."""

import asyncio
import contextlib
import json
import math
import threading
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import SamplingParams
from quire.async_llm import AsyncLLM, OverloadError
from quire.async_llm.admission import Admission, Limits
from quire.async_llm.updates import Update
from quire.core.sequence import TokenLogprob
from quire.server import service as service_module
from quire.server.access import AccessLog
from quire.server.config import ServerConfig
from quire.server.errors import ApiError, as_api_error
from quire.server.grpc import messages
from quire.server.grpc.proto import quire_pb2 as pb
from quire.server.grpc.proto import quire_pb2_grpc
from quire.server.grpc.server import GrpcServer
from quire.server.http import routes
from quire.server.http.routes import Api
from quire.server.keys import Keys, key_limits
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.answer_parser import AnswerParser
from quire.server.openai.format import ChatFormatter, CompletionFormatter
from quire.server.openai.json_parts import encode
from quire.server.openai.parse import choice_bytes, parse_completion
from quire.server.openai.request_body import BodyReader
from quire.server.service import MAX_DECODED_ON_LOOP, Service
from tests.fake_llm import Gate, fake_llm

ALICE, BOB = "a-key-of-alice", "a-key-of-bob"
BODY = schema.CompletionRequest(model="m", prompt=[1, 2], max_tokens=4)  # pyright: ignore[reportCallIssue]


def test_flags_are_the_limits_of_keys_that_have_none_of_their_own():
    assert key_limits(ServerConfig()) == Limits(math.inf, math.inf, math.inf)
    config = ServerConfig(max_key_requests=3, max_key_queued_tokens=500, max_key_tokens_per_minute=60)
    assert key_limits(config) == Limits(3, 500, 60)
    assert Keys(limits=key_limits(config)).everyone.limits == Limits(3, 500, 60), "all clients without keys together"
    with pytest.raises(ValueError, match="max_key_requests"):
        ServerConfig(max_key_requests=0)


def test_a_key_at_its_limit_reads_which_one_and_others_go_on(tmp_path):
    file, gate = tmp_path / "keys", Gate()
    file.write_text(f"{ALICE} name=alice requests=1\n{BOB} name=bob\n")
    keys = Keys(file=file)
    alice, bob = keys.find(ALICE), keys.find(BOB)
    assert alice
    assert bob

    async def run() -> None:
        admission = Admission(find_client=keys.find_tenant)
        async with AsyncLLM.from_factory(lambda: fake_llm(gate), admission=admission) as engine:
            service = Service(engine, "m", 0)
            gate.close()
            (stream,) = engine.submit((await parse_completion(service, BODY, alice)).requests)
            with pytest.raises(OverloadError) as refused:
                await parse_completion(service, BODY, alice)
            error = as_api_error(refused.value)
            assert (error.status, error.code) == (429, "key_requests")
            assert error.message == "key alice: 1 requests wait or run, and at most requests=1 may"
            assert int(error.headers["Retry-After"]) >= 1
            (other,) = engine.submit((await parse_completion(service, BODY, bob)).requests)
            gate.open()
            for one in (stream, other):
                await one.read_all()
            await parse_completion(service, BODY, alice)
            file.write_text(f"{ALICE} name=alice tokens_per_minute=1\n{BOB} name=bob\n")
            keys.reload()
            for one in engine.submit((await parse_completion(service, BODY, alice)).requests):
                await one.read_all()
            with pytest.raises(OverloadError, match=r"key alice: 0 of tokens_per_minute=1 are left"):
                await parse_completion(service, BODY, alice)
            service.close()

    asyncio.run(run())


def parse(service: Service, **fields):
    body = schema.CompletionRequest(model="m", **{"prompt": [1, 2], "max_tokens": 4} | fields)
    return asyncio.run(parse_completion(service, body, Keys().everyone))


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        (
            {"prompt": [1] * 8000, "n": 128, "max_tokens": 1, "echo": True, "logprobs": 20},
            "lower n or logprobs, or leave out echo",
        ),
        ({"prompt": [1] * 8000, "n": 8, "max_tokens": 1, "echo": True, "logprobs": 20}, None),
        ({"n": 128, "max_tokens": 8000, "logprobs": 20}, "lower n, max_tokens or logprobs"),
        ({"n": 1, "max_tokens": 8000, "logprobs": 20}, None),
        (
            {"prompt": [[1] * 8000] * 64, "n": 128, "max_tokens": 1, "return_token_ids": True},
            "send fewer prompts, lower n, or leave out return_token_ids",
        ),
        (
            {"prompt": [[1] * 8000] * 64, "n": 2, "max_tokens": 1, "prompt_logprobs": True},
            "or leave out prompt_logprobs",
        ),
        ({"n": 128, "max_tokens": 8000}, None),
    ],
)
def test_a_response_has_a_bounded_number_of_log_probabilities(fields, advice):
    llm = SimpleNamespace(engine=SimpleNamespace(tokenizer=None, max_request_len=8192), default_params=SamplingParams())
    service = Service(cast(Any, SimpleNamespace(llm=llm, admission=Admission())), "m", 0)
    if advice is None:
        assert parse(service, **fields).requests
    else:
        with pytest.raises(ApiError, match=f"at most 67,108,864 bytes are allowed; .*{advice}$") as refused:
            parse(service, **fields)
        assert refused.value.code == "response_too_large"
        assert refused.value.param == "n"
    service.close()


CHAT = {"model": "m", "messages": [schema.Message(role="user", content="hello")], "logprobs": True}


@pytest.mark.parametrize(
    ("kind", "fields", "num_bytes"),
    [
        (schema.CompletionRequest, {"model": "m", "prompt": [1], "logprobs": 20}, 640),
        (schema.CompletionRequest, {"model": "m", "prompt": [1], "logprobs": 0, "return_token_ids": True}, 48),
        (schema.ChatRequest, CHAT | {"top_logprobs": 20}, 2120),
        (schema.ChatRequest, CHAT | {"top_logprobs": 20, "stream": True}, 2120),
        (schema.ChatRequest, CHAT, 120),
    ],
)
def test_the_bytes_of_a_response_are_those_that_its_formatter_writes(kind, fields, num_bytes):
    """Of one token, as the bound counts them: text of six bytes, which numbers tell again in a chat."""
    pieces = [f" tok{i:02}".encode() for i in range(21)]
    engine = SimpleNamespace(llm=SimpleNamespace(engine=SimpleNamespace(tokenizer=SimpleNamespace(pieces=pieces))))
    service, body = cast(Any, SimpleNamespace(engine=engine, model_name="m")), kind(**fields)
    num_alternatives = body.top_logprobs or 0 if kind is schema.ChatRequest else body.logprobs
    top = tuple((i, float(np.float32(-i / 7))) for i in range(num_alternatives))
    logprob = TokenLogprob(20, float(np.float32(-0.3)), top)

    def written(num_tokens: int) -> int:
        update = Update(0, "", [100_000] * num_tokens, [logprob] * num_tokens, "length")
        stream: Any = SimpleNamespace(
            request=SimpleNamespace(id="r", prompt_token_ids=(1,)), num_output_tokens=0, num_cached_tokens=0
        )
        if kind is schema.ChatRequest:
            formatter = ChatFormatter(service, body, lambda: AnswerParser(None, None))
        else:
            formatter = CompletionFormatter(service, body, [[1]])
        return len(encode(formatter.choice(0, stream, update)))

    params = SamplingParams(max_tokens=1, logprobs=num_alternatives)
    assert choice_bytes(body, params, 1, 2) - choice_bytes(body, params, 1, 1) == num_bytes
    assert 0.7 * num_bytes <= (written(101) - written(1)) / 100 <= num_bytes


def test_formatting_leaves_a_thread_to_other_keys_and_asyncios_own_threads_alone():
    alice, bob = Keys([ALICE]).callers[0], Keys([BOB]).callers[0]
    begun, may_end = threading.Event(), threading.Event()

    def block() -> str:
        begun.set()
        assert may_end.wait(600)
        return threading.current_thread().name

    async def run() -> None:
        service = Service(cast(Any, None), "m", 0)
        jobs = [asyncio.create_task(service.format(alice, block)) for _ in range(50)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert await service.format(bob, lambda: 3) == 3
        assert await asyncio.to_thread(lambda: 4) == 4
        may_end.set()
        assert {name.partition("_")[0] for name in await asyncio.gather(*jobs)} == {"format"}
        service.close()

    asyncio.run(run())


class FormattingThreads:
    """Names of the threads on which log-probabilities are formatted, by whether there are many of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *owners: tuple[Any, str]) -> None:
        self.names: set[str] = set()
        for owner, name in owners:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function: Any) -> Any:
        def watched(*args: Any, **how: Any) -> Any:
            self.names.add(threading.current_thread().name.partition("_")[0])
            return function(*args, **how)

        return watched


NUMBERS = {"logprobs": 20, "prompt": [1] * 30, "max_tokens": 2, "ignore_eos": True}
"""A body whose prompt has 630 log-probabilities, and whose text has 42."""


@pytest.mark.parametrize("is_large", [False, True])
def test_a_streamed_prompt_with_many_log_probabilities_is_formatted_off_the_event_loop(monkeypatch, is_large):
    threads = FormattingThreads(monkeypatch, (CompletionFormatter, "_logprobs"), (routes, "_lines"))
    monkeypatch.setattr(service_module, "MAX_NUMBERS_ON_LOOP", 600 if is_large else 2000)

    async def run() -> None:
        async with serving_in_process(Keys([ALICE]), Gate()) as post:
            sent = await post("/v1/completions", NUMBERS | {"model": "m", "echo": True, "stream": True}, ALICE)
            events = [json.loads(one.partition("data: ")[2]) for one in sent[1].split("\n\n")[:-2]]
            shown = [logprob for event in events for logprob in event["choices"][0]["logprobs"]["token_logprobs"]]
            assert (sent[0], len(shown)) == (200, 32)

    asyncio.run(run())
    assert ("format" in threads.names) == is_large


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("method", ["Run", "Generate"])
def test_a_message_with_many_log_probabilities_is_made_off_the_event_loop(monkeypatch, method, is_large):
    threads = FormattingThreads(monkeypatch, (messages, "_logprob"))
    monkeypatch.setattr(service_module, "MAX_NUMBERS_ON_LOOP", 600 if is_large else 2000)
    keys, fields = Keys([ALICE]), dict[str, Any](NUMBERS | {"prompt_logprobs": True})
    ask = pb.GenerateRequest(token_ids=pb.TokenIds(ids=fields.pop("prompt")), **fields)

    async def run() -> None:
        async with AsyncLLM.from_factory(lambda: fake_llm(max_logprobs=20)) as engine:
            service, server = Service(engine, "m", 0), GrpcServer(ServerConfig(grpc_port=0), keys, AccessLog())
            await server.start(service)
            async with grpc.aio.insecure_channel(server.address) as channel:
                call = getattr(quire_pb2_grpc.QuireStub(channel), method)
                answer = call(ask, metadata=(("authorization", f"Bearer {ALICE}"),))
                last = await answer if method == "Run" else [update async for update in answer][-1]
                assert len(last.prompt_logprobs) == 30
                assert len(last.prompt_logprobs[1].top) == 20
                assert last.usage.prompt_tokens == 30
            await server.stop()
            service.close()

    asyncio.run(run())
    assert ("format" in threads.names) == is_large


def test_when_all_calls_are_open_health_answers_and_refusals_are_counted():
    keys, gate, ended = Keys([ALICE]), Gate(), list[tuple[str, str, str | None]]()
    config = ServerConfig(grpc_port=0, max_connections=2)
    access = AccessLog("off", lambda _, route, status, reason, key: ended.append((route, status, reason)))
    metadata = (("authorization", f"Bearer {ALICE}"),)

    async def run() -> None:
        async with AsyncLLM.from_factory(lambda: fake_llm(gate)) as engine:
            service, server = Service(engine, "m", 0), GrpcServer(config, keys, access)
            await server.start(service)
            async with grpc.aio.insecure_channel(server.address) as channel, contextlib.AsyncExitStack() as at_end:
                at_end.callback(gate.open)

                def ask() -> Any:
                    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), max_tokens=4)
                    return quire_pb2_grpc.QuireStub(channel).Run(request, metadata=metadata, timeout=600)

                gate.close()
                open_calls = [asyncio.ensure_future(ask()) for _ in range(2)]
                async with asyncio.timeout(600):
                    while engine.num_streams < 2:
                        await asyncio.sleep(0.005)
                with pytest.raises(grpc.aio.AioRpcError, match="2 calls are open") as refused:
                    await ask()
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=600)
                assert (await health).status == health_pb2.HealthCheckResponse.SERVING
                gate.open()
                await asyncio.gather(*open_calls)
                await ask()
                with pytest.raises(grpc.aio.AioRpcError) as unknown:
                    await channel.unary_unary("/quire.v1.Quire/Other")(b"", metadata=metadata, timeout=600)
                assert unknown.value.code() == grpc.StatusCode.UNIMPLEMENTED
            await server.stop()
            service.close()

    asyncio.run(run())
    assert ("/quire.v1.Quire/Run", "RESOURCE_EXHAUSTED", "max_connections") in ended
    assert ("none", "UNIMPLEMENTED", "unknown_method") in ended
    assert len(ended) == 6


# -- what needs no row ------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving_in_process(keys: Keys, gate: Gate):
    """A function that sends a body to a route in this process, and returns the status and the JSON of the response."""
    admission = Admission(find_client=keys.find_tenant)
    async with AsyncLLM.from_factory(lambda: fake_llm(gate, max_logprobs=20), admission=admission) as engine:
        service = Service(engine, "m", 0)
        app = Api(service, ServerConfig(page=False), Metrics()).app(keys)

        async def post(path: str, body: dict, key: str) -> tuple[int, Any]:
            messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
            headers = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
            sent: list[Any] = []

            async def receive() -> Any:
                return messages.pop() if messages else await asyncio.Event().wait()

            async def send(message: Any) -> None:
                sent.append(message)

            await app(scope, receive, send)
            content = b"".join(one.get("body", b"") for one in sent)
            return sent[0]["status"], content.decode() if body.get("stream") else json.loads(content)

        try:
            yield post
        finally:
            gate.open()
            service.close()


def test_tokenizing_counts_as_a_request_of_its_key(tmp_path):
    file, gate = tmp_path / "keys", Gate()
    file.write_text(f"{ALICE} name=alice requests=1\n{BOB} name=bob\n")
    text, ids = ("/tokenize", {"prompt": "ab"}), ("/detokenize", {"tokens": [1, 2]})

    async def run() -> None:
        async with serving_in_process(Keys(file=file), gate) as post:
            gate.close()
            generating = asyncio.create_task(
                post("/v1/completions", {"model": "m", "prompt": [1, 2], "max_tokens": 4}, ALICE)
            )
            await asyncio.to_thread(gate.wait_until_held)
            for path, body in (text, ids):
                status, refusal = await post(path, body, ALICE)
                assert (status, refusal["error"]["code"]) == (429, "key_requests")
                assert (await post(path, body, BOB))[0] == 200
            gate.open()
            assert (await generating)[0] == 200
            for _ in range(3):  # each is counted only while it lasts
                assert (await post(*text, ALICE))[0] == (await post(*ids, ALICE))[0] == 200

    asyncio.run(run())


def test_a_long_body_is_decoded_off_the_event_loop_beside_other_requests(monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    read, lengths = BodyReader.read, list[int]()

    def watched(reader: BodyReader, body: bytes, kind: type) -> Any:
        if threading.current_thread() is threading.main_thread():
            lengths.append(len(body))
            begun.set()
        else:
            begun.set()
            assert may_end.wait(600)
        return read(reader, body, kind)

    monkeypatch.setattr(BodyReader, "read", watched)

    async def run() -> None:
        async with serving_in_process(Keys([ALICE, BOB]), Gate()) as post:
            long = asyncio.create_task(post("/detokenize", {"tokens": [1] * (1 << 20)}, ALICE))
            assert await asyncio.to_thread(begun.wait, 600)
            assert (await post("/detokenize", {"tokens": [1, 2]}, BOB))[0] == 200
            assert not long.done()
            may_end.set()
            status, refusal = await long
            assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
            many = {"model": "m", "prompt": [1], "user": "x" * MAX_DECODED_ON_LOOP}
            assert (await post("/v1/completions", many, ALICE))[0] in (200, 400)

    asyncio.run(run())
    assert lengths
    assert max(lengths) <= MAX_DECODED_ON_LOOP


class CountedPieces(list):
    """The bytes of tokens, counting how often any is looked up."""

    num_read = 0

    def __getitem__(self, i: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(i)


def test_what_all_choices_share_is_formatted_once():
    num_prompt, n = 50, 16
    pieces = CountedPieces(b"abcdefgh"[i : i + 1] for i in range(8))
    tokenizer = SimpleNamespace(pieces=pieces, decode=lambda ids: "".join("abcdefgh"[i] for i in ids))
    engine = SimpleNamespace(llm=SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer)))
    service = cast(Any, SimpleNamespace(engine=engine, model_name="m"))
    prompt: Any = [i % 8 for i in range(num_prompt)]
    fields: dict[str, Any] = {"n": n, "echo": True, "logprobs": 2, "return_token_ids": True, "prompt_logprobs": True}
    body = schema.CompletionRequest(model="m", prompt=prompt, **fields)
    logprobs = [None, *(TokenLogprob(i, -1.0, ((i, -1.0), (7 - i, -2.0))) for i in prompt[1:])]
    request = SimpleNamespace(id="r", prompt_token_ids=tuple(prompt))
    stream: Any = SimpleNamespace(
        request=request, prompt_logprobs=logprobs, num_output_tokens=n, num_cached_tokens=0, sequences=[]
    )
    updates = [
        Update(i, "ab"[i % 2], [i % 2], [TokenLogprob(i % 2, -3.0, ((i % 2, -3.0),))], "length") for i in range(n)
    ]
    whole = CompletionFormatter(service, body, [prompt])
    response = json.loads(encode(whole.response([stream], [updates])))
    pieces.num_read, num_read_whole = 0, pieces.num_read
    streamed = CompletionFormatter(service, body, [prompt])
    events = [json.loads(encode(e)) for update in updates for e in streamed.events(0, stream, update)]
    assert response["choices"] == [choice for event in events for choice in event["choices"]]
    for i, choice in enumerate(response["choices"]):
        shown = choice["logprobs"]
        tokens = [chr(ord("a") + token_id) for token_id in [*prompt, i % 2]]
        assert (choice["index"], choice["text"], shown["tokens"]) == (i, "".join(tokens), tokens)
        assert shown["token_logprobs"] == [None, *[-1.0] * (num_prompt - 1), -3.0]
        assert shown["text_offset"] == list(range(num_prompt + 1))
        assert shown["top_logprobs"][:2] == [None, {"b": -1.0, "g": -2.0}]
        assert shown["top_logprobs"][-1] == {tokens[-1]: -3.0}
        assert choice["prompt_token_ids"] == prompt
        assert choice["prompt_logprobs"][:2] == [None, {"token_id": 1, "token": "b", "logprob": -1.0}]
    assert max(num_read_whole, pieces.num_read) <= 4 * num_prompt + 2 * n
