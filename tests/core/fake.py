"""A step's result without a device, and sequences to schedule."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from quire.core.audit import audit
from quire.core.page_pool import PagePool, WindowPool
from quire.core.page_tables import PageTables
from quire.core.pages import PageAllocator
from quire.core.plan import StepPlan
from quire.core.prefix_cache import PrefixCache
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, TokenEvent


@dataclass
class Result:
    """Tokens that a test wants a step to have produced."""

    tokens_SR: np.ndarray
    logprobs_SR: np.ndarray
    top_ids_SRX: np.ndarray
    top_logprobs_SRX: np.ndarray
    processed_logprobs_SR: np.ndarray
    kept_mass_SR: np.ndarray
    processed_top_ids_SRX: np.ndarray
    processed_top_logprobs_SRX: np.ndarray
    scores: "Result | None" = None
    drafted_BR: np.ndarray | None = None
    pooled_BD: np.ndarray | None = None


def result(plan: StepPlan, token: Callable[[Sequence, int], int] | int = 7) -> Result:
    """Every sample draws `token(sequence, position)`, or a constant."""
    drawn = said_of([token(s.sequence, s.position) if callable(token) else token for s in plan.samples])
    drawn.scores = said_of([score.token_id for score in plan.scores])
    return drawn


def said_of(token_ids: list[int]) -> Result:
    """One round of these."""
    tokens = np.array(token_ids, np.int32).reshape(-1, 1)
    logprobs, top_ids = -np.ones(tokens.shape, np.float32), np.zeros((*tokens.shape, 20), np.int32)
    top = np.zeros((*tokens.shape, 20), np.float32)
    return Result(tokens, logprobs, top_ids, top, logprobs, logprobs, top_ids, top)


def scheduler(
    num_pages: int = 64,
    page_size: int = 4,
    rows: int = 8,
    budget: int = 16,
    *,
    prefix_cache: bool = False,
    num_host_pages: int = 0,
    poison_freed: bool = False,
    windows: tuple[tuple[int, int], ...] = (),
    **more,
) -> Scheduler:
    """One without a prefix cache and without host memory, unless a test asks for them."""
    knobs = {"num_host_pages": num_host_pages, "prefix_cache": prefix_cache, "poison_freed": poison_freed}
    pools = [
        WindowPool(window, pages, page_size, pages_per_row=-(-(window - 1 + budget) // page_size) + 1, **knobs)
        for window, pages in windows
    ]
    tables = PageTables(PagePool(num_pages, page_size, **knobs), pools)
    return Scheduler(tables, max_num_seqs=rows, max_num_batched_tokens=budget, **more)


def host_of(s: Scheduler) -> PageAllocator:
    """The host memory of a scheduler that swaps."""
    assert s.tables.pool.host is not None
    return s.tables.pool.host


def prefix_cache_of(s: Scheduler) -> PrefixCache:
    """The prefix cache of a scheduler that has one."""
    assert s.tables.pool.prefix_cache is not None
    return s.tables.pool.prefix_cache


class Arrivals:
    """Makes sequences in order of arrival."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self,
        prompt_len: int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        tenant: str = "",
        eos: Iterable[int] = (),
        **params,
    ) -> Sequence:
        self.count += 1
        request = Request(
            id=f"r{self.count}",
            prompt_token_ids=tuple(range(100, 100 + prompt_len)),
            params=SamplingParams(max_tokens=max_tokens, **params),
            priority=priority,
            tenant=tenant,
        )
        return Sequence(request, index=0, arrival=self.count, seed=0, max_tokens=max_tokens, eos_ids=frozenset(eos))


def run(s: Scheduler, steps: int = 10_000, token: Callable[[Sequence, int], int] | int = 7) -> list[list[TokenEvent]]:
    """Step until nothing is left, auditing all the way; returns each step's events."""
    history = []
    while (s.running or s.waiting) and len(history) < steps:
        plan = s.schedule()
        assert plan, "work is left and nothing was planned"
        audit(s)
        history.append(s.commit(plan, result(plan, token)))
        audit(s)
    return history
