"""Who may wait, and what the others get."""

import pytest

from quire.async_llm.admission import LONGEST_RETRY_S, Admission, OverloadError, Work


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def admission(**limits) -> tuple[Admission, Clock]:
    clock = Clock()
    return Admission(**({"max_requests": 4, "max_tokens": 1000, "num_rows": 0} | limits), clock=clock), clock


def test_requests_beyond_the_bound_are_refused_until_one_begins_or_leaves():
    gate, _ = admission()
    for i in range(4):
        gate.arrive([Work(str(i), 1, 20)])
    with pytest.raises(OverloadError, match="4 requests wait, at most 4 may"):
        gate.arrive([Work("4", 1, 20)])
    gate.start("0")
    gate.arrive([Work("5", 1, 20)])
    with pytest.raises(OverloadError):
        gate.check_room()
    gate.leave("1")
    gate.check_room()
    assert (gate.num_waiting, gate.num_waiting_tokens, gate.num_rejected) == (3, 60, 2)


def test_tokens_are_counted_by_what_they_may_come_to():
    gate, _ = admission()
    gate.arrive([Work("a", 4, 900)])
    with pytest.raises(OverloadError, match="900 tokens wait and this may come to 150 more; at most 1,000"):
        gate.arrive([Work("b", 1, 150)])
    gate.start("a")
    gate.arrive([Work("b", 1, 150)])


def test_a_request_larger_than_the_queue_waits_alone():
    gate, _ = admission()
    gate.arrive([Work("huge", 10, 10100)])
    with pytest.raises(OverloadError):
        gate.arrive([Work("small", 1, 2)])


def fill(gate: Admission, name: str, *, begin: int, wait: int) -> None:
    for i in range(begin + wait):
        gate.arrive([Work(f"{name}{i}", 1, 2)])
        if i < begin:
            gate.start(f"{name}{i}")


def test_a_client_is_told_when_those_that_wait_will_have_begun():
    gate, clock = admission(max_requests=10, max_tokens=10**6)
    for i in range(30):  # two run at once, each for four seconds: one begins every two seconds
        gate.arrive([Work(str(i), 1, 2)])
        gate.start(str(i))
        clock.now += 2
        gate.leave(str(i - 1))
    fill(gate, "w", begin=1, wait=10)
    with pytest.raises(OverloadError) as refused:
        gate.check_room()
    assert refused.value.retry_after_s == pytest.approx(20, abs=1)


def test_those_that_found_a_free_row_do_not_make_the_wait_look_short():
    gate, clock = admission(num_rows=8, max_requests=64, max_tokens=10**6)
    for wave in range(3):  # nobody waits: as many come as there are rows
        fill(gate, f"quiet{wave}.", begin=8, wait=0)
        clock.now += 4
        for i in range(8):
            gate.leave(f"quiet{wave}.{i}")
    fill(gate, "busy", begin=8, wait=64)
    assert gate.retry_after_s == 32, "eight times the four seconds of a row"


def test_requests_that_run_longer_than_those_before_make_the_wait_longer():
    gate, clock = admission(max_requests=64, max_tokens=10**6)
    fill(gate, "short", begin=2, wait=0)
    clock.now += 1
    for i in range(2):
        gate.leave(f"short{i}")
    fill(gate, "long", begin=2, wait=4)
    assert gate.retry_after_s == 2
    clock.now += 30
    assert gate.retry_after_s == 60


def test_without_any_beginning_the_wait_so_far_is_told_within_what_clients_obey():
    gate, clock = admission()
    for i in range(4):
        gate.arrive([Work(str(i), 1, 2)])
    assert gate.retry_after_s == 1
    clock.now += 7.5
    assert gate.retry_after_s == 8
    clock.now += 10_000
    assert gate.retry_after_s == LONGEST_RETRY_S


def test_whoever_leaves_twice_is_counted_once():
    gate, _ = admission()
    gate.arrive([Work("a", 1, 10)])
    gate.start("a")
    gate.leave("a")
    gate.leave("a")
    assert (gate.num_waiting, gate.num_waiting_tokens) == (0, 0)


def test_nobody_is_refused_while_rows_are_free():
    gate, _ = admission(num_rows=100)
    for i in range(50):  # far more than may wait
        gate.arrive([Work(str(i), 2, 500)])
    with pytest.raises(OverloadError):
        gate.arrive([Work("one too many", 1, 1)])
    gate.start("0")
    gate.leave("0")
    gate.arrive([Work("in its place", 2, 1)])


def test_what_a_client_asks_for_at_once_is_taken_whole_or_not_at_all():
    gate, _ = admission()
    gate.arrive([Work(f"a{i}", 1, 1) for i in range(9)])  # more than may wait, and nobody waits
    with pytest.raises(OverloadError):
        gate.arrive([Work(f"b{i}", 1, 1) for i in range(2)])
    assert gate.num_waiting == 9
