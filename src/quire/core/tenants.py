"""Which tenant is served next, by what each has been served so far.

Every tenant has a clock: the tokens it was served, divided by its weight. The waiting tenant with the earliest clock is
next, so tenants that always wait advance together, in proportion to their weights: fair queueing, as deficit round
robin has it, without rounds. A tenant that had nothing waiting starts at the present time: it can neither save up what
it did not use nor lose what it owes. Time advances with what all tenants are served, divided by the weights of the
active ones, as the clock of a tenant that gets exactly its share does.

A token is charged when it is served, once for each position of a sequence: found in the prefix cache it is free, and
what a preemption makes the engine compute again is not charged again. Refuses to know: sequences, rows, pages.
"""

from collections.abc import ItemsView, Iterator, Mapping
from operator import gt
from typing import Any

from quire.field_error import FieldError

MIN_WEIGHT = 0.001
MAX_WEIGHT = 1000
UNITS = 2**62
"""In a weight of 1. Every weight is a whole number of units, as `MIN_WEIGHT` is above 2**-10: their sum is exact."""
MAX_IDLE = 1024
"""Tenants without requests that are remembered beyond the number of those with requests."""


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return a copy of the weights of tenants, or raise FieldError."""
    if not isinstance(weights, Mapping):
        raise FieldError(f"weights={weights!r} must map names of tenants to numbers", field="weights")
    weights = dict(weights)
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            message = f"weights[{name!r}]={weight!r} must be a number from {MIN_WEIGHT} to {MAX_WEIGHT:,}"
            raise FieldError(message, field="weights")
    return weights


class Tenant:
    """One tenant. Active while it has a sequence that waits or runs."""

    __slots__ = (
        "clock",
        "heap",
        "is_new",
        "is_queued",
        "num_running",
        "num_waiting",
        "number",
        "owed",
        "place",
        "weight",
    )

    def __init__(self, number: int, weight: float) -> None:
        self.number = number
        """In order of first use: ties are broken by it."""
        self.weight = weight
        self.clock = 0.0
        """Tokens it was served, divided by its weight, beside what it was spared while it had nothing to do."""
        self.owed = 0
        """Tokens to charge with its next admission."""
        self.place = (0.0, number)
        """Its clock when the step being planned began: the order of the running list."""
        self.num_running = 0
        self.num_waiting = 0
        self.is_new = True
        """Whether it has not had a row since it became active."""
        self.heap: list[tuple[tuple[int, int, int], Any]] = []
        """Its part of the waiting queue, with stale entries; see `WaitingQueue`."""
        self.is_queued = False
        """Whether the waiting queue has an entry for it."""

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were served."""
        self.clock += num_tokens / self.weight


class Tenants:
    """All tenants that have requests, those with a row, and the time that new ones start at."""

    def __init__(self) -> None:
        self._by_name: dict[str, Tenant] = {}
        self._weights: dict[str, float] = {}
        self._num_made = 0
        self.now = 0.0
        """The time: at least the earliest clock of the running tenants at the last step, and of the waiting ones."""
        self._earliest: list[Tenant] = []
        """The two running tenants with the earliest clocks when the step being planned began."""
        self.running: dict[Tenant, None] = {}
        """Those with a row, in no particular order."""
        self.num_active = 0
        self._active_units = 0

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    @property
    def active_weight(self) -> float:
        """Sum of the weights of those that are active."""
        return self._active_units / UNITS

    def items(self) -> ItemsView[str, Tenant]:
        """All that are remembered, by name."""
        return self._by_name.items()

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Replace all weights; a tenant that is not named has 1. What was served before keeps its price."""
        self._weights = checked_weights(weights)
        for name, tenant in self._by_name.items():
            tenant.weight = self._weights.get(name, 1.0)
        self._active_units = sum(_units(one) for one in self if one.num_running or one.num_waiting)

    def of(self, name: str) -> Tenant:
        """The tenant of this name."""
        tenant = self._by_name.get(name)
        if tenant is None:
            if len(self._by_name) > 2 * self.num_active + MAX_IDLE:
                self._forget_idle()
            self._num_made += 1
            tenant = self._by_name[name] = Tenant(self._num_made, self._weights.get(name, 1.0))
        return tenant

    def _forget_idle(self) -> None:
        """Keep the active tenants, and idle ones that are ahead of the others: these owe something."""
        kept = {name: one for name, one in self._by_name.items() if one.num_running or one.num_waiting}
        owing = {name: one for name, one in self._by_name.items() if name not in kept and one.clock > self.now}
        self._by_name = kept | dict(list(owing.items())[-MAX_IDLE // 2 :])

    # -- waiting and running -------------------------------------------------------------------------------------

    def wait(self, tenant: Tenant, *, was_preempted: bool = False) -> None:
        """One more of its sequences waits: a new one, or one that was preempted."""
        if not tenant.num_waiting and not was_preempted:
            tenant.clock = max(tenant.clock, self._start_of(tenant))
        if not tenant.num_waiting and not tenant.num_running:
            self.num_active += 1
            self._active_units += _units(tenant)
            tenant.is_new = True
        tenant.num_waiting += 1

    def _start_of(self, tenant: Tenant) -> float:
        """The clock of a tenant that had nothing waiting: just before the present time, and not after others that run.

        Before another that runs it is only until that one is served: new tenants, however many come, stop no other.
        """
        running = (one.place[0] for one in self._earliest if one.num_running and one is not tenant)
        return min((self.now - 1 / tenant.weight, *running))

    def advance(self, num_tokens: int) -> None:
        """Let the time advance by tokens that active tenants were charged for."""
        if num_tokens:
            self.now += num_tokens * UNITS / self._active_units

    def end_wait(self, tenant: Tenant) -> None:
        """One of its waiting sequences ended there."""
        tenant.num_waiting -= 1
        self._settle(tenant)

    def start(self, tenant: Tenant) -> None:
        """One of its waiting sequences got a row."""
        tenant.num_waiting -= 1
        tenant.num_running += 1
        tenant.is_new = False
        self.running[tenant] = None
        tenant.charge(tenant.owed)
        tenant.owed = 0

    def stop(self, tenant: Tenant) -> None:
        """One of its sequences gave its row up; if it waits again, `wait` comes before."""
        tenant.num_running -= 1
        if not tenant.num_running:
            del self.running[tenant]
        self._settle(tenant)

    def _settle(self, tenant: Tenant) -> None:
        if not tenant.num_waiting and not tenant.num_running:
            self.num_active -= 1
            self._active_units -= _units(tenant)

    # -- order ---------------------------------------------------------------------------------------------------

    def begin_step(self, head: Tenant | None = None) -> list[Tenant] | None:
        """Return the running tenants in the order of this step, which does not change while it is planned.

        None if that is the order they had. `head` is the waiting tenant with the earliest clock.
        """
        order = sorted(self.running, key=_clock)
        places = [tenant.place for tenant in order]
        for tenant in order:
            tenant.place = (tenant.clock, tenant.number)
        self._earliest = order[:2]
        if order:
            self.now = max(self.now, order[0].clock)
        if head:  # that others run with earlier clocks is because they want no more
            self.now = max(self.now, head.clock)
        return order if any(map(gt, places, places[1:])) else None

    def excess(self, tenant: Tenant, num_rows: int) -> float:
        """How many of so many rows a tenant has beyond its share; below 0 if it has less."""
        return tenant.num_running - num_rows * tenant.weight / self.active_weight


def _units(tenant: Tenant) -> int:
    return int(tenant.weight * UNITS)


def _clock(tenant: Tenant) -> tuple[float, int]:
    return tenant.clock, tenant.number
