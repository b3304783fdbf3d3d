"""Several engines, a policy that chooses among them, and one clock.

What happens next is the earlier of the next arrival and the next end of a step. An engine that has nothing to do begins
a step when something arrives; one that computes begins the next when its step ends.
"""

import gc
import heapq
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quire.core.scheduler_config import SchedulerConfig
from quire.field_error import FieldError
from quire.routing import Load, Router
from quire.simulate.cost import Cost
from quire.simulate.engine import SimulatedEngine, shared_names
from quire.simulate.traffic import Arrival, Traffic

MAX_REPLICAS = 10_000


class Policy(Protocol):
    """Chooses the engine for a request. Made from the engines and the traffic."""

    def choose(self, arrival: Arrival) -> int:
        """The index of an engine."""
        ...


class InTurn:
    """One after the other."""

    def __init__(self, engines: list[SimulatedEngine], traffic: Traffic) -> None:
        self._num, self._next = len(engines), -1

    def choose(self, arrival: Arrival) -> int:
        """The next."""
        self._next = (self._next + 1) % self._num
        return self._next


class LeastLoaded:
    """The one with the fewest tokens to do."""

    def __init__(self, engines: list[SimulatedEngine], traffic: Traffic) -> None:
        self._engines = engines

    def choose(self, arrival: Arrival) -> int:
        """The first of them."""
        loads = [engine.queued_tokens for engine in self._engines]
        return loads.index(min(loads))


class ByPrefix:
    """`quire.routing.Router`: who has the beginning of the prompt cached, unless it has too much to do.

    The router learns what an engine has when it sends it there, not when the engine publishes or evicts it.
    """

    def __init__(self, engines: list[SimulatedEngine], traffic: Traffic) -> None:
        self._engines, self._traffic, self._router = engines, traffic, Router()
        self._page_size = engines[0].scheduler.tables.page_size
        self._reported = [-1] * len(engines)

    def choose(self, arrival: Arrival) -> int:
        """What the router says."""
        for i, engine in enumerate(self._engines):
            if engine.queued_tokens != self._reported[i]:
                self._reported[i] = engine.queued_tokens
                self._router.report(str(i), Load(engine.queued_tokens))
        names = shared_names(arrival, self._traffic, self._page_size)[: arrival.prompt_len // self._page_size]
        choice = self._router.choose(names)
        if choice is None:
            raise RuntimeError("the router has no engine")
        self._router.pages.add(choice.engine, names)
        return int(choice.engine)


POLICIES: dict[str, Callable[[list[SimulatedEngine], Traffic], Policy]] = {
    "prefix": ByPrefix,
    "least": LeastLoaded,
    "turns": InTurn,
}


@dataclass
class Outcome:
    """What became of every request, in order of arrival; times in seconds."""

    arrived: array = field(default_factory=lambda: array("d"))
    first_token: array = field(default_factory=lambda: array("d"))
    """When its first token came."""
    last_token: array = field(default_factory=lambda: array("d"))
    """When all its samples had ended."""
    num_tokens: array = field(default_factory=lambda: array("q"))
    """Generated, by all its samples."""
    engine: array = field(default_factory=lambda: array("i"))
    tenant: list[str] = field(default_factory=list)
    busy_seconds: float = 0.0
    """Of all engines together."""
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    host_seconds: float = 0.0
    """That the simulation itself took."""


def run_fleet(
    traffic: Traffic,
    config: SchedulerConfig,
    cost: Cost,
    *,
    replicas: int = 1,
    routing: str = "prefix",
    tenant_weights: Mapping[str, float] | None = None,
) -> Outcome:
    """Send all traffic through a fleet, to its end."""
    was_collecting = gc.isenabled()
    gc.disable()  # what ends is taken apart by hand; the collector would look at all arrivals again and again
    try:
        return _run_fleet(traffic, config, cost, replicas, routing, tenant_weights or {})
    finally:
        if was_collecting:
            gc.enable()


def _run_fleet(
    traffic: Traffic,
    config: SchedulerConfig,
    cost: Cost,
    replicas: int,
    routing: str,
    tenant_weights: Mapping[str, float],
) -> Outcome:
    if not 1 <= replicas <= MAX_REPLICAS:
        raise FieldError(f"replicas={replicas} must be from 1 to {MAX_REPLICAS:,}", field="replicas")
    if routing not in POLICIES:
        raise FieldError(f"routing={routing!r} must be one of {', '.join(POLICIES)}", field="routing")
    started = time.perf_counter()
    engines = [SimulatedEngine(config, cost, traffic) for _ in range(replicas)]
    for engine in engines:
        engine.scheduler.set_tenant_weights(tenant_weights)
    policy = POLICIES[routing](engines, traffic) if replicas > 1 else InTurn(engines, traffic)
    arrivals, count = traffic.arrivals, len(traffic.arrivals)
    nothing = bytes(8 * count)
    outcome = Outcome(array("d", nothing), array("d", nothing), array("d", nothing), array("q", nothing))
    outcome.engine = array("i", bytes(4 * count))
    first_token, last_token, num_tokens = outcome.first_token, outcome.last_token, outcome.num_tokens
    ends: list[tuple[float, int]] = []
    """When the steps under way end, and whose they are."""
    number = 0

    def begin(i: int, now: float) -> None:
        seconds = engines[i].begin()
        if seconds is not None:
            heapq.heappush(ends, (now + seconds, i))

    while number < count or ends:
        if number < count and (not ends or arrivals[number].at <= ends[0][0]):
            arrival = arrivals[number]
            i = policy.choose(arrival)
            engine = engines[i]
            engine.add(number, arrival)
            outcome.arrived[number], outcome.engine[number] = arrival.at, i
            number += 1
            if not engine.is_busy:
                begin(i, arrival.at)
            continue
        now, i = heapq.heappop(ends)
        for sequence, token_ids, reason in engines[i].end():
            request = sequence.arrival
            if not num_tokens[request]:
                first_token[request] = now
            num_tokens[request] += len(token_ids)
            if reason is not None:
                last_token[request] = now
        begin(i, now)
    if any(engine.queued_tokens for engine in engines):
        raise RuntimeError("the simulation ended before its requests did")
    for engine in engines:
        outcome.busy_seconds += engine.busy_seconds
        outcome.steps += engine.num_steps
        outcome.preemptions += engine.scheduler.num_preemptions
        outcome.cached_tokens += engine.scheduler.cached_tokens
    outcome.tenant = [arrival.more.get("tenant", "") for arrival in arrivals]
    outcome.prompt_tokens = sum(arrival.prompt_len for arrival in arrivals)
    outcome.host_seconds = time.perf_counter() - started
    return outcome
