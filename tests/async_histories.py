"""Random lives of `AsyncLLM` and `Rollouts` over engines without a model, whose tokens are known beforehand.

Many tasks submit, cancel, abort and time out requests under few ids, which they reuse at once; steps fail. A stream has
the beginning of its own tokens, and all of them if it ended by its length.
"""

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress

from quire import LLM, AsyncLLM, Request, SamplingParams
from quire.async_llm import GenerationError, OverloadError, UnavailableError
from quire.core.errors import RequestError
from quire.engine.engine import Engine
from quire.rollouts import Rollouts
from quire.testing import fake_engine, hash_step, next_token
from tests.fake_llm import LONG_S

VOCAB = 1000


def expected(prompt: list[int], count: int) -> list[int]:
    """The greedy tokens after a prompt."""
    state, tokens = 0, []
    for token in prompt:
        state = hash_step(state, token, 0)
    for _ in range(count):
        tokens.append(next_token(state, VOCAB))
        state = hash_step(state, tokens[-1], 0)
    return tokens


def opener(rng: random.Random, engines: list[Engine], **knobs):
    """What opens an LLM of random sizes, and notes its engine."""
    seed, drafts = rng.randrange(1 << 30), rng.choice((0, 8))
    sizes = {"num_pages": rng.choice((18, 24, 40)), "max_num_seqs": 4, "max_rounds": rng.choice((1, 3))}

    def open_llm() -> LLM:
        more = sizes | ({"drafts": drafts} if drafts else {}) | knobs
        engines.append(fake_engine(vocab_size=VOCAB, eos_ids=(), max_model_len=64, seed=seed, **more))
        return LLM.from_engine(engines[-1], quiet=True)

    return open_llm


class AsyncHistory:
    """Requests of many tasks to one AsyncLLM of one or several engines."""

    def __init__(self, seed: int, num_engines: int) -> None:
        self.seed, self.count, self.engines = seed, Counter(), []
        rng = random.Random(seed)
        self.open_llms = [opener(rng, self.engines) for _ in range(num_engines)]

    async def play(self, num_tasks: int, requests_each: int) -> Counter:
        async with AsyncLLM.from_factory(*self.open_llms) as llm:
            for thread in llm.engines.threads:
                thread.heartbeat.limit_s = LONG_S  # a machine that others share may stand still for seconds
            rngs = [random.Random(f"{self.seed} {i}") for i in range(num_tasks)]
            await asyncio.gather(*(self.task(llm, rng, requests_each) for rng in rngs))
            await llm.call_all(lambda engine: engine.audit())
            assert (llm.num_streams, llm.admission.num_waiting, llm.admission.num_waiting_tokens) == (0, 0, 0)
            for stats in await llm.call_all(lambda engine: engine.stats()):
                assert (stats.held_pages, stats.running, stats.waiting) == (0, 0, 0)
        return self.count

    async def task(self, llm: AsyncLLM, rng: random.Random, num_requests: int) -> None:
        for _ in range(num_requests):
            await self.request(llm, rng)
            if rng.random() < 0.05:
                rng.choice(self.engines).runner.fail_next = rng.choice(("before", "inside"))
                self.count["fail"] += 1
            if rng.random() < 0.05:
                await llm.call_all(lambda engine: engine.audit())

    async def request(self, llm: AsyncLLM, rng: random.Random) -> None:
        """Submit a request under one of few ids, read as much of it as chance has it, and compare."""
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))]
        if rng.random() < 0.3:
            prompt = [*range(1, 9)][: len(prompt)] + prompt
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 12), n=rng.choice((1, 1, 2, 3)))
        request = Request(
            id=f"id{rng.randrange(6)}",
            prompt_token_ids=tuple(prompt),
            params=params,
            stream=rng.random() < 0.5,
            priority=rng.choice((0, 0, 1)),
        )
        try:
            (stream,) = llm.submit([request], timeout_s=rng.choice((None, None, 0.01)))
        except RequestError:
            self.count["in use"] += 1
            await asyncio.sleep(0)
            return
        except UnavailableError:  # three steps in a row failed
            self.count["unavailable"] += 1
            await asyncio.sleep(0.1)
            await self.request(llm, rng)
            return
        got: dict[int, list[int]] = {i: [] for i in range(params.n)}
        ended: dict[int, str] = {}
        end, num_read = rng.choice(("read", "read all", "cancel", "abort", "call")), rng.randint(0, 4)
        try:
            if end == "read all":
                take(await stream.read_all(), got, ended)
            else:
                async for updates in stream:
                    take(updates, got, ended)
                    num_read -= 1
                    if num_read >= 0 or end == "read":
                        continue
                    if end == "cancel":
                        stream.cancel()
                        break
                    if end == "abort":
                        llm.abort(request.id)
                    else:
                        await llm.call_all(lambda engine: engine.abort(request.id))
        except GenerationError as error:
            self.count[error.reason] += 1
        self.count[end] += 1
        whole = expected(prompt, params.max_tokens)
        for index, token_ids in got.items():
            assert token_ids == whole[: len(token_ids)], (request.id, index, end)
            assert ended.get(index) != "length" or token_ids == whole, (request.id, index, end)


def take(updates, got: dict[int, list[int]], ended: dict[int, str]) -> None:
    for update in updates:
        got[update.index] += update.token_ids
        if update.finish_reason:
            ended[update.index] = update.finish_reason


class RolloutsHistory:
    """Threads that submit, collect, abort, pause, change weights and let steps fail, all at once."""

    def __init__(self, seed: int) -> None:
        self.seed, self.count, self.engines = seed, Counter(), []
        self.lock, self.futures, self.errors = threading.Lock(), [], []
        self.is_over = threading.Event()
        rng = random.Random(seed)
        self.rollouts = Rollouts.from_factory(opener(rng, self.engines), max_pending=rng.choice((None, 6)))

    def play(self, num_submits: int) -> Counter:
        submitters = [threading.Thread(target=self.run, args=(self.submit, i, num_submits)) for i in range(3)]
        others = [threading.Thread(target=self.run, args=(what, 9, None)) for what in (self.control, self.collect)]
        for thread in (*submitters, *others):
            thread.start()
        for thread in submitters:
            thread.join(LONG_S)
        self.is_over.set()
        for thread in (*submitters, *others):
            thread.join(LONG_S)
            assert not thread.is_alive()
        if self.errors:
            raise self.errors[0]
        self.rollouts.resume()
        for future, prompts in self.futures:
            with suppress(GenerationError):
                outputs = future.result(LONG_S)
                for output, prompt in zip(outputs, prompts, strict=True):
                    assert output.prompt_token_ids == prompt
                    assert all(len(one.token_ids) == len(one.weight_versions) for one in output.outputs)
        self.rollouts.call(lambda engine: engine.audit())
        self.rollouts.close()
        return self.count

    def run(self, what, number: int, num_times: int | None) -> None:
        rng, done = random.Random(f"{self.seed} {what.__name__} {number}"), 0
        try:
            while done != num_times and not (num_times is None and self.is_over.is_set()):
                what(rng)
                done += 1
        except BaseException as error:
            self.errors.append(error)

    def submit(self, rng: random.Random) -> None:
        prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.4:
            prompts = [prompts[0]] * rng.randint(1, 4)
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 10), n=rng.choice((1, 2)))
        group = rng.randrange(100) if rng.random() < 0.7 else None
        with suppress(OverloadError):
            future = self.rollouts.submit(prompts, params, group=group, wait_s=LONG_S)
            with self.lock:
                self.futures.append((future, prompts))
                self.count["submit"] += 1
        if group is not None and rng.random() < 0.15:
            self.rollouts.abort(group)

    def control(self, rng: random.Random) -> None:
        rollouts, version = self.rollouts, self.count["version"]
        what = rng.choice(("weights", "sleep", "pause", "fail", "abort all", "audit", "audit"))
        self.count[what] += 1
        if what == "weights":
            self.count["version"] += 1
            rollouts.set_weights(version, version=version, running=rng.choice(("keep", "recompute", "abort")))
        elif what == "sleep":
            self.count["version"] += 1
            rollouts.sleep()
            rollouts.wake(version, version=version)
        elif what == "pause":
            rollouts.pause()
            rollouts.resume()
        elif what == "fail":
            self.engines[0].runner.fail_next = rng.choice(("before", "inside"))
        elif what == "abort all":
            rollouts.abort_all()
        else:
            rollouts.call(lambda engine: engine.audit())
        self.is_over.wait(0.002)  # so that requests get on

    def collect(self, rng: random.Random) -> None:
        with suppress(TimeoutError, GenerationError):
            self.rollouts.collect(rng.randint(1, 3), max_lag=rng.choice((None, 0, 2)), timeout_s=0.02)
            self.count["collected"] += 1
