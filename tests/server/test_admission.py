"""Who may wait, and what the others are told."""

import pytest

from quire.server.admission import LONGEST_RETRY_S, Admission, OverloadError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(**limits) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(**({"max_requests": 4, "max_tokens": 1000} | limits), clock=clock), clock


def test_requests_beyond_the_bound_are_refused_until_one_begins_or_leaves():
    gate, _ = admission()
    for i in range(4):
        gate.arrive(str(i), 1, 10, 10)
    with pytest.raises(OverloadError, match="4 requests wait, at most 4 may"):
        gate.arrive("4", 1, 10, 10)
    gate.start("0")
    gate.arrive("5", 1, 10, 10)
    with pytest.raises(OverloadError):
        gate.check_room()
    gate.leave("1")
    gate.check_room()
    assert (gate.num_waiting, gate.num_waiting_tokens, gate.num_rejected) == (3, 60, 2)


def test_tokens_are_counted_by_what_they_may_come_to():
    gate, _ = admission()
    gate.arrive("a", 4, 100, 200)
    with pytest.raises(OverloadError, match="900 tokens wait and this request may come to 150 more; at most 1,000"):
        gate.arrive("b", 1, 50, 100)
    gate.start("a")
    gate.arrive("b", 1, 50, 100)


def test_a_request_larger_than_the_queue_waits_alone():
    gate, _ = admission()
    gate.arrive("huge", 10, 100, 1000)
    with pytest.raises(OverloadError):
        gate.arrive("small", 1, 1, 1)


def test_a_client_is_told_when_those_that_wait_will_have_begun():
    gate, clock = admission(max_requests=10, max_tokens=10**6)
    for i in range(30):  # one begins every two seconds
        gate.arrive(str(i), 1, 1, 1)
        clock.now += 2
        gate.start(str(i))
    for i in range(10):
        gate.arrive(f"w{i}", 1, 1, 1)
    with pytest.raises(OverloadError) as refused:
        gate.check_room()
    assert refused.value.retry_after_s == pytest.approx(20, abs=1)


def test_without_any_beginning_the_wait_so_far_is_told_within_what_clients_obey():
    gate, clock = admission()
    for i in range(4):
        gate.arrive(str(i), 1, 1, 1)
    assert gate.retry_after_s == 1
    clock.now += 7.5
    assert gate.retry_after_s == 8
    clock.now += 10_000
    assert gate.retry_after_s == LONGEST_RETRY_S


def test_whoever_leaves_twice_is_counted_once():
    gate, _ = admission()
    gate.arrive("a", 1, 5, 5)
    gate.start("a")
    gate.leave("a")
    gate.leave("a")
    assert (gate.num_waiting, gate.num_waiting_tokens) == (0, 0)
