"""Who may wait, and what the others get."""

import pytest

from quire.async_llm.admission import LONGEST_RETRY_S, Admission, Limits, OverloadError, Work
from quire.core.errors import RequestError
from quire.server.keys import Caller


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
    assert (gate.num_waiting, gate.num_waiting_tokens) == (3, 60)


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
    gate.arrive([Work(f"a{i}", 1, 1) for i in range(3)])
    with pytest.raises(OverloadError):
        gate.arrive([Work(f"b{i}", 1, 1) for i in range(2)])
    assert gate.num_waiting == 3


def test_more_prompts_than_may_wait_are_refused_for_good_unless_they_find_rows():
    gate, _ = admission(num_rows=6)
    with pytest.raises(
        RequestError, match="the limit of this server is --max-queued-requests=4; send fewer"
    ) as refused:
        arrive(gate, "a", *map(str, range(7)))
    assert refused.value.code == "request_too_large"
    assert gate.num_waiting == 0
    arrive(gate, "a", *map(str, range(6)))


# -- tenants ----------------------------------------------------------------------------------------------------------


def limited(**limits: float) -> tuple[Admission, Clock]:
    """Return an Admission with room for all, in which the tenant "a" has limits and "b" has none."""
    alice = Caller("a", "alice", limits=Limits(**limits))
    return admission(max_requests=10**6, max_tokens=10**9, find_client=lambda tenant: alice if tenant == "a" else None)


def arrive(gate: Admission, tenant: str, *names: str, num_tokens: int = 10, n: int = 1) -> None:
    gate.arrive([Work(name, n, num_tokens, tenant) for name in names])


def test_a_full_queue_refuses_the_tenant_that_filled_it_and_no_other():
    gate, _ = admission(max_requests=8, max_tokens=10**9)
    for i in range(8):
        arrive(gate, "a", f"a{i}")
    with pytest.raises(OverloadError):
        arrive(gate, "a", "one too many")
    for i in range(4):
        gate.check_room("b")
        arrive(gate, "b", f"b{i}")
    with pytest.raises(OverloadError):
        arrive(gate, "b", "more than half, while another waits")
    with pytest.raises(OverloadError):
        gate.check_room("b")
    arrive(gate, "c", "c0")


def test_clients_that_are_more_than_the_queue_has_places_do_not_fill_it_without_a_bound():
    gate, _ = admission(max_requests=8)
    for i in range(16):
        arrive(gate, f"client {i}", f"{i}")
    with pytest.raises(OverloadError, match="16 requests wait, at most 8 may"):
        arrive(gate, "another client", "one too many")


@pytest.mark.parametrize("max_requests", [10, 256])
def test_the_queue_is_bounded_whatever_clients_do(max_requests):
    """However many clients there are, and however many requests each of them sends."""
    gate, _ = admission(max_requests=max_requests, max_tokens=10 * max_requests)
    for client in range(5 * max_requests):
        for number in range(5 * max_requests):
            try:
                arrive(gate, f"client {client}", f"{client}/{number}")
            except OverloadError:
                break
    assert gate.num_waiting <= 2 * max_requests


def test_tokens_that_wait_are_bounded_whatever_clients_do():
    """A request that is larger than the queue waits alone: further clients with such a one are refused."""
    gate, _ = admission(max_requests=1000, max_tokens=100)
    for client in range(100):
        try:
            arrive(gate, f"client {client}", f"{client}", num_tokens=500)
        except OverloadError:
            break
    assert gate.num_waiting_tokens == 500


def test_requests_that_take_turns_are_never_refused_for_good():
    """They are divided already: where the limits do not allow the first of them now, they do later."""
    gate, _ = admission(max_requests=256, max_tokens=1_000_000, num_rows=64)
    gate.arrive([Work(f"{i}", 1, 8000) for i in range(128)], in_turns=True)
    assert gate.num_waiting == 128


def test_many_prompts_that_exceed_the_queue_are_refused_for_good():
    """They would be taken whenever no request waits, and keep all others out for as long as they run."""
    gate, _ = admission(max_requests=256, max_tokens=1_000_000, num_rows=8)
    with pytest.raises(RequestError) as refused:
        arrive(gate, "a", *map(str, range(64)), num_tokens=128 * 8000, n=128)
    assert str(refused.value) == (
        "64 prompts may come to 65,536,000 tokens, and the limit of this server is --max-queued-tokens=1,000,000; "
        "send fewer prompts at once, or lower n or max_tokens"
    )
    assert (refused.value.field, refused.value.code) == ("prompt", "request_too_large")
    arrive(gate, "a", "one prompt cannot be divided", num_tokens=128 * 8000, n=128)
    arrive(gate, "b", "and keeps no other tenant out")
    with pytest.raises(OverloadError):
        arrive(gate, "a", "but its own")


def test_the_requests_of_a_key_are_counted_while_they_wait_and_run():
    gate, clock = limited(requests=2)
    arrive(gate, "a", "a0")
    gate.start("a0")
    clock.now += 5
    arrive(gate, "a", "a1")
    for check in (lambda: arrive(gate, "a", "a2"), lambda: gate.check_room("a")):
        with pytest.raises(
            OverloadError, match=r"^key alice: 2 requests wait or run, and at most requests=2 may$"
        ) as no:
            check()
        assert (no.value.code, no.value.retry_after_s) == ("key_requests", 5)
    assert gate.room_for("a") == 0
    arrive(gate, "b", "b0")
    gate.leave("a1")
    arrive(gate, "a", "a2")
    with pytest.raises(RequestError, match="the limit of key alice is requests=2; send fewer prompts"):
        arrive(gate, "a", "a3", "a4", "a5")


def test_the_waiting_tokens_of_a_key_are_bounded():
    gate, _ = limited(queued_tokens=100)
    arrive(gate, "a", "larger than the limit, alone", num_tokens=500)
    with pytest.raises(OverloadError) as no:
        arrive(gate, "a", "a1")
    assert str(no.value) == ("key alice: 500 tokens wait and this may come to 10 more; at most queued_tokens=100 may")
    assert no.value.code == "key_queued_tokens"
    arrive(gate, "b", "b0", num_tokens=10**6)
    gate.start("larger than the limit, alone")
    arrive(gate, "a", "a1", "a2", num_tokens=50)
    with pytest.raises(RequestError, match="queued_tokens=100; send fewer prompts"):
        arrive(gate, "a", "a3", "a4", num_tokens=51)


def test_tokens_per_minute_come_back_evenly_and_what_was_not_computed_at_once():
    gate, clock = limited(tokens_per_minute=600)
    arrive(gate, "a", "a0", num_tokens=600)
    with pytest.raises(OverloadError) as no:
        arrive(gate, "a", "a1", num_tokens=100)
    assert str(no.value) == "key alice: 0 of tokens_per_minute=600 are left and this may need 100"
    assert (no.value.code, no.value.retry_after_s) == ("key_tokens_per_minute", 10)
    with pytest.raises(OverloadError) as no:
        arrive(gate, "a", "larger than a minute", num_tokens=701)
    assert str(no.value).endswith("this may need 701; it runs once a whole minute's tokens are left")
    assert no.value.retry_after_s == 60
    with pytest.raises(OverloadError):
        gate.check_room("a")
    clock.now += 9.5
    with pytest.raises(OverloadError):
        arrive(gate, "a", "a1", num_tokens=100)
    clock.now += 0.5
    arrive(gate, "a", "a1", num_tokens=100)
    gate.start("a0")
    gate.leave("a0", 250)  # 350 fewer than there might have been
    arrive(gate, "a", "a2", num_tokens=350)
    gate.leave("a2", 0)
    arrive(gate, "a", "it never runs", num_tokens=350)
    with pytest.raises(OverloadError):
        gate.check_room("a")
    arrive(gate, "b", "b0", num_tokens=10**6)


def test_a_request_larger_than_a_minute_needs_a_whole_one_and_is_counted_in_full():
    gate, clock = limited(tokens_per_minute=600)
    arrive(gate, "a", "large", num_tokens=1200)
    gate.start("large")
    gate.leave("large", 1200)
    clock.now += 61
    with pytest.raises(OverloadError) as no:
        arrive(gate, "a", "large again", num_tokens=1200)
    assert no.value.retry_after_s == 59
    clock.now += 59
    arrive(gate, "a", "large again", num_tokens=1200)


def test_tenants_with_nothing_under_way_are_forgotten():
    """In the library each user may be one. The tokens of a limited tenant are kept until all of a minute are left."""
    gate, clock = limited(requests=8, tokens_per_minute=60)
    for i in range(50):
        gate.check_room(f"asks-{i}")
        arrive(gate, f"user-{i}", f"{i}")
        gate.start(f"{i}")
        gate.leave(f"{i}", 10)
        with gate.hold(f"reads-{i}"), pytest.raises(KeyError):
            raise KeyError
    arrive(gate, "a", "a0", num_tokens=20)
    gate.leave("a0")
    assert gate.num_tenants == 0
    arrive(gate, "a", "a0", num_tokens=20)
    arrive(gate, "a", "a1", num_tokens=20)
    gate.start("a0")
    gate.leave("a0", 20)
    gate.leave("a1")
    assert gate.num_tenants == 1
    with pytest.raises(OverloadError, match="40 of tokens_per_minute=60 are left"):
        arrive(gate, "a", "a2", num_tokens=50)
    clock.now += 20
    arrive(gate, "a", "a2", num_tokens=50)
    gate.leave("a2")
    assert gate.num_tenants == 0
    gate.arrive([Work("a3", 1, 20, "a")], is_admitted=True)
    with pytest.raises(OverloadError, match="40 of tokens_per_minute=60 are left"):
        arrive(gate, "a", "a4", num_tokens=50)


def test_requests_that_were_admitted_are_counted_and_not_refused():
    gate, _ = limited(requests=1, tokens_per_minute=100)
    arrive(gate, "a", "a0", num_tokens=100)
    gate.arrive([Work("a1", 1, 100, "a")], is_admitted=True)
    gate.leave("a0", 0)
    with pytest.raises(OverloadError) as no:
        gate.check_room("a")
    assert no.value.code == "key_requests"
