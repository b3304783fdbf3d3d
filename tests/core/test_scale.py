"""The host column's cost follows what runs: not what waits, not the pool, and linearly."""

import gc
import time

import numpy as np
import pytest

from tests.core.fake import Arrivals, result, scheduler

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def busy(num_running: int, num_waiting: int, num_tenants: int = 1):
    """A scheduler with so many decoding and so many waiting, over a million pages; both of so many tenants."""
    arrive = Arrivals()
    s = scheduler(prefix_cache=True, num_pages=1_000_000, page_size=16, rows=num_running, budget=2 * num_running)
    for i in range(num_running):
        s.add(arrive(2, 100_000, tenant=str(i % num_tenants)))
    while any(x.num_tokens == 2 for x in s.running) or len(s.running) < num_running:
        s.commit(plan := s.schedule(), result(plan))
    for i in range(num_waiting):
        s.add(arrive(2, 100, tenant=str(i % num_tenants)))
    return s


def step_seconds(*schedulers, repeats: int = 25) -> list[float]:
    """Median time of schedule + commit of each, interleaved; of this thread, whoever else is on the machine."""
    times: list[list[float]] = [[] for _ in schedulers]
    gc.collect()
    for _ in range(repeats):
        for s, own in zip(schedulers, times, strict=True):
            start = time.thread_time()
            plan = s.schedule()
            planned = time.thread_time()
            made = result(plan)
            committing = time.thread_time()
            s.commit(plan, made)
            own.append(planned - start + time.thread_time() - committing)
    return [float(np.median(own)) for own in times]


def test_cost_does_not_depend_on_what_waits():
    idle, crowded = step_seconds(busy(4096, 0), busy(4096, 100_000))
    print(f"4,096 running: {idle * 1e3:.1f} ms with none waiting, {crowded * 1e3:.1f} ms with 100,000")
    assert crowded < 1.3 * idle


def test_cost_does_not_depend_on_how_many_tenants_wait():
    one, many = step_seconds(busy(4096, 100_000), busy(4096, 100_000, num_tenants=1000))
    print(f"100,000 waiting: {one * 1e3:.1f} ms of one tenant, {many * 1e3:.1f} ms of 1,000")
    assert many < 1.3 * one


def test_cost_is_linear_in_what_runs():
    few, many = step_seconds(busy(64, 0), busy(4096, 0))
    print(f"per sequence: {few / 64 * 1e6:.2f} us at 64 running, {many / 4096 * 1e6:.2f} us at 4,096")
    assert many / 4096 < 2 * few / 64
