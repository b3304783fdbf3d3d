"""A group comes together, or every process says why not. Without jax: its processes are threads of this one."""

import contextlib
import socket
import threading
import time
from functools import partial

import pytest

from quire import LLM, Engine, EngineConfig, follow
from quire.device.mesh import make_mesh
from quire.distributed import channel, group, leader
from quire.distributed.errors import GroupError
from quire.distributed.follower import Follower
from quire.distributed.leader import Leader
from quire.distributed.messages import CODEC
from quire.field_error import FieldError
from tests.tiny import tiny_config, tiny_tensors

FACTS = {"version of quire": "1", "config or model": "abc"}
KEY = "a key of sixteen characters or more"
SOON_S = 60.0
"""What is waited for comes long before."""


class Exits:
    """Stands for `os._exit`: remembers that a process would have ended."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self._ended.set()

    def wait(self) -> int | None:
        assert self._ended.wait(SOON_S)
        return self.code


class Group:
    """Opens leaders and followers that meet at one port, and closes them."""

    def __init__(self, closing: contextlib.ExitStack) -> None:
        self.coordinator, self._closing = f"127.0.0.1:{group.free_port('127.0.0.1')}", closing

    def config(self, process_id: int = 0, **knobs) -> EngineConfig:
        knobs = {"num_processes": 2, "join_timeout_s": 30} | knobs
        return EngineConfig(process_id=process_id, coordinator=self.coordinator, **knobs)

    def lead(self, facts=FACTS, exits=None, **knobs) -> Leader:
        made = Leader(self.config(**knobs), facts, exits or Exits())
        self._closing.callback(made.close)
        self._closing.callback(lambda: [one.connection.close() for one in made._followers.values()])
        return made

    def follow(self, process_id: int = 1, facts=FACTS, exits=None, **knobs) -> Follower:
        made = Follower(self.config(process_id, **knobs), facts, exits or Exits())
        self._closing.callback(made._connection.close)
        return made

    def lead_beside(self, *follows, **how) -> Leader:
        """A leader with the followers that these calls open, each on a thread of its own."""
        threads = [threading.Thread(target=follow) for follow in follows]
        for thread in threads:
            thread.start()
        try:
            return self.lead(**how)
        finally:
            for thread in threads:
                thread.join()


@pytest.fixture
def meet(monkeypatch):
    monkeypatch.setenv("QUIRE_GROUP_KEY", KEY)
    monkeypatch.setattr(leader, "GRACE_S", 0.0)
    with contextlib.ExitStack() as closing:
        yield Group(closing)


def caught(call, found: list) -> None:
    try:
        found.append(call())
    except GroupError as error:
        found.append(error)


def wait_until(is_so) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- coming together ---------------------------------------------------------------------------------------------------


def test_commands_arrive_in_order_and_are_acknowledged(meet):
    found: list = []
    lead = meet.lead_beside(
        *(partial(caught, partial(meet.follow, i, num_processes=3), found) for i in (1, 2)), num_processes=3
    )
    assert lead.process_ids == [1, 2]
    for i in range(5):
        lead.send("connect", str(i))
    for follower in found:
        assert [follower.expect("connect") for _ in range(5)] == [(str(i),) for i in range(5)]
        follower.acknowledge()
    lead.wait_for_acks()
    assert lead.failure is None


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"version of quire": "2"}, "another version of quire, '2' where the leader has '1'"),
        ({"config or model": "abd"}, "another config or model, 'abd' where the leader has 'abc'"),
    ],
)
def test_another_version_or_config_is_told_at_both_ends(meet, facts, message):
    found: list = []
    with pytest.raises(GroupError, match=f"failed: process 1 has {message}"):
        meet.lead_beside(partial(caught, partial(meet.follow, facts=FACTS | facts), found))
    assert f"refuses this process: it has {message}" in str(found[0])


def test_another_key_is_told_at_both_ends(meet, tmp_path):
    file, found = tmp_path / "key", []
    file.write_text("quite another key than the one above\n")
    with pytest.raises(GroupError, match="failed: a process came with another key"):
        meet.lead_beside(partial(caught, partial(meet.follow, group_key_file=str(file)), found))
    assert str(found[0]) == f"the leader at {meet.coordinator} has another key"


def test_a_process_that_does_not_come_is_named(meet):
    with pytest.raises(GroupError, match=r"failed: process 2 has not come to 127.0.0.1:\d+ in join_timeout_s=1"):
        meet.lead_beside(partial(caught, partial(meet.follow, num_processes=3), []), num_processes=3, join_timeout_s=1)


def test_a_leader_that_does_not_come_is_named(meet):
    with pytest.raises(GroupError, match=r"no leader has answered at 127.0.0.1:\d+ in join_timeout_s=1"):
        meet.follow(join_timeout_s=1)


def test_who_comes_late_or_twice_is_refused_and_the_group_goes_on(meet):
    found: list = []
    lead = meet.lead_beside(partial(caught, meet.follow, found))
    with pytest.raises(GroupError, match="refuses this process: a process with process_id=1 is in the group already"):
        meet.follow()
    with pytest.raises(GroupError, match="it has another version of quire"):
        meet.follow(facts={})
    with socket.create_connection(group.address_of(meet.coordinator)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(5000))
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):
                pass
    lead.send("close")
    assert found[0].expect("close") == ()
    assert lead.failure is None


def test_strangers_do_not_keep_a_group_from_coming_together(meet):
    found: list = []

    def come() -> None:
        strangers = []
        wait_until(lambda: _connected(meet.coordinator, strangers))
        strangers += [socket.create_connection(group.address_of(meet.coordinator)) for _ in range(5)]
        for stranger in strangers:
            stranger.sendall(b"\x80\x04\x95 pickle")
            stranger.close()
        caught(meet.follow, found)

    lead = meet.lead_beside(come)
    assert (lead.process_ids, lead.failure) == ([1], None)


def test_a_follower_that_finds_no_place_among_idle_strangers_tries_again(meet, monkeypatch):
    found, turned_away = [], threading.Event()

    def introduce(*given):
        try:
            return channel.introduce(*given)
        except GroupError:
            turned_away.set()
            raise

    def come() -> None:
        strangers: list[socket.socket] = []
        with contextlib.ExitStack() as closing:
            for _ in range(leader.MAX_HANDSHAKES):
                wait_until(lambda: _connected(meet.coordinator, strangers))
                closing.enter_context(strangers[-1]).recv(1)  # it has its place
            follows = threading.Thread(target=caught, args=(meet.follow, found))
            follows.start()
            assert turned_away.wait(SOON_S)
        follows.join()

    monkeypatch.setattr(channel, "HANDSHAKE_S", SOON_S)  # or strangers leave by themselves
    monkeypatch.setattr("quire.distributed.follower.introduce", introduce)
    lead = meet.lead_beside(come)
    assert (lead.process_ids, lead.failure) == ([1], None)


def test_a_follower_that_meets_somebody_who_goes_away_tries_again(meet):
    found: list = []
    follows = threading.Thread(target=caught, args=(meet.follow, found))
    with socket.create_server(group.address_of(meet.coordinator)) as before:
        follows.start()
        before.accept()[0].close()
    lead = meet.lead()
    follows.join()
    assert (lead.process_ids, lead.failure) == ([1], None)


def test_what_listens_and_says_nothing_is_no_leader(meet, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.1)
    with (
        socket.create_server(group.address_of(meet.coordinator)),
        pytest.raises(GroupError, match=r"no leader has answered at .* in join_timeout_s=1: has not been heard of"),
    ):
        meet.follow(join_timeout_s=1)


def _connected(coordinator: str, sockets: list) -> bool:
    try:
        sockets.append(socket.create_connection(group.address_of(coordinator)))
    except OSError:
        return False
    return True


# -- failing -----------------------------------------------------------------------------------------------------------


def test_a_follower_that_ends_fails_the_group_and_whoever_waits(meet, capsys):
    found, exits = [], Exits()
    opened = [partial(meet.follow, 1, num_processes=3), partial(meet.follow, 2, num_processes=3, exits=exits)]
    lead = meet.lead_beside(*(partial(caught, follow, found) for follow in opened), num_processes=3)
    first = next(follower for follower in found if follower._config.process_id == 1)
    forever = threading.Event()
    threading.Timer(0.2, first._connection.close).start()
    with pytest.raises(GroupError, match="failed: process 1 has ended, or closed the connection"):
        lead.wait(forever.wait)
    assert exits.wait() == 1
    assert "process 2 ends: the group of processes has failed: process 1 has ended" in capsys.readouterr().err
    with pytest.raises(GroupError, match="failed: process 1"):
        lead.send("run")
    forever.set()


def test_a_follower_that_is_silent_fails_the_group(meet, monkeypatch):
    monkeypatch.setattr(channel, "SILENT_S", 1.5)
    monkeypatch.setattr(Follower, "_beat", lambda self: None)
    lead = meet.lead_beside(partial(caught, meet.follow, []))
    wait_until(lambda: lead.failure)
    assert "process 1 has not been heard of for 1.5 seconds" in str(lead.failure)


def test_a_follower_that_does_not_begin_a_step_fails_the_group(meet, monkeypatch):
    monkeypatch.setattr(leader, "HANG_S", 0.5)
    lead, forever = meet.lead_beside(partial(caught, meet.follow, [])), threading.Event()
    lead.send("run")
    with pytest.raises(GroupError, match=r"process 1 hangs: it has not begun a step in 0.5 seconds"):
        lead.wait(forever.wait)
    forever.set()


def test_a_leader_that_ends_or_is_silent_ends_its_followers(meet, monkeypatch, capsys):
    exits = Exits()
    lead = meet.lead_beside(partial(caught, partial(meet.follow, exits=exits), []))
    lead._followers[1].connection.close()
    assert exits.wait() == 1
    assert f"process 1 ends: the leader at {meet.coordinator} has ended" in capsys.readouterr().err


def test_a_leader_that_is_silent_ends_its_followers(meet, monkeypatch, capsys):
    monkeypatch.setattr(channel, "SILENT_S", 1.5)
    monkeypatch.setattr(Leader, "_beat", lambda self: None)
    exits = Exits()
    meet.lead_beside(partial(caught, partial(meet.follow, exits=exits), []))
    assert exits.wait() == 1
    assert "has not been heard of for 1.5 seconds" in capsys.readouterr().err


def test_a_follower_that_cannot_go_on_says_why(meet, capsys):
    found, exits = [], Exits()
    lead = meet.lead_beside(partial(caught, partial(meet.follow, exits=exits), found))
    found[0].leave("MemoryError: no room")
    wait_until(lambda: lead.failure)
    assert "process 1: MemoryError: no room" in str(lead.failure)
    assert exits.wait() == 1


def test_an_error_of_the_leader_in_the_middle_of_a_command_fails_the_group(meet):
    exits = Exits()
    lead = meet.lead_beside(partial(caught, partial(meet.follow, exits=exits), []))
    with pytest.raises(ZeroDivisionError), lead.inside():
        _ = 1 / 0
    assert "process 0: ZeroDivisionError" in str(lead.failure)
    assert exits.wait() == 1


def test_a_leader_that_is_stuck_in_jax_when_the_group_fails_ends(meet, capsys):
    found, exits = [], Exits()
    lead = meet.lead_beside(partial(caught, meet.follow, found), exits=exits)
    with lead.inside():
        found[0]._connection.close()
        assert exits.wait() == 1
    assert "the group of processes has failed: process 1 has ended" in capsys.readouterr().err


def test_a_leader_that_waits_nowhere_when_the_group_fails_goes_on(meet, monkeypatch):
    found, exits, looked = [], Exits(), threading.Event()
    end_if_stuck = Leader._end_if_stuck

    def look(self) -> None:
        end_if_stuck(self)
        looked.set()

    monkeypatch.setattr(Leader, "_end_if_stuck", look)
    lead = meet.lead_beside(partial(caught, meet.follow, found), exits=exits)
    found[0]._connection.close()
    assert looked.wait(SOON_S)
    assert lead.failure
    assert exits.code is None


def test_a_replayed_step_is_never_run(meet, capsys):
    found, exits = [], Exits()
    lead = meet.lead_beside(partial(caught, partial(meet.follow, exits=exits), found))
    connection, follower = lead._followers[1].connection, found[0]
    lead.send("connect", "once")
    with connection._lock:
        connection._num_sent -= 1  # the same number, and so the same bytes
    with contextlib.suppress(GroupError):
        connection.send(CODEC.encode(("connect", "once")))
    assert exits.wait() == 1
    assert "where" in capsys.readouterr().err
    assert follower.expect("connect") == ("once",)
    assert follower._commands.empty()


def test_followers_that_hang_up_while_others_are_told_to_close_do_not_fail_the_group(meet, caplog):
    """A process that fails its group ends with 1, and that of a job which is done must not."""
    found: list = []
    lead = meet.lead_beside(
        *(partial(caught, partial(meet.follow, i, num_processes=3), found) for i in (1, 2)), num_processes=3
    )
    first, last = (one.connection for one in lead._followers.values())
    follower = next(one for one in found if one._config.process_id == next(iter(lead._followers)))
    with last._lock:  # it cannot be told yet
        closing = threading.Thread(target=lead.close)
        closing.start()
        assert follower.expect("close") == ()
        follower._connection.close()
        wait_until(lambda: first._socket.fileno() < 0)
    closing.join()
    assert all(one.expect("close") == () for one in found if one is not follower)
    assert (lead.failure, caplog.text) == (None, "")


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"num_processes": 2}, "coordinator"),
        ({"coordinator": "127.0.0.1:7411"}, "coordinator"),
        ({"num_processes": 2, "coordinator": "127.0.0.1"}, "coordinator"),
        ({"num_processes": 2, "coordinator": "127.0.0.1:0"}, "coordinator"),
        ({"num_processes": 2, "coordinator": "127.0.0.1:99999"}, "coordinator"),
        ({"num_processes": 2, "coordinator": "a b:1"}, "coordinator"),
        ({"num_processes": 2, "coordinator": "h:1", "mesh": "model=3"}, "mesh"),
    ],
)
def test_a_config_that_makes_no_group_is_refused_by_name(knobs, field):
    with pytest.raises(FieldError) as error:
        EngineConfig(**knobs)
    assert error.value.field == field


@pytest.mark.parametrize("knobs", [{"process_id": 1}, {"num_processes": 0}, {"process_id": -1}, {"join_timeout_s": 0}])
def test_numbers_out_of_range_are_refused(knobs):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        EngineConfig(**knobs)


def test_a_key_must_be_there_and_long_enough(meet, monkeypatch, tmp_path):
    monkeypatch.delenv("QUIRE_GROUP_KEY")
    with pytest.raises(FieldError, match="QUIRE_GROUP_KEY: the processes of a group need a key of at least 16"):
        meet.lead()
    monkeypatch.setenv("QUIRE_GROUP_KEY", "short")
    with pytest.raises(FieldError, match="at least 16 characters"):
        meet.follow()
    with pytest.raises(FieldError, match="cannot be read"):
        meet.lead(group_key_file=str(tmp_path / "none"))


def test_an_address_that_is_not_ours_is_refused(meet, monkeypatch):
    meet.coordinator = "192.0.2.1:7411"  # of nobody: RFC 5737
    with pytest.raises(
        FieldError, match=r"coordinator=192.0.2.1:7411 cannot be listened on.*machine that process 0 runs"
    ):
        meet.lead()


def test_what_a_group_cannot_do_is_refused_by_name(meet):
    two = {"num_processes": 2, "coordinator": meet.coordinator}
    with pytest.raises(FieldError, match=r"process_id=1 follows process 0: call quire.follow"):
        LLM("nowhere", process_id=1, **two)
    with pytest.raises(FieldError, match="process_id=0 leads: open an LLM"):
        follow("nowhere", **two)
    with pytest.raises(FieldError, match="mesh is a Mesh"):
        LLM("nowhere", mesh=make_mesh(), **two)
    with pytest.raises(FieldError, match="num_processes=2: each process of a group reads its weights from a file"):
        LLM.from_params(tiny_config(), tiny_tensors(tiny_config()), **two)
    with pytest.raises(FieldError, match="num_processes=2: a group is made by LLM"):
        Engine(tiny_config(), None, EngineConfig(**two))
