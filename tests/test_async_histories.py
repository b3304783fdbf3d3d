"""Requests are told apart, and all end, in random lives of `AsyncLLM`, `Rollouts` and pooled prompts."""

import asyncio
import contextlib
import random

import numpy as np
import pytest

from quire import Request, SamplingParams
from quire.core.sequence import Sequence, SequenceState
from quire.engine.engine import Engine
from quire.testing import InjectedError, fake_engine, hash_step, hidden_state
from tests.async_histories import AsyncHistory, RolloutsHistory
from tests.effort import slow
from tests.fake_llm import LONG_S

CASES = [0, *(slow(i) for i in range(1, 6))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_engines", [1, 2])
def test_requests_that_reuse_ids_get_their_own_tokens(num_engines, case, fresh_seed):
    history = AsyncHistory(fresh_seed + case, num_engines)
    count = asyncio.run(asyncio.wait_for(history.play(num_tasks=8, requests_each=60), LONG_S))
    assert min(count[name] for name in ("in use", "read", "read all", "cancel", "abort", "call")) > 0, count


@pytest.mark.parametrize("case", CASES)
def test_every_rollout_ends_with_its_own_prompt(case, fresh_seed):
    count = RolloutsHistory(fresh_seed + case).play(num_submits=60)
    assert count["submit"] > 0


class PooledHistory:
    """Prompts that are embedded beside others that generate, while pages are taken, lost and computed again."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        windows = rng.choice(((None,), (None, 3), (5, None, 2)))
        drafts = {"drafts": 4} if seed % 2 else {}
        self.engine: Engine = fake_engine(
            vocab_size=50, eos_ids=(), page_size=rng.choice((1, 2, 4)), num_pages=rng.choice((32, 48)),
            num_host_pages=16, max_rounds=2, max_num_batched_tokens=rng.choice((4, 8, 16)), max_model_len=24,
            debug=True, windows=windows, **drafts,
        )  # fmt: skip
        self.alive: dict[Sequence, SamplingParams] = {}
        self.mixed: set[Sequence] = set()
        self.num_added = self.weights = self.num_checked = 0

    def play(self, num_operations: int) -> int:
        """Returns how many embeddings were those that were expected."""
        for _ in range(num_operations):
            if self.rng.random() < 0.4 and len(self.alive) < 8:
                self.add()
            self.disturb()
            with contextlib.suppress(InjectedError):
                self.engine.step()
            self.engine.audit()
            for sequence in [one for one in self.alive if one.state is SequenceState.FINISHED]:
                self.check(sequence, self.alive.pop(sequence))
        return self.num_checked

    def add(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 16))]
        if rng.random() < 0.5:
            prompt[:12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8][: len(prompt)]
        scored = rng.random() < 0.3
        if pooling := rng.choice(("last", "mean", None)):
            start = rng.randint(1, 9)
            params = SamplingParams(max_tokens=0, pooling=pooling, prompt_logprobs=scored, prompt_logprobs_start=start)
        else:
            n = rng.choice((1, 2))
            params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 6), n=n, prompt_logprobs=scored)
        self.num_added += 1
        request = Request(
            id=f"r{self.num_added}",
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=rng.choice((0, 0, 1)),
            keeps_end=rng.random() < 0.4,
            cache_salt=rng.choice(("", "t")),
        )
        self.alive |= dict.fromkeys(self.engine.add(request), params)

    def disturb(self) -> None:
        rng, engine, chance = self.rng, self.engine, self.rng.random()
        running = engine.scheduler.running
        if chance < 0.1 and running:
            engine.scheduler.preempt(rng.choice(running), swap=rng.choice((True, False, None)))
        elif chance < 0.13:
            how = rng.choice(("keep", "recompute", "abort"))
            if how == "keep":
                self.mixed |= {one for one in self.alive if any(member.num_computed for member in one.family)}
            self.weights += 1
            engine.set_weights(self.weights, version=self.weights, running=how)
        elif chance < 0.15:
            self.weights += 1
            engine.sleep()
            engine.wake(self.weights, version=self.weights)
        elif chance < 0.17:
            engine.runner.fail_next = rng.choice(("before", "inside"))
        elif chance < 0.2 and self.alive:
            engine.abort(rng.choice(list(self.alive)))

    def check(self, sequence: Sequence, params: SamplingParams) -> None:
        if not params.pooling:
            return
        if sequence.finish_reason != "length":
            assert sequence.embedding_D is None
        elif sequence not in self.mixed:
            state, states = 0, []
            for token in sequence.request.prompt_token_ids:
                state = hash_step(state, token, self.weights)
                states.append(hidden_state(state))
            expected = states[-1] if params.pooling == "last" else sum(states) / np.float32(len(states))
            assert sequence.embedding_D is not None
            assert np.array_equal(sequence.embedding_D.astype(np.float32), expected.astype(np.float32))
            if params.prompt_logprobs:
                assert len(sequence.prompt_logprobs) == len(states)
            self.num_checked += 1


@pytest.mark.parametrize("case", CASES)
def test_embeddings_are_those_of_their_prompts(case, fresh_seed):
    assert PooledHistory(fresh_seed + case).play(num_operations=600) > 0
