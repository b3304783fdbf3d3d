"""Ten thousand requests through one engine that is never reset: no page lost, nothing compiled, memory flat."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from quire import SamplingParams
from quire.core.request import Request
from tests.tiny import VOCAB, tiny_llm

NUM_REQUESTS = 10_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_request(rng: np.random.Generator, i: int) -> Request:
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 1.0])),
        seed=int(rng.integers(1 << 60)),
        max_tokens=int(rng.integers(1, 24)),
        top_k=int(rng.choice([0, 0, 5])),
        top_p=float(rng.choice([1.0, 0.8])),
        stop_token_ids=rng.integers(0, VOCAB, size=rng.integers(0, 3)).tolist(),
        stop=[rng.integers(0, VOCAB, size=2).tolist()] if rng.random() < 0.2 else (),
        logprobs=2 if rng.random() < 0.1 else None,
        n=2 if rng.random() < 0.05 else 1,
    )
    prompt = rng.integers(0, VOCAB, size=min(int(rng.exponential(12)) + 1, 90))
    return Request(id=str(i), prompt_token_ids=tuple(prompt.tolist()), params=params, priority=int(rng.integers(-1, 2)))


@pytest.mark.slow
def test_10000_requests_leave_nothing_behind():
    rng = np.random.default_rng(7)
    with tiny_llm(num_pages=48, max_num_seqs=8, max_num_batched_tokens=32) as llm:
        engine = llm.engine
        added = ended = 0
        alive: list[str] = []
        memory: dict[int, int] = {}
        start = time.perf_counter()
        while added < NUM_REQUESTS or engine.has_work:
            while added < NUM_REQUESTS and engine.stats().waiting < 4:
                engine.add(request := random_request(rng, added))
                alive.append(request.id)
                added += 1
                if added % 500 == 0:
                    memory[added] = resident_bytes()
            if alive and rng.random() < 0.05:
                ended += engine.abort(alive.pop(int(rng.integers(len(alive)))))
                alive = alive[-64:]
            ended += sum(event.finish_reason is not None for event in engine.step())
            engine.audit()
        stats = engine.stats()
        mib = {count: size / 2**20 for count, size in memory.items()}
        print(
            f"\n{stats.steps} steps, {stats.preemptions} preemptions, {time.perf_counter() - start:.0f} s, MiB: {mib}"
        )
        assert ended > NUM_REQUESTS
        assert stats.held_pages == 0
        assert stats.free_pages + stats.cached_pages == 48
        assert stats.compiles_after_warmup == 0
        assert stats.preemptions > 100
        assert not engine._requests
    last_half = [size for count, size in memory.items() if count >= NUM_REQUESTS // 2]
    assert max(last_half) - last_half[0] < 8 << 20
