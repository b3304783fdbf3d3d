"""Several engines behind one `AsyncLLM`: the same tokens, kept together, drained, changed and lost one by one."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from quire import LLM, AsyncLLM, EngineConfig, SamplingParams
from quire.async_llm import UnavailableError
from quire.field_error import FieldError
from quire.rollouts import Rollouts
from tests.fake_llm import LONG_S, Gate, fake_llm
from tests.test_async_llm import run, tokens, until
from tests.tiny import tiny_config, tiny_llm, tiny_tensors

KNOBS = {"num_pages": 64, "max_num_seqs": 4}


@asynccontextmanager
async def opened(*gates: Gate | None, **knobs):
    """An AsyncLLM over engines without a model; when it is left, no page of a living one may be held."""
    open_llms = [lambda gate=gate: fake_llm(gate, **KNOBS | knobs) for gate in gates]
    async with AsyncLLM.from_factory(*open_llms) as llm:
        yield llm
        for i, state in enumerate(llm.engines.states):
            assert (state.num_requests, state.queued_tokens) == (0, 0)
            if state.is_healthy:
                stats = await llm.call(lambda engine: (engine.audit(), engine.stats())[1], engine=i)
                assert (stats.held_pages, stats.running, stats.waiting) == (0, 0, 0)


async def engine_of(llm: AsyncLLM, request_id: str) -> int:
    """The engine that has a request, once it has been submitted."""
    await until(lambda: any(stream.request.id == request_id for stream in llm.streams))
    return next(stream.engine for stream in llm.streams if stream.request.id == request_id)


def prompt(i: int) -> list[int]:
    return [1 + (i * 3 + j * j) % 10 for j in range(9)]


# -- the same as one --------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_one_engine():
    seeded = SamplingParams(seed=7, max_tokens=6, n=3, ignore_eos=True)

    async def main() -> None:
        found = []
        for gates in ([None], [None, None, None]):
            async with opened(*gates) as llm:
                outputs = await asyncio.gather(*(llm.generate(prompt(i), seeded) for i in range(12)))
                found.append([[one.token_ids for one in output.outputs] for output in outputs])
                counts = [stats.prompt_tokens for stats in await llm.call_all(lambda engine: engine.stats())]
                assert all(counts)
                assert sum(counts) == 12 * 9
        assert found[0] == found[1]

    run(main)


@pytest.mark.slow
def test_a_real_model_on_meshes_of_its_own_is_the_same():
    """data=2,model=2 on four devices: tokens, weights by name, and what does not fit is refused as by one."""
    config, rng = tiny_config(), np.random.default_rng(0)
    prompts = [rng.integers(1, config.vocab_size, size=n).tolist() for n in (3, 9, 17, 5, 12, 8)]
    seeded = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, n=2)
    changed = {name: tensor * np.float32(1.25) for name, tensor in tiny_tensors(config).items()}
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "debug": True}
    expected = []
    with tiny_llm(config, **small) as llm:
        for weights in (None, changed):
            if weights:
                llm.set_weights(weights)
            expected.append([[one.token_ids for one in output.outputs] for output in llm.generate(prompts, seeded)])

    async def main() -> None:
        async with AsyncLLM.from_params(
            config,
            tiny_tensors(config),
            mesh="data=2,model=2",
            dtype="float32",
            page_size=4,
            num_pages=64,
            quiet=True,
            **small,
        ) as llm:
            devices = [
                {device.id for device in engine.runner.mesh.devices.flat} for engine in await llm.call_all(lambda e: e)
            ]
            assert [len(each) for each in devices] == [2, 2]
            assert not devices[0] & devices[1]
            for weights, want in zip((None, changed), expected, strict=True):
                if weights:
                    assert await llm.set_weights(weights, version="second") == 0
                outputs = await asyncio.gather(*(llm.generate(one, seeded) for one in prompts))
                assert [[one.token_ids for one in output.outputs] for output in outputs] == want
                used = await llm.call_all(lambda engine: (engine.stats().prompt_tokens, engine.stats().weight_version))
                assert all(count for count, _ in used)
            assert [version for _, version in used] == ["second", "second"]
            assert [stats.compiles_after_warmup for stats in await llm.call_all(lambda e: e.stats())] == [0, 0]

    run(main)


# -- who gets what ----------------------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_is_cached():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates) as llm:
            first = await llm.generate(prompt(1), tokens(1))
            assert first.num_cached_tokens == 0
            (home,) = [i for i, count in enumerate(await llm.call_all(lambda e: e.stats().prompt_tokens)) if count]
            for _ in range(4):
                again = await llm.generate(prompt(1), tokens(1))
                assert again.num_cached_tokens == 8
            await llm.call(lambda engine: engine.clear_prefix_cache(), engine=home)
            other = await llm.generate(prompt(1), tokens(1))
            assert other.num_cached_tokens == 0
            counts = await llm.call_all(lambda e: e.stats().prompt_tokens)
            assert counts[1 - home] == 9, "what is cached nowhere goes to the one that has waited longer for a request"

    run(main)


def test_a_group_and_the_samples_of_a_request_stay_together():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates, max_num_seqs=4) as llm:
            for gate in gates:
                gate.close()
            tasks = [
                asyncio.create_task(
                    llm.generate(prompt(i), tokens(2, n=2), group="session" if i % 2 else "", request_id=f"r{i}")
                )
                for i in range(8)
            ]
            engines = [await engine_of(llm, f"r{i}") for i in range(8)]
            assert len(set(engines[1::2])) == 1
            assert set(engines) == {0, 1}
            other_salt = asyncio.create_task(
                llm.generate(prompt(9), tokens(1), group="session", cache_salt="x", request_id="s")
            )
            assert await engine_of(llm, "s") in (0, 1)
            for gate in gates:
                gate.open()
            await asyncio.gather(*tasks, other_salt)

    run(main)


# -- one of them ------------------------------------------------------------------------------------------------------


def test_one_engine_drains_while_the_other_serves():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates) as llm:
            gates[0].close()
            held = asyncio.create_task(llm.generate(prompt(0), tokens(3), request_id="held"))
            assert await engine_of(llm, "held") == 0
            draining = asyncio.create_task(llm.drain_engine(0))
            await until(lambda: llm.engines.states[0].refusal)
            for i in range(6):
                await llm.generate(prompt(i), tokens(2))
            assert not draining.done()
            assert llm.is_ready
            with pytest.raises(ValueError, match="engine=1 is the last one that takes requests"):
                llm.engines.drain(1)
            gates[0].open()
            assert len((await held).outputs[0].token_ids) == 3
            await draining
            assert await llm.call(lambda engine: engine.stats().prompt_tokens, engine=0) == 9
            llm.engines.resume(0)
            await asyncio.gather(*(llm.generate(prompt(20 + i), tokens(2)) for i in range(4)))
            assert await llm.call(lambda engine: engine.stats().prompt_tokens, engine=0) > 9
            with pytest.raises(FieldError, match="engine=2 must be a whole number from 0 to 1"):
                await llm.drain_engine(2)

    run(main)


def test_a_dead_engine_ends_its_requests_and_the_other_serves():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates) as llm:
            gates[0].close()
            lost = asyncio.create_task(llm.generate(prompt(0), tokens(3), request_id="lost"))
            assert await engine_of(llm, "lost") == 0
            llm.engines.threads[0].llm.engine.runner.failure = RuntimeError("gone")
            gates[0].open()
            with pytest.raises(UnavailableError, match="the engine has stopped"):
                await lost
            await until(lambda: not llm.is_healthy)
            assert llm.engines.silent == [0]
            assert llm.is_ready
            for i in range(6):
                assert len((await llm.generate(prompt(i), tokens(2))).outputs[0].token_ids) == 2
            with pytest.raises(UnavailableError):
                await llm.call_all(lambda engine: engine.stats())
            assert llm.engines.states[1].is_healthy

    run(main)


def test_a_hanging_engine_gets_no_requests_and_keeps_its_own():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates) as llm:
            gates[0].close()
            held = asyncio.create_task(llm.generate(prompt(0), tokens(3), request_id="held"))
            assert await engine_of(llm, "held") == 0
            await asyncio.to_thread(gates[0].wait_until_held)
            pace = llm.engines.threads[0].llm.engine.pace
            pace.in_flight = pace.in_flight._replace(expected_s=1e-9)
            llm.engines.threads[0].heartbeat.limit_s = 1e-9
            assert llm.engines.silent == [0]
            assert len((await llm.generate(prompt(0), tokens(2))).outputs[0].token_ids) == 2
            llm.engines.threads[0].heartbeat.limit_s = LONG_S
            gates[0].open()
            assert len((await held).outputs[0].token_ids) == 3
            await until(lambda: llm.is_healthy)

    run(main)


# -- all of them ------------------------------------------------------------------------------------------------------


def test_weights_sleep_and_abort_reach_all():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates) as llm:
            await llm.set_weights(5, version="v")
            assert await llm.call_all(lambda e: e.stats().weight_version) == ["v", "v"]
            await llm.sleep()
            assert await llm.call_all(lambda e: e.is_asleep) == [True, True]
            waiting = [asyncio.create_task(llm.generate(prompt(i), tokens(2), request_id=f"w{i}")) for i in range(2)]
            assert {await engine_of(llm, "w0"), await engine_of(llm, "w1")} == {0, 1}
            await llm.wake(6, version="w")
            for output in await asyncio.gather(*waiting):
                assert output.outputs[0].weight_versions == ["w", "w"]
            for gate in gates:
                gate.close()
            running = [asyncio.create_task(llm.generate(prompt(i), tokens(9), request_id=f"a{i}")) for i in range(4)]
            assert {await engine_of(llm, f"a{i}") for i in range(4)} == {0, 1}
            assert llm.abort_all() == 4
            for gate in gates:
                gate.open()
            assert [output.outputs[0].finish_reason for output in await asyncio.gather(*running)] == ["abort"] * 4

    run(main)


def test_weights_of_tenants_reach_all():
    async def main() -> None:
        async with opened(None, None) as llm:
            llm.set_tenant_weights({"a": 3})
            assert await llm.call_all(lambda e: e.scheduler.tenants.of("a").weight) == [3, 3]
            with pytest.raises(FieldError, match=r"weights\['a'\]=0 must be a number from 0.001 to 1,000"):
                llm.set_tenant_weights({"a": 0})

    run(main)


def test_an_engine_whose_weights_could_not_be_set_serves_no_more():
    async def main() -> None:
        async with opened(None, None) as llm:
            runner = llm.engines.threads[1].llm.engine.runner

            def refuse(params, *, copy=True):
                raise MemoryError("no room for them")

            runner.set_weights = refuse
            with pytest.raises(MemoryError, match="no room"):
                await llm.set_weights(5, version="new")
            for i in range(4):
                output = await llm.generate(prompt(i), tokens(1))
                assert output.outputs[0].weight_versions == ["new"]
            with pytest.raises(ValueError, match="engine=1 cannot go on: its weights are older"):
                llm.engines.resume(1)
            assert llm.engines.states[1].refusal == "its weights are older than the others'"

    run(main)


def test_ids_are_unique_over_all_and_the_queue_is_one():
    async def main() -> None:
        gates = [Gate(), Gate()]
        async with opened(*gates, max_num_seqs=1) as llm:
            for gate in gates:
                gate.close()
            tasks = [asyncio.create_task(llm.generate(prompt(i), tokens(2), request_id=f"r{i}")) for i in range(3)]
            await until(lambda: llm.num_streams == 3)
            assert llm.admission.num_rows == 2
            with pytest.raises(ValueError, match="request id 'r1' is in use"):
                await llm.generate(prompt(5), tokens(1), request_id="r1")
            for gate in gates:
                gate.open()
            await asyncio.gather(*tasks)

    run(main)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_one_engine_refuses_several_by_name():
    message = "mesh='data=2' has data=2, several engines, and this is one: leave data out"
    for open_one in (LLM, Rollouts):
        with pytest.raises(FieldError, match=message) as error:
            open_one("nowhere", mesh="data=2")
        assert error.value.field == "mesh"
    assert (EngineConfig(mesh="data=2,model=3").num_engines, EngineConfig().num_engines) == (2, 1)
    assert replace(EngineConfig(mesh="model=3"), mesh="expert=2").num_engines == 1


def test_too_many_engines_and_calls_that_name_none_are_refused():
    async def main() -> None:
        with pytest.raises(FieldError, match=r"'data=3,model=2' needs 6 devices, and there are 4 \(cpu\)"):
            async with AsyncLLM("nowhere", mesh="data=3,model=2"):
                pass
        async with opened(None, None) as llm:
            with pytest.raises(FieldError, match="there are 2 engines: name one, or use call_all"):
                await llm.call(lambda engine: engine.stats())

    run(main)
