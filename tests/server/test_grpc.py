"""A real gRPC client against a real server: the tokens of `LLM` offline, the limits and keys of HTTP."""

import itertools
import json
import pickle
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import SamplingParams
from quire.server.grpc.proto import quire_pb2 as pb
from quire.server.grpc.proto import quire_pb2_grpc
from quire.server.logs import read_line
from tests.server.process import LONGEST_S, SMALL, serving

pytestmark = pytest.mark.own_server

ROOT = Path(__file__).resolve().parents[2]
KEY, OTHER, ADMIN_KEY = "key-of-one-tenant", "key-of-another", "key-of-an-admin"
PROMPT = "The old harbour was quiet, and "
METHODS = ("Generate", "Run", "Embed", "Abort", "GetModel")
Ask = pb.GenerateRequest


def bearer(key):
    return (("authorization", f"Bearer {key}"),)


class Client:
    """The stub, with a key on every call."""

    def __init__(self, address, key=KEY):
        self.channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = quire_pb2_grpc.QuireStub(self.channel)
        self.metadata = bearer(key) if key else ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def call(self, method, request, **how):
        return getattr(self.stub, method)(request, metadata=self.metadata, timeout=how.pop("timeout", LONGEST_S), **how)

    def generate(self, **fields):
        return self.call("Generate", Ask(**fields))

    def run(self, **fields):
        return self.call("Run", Ask(**fields))

    def abort(self, request_id):
        return self.call("Abort", pb.AbortRequest(request_id=request_id)).num_aborted

    def raw(self, path, data=b"", metadata=None):
        return self.channel.unary_unary(path)(data, metadata=self.metadata if metadata is None else metadata)

    def health(self, service=""):
        stub = health_pb2_grpc.HealthStub(self.channel)
        status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LONGEST_S).status
        return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


@pytest.fixture(scope="module")
def rpc_server(tiny_folder):
    flags = ("--grpc-port", "0", "--api-key", KEY, "--api-key", OTHER, "--admin-port", "0", "--admin-key", ADMIN_KEY)
    with serving(tiny_folder, *SMALL, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(rpc_server):
    with Client(rpc_server.grpc) as client:
        yield client


@pytest.fixture
def fails(client):
    """Checks how a call ends, and hands out its trailing metadata."""

    def check(code, method, request, match=None, **how):
        with pytest.raises(grpc.RpcError, match=match) as caught:
            list(answer) if hasattr(answer := client.call(method, request, **how), "__next__") else answer
        assert caught.value.code() == code, caught.value
        return dict(caught.value.trailing_metadata())

    return check


def gather(updates, n=1):
    """The text, tokens and finish reason of each sequence, and the last update."""
    outputs = [("", [], 0) for _ in range(n)]
    last = None
    for last in updates:
        text, ids, _ = outputs[last.index]
        outputs[last.index] = (text + last.text, ids + list(last.token_ids), last.finish_reason)
    return outputs, last


def expected(offline, prompt, **params):
    (output,) = offline.generate([prompt], SamplingParams(**params), progress=False)
    return output


# -- generating -------------------------------------------------------------------------------------------------------


def test_generate_says_what_the_library_says(client, offline):
    whole = expected(offline, PROMPT, temperature=0, max_tokens=50)
    updates = list(client.generate(text=PROMPT, temperature=0, max_tokens=50))
    ((text, ids, reason),), last = gather(updates)
    assert (text, ids) == (whole.outputs[0].text, whole.outputs[0].token_ids)
    assert pb.FinishReason.Name(reason) == f"FINISH_REASON_{whole.outputs[0].finish_reason.upper()}"
    assert len(updates) > 1
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), len(ids))
    assert not any(update.HasField("usage") for update in updates[:-1])
    assert len({update.request_id for update in updates}) == 1


@pytest.mark.parametrize("prompt", [PROMPT, list(range(20, 60))], ids=["text", "ids"])
def test_run_says_the_same_at_once(client, offline, prompt):
    whole = expected(offline, prompt, temperature=0, max_tokens=40)
    fields = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
    answer = client.run(**fields, temperature=0, max_tokens=40, request_id="mine")
    assert answer.request_id == "mine"
    assert answer.outputs[0].text == whole.outputs[0].text
    assert list(answer.outputs[0].token_ids) == whole.outputs[0].token_ids
    assert answer.usage.prompt_tokens == len(whole.prompt_token_ids)


def test_several_samples_with_a_seed(client, offline):
    params = {"seed": 5, "n": 3, "max_tokens": 12, "top_p": 0.9, "top_k": 50}
    whole = [(one.text, one.token_ids) for one in expected(offline, "one ", **params).outputs]
    outputs, last = gather(client.generate(text="one ", **params), n=3)
    assert [one[:2] for one in outputs] == whole
    assert last.usage.completion_tokens == sum(len(ids) for _, ids in whole)
    outputs = client.run(text="one ", **params).outputs
    assert [(one.text, list(one.token_ids)) for one in outputs] == whole
    assert [one.index for one in outputs] == [0, 1, 2]


def test_a_chat_goes_through_the_template(client, offline):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a quire?"}]
    whole = offline.chat(messages, SamplingParams(temperature=0, max_tokens=30))
    chat = pb.Chat(messages=[pb.Message(**message) for message in messages])
    answer = client.run(chat=chat, temperature=0, max_tokens=30, logprobs=2)
    assert answer.outputs[0].text == whole.outputs[0].text
    assert [len(entry.top) for entry in answer.outputs[0].logprobs] == [2] * len(answer.outputs[0].token_ids)


@pytest.mark.parametrize("method", ["Generate", "Run"])
def test_logprobs_are_those_of_the_library(client, offline, method):
    params = {"temperature": 0.7, "seed": 1, "max_tokens": 8, "logprobs": 3, "prompt_logprobs": True}
    whole = expected(offline, PROMPT, **params)
    answer = client.call(method, Ask(text=PROMPT, **params))
    if method == "Run":
        entries, prompt = answer.outputs[0].logprobs, answer.prompt_logprobs
    else:
        updates = list(answer)
        entries, prompt = [entry for update in updates for entry in update.logprobs], updates[-1].prompt_logprobs
    for entry, known in zip(entries, whole.outputs[0].logprobs, strict=True):
        assert entry.token_id == known.token_id
        assert entry.logprob == pytest.approx(known.logprob, abs=1e-4)
        assert entry.processed_logprob == pytest.approx(known.processed_logprob, abs=1e-4)
        assert [top.token_id for top in entry.top] == [token_id for token_id, _ in known.top]
    assert [entry.token_id for entry in prompt] == whole.prompt_token_ids
    assert not prompt[0].HasField("logprob")
    scores = [entry.logprob for entry in prompt[1:]]
    assert scores == pytest.approx([entry.logprob for entry in whole.prompt_logprobs[1:]], abs=1e-4)


def test_stops_and_biases_reach_the_sampler(client, offline):
    free = expected(offline, PROMPT, temperature=0, max_tokens=30).outputs[0].text
    stop = free[6:9]
    (output,) = client.run(text=PROMPT, temperature=0, max_tokens=30, stop=[stop]).outputs
    assert output.text == free[: free.index(stop)]
    assert output.finish_reason == pb.FINISH_REASON_STOP
    (output,) = client.run(text=PROMPT, temperature=0, max_tokens=5, logit_bias={65: 100}).outputs
    assert list(output.token_ids) == [65] * 5


def test_cached_prefixes_are_told_and_are_a_keys_own(client, rpc_server):
    fields = {"text": "a prompt that is sent more than once, word for word", "temperature": 0, "max_tokens": 2}
    assert [client.run(**fields).usage.cached_tokens > 0 for _ in range(2)] == [False, True]
    assert client.run(**fields, cache_salt="apart").usage.cached_tokens == 0
    with Client(rpc_server.grpc, OTHER) as stranger:
        assert stranger.run(**fields).usage.cached_tokens == 0


def test_the_model_is_described(client, offline):
    model = client.call("GetModel", pb.GetModelRequest())
    assert (model.name, model.vocab_size) == ("tiny", offline.engine.model.vocab_size)
    assert model.max_model_len == offline.engine.max_model_len
    assert client.run(text="x", max_tokens=1, model="tiny").outputs


# -- embedding --------------------------------------------------------------------------------------------------------


def texts(*given):
    return pb.EmbedRequest(texts=pb.Texts(texts=given))


def id_lists(*given, **fields):
    return pb.EmbedRequest(token_ids=pb.TokenIdLists(lists=[pb.TokenIds(ids=one) for one in given]), **fields)


def vectors(response):
    return np.array([list(one.values) for one in response.embeddings], np.float32)


def test_embeddings_are_those_of_the_library(client, offline):
    response = client.call("Embed", texts(PROMPT, "a", "é"))
    np.testing.assert_allclose(vectors(response), offline.embed([PROMPT, "a", "é"]), atol=1e-5)
    assert response.usage.prompt_tokens == len(PROMPT) + 1 + 2
    lists = [list(range(20, 60)), [7]]
    response = client.call("Embed", id_lists(*lists, dimensions=5, model="tiny"))
    np.testing.assert_allclose(vectors(response), offline.embed(lists, dimensions=5), atol=1e-5)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (41, 0)


def test_more_inputs_than_may_wait_are_embedded_in_turns(client, rpc_server):
    response = client.call("Embed", id_lists(*([i % 200] for i in range(600))))
    assert len(response.embeddings) == 600
    few = client.call("Embed", id_lists([0], [1]))
    np.testing.assert_allclose(vectors(response)[[0, 1, 200]], vectors(few)[[0, 1, 0]], atol=1e-5)
    rpc_server.wait_idle()


@pytest.mark.parametrize(
    ("request_", "field", "match"),
    [
        (pb.EmbedRequest(), "input", "missing"),
        (texts(), "input", "length >= 1"),
        (texts(""), "input", "the prompt is empty"),
        (id_lists([1], []), "input", "the prompt is empty"),
        (id_lists([99999]), "input", "is no token id"),
        (id_lists([1 << 31]), "input", "Expected"),
        (id_lists([1] * 5000), "input", "4,096"),
        (texts("x" * 5000), "input", "max_model_len=4096"),
        (texts(*["a"] * 2049), "input", "at most 2,048"),
        (id_lists([1], dimensions=0), "dimensions", ">= 1"),
        (id_lists([1], dimensions=1 << 20), "dimensions", "the model's hidden size"),
        (id_lists([1], priority=1), "priority", "--max-priority"),
        (id_lists([1], cache_salt="x" * 2000), "cache_salt", "<="),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_an_error_about_embeddings_names_the_field(fails, request_, field, match):
    trailing = fails(StatusCode.INVALID_ARGUMENT, "Embed", request_, match=match)
    assert trailing["quire-field"].startswith(field)


def test_embedding_ends_with_its_call(fails, rpc_server):
    many = id_lists(*([i % 200] * 900 for i in range(500)))
    fails(StatusCode.NOT_FOUND, "Embed", id_lists([1], model="other"), match="does not exist")
    fails(StatusCode.DEADLINE_EXCEEDED, "Embed", many, timeout=0.5)
    rpc_server.wait_idle()


# -- how it ends ------------------------------------------------------------------------------------------------------


def endless(client, **fields):
    """A stream that has begun and goes on for seconds."""
    stream = client.generate(text=PROMPT, ignore_eos=True, n=8, **fields)
    next(stream)
    return stream


def test_abort_ends_requests_of_the_same_key_only(client, rpc_server):
    stream = endless(client, request_id="long")
    with Client(rpc_server.grpc, OTHER) as stranger:
        assert stranger.abort("long") == 0
    assert client.abort("short") == 0
    assert client.abort("long") == 1
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() == StatusCode.CANCELLED
    assert "the request was cancelled" in caught.value.details()  # from the server
    rpc_server.wait_idle()
    assert client.abort("long") == 0


def call_line(server, request_id):
    """The line of the access log about a call with this id."""
    server.wait_for_line('"event": "call"', f'"request_id": "{request_id}"')
    lines = (read_line(line) for line in server.lines if line.startswith("{"))
    return next(one for one in lines if (one.event, one.request_id) == ("call", request_id))


def named(client, given, **fields):
    """Call `Run` with `x-request-id` as metadata; returns the ids in the response and in its trailing metadata."""
    metadata = (*client.metadata, ("x-request-id", given))
    response, call = client.stub.Run.with_call(Ask(text="x", max_tokens=1, **fields), metadata=metadata)
    return response.request_id, dict(call.trailing_metadata())["x-request-id"]


def test_x_request_id_of_a_call_is_echoed_and_logged(client, rpc_server):
    assert named(client, "from/metadata=1") == ("from/metadata=1", "from/metadata=1")
    line = call_line(rpc_server, "from/metadata=1")
    assert (line.route, line.status, line.reason) == ("/quire.v1.Quire/Run", "OK", None)
    assert line.key.startswith("key-")
    assert named(client, "the-call", request_id="the-message") == ("the-message", "the-call")
    assert call_line(rpc_server, "the-call").status == "OK"
    for wrong in ("two words", "z" * 129):
        with pytest.raises(grpc.RpcError) as caught:
            named(client, wrong)
        assert caught.value.code() == StatusCode.INVALID_ARGUMENT
        trailing = dict(caught.value.trailing_metadata())
        assert trailing["quire-field"] == "x-request-id"
        assert call_line(rpc_server, trailing["x-request-id"]).reason == "invalid_request_id"


@pytest.mark.parametrize("how", ["Abort", "admin"])
def test_a_call_is_aborted_by_its_x_request_id(client, rpc_server, how):
    request_id = f"ended-by-{how}"
    metadata = (*client.metadata, ("x-request-id", request_id))
    stream = client.stub.Generate(Ask(text=PROMPT, ignore_eos=True, n=8), metadata=metadata, timeout=LONGEST_S)
    next(stream)
    if how == "Abort":
        assert client.abort(request_id) == 1
    else:
        request = urllib.request.Request(
            f"http://127.0.0.1:{rpc_server.admin_port}/admin/abort",
            json.dumps({"request_id": request_id}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {ADMIN_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=LONGEST_S) as response:
            assert json.load(response) == {"aborted_requests": 1}
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    assert caught.value.code() == StatusCode.CANCELLED
    assert dict(caught.value.trailing_metadata())["x-request-id"] == request_id
    line = call_line(rpc_server, request_id)
    assert (line.route, line.status, line.reason) == ("/quire.v1.Quire/Generate", "CANCELLED", "cancelled")
    rpc_server.wait_idle()


def test_a_client_that_cancels_holds_no_page(client, rpc_server):
    stream = endless(client)
    assert rpc_server.metric("quire_pages_held") > 0
    stream.cancel()
    rpc_server.wait_idle()


def test_a_client_that_goes_holds_no_page(rpc_server):
    with Client(rpc_server.grpc) as client:
        endless(client)
    rpc_server.wait_idle()


@pytest.mark.parametrize("method", ["Generate", "Run"])
def test_a_deadline_is_kept(fails, rpc_server, method):
    fails(StatusCode.DEADLINE_EXCEEDED, method, Ask(text=PROMPT, ignore_eos=True, n=8), timeout=0.3)
    rpc_server.wait_idle()


# -- who may ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [*(f"/quire.v1.Quire/{name}" for name in METHODS), "/quire.v1.Quire/Other", "/a/b"])
@pytest.mark.parametrize(
    "metadata",
    [(), bearer("wrong-key"), bearer(KEY) * 2, (("authorization", KEY),), (("x-api-key", KEY),)],
    ids=["none", "wrong", "twice", "bare", "elsewhere"],
)
def test_nothing_is_open_without_a_key(client, method, metadata):
    with pytest.raises(grpc.RpcError, match="no valid API key") as caught:
        client.raw(method, b"anything", metadata)
    assert caught.value.code() == StatusCode.UNAUTHENTICATED


def test_every_method_of_the_proto_is_tried_above():
    assert {method.name for method in pb.DESCRIPTOR.services_by_name["Quire"].methods} == set(METHODS)


def test_with_a_key_there_is_nothing_but_what_is_documented(client):
    reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    for method in ("/quire.v1.Quire/Other", "/a/b", reflection):
        with pytest.raises(grpc.RpcError) as caught:
            client.raw(method)
        assert caught.value.code() == StatusCode.UNIMPLEMENTED


def test_health_needs_no_key(rpc_server):
    with Client(rpc_server.grpc, key=None) as anybody:
        assert anybody.health() == anybody.health("quire.v1.Quire") == "SERVING"
        watch = health_pb2_grpc.HealthStub(anybody.channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            anybody.health("other")
        assert caught.value.code() == StatusCode.NOT_FOUND


def test_watchers_are_bounded(rpc_server):
    with Client(rpc_server.grpc, key=None) as anybody:
        stub, ask = health_pb2_grpc.HealthStub(anybody.channel), health_pb2.HealthCheckRequest()
        watches = [stub.Watch(ask) for _ in range(64)]
        assert {next(watch).status for watch in watches} == {health_pb2.HealthCheckResponse.SERVING}
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Watch(ask))
        assert caught.value.code() == StatusCode.RESOURCE_EXHAUSTED
        assert anybody.health() == "SERVING"


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"text": "x", "temperature": 9}, "temperature"),
        ({"text": "x", "temperature": float("nan")}, "temperature"),
        ({"text": "x", "top_p": 1.5}, "top_p"),
        ({"text": "x", "top_k": 2**32 - 1}, "top_k"),
        ({"text": "x", "n": 0}, "n"),
        ({"text": "x", "n": 129}, "n"),
        ({"text": "x", "max_tokens": 2**32 - 1}, "max_tokens"),
        ({"text": "x", "max_tokens": 0}, "max_tokens"),
        ({"text": "x", "min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"text": "x", "max_tokens": 1 << 20}, "prompt"),
        ({"text": "x", "stop": [""]}, "stop[0]"),
        ({"text": "x", "stop": ["x"] * 17}, "stop"),
        ({"text": "x", "stop_token_ids": range(65)}, "stop_token_ids"),
        ({"text": "x", "stop_token_ids": [1] * 1_000_000}, "stop_token_ids"),
        ({"text": "x", "logit_bias": {5: 1e9}}, "logit_bias[...]"),
        ({"text": "x", "repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"text": "x", "priority": 2**63 - 1}, "priority"),
        ({"text": "x", "logprobs": 21}, "logprobs"),
        ({"text": "x", "cache_salt": "x" * 2000}, "cache_salt"),
        ({"text": "x", "request_id": "a b"}, "request_id"),
        ({"token_ids": pb.TokenIds()}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[99999])}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[1] * 1_000_000)}, "prompt"),
        ({"chat": pb.Chat()}, "messages"),
        ({"chat": pb.Chat(messages=[pb.Message(role="root", content="x")])}, "messages[0].role"),
        ({"text": "x", "structured_outputs": pb.StructuredOutputs()}, "structured_outputs"),
        ({"text": "x", "structured_outputs": pb.StructuredOutputs(json_schema="{")}, "structured_outputs.json_schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value)[:40],
)
def test_an_error_names_the_field(fails, fields, field):
    trailing = fails(StatusCode.INVALID_ARGUMENT, "Run", Ask(**fields))
    assert trailing["quire-field"] == field


def test_a_model_that_is_not_here(fails):
    fails(StatusCode.NOT_FOUND, "Run", Ask(text="x", model="other"), match="does not exist")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_message_is_refused(client, method):
    for data in (b"\xff\xff\xff", pickle.dumps(print), b"\xf8\x07\x01"):  # the last has a field that does not exist
        with pytest.raises(grpc.RpcError) as caught:
            client.raw(f"/quire.v1.Quire/{method}", data)
        assert caught.value.code() == StatusCode.INVALID_ARGUMENT


def test_large_and_compressed_messages_are_refused(fails, client):
    fails(StatusCode.RESOURCE_EXHAUSTED, "Run", Ask(text="x" * (9 << 20)))
    fails(StatusCode.UNIMPLEMENTED, "Run", Ask(text="x" * 1000), compression=grpc.Compression.Gzip)
    with pytest.raises(grpc.RpcError) as caught:
        client.raw("/quire.v1.Quire/GetModel", b"", (*client.metadata, ("x-large", "x" * 100_000)))
    assert caught.value.code() == StatusCode.RESOURCE_EXHAUSTED
    assert client.health() == "SERVING"


def test_bytes_that_are_no_grpc_do_not_disturb_a_bystander(client, rpc_server, offline, tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    stream = client.generate(text=PROMPT, temperature=0, max_tokens=400)
    host, _, port = rpc_server.grpc.rpartition(":")
    for data in (pickle.dumps(Attack()) * 100, b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b""):
        with socket.create_connection((host, int(port)), timeout=LONGEST_S) as peer:
            peer.sendall(data)
    ((_, ids, _),), _ = gather(stream)
    assert ids == expected(offline, PROMPT, temperature=0, max_tokens=400).outputs[0].token_ids
    assert rpc_server.process.poll() is None
    assert not (tmp_path / "ran").exists()


def test_logs_tell_no_prompt_and_no_key(client, rpc_server):
    client.run(text="a secret sentence", max_tokens=1)
    log = "".join(rpc_server.lines)
    assert "/quire.v1.Quire/Run" in log
    assert "secret sentence" not in log
    assert KEY not in log


# -- a server under load, and one that stops --------------------------------------------------------------------------


@pytest.mark.slow
def test_overload_unread_streams_and_draining(tiny_folder):
    flags = ("--grpc-port", "0", "--max-queued-requests", "1", "--write-timeout-s", "1", "--read-timeout-s", "1")
    with serving(tiny_folder, *SMALL, *flags) as server, Client(server.grpc, key=None) as client:
        _check_unsent(client)
        _check_unread(server)
        _check_overload(client)
        server.wait_idle()
        _check_drain(server, client)
        assert server.process.wait(LONGEST_S) == 0


def _check_unsent(client):
    """A call whose message does not come ends."""
    never = threading.Event()

    def messages():
        never.wait()
        yield b""

    with pytest.raises(grpc.RpcError) as caught:
        next(client.channel.stream_stream("/quire.v1.Quire/Generate")(messages()))
    never.set()
    assert caught.value.code() == StatusCode.DEADLINE_EXCEEDED


def _check_unread(server):
    """A client that leaves its stream unread loses it, and its request ends."""
    with Client(server.grpc, key=None) as client:
        first = len(server.lines)
        stream = endless(client, logprobs=20, temperature=1)
        server.wait_idle()
        server.wait_for_line("/quire.v1.Quire/Generate", "CANCELLED", start=first)
        with pytest.raises(grpc.RpcError, match="nothing was read for 1 s") as caught:
            list(stream)
        assert caught.value.code() == StatusCode.CANCELLED


def _check_overload(client):
    """All rows are taken, one request waits: the next is refused, with a time to try again."""
    running = endless(client)
    waiting = client.generate(text="x", max_tokens=1)
    refused = None
    for _ in range(100):  # until the one that waits has arrived
        try:
            client.call("Run", Ask(text="x", max_tokens=1), timeout=0.2)
        except grpc.RpcError as error:
            if error.code() == StatusCode.RESOURCE_EXHAUSTED:
                refused = error
                break
    assert refused is not None
    assert int(dict(refused.trailing_metadata())["retry-after"]) >= 1
    running.cancel()
    assert list(waiting)


def _check_drain(server, client):
    """Not ready at once; what runs goes on to its end."""
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    stream = client.generate(text=PROMPT, ignore_eos=True, max_tokens=4000)
    next(stream)
    server.process.terminate()
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert client.health() == "NOT_SERVING"
    with pytest.raises(grpc.RpcError, match="draining") as caught:
        client.run(text="x")
    assert caught.value.code() == StatusCode.UNAVAILABLE
    assert "retry-after" in dict(caught.value.trailing_metadata())
    assert list(stream)[-1].usage.completion_tokens == 4000


def test_a_port_that_is_taken_is_one_line(tiny_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "quire", "serve", str(tiny_folder), "--port", "0", "--grpc-port", port]
        out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    assert out.returncode == 2
    assert out.stderr == f"quire: --grpc-port {port} on 127.0.0.1 cannot be listened on\n"


# -- what is checked in -----------------------------------------------------------------------------------------------


def test_generated_code_is_what_the_proto_says(tmp_path):
    folder = "quire/server/grpc/proto"
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'src'}", *outs, f"{folder}/quire.proto"]
    subprocess.run(command, check=True, cwd=ROOT / "src")
    names = ["quire_pb2.py", "quire_pb2.pyi", "quire_pb2_grpc.py"]
    assert sorted(path.name for path in (tmp_path / folder).iterdir()) == names
    for name in names:
        same = (tmp_path / folder / name).read_bytes() == (ROOT / "src" / folder / name).read_bytes()
        assert same, f"{name} is not what quire.proto says: make proto"


def test_every_message_and_field_is_described():
    lines = (ROOT / "src/quire/server/grpc/proto/quire.proto").read_text().splitlines()
    declared = re.compile(
        r"\s*(message|enum|service|oneof|rpc|(optional |repeated )?[\w<>, ]+ \w+ = \d+;|[A-Z_]+ = \d+;)"
    )
    bare = [line for before, line in itertools.pairwise(lines) if declared.match(line) and "//" not in before]
    assert not bare


def test_the_documented_example_runs(rpc_server, capsys, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/grpc.md").read_text(), re.DOTALL)
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    exec(compile(code.replace("localhost:8001", rpc_server.grpc), "docs/grpc.md", "exec"), {})
    assert "16 tokens" in capsys.readouterr().out
