"""Every state that 4 pages and 3 requests can get into: breadth first, states deduplicated, nothing left to chance.

From each state every operation that makes sense is tried, with the audit after it; and each state must drain: stepping
on, all that was asked for ends and every page comes back.
"""

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from quire.core.page_pool import PagePool
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence
from quire.engine.stats import StepTimer
from tests.histories import History

SECONDS = 30
MIN_DEPTH = 6

REQUESTS = [
    Request(id="a", prompt_token_ids=(3, 1, 4), params=SamplingParams(temperature=0, max_tokens=3)),
    Request(id="b", prompt_token_ids=(3, 1, 4, 1), params=SamplingParams(seed=1, max_tokens=2, n=2)),
    Request(id="c", prompt_token_ids=(2, 7), params=SamplingParams(temperature=0, max_tokens=5), priority=1),
]
"""Two that begin alike, one of them with a fork, and one that comes first."""


def standing_clock() -> float:
    return 0.0


def beginning(windows: tuple[int | None, ...], window_pages: tuple[int, ...], has_tenants: bool) -> History:
    history = History(
        int(has_tenants),
        tokenizer=None,
        windows=windows,
        window_pages=window_pages,
        num_pages=4,
        page_size=2,
        num_host_pages=2,
        max_num_seqs=2,
        max_num_batched_tokens=3,
        preemption="swap",
    )
    history.engine._timer = StepTimer(standing_clock)
    history.random = None  # pyright: ignore
    return history


def operations(history: History) -> Iterator[tuple[str, Callable[[History], object]]]:
    """What can be done now. Each takes the history it is done to: a copy of this one."""
    engine, scheduler = history.engine, history.engine.scheduler
    yield "step", History.step
    for request in REQUESTS[history.num_requests :][:1]:
        request = replace(request, tenant=request.id if history.has_tenants else "")
        yield f"add {request.id}", lambda h, request=request: h.admit(request)
    for i, sequence in enumerate(history.alive):
        yield f"abort {i}", lambda h, i=i: h.abort_one(h.alive[i])
        if sequence.num_output and len(sequence.family) < 3:
            yield f"fork {i}", lambda h, i=i: h.fork_one(h.alive[i])
    for i in range(len(scheduler.running)):
        for swap in (True, False):
            yield f"preempt {i} {swap}", lambda h, i=i, swap=swap: preempt(h, i, swap)
    for i, pool in enumerate(scheduler.tables.pools):
        if pool.num_cached:
            yield f"evict {i}", lambda h, i=i: h.engine.scheduler.tables.pools[i].evict(1)
    if engine.stats().weight_version == 0:
        yield "weights keep", lambda h: h.set_weights("keep")
        yield "weights recompute", lambda h: h.set_weights("recompute")


def preempt(history: History, i: int, swap: bool) -> None:
    history.engine.scheduler.preempt(history.engine.scheduler.running[i], swap=swap)


def signature(history: History) -> tuple:
    """All that can influence what happens next."""
    scheduler, tables = history.engine.scheduler, history.engine.scheduler.tables

    def one(s: Sequence) -> tuple:
        return (
            *(s.request.id, s.index, str(s.state), tuple(s.tokens), tuple(s.pages), tuple(s.host_pages)),
            tuple((table.first, tuple(table.pages), tuple(table.host_pages)) for table in s.windows),
            *(
                s.num_computed,
                s.num_published,
                s.kv_weights,
                s.parent and s.parent.index,
                s.num_inherited,
                s.num_failures,
            ),
        )

    tenants = ((t.clock, t.owed, t.is_new, t.place) for t in scheduler.tenants) if history.has_tenants else ()
    return (
        *(tuple(tenants), scheduler.tenants.now if history.has_tenants else 0),
        *(tuple(map(one, history.alive)), history.num_requests, tuple(one(s) for s in scheduler.running)),
        tuple(sorted(map(one, scheduler.waiting))),
        tuple((key, tuple(map(one, value))) for key, value in scheduler.waiting_for_prompt.items()),
        *(tables.weights, tuple(map(books, tables.pools))),
        *(tuple(map(tuple, history.runner._pages)), frozenset(history.mixed)),
        tuple(tuple(map(tuple, window.pages)) for window in history.runner._windows),
    )


def books(pool: PagePool) -> tuple:
    """What a pool knows of its pages."""
    cache, host = pool.prefix_cache, pool.host
    assert cache is not None
    return (
        *(tuple(pool.allocator._free), tuple(pool.allocator._refcounts), tuple(host._free) if host else ()),
        *(tuple(cache._page_of.items()), tuple(cache._idle), tuple(pool.operations.swap_outs)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "window_pages", "has_tenants"),
    [
        pytest.param((None,), (), False, id="every position"),
        pytest.param((None,), (), True, id="a tenant for each request"),
        pytest.param((None, 2), (), False, id="a window", marks=pytest.mark.nightly),
        pytest.param((None, 2), (3,), False, id="a window with the pages of one sequence"),
    ],
)
def test_every_state_of_four_pages_and_three_requests(windows, window_pages, has_tenants):
    start = time.monotonic()
    first = beginning(windows, window_pages, has_tenants)
    assert len(first.engine.scheduler.tables.windows) == len(windows) - 1
    drains: set[int] = set()
    seen = {hash(signature(first))}
    # State -> how many histories lead to it; those of the depth reached so far.
    frontier: dict[int, tuple[bytes, int]] = {hash(signature(first)): (pickle.dumps(first), 1)}
    depth = num_histories = 0
    while time.monotonic() - start < SECONDS or depth < MIN_DEPTH:
        following: dict[int, tuple[bytes, int]] = {}
        for frozen, ways in frontier.values():
            for name, apply in operations(pickle.loads(frozen)):
                history = pickle.loads(frozen)
                try:
                    apply(history)
                    history.check()
                except Exception as error:
                    raise AssertionError(f"depth {depth}, {name}: {error}\n{history.engine.page_map()}") from error
                num_histories += ways
                key = hash(signature(history))
                if key in following:
                    following[key] = (following[key][0], following[key][1] + ways)
                elif key not in seen:
                    seen.add(key)
                    following[key] = (pickle.dumps(history), ways)
                    drain(history, drains)
            if time.monotonic() - start >= SECONDS and depth >= MIN_DEPTH:
                break
        else:
            depth += 1
            print(f"\ndepth {depth}: {len(seen)} states, {num_histories} histories, {time.monotonic() - start:.0f} s")
        frontier = following
        if not frontier:
            break
    assert depth >= MIN_DEPTH


def drain(history: History, drains: set[int]) -> None:
    """Step until nothing is left, or until a state is reached that is known to drain."""
    visited: list[int] = []
    for _ in range(200):
        key = hash(signature(history))
        if not history.engine.has_work or key in drains:
            drains.update(visited)
            return
        visited.append(key)
        history.step()
        history.check()
    raise AssertionError("200 steps did not end what there was to do")
