"""A key at its limit over gRPC and in batches: it is refused, or waits, and other keys go on."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.async_llm import AsyncLLM, OverloadError
from quire.async_llm.admission import Admission
from quire.server.access import AccessLog
from quire.server.batches.answer import MAX_LIMIT_WAIT_S, OVERLOAD_WAIT_S, seconds_to_wait
from quire.server.config import ServerConfig
from quire.server.grpc.proto import quire_pb2 as pb
from quire.server.grpc.proto import quire_pb2_grpc
from quire.server.grpc.server import GrpcServer
from quire.server.keys import Caller, Keys
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.parse import parse_completion
from quire.server.service import Service
from tests.fake_llm import Gate, fake_llm
from tests.server.test_limits import ALICE, BOB
from tests.test_batch_worker import add_batch, batches_in, ended

BODY = schema.CompletionRequest(model="toy", prompt=[1, 2], max_tokens=4)  # pyright: ignore[reportCallIssue]
REFUSAL = "key alice: 1 requests wait or run, and at most requests=1 may"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    file = tmp_path / "keys"
    file.write_text(f"{ALICE} name=alice requests=1\n{BOB} name=bob\n")
    return Keys(file=file)


def caller(keys: Keys, key: str) -> Caller:
    found = keys.find(key)
    assert found
    return found


def test_a_key_at_its_limit_is_refused_over_grpc(keys):
    gate, config = Gate(), ServerConfig(port=0, grpc_port=0)

    async def run() -> None:
        admission = Admission(find_client=keys.find_tenant)
        async with AsyncLLM.from_factory(lambda: fake_llm(gate), admission=admission) as engine:
            service, server = Service(engine, "m", 0), GrpcServer(config, keys, AccessLog())
            await server.start(service)
            async with grpc.aio.insecure_channel(server.address) as channel:
                stub = quire_pb2_grpc.QuireStub(channel)

                def ask(key: str) -> Any:
                    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), max_tokens=4)
                    return stub.Run(request, metadata=(("authorization", f"Bearer {key}"),))

                gate.close()
                first = ask(ALICE)
                await asyncio.to_thread(gate.wait_until_held)
                with pytest.raises(grpc.aio.AioRpcError, match=REFUSAL) as refused:
                    await ask(ALICE)
                assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                other = ask(BOB)
                gate.open()
                await first
                await other
                await ask(ALICE)
            await server.stop()
            service.close()

    asyncio.run(run())


def test_lines_of_a_batch_wait_for_the_limit_of_their_key(keys, tmp_path):
    gate, alice, bob = Gate(), caller(keys, ALICE), caller(keys, BOB)

    async def run() -> None:
        admission = Admission(find_client=keys.find_tenant)
        async with batches_in(tmp_path / "batches", gate, admission=admission) as batches:
            service = batches._service
            gate.close()
            batch = await add_batch(batches, 6, alice)
            await asyncio.to_thread(gate.wait_until_held)
            with pytest.raises(OverloadError, match=REFUSAL):
                await parse_completion(service, BODY, alice)
            (stream,) = service.engine.submit((await parse_completion(service, BODY, bob)).requests)
            gate.open()
            await stream.read_all()
            await ended(batch)
            assert (batch.status, batch.completed, batch.failed) == ("completed", 6, 0)

    asyncio.run(run())


@pytest.mark.parametrize(("limit", "num_lines"), [("requests=4", 2), ("requests=3", 2), ("tokens_per_minute=30", 3)])
def test_a_batch_leaves_half_of_its_keys_limit_to_interactive_requests(tmp_path, limit, num_lines):
    file, gate = tmp_path / "keys", Gate()
    file.write_text(f"{ALICE} name=alice {limit}\n")
    keys = Keys(file=file)
    alice = caller(keys, ALICE)

    async def run() -> None:
        admission = Admission(find_client=keys.find_tenant)
        async with batches_in(tmp_path / "batches", gate, admission=admission) as batches:
            engine = batches._service.engine
            gate.close()
            batch = await add_batch(batches, 6, alice)
            await asyncio.to_thread(gate.wait_until_held)
            async with asyncio.timeout(60):
                while engine.num_streams < num_lines:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(2 * OVERLOAD_WAIT_S)
            assert engine.num_streams == num_lines
            (stream,) = engine.submit((await parse_completion(batches._service, BODY, alice)).requests)
            gate.open()
            await stream.read_all()
            if "requests" in limit:
                assert (await ended(batch)).completed == 6

    asyncio.run(run())


def test_a_batch_whose_key_has_no_tokens_left_keeps_no_other_batch_waiting(tmp_path):
    """A token is left of the minute, so each line is read, and refused when it is to run."""
    file = tmp_path / "keys"
    file.write_text(f"{ALICE} name=alice tokens_per_minute=8\n{BOB} name=bob\n")
    keys = Keys(file=file)

    async def run() -> None:
        admission = Admission(find_client=keys.find_tenant)
        async with batches_in(tmp_path / "batches", admission=admission) as batches:
            slow, fast = [await add_batch(batches, 40, caller(keys, key)) for key in (ALICE, BOB)]
            async with asyncio.timeout(60):
                await ended(fast)
            assert (fast.completed, slow.has_ended) == (40, False)

    asyncio.run(run())


def test_a_line_waits_until_tokens_of_its_key_come_back_within_a_bound():
    def wait_s(retry_after_s: int, code: str) -> float:
        return seconds_to_wait(OverloadError("", retry_after_s, code))

    assert wait_s(7, "key_tokens_per_minute") == 7
    assert wait_s(50, "key_tokens_per_minute") == MAX_LIMIT_WAIT_S
    assert wait_s(7, "key_requests") == wait_s(7, "overloaded") == OVERLOAD_WAIT_S


def test_a_rejection_is_counted_when_a_client_is_answered():
    """A line of a batch that waits for a limit reaches no client."""
    metrics = Metrics()
    for reason in ("key_requests", "request_too_large", "cancelled", None):
        metrics.count_request("http", "/v1/completions", "429", reason, "alice")
    assert metrics.registry.get_sample_value("quire_rejections_total") == 2
