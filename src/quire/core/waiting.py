"""The sequences without a row, waiting or swapped, in the order they will get one."""

import heapq

from quire.core.sequence import Sequence, SequenceState
from quire.core.tenants import Tenant, Tenants

LIVE = (SequenceState.WAITING, SequenceState.SWAPPED)


class WaitingQueue:
    """The tenant with the earliest clock is next; of its sequences the highest priority, then the earliest arrival.

    Each tenant has a heap of its own, and one heap orders the tenants, so push and pop are O(log n) and discard is
    O(1) amortised. Clocks only advance: an entry of the tenants' heap whose tenant was served meanwhile is moved back
    when it surfaces. A discarded sequence stays in its heap as a stale entry until it surfaces, or until stale entries
    outnumber live ones and are swept: memory follows what waits, however many were aborted.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self._heap: list[tuple[float, int, Tenant]] = []
        """One entry for each tenant with waiting sequences, by a clock that it had; ties by order of entry."""
        self._last_turn = 0
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self):
        """The sequences that wait, in no particular order."""
        return (one for tenant in self.tenants for _, one in tenant.heap if one.state in LIVE)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is waiting or swapped."""
        sequence.tenant = tenant = self.tenants.of(sequence.request.tenant or "")
        self.tenants.wait(tenant, was_preempted=sequence.preemptions > 0)
        heapq.heappush(tenant.heap, (sequence.order, sequence))
        self._num_live += 1
        if not tenant.is_queued:
            tenant.is_queued = True
            heapq.heappush(self._heap, self._entry(tenant))
            if len(self._heap) > 2 * self.tenants.num_active + 16:
                self._sweep()

    def _entry(self, tenant: Tenant) -> tuple[float, int, Tenant]:
        self._last_turn += 1
        return tenant.clock, self._last_turn, tenant

    def _sweep(self) -> None:
        for _, _, tenant in self._heap:
            tenant.is_queued = tenant.num_waiting > 0
        self._heap = [entry for entry in self._heap if entry[2].is_queued]
        heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        """The next in order, left where it is."""
        heap = self._heap
        while heap:
            clock, _, tenant = heap[0]
            if not tenant.num_waiting:
                tenant.is_queued, tenant.heap = False, []
                heapq.heappop(heap)
            elif tenant.clock > clock:
                heapq.heapreplace(heap, self._entry(tenant))
            else:
                while tenant.heap[0][1].state not in LIVE:
                    heapq.heappop(tenant.heap)
                if not tenant.num_running:
                    tenant.place = (tenant.clock, tenant.number)
                return tenant.heap[0][1]
        return None

    def pop(self) -> Sequence:
        """Take the next in order, which gets a row; the queue must not be empty."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nothing waits")
        heapq.heappop(sequence.tenant.heap)
        self._num_live -= 1
        self.tenants.start(sequence.tenant)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has just ended where it was (an abort)."""
        if sequence.state in LIVE:
            raise ValueError(f"sequence {sequence.request.id} still waits: pop it, or finish it first")
        self._num_live -= 1
        tenant = sequence.tenant
        self.tenants.end_wait(tenant)
        if not tenant.num_waiting:
            tenant.heap = []
        elif len(tenant.heap) > 2 * tenant.num_waiting + 16:
            tenant.heap = [entry for entry in tenant.heap if entry[1].state in LIVE]
            heapq.heapify(tenant.heap)
