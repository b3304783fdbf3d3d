"""One engine without a device: the scheduler itself, and a clock that each step moves by what it would cost."""

from collections.abc import Callable
from typing import Any

from quire.config import MAX_ROUNDS
from quire.core.plan import StepPlan
from quire.core.prefix_cache import PrefixCache
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, TokenEvent, Weights
from quire.recording.stand_ins import PLAIN, stand_in
from quire.simulate.cost import Cost, size_of
from quire.simulate.traffic import Arrival, Traffic

DRAWN = [[PLAIN] * count for count in range(MAX_ROUNDS + 1)]
"""So many tokens."""


class DrawnTokens:
    """What a step drew, as `commit` reads it: lists, without an array around them."""

    scores = pooled_BD = logprobs_SR = top_ids_SRX = top_logprobs_SRX = processed_logprobs_SR = kept_mass_SR = None
    processed_top_ids_SRX = processed_top_logprobs_SRX = drafted_BR = None

    def __init__(self, tokens: list[list[int]]) -> None:
        self._tokens = tokens

    @property
    def tokens_SR(self) -> Any:
        """Itself."""
        return self

    def tolist(self) -> list[list[int]]:
        """Tokens of each sample."""
        return self._tokens


class NamedPages(PrefixCache):
    """A prefix cache in which pages have the names that the traffic gives them, and no token is hashed."""

    def __init__(self, empty: PrefixCache, names_of: Callable[[Sequence, int], list[Any]]) -> None:
        super().__init__(empty._allocator, empty._page_size)
        self._names_of = names_of

    def hashes(self, sequence: Sequence, weights: Weights, count: int) -> list[bytes]:
        """See `PrefixCache`."""
        hashes = sequence.page_hashes
        if len(hashes) < count:
            hashes += self._names_of(sequence, count)[len(hashes) :]
        return hashes


class SimulatedEngine:
    """A scheduler, what it has taken, and until when it is busy."""

    def __init__(self, config: SchedulerConfig, cost: Cost, traffic: Traffic) -> None:
        self.scheduler: Scheduler = config.build()
        self._cost, self._traffic, self._page_size = cost, traffic, config.page_size
        self.scheduler.costs.seconds_per_move = cost.seconds_per_move
        self.scheduler.costs.pages_per_move = cost.pages_per_move
        pool = self.scheduler.tables.pool
        if pool.prefix_cache is not None:
            pool.prefix_cache = NamedPages(pool.prefix_cache, self._names)
        self._arrivals: dict[int, Arrival] = {}
        self._plan: StepPlan | None = None
        self.is_busy = False
        self.queued_tokens = 0
        """Tokens of the requests that it has, prompts and what they will generate."""
        self.num_steps = 0
        self.busy_seconds = 0.0

    def add(self, number: int, arrival: Arrival) -> None:
        """Take a request."""
        lengths = arrival.new_tokens
        first = stand_in(number, arrival.prompt_len, max(lengths), n=len(lengths), **arrival.more)
        self.scheduler.tables.check_fits(first.request.id, arrival.prompt_len, max(lengths))
        for _ in lengths[1:]:
            first.fork()
        for member, length in zip(first.family, lengths, strict=True):
            member.max_tokens = length
        self.scheduler.add(first)
        self._arrivals[number] = arrival
        self.queued_tokens += arrival.prompt_len + sum(lengths)

    def begin(self) -> float | None:
        """Plan a step; returns how long it takes, or None if there is nothing to do."""
        plan = self.scheduler.schedule()
        if not plan:
            self.is_busy = False
            return None
        self._plan, self.is_busy = plan, True
        seconds = self._cost.seconds(size_of(plan))
        if plan.operations[0].swap_outs or plan.operations[0].swap_ins:
            seconds += self._seconds_of_moves(plan)
        if plan.has_long_prompts:
            self.scheduler.costs.learn(seconds, plan.num_tokens)
        self.busy_seconds += seconds
        self.num_steps += 1
        return seconds

    def _seconds_of_moves(self, plan: StepPlan) -> float:
        cost, operations = self._cost, plan.operations[0]
        moves = [-(-len(pages) // cost.pages_per_move) for pages in (operations.swap_outs, operations.swap_ins)]
        return sum(moves) * cost.seconds_per_move

    def end(self) -> list[TokenEvent]:
        """Commit the step: every row draws as far as it may."""
        plan, self._plan = self._plan, None
        assert plan is not None, "a step ends that has not begun"
        rows = plan.rows
        drawn = [DRAWN[rows[sample[1]][3]] for sample in plan.samples]
        events = self.scheduler.commit(plan, DrawnTokens(drawn))
        for sequence, _, reason in events:
            family = sequence.family  # empty once the last of it has ended
            if reason is not None and family and all(member.finish_reason for member in family):
                arrival = self._arrivals.pop(sequence.arrival)
                self.queued_tokens -= arrival.prompt_len + sum(arrival.new_tokens)
                family.clear()
        return events

    def _names(self, sequence: Sequence, count: int) -> list[Any]:
        """Names of the first `count` pages of a sequence: those it shares with others, and its own."""
        names = shared_names(self._arrivals[sequence.arrival], self._traffic, self._page_size)
        if names and sequence.index:  # what others than the first sample generated is their own
            del names[sequence.prompt_len // self._page_size :]
        own = (sequence.arrival, sequence.index)
        return names[:count] + [(own, i) for i in range(len(names), count)]


def shared_names(arrival: Arrival, traffic: Traffic, page_size: int) -> list[Any]:
    """The names of an arrival's pages that others may have too, for pages of another size than recorded as well.

    A larger page is known by the last of those it is made of; a smaller one is as known as the one it is a part of.
    """
    if not arrival.names:
        if arrival.prefix is None:
            return []
        return [(arrival.prefix, i) for i in range(traffic.prefix_tokens // page_size)]
    recorded = traffic.page_size or page_size
    ends = range(page_size, len(arrival.names) * recorded + 1, page_size)
    return [(arrival.names[-(-end // recorded) - 1], end % recorded) for end in ends]
