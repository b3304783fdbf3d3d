"""The sequences without a row, waiting or swapped, in the order they will get one."""

import heapq

from quire.core.sequence import Sequence, SequenceState

LIVE = (SequenceState.WAITING, SequenceState.SWAPPED)


class WaitingQueue:
    """A heap by priority, then arrival. Push and pop are O(log n), discard is O(1) amortised.

    A discarded sequence stays in the heap as a stale entry until it surfaces, or until stale entries outnumber live
    ones and are swept: memory follows what waits, however many were aborted.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self):
        """The sequences that wait, in no particular order."""
        return (sequence for _, sequence in self._heap if sequence.state in LIVE)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is waiting or swapped."""
        heapq.heappush(self._heap, (sequence.order, sequence))
        self._num_live += 1

    def peek(self) -> Sequence | None:
        """The next in order, left where it is."""
        heap = self._heap
        while heap and heap[0][1].state not in LIVE:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Take the next in order; the queue must not be empty."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("nothing waits")
        heapq.heappop(self._heap)
        self._num_live -= 1
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that has just ended where it was (an abort)."""
        if sequence.state in LIVE:
            raise ValueError(f"sequence {sequence.request.id} still waits: pop it, or finish it first")
        self._num_live -= 1
        if len(self._heap) > 2 * self._num_live + 16:
            self._heap = [entry for entry in self._heap if entry[1].state in LIVE]
            heapq.heapify(self._heap)
