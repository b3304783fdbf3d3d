"""The queue's memory follows what waits, however many were aborted behind a busy head."""

from quire.core.stopping import FinishReason
from quire.core.tenants import Tenants
from quire.core.waiting import WaitingQueue
from tests.core.fake import Arrivals


def test_aborted_entries_are_swept_even_when_they_never_surface():
    arrive, queue = Arrivals(), WaitingQueue(Tenants())
    head = arrive(1, priority=1)
    queue.push(head)
    for _ in range(1000):
        sequence = arrive(1)
        queue.push(sequence)
        sequence.finish(FinishReason.ABORT)
        queue.discard(sequence)
    assert len(queue) == 1
    assert len(head.tenant.heap) < 40
    assert list(queue) == [head]
    assert queue.pop() is head
    assert queue.peek() is None
