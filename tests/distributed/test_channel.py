"""The wire between the processes of a group: what was changed, repeated or made up by a stranger is never read."""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.distributed import channel
from quire.distributed.channel import MAX_FRAME_LEN, Connection, introduce, welcome
from quire.distributed.codec import MAX_DEPTH, Codec
from quire.distributed.errors import ChannelError, GroupError, WrongKeyError

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
HEADER = struct.Struct(">QI")


class Tape:
    """A socket that keeps what is sent, and gives out what it was made with."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.sent = data, b""

    def settimeout(self, _: float) -> None: ...

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def recv(self, length: int) -> bytes:
        piece, self.data = self.data[:length], self.data[length:]
        return piece


def frames(*payloads: bytes, key: bytes = KEY) -> list[bytes]:
    """The bytes of these frames, as one connection sends them."""
    tape = Tape()
    connection, sent = Connection(tape, send_key=key, receive_key=key), []  # type: ignore[arg-type]
    for payload in payloads:
        tape.sent = b""
        connection.send(payload)
        sent.append(tape.sent)
    return sent


def receiver(data: bytes, key: bytes = KEY) -> Connection:
    return Connection(Tape(data), send_key=key, receive_key=key)  # type: ignore[arg-type]


# -- frames ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_what_is_sent_arrives(payloads):
    connection = receiver(b"".join(frames(*payloads)))
    assert [connection.receive() for _ in payloads] == payloads
    with pytest.raises(ChannelError, match="has ended"):
        connection.receive()


def test_a_large_frame_arrives():
    payload = bytes(range(256)) * 1000
    assert receiver(frames(payload)[0]).receive() == payload


@given(st.binary(max_size=100), st.data())
def test_a_frame_with_a_flipped_bit_is_refused(payload, data):
    (frame,) = frames(payload)
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    changed = bytearray(frame)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChannelError):
        receiver(bytes(changed)).receive()


@given(st.binary(max_size=100), st.data())
def test_a_frame_that_is_cut_off_is_refused(payload, data):
    (frame,) = frames(payload)
    end = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(ChannelError, match="has ended"):
        receiver(frame[:end]).receive()


@given(st.lists(st.binary(max_size=50), min_size=2, max_size=4), st.data())
def test_frames_in_another_order_are_refused(payloads, data):
    sent = frames(*payloads)
    order = data.draw(st.permutations(range(len(sent))))
    connection, first_wrong = receiver(b"".join(sent[i] for i in order)), 0
    while first_wrong < len(order) and order[first_wrong] == first_wrong:
        assert connection.receive() == payloads[first_wrong]
        first_wrong += 1
    with pytest.raises(ChannelError, match="was due" if first_wrong < len(order) else "has ended"):
        connection.receive()


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.data())
def test_a_frame_that_is_repeated_or_left_out_is_refused(payloads, data):
    sent = frames(*payloads)
    repeated = data.draw(st.integers(0, len(sent) - 1))
    connection = receiver(b"".join(sent) + sent[repeated])
    for payload in payloads:
        assert connection.receive() == payload
    with pytest.raises(ChannelError, match=f"sent frame {repeated} where {len(payloads)} was due"):
        connection.receive()
    if len(sent) > 1:
        with pytest.raises(ChannelError, match="sent frame 1 where 0 was due"):
            receiver(sent[1]).receive()


@given(st.binary(max_size=200))
def test_what_a_stranger_makes_up_is_refused(data):
    with pytest.raises(ChannelError):
        receiver(data).receive()
    with pytest.raises(ChannelError, match="not signed with the key"):
        receiver(frames(data, key=OTHER_KEY)[0]).receive()


@given(st.integers(MAX_FRAME_LEN + 1, (1 << 32) - 1))
def test_a_frame_that_is_too_long_is_refused_before_it_is_read(length):
    tape = Tape(HEADER.pack(0, length) + bytes(100))
    with pytest.raises(ChannelError, match=f"sent a frame of {length:,} bytes; at most"):
        Connection(tape, send_key=KEY, receive_key=KEY).receive()  # type: ignore[arg-type]
    assert len(tape.data) == 100


def test_what_is_too_long_is_not_sent(monkeypatch):
    monkeypatch.setattr(channel, "MAX_FRAME_LEN", 10)
    with pytest.raises(ValueError, match="a frame of 11 bytes"):
        frames(bytes(11))


# -- the handshake -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shake():
    """Shakes hands: what either end comes to, a connection or an error."""
    with contextlib.ExitStack() as sockets:
        yield partial(shake_hands, sockets)


def shake_hands(sockets, leader_key=KEY, follower_key=KEY, refuse: str | None = None) -> tuple[Any, Any]:
    ours, theirs = map(sockets.enter_context, socket.socketpair())
    found: dict[str, Any] = {}

    def follow() -> None:
        try:
            found["follower"] = introduce(theirs, follower_key, {"process_id": 1})
        except GroupError as error:
            found["follower"] = error

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        facts, found["leader"] = welcome(ours, leader_key, lambda facts: refuse)
        assert facts == {"process_id": 1}
    except GroupError as error:
        found["leader"] = error
    thread.join()
    return found["leader"], found["follower"]


def test_both_ends_talk_and_nothing_of_one_session_is_good_in_another(shake):
    leader, follower = shake()
    leader.send(b"step")
    assert follower.receive() == b"step"
    follower.send(b"done")
    assert leader.receive() == b"done"
    other, _ = shake()
    assert len({leader._send_key, leader._receive_key, other._send_key, other._receive_key}) == 4
    assert (leader._send_key, leader._receive_key) == (follower._receive_key, follower._send_key)


def test_a_frame_that_is_sent_back_is_refused(shake):
    leader, _ = shake()
    (frame,) = frames(b"x", key=leader._send_key)
    with pytest.raises(ChannelError, match="not signed"):
        receiver(frame, key=leader._receive_key).receive()


def test_another_key_is_told_at_both_ends(shake):
    leader, follower = shake(follower_key=OTHER_KEY)
    assert isinstance(leader, WrongKeyError)
    assert str(leader) == "came with another key"
    assert isinstance(follower, WrongKeyError)
    assert str(follower) == "has another key"


def test_a_refusal_says_why(shake):
    leader, follower = shake(refuse="it is tuesday")
    assert (str(leader), str(follower)) == ("it is tuesday", "refuses this process: it is tuesday")


@given(st.binary(max_size=300))
def test_whatever_a_stranger_says_first_is_no_introduction(data):
    def never(_: object) -> str | None:
        raise AssertionError("a stranger's facts were read")

    with pytest.raises(ChannelError):
        welcome(Tape(data), KEY, never)  # type: ignore[arg-type]
    with pytest.raises(ChannelError):
        introduce(Tape(data), KEY, {})  # type: ignore[arg-type]


class Trickle(Tape):
    """A peer that sends one byte every three seconds, by a clock of its own."""

    def __init__(self, data: bytes = b"") -> None:
        super().__init__(data)
        self.now, self._timeout = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0, "a socket would not wait at all"
        self._timeout = seconds

    def recv(self, length: int) -> bytes:
        self.now += min(3.0, self._timeout)
        if self._timeout <= 3.0:
            raise TimeoutError
        return super().recv(1)


@pytest.mark.parametrize(
    "shake",
    [lambda peer: welcome(peer, KEY, lambda _: None), lambda peer: introduce(peer, KEY, {})],
    ids=["leader", "follower"],
)
def test_who_sends_a_byte_now_and_then_does_not_hold_a_handshake_open(shake, monkeypatch):
    peer = Trickle(channel.MAGIC + bytes(5000))
    monkeypatch.setattr(channel, "time", peer)
    with pytest.raises(ChannelError, match="5 seconds"):
        shake(peer)
    assert peer.now == 100.0 + channel.HANDSHAKE_S


def test_a_leader_that_did_not_see_the_nonce_is_none():
    """Somebody who recorded a whole handshake plays the leader's part again."""
    old = channel.MAGIC + bytes(32)
    body = json.dumps({"refused": None}).encode()
    signed = struct.pack(">H", len(body)) + body
    recorded = channel.hmac.digest(KEY, b"leader" + bytes(32) + bytes(32) + body, "sha256")
    with pytest.raises(WrongKeyError):
        introduce(Tape(old + signed + recorded), KEY, {})  # type: ignore[arg-type]


# -- values ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any = None


CODEC = Codec(Pair)
arrays = st.builds(
    lambda dtype, shape, seed: np.array(np.random.default_rng(seed).random(shape) * 100).astype(dtype),
    st.sampled_from(["bool", "uint8", "int32", "uint32", "int64", "float32"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 99),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=20) | arrays,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.builds(Pair, inner, inner),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Pair):
        return isinstance(b, Pair) and same(a.first, b.first) and same(a.second, b.second)
    return type(a) is type(b) and a == b


def depth(value: Any) -> int:
    parts = value if isinstance(value, tuple) else (value.first, value.second) if isinstance(value, Pair) else ()
    return 1 + max(map(depth, parts), default=-1)


@given(values.filter(lambda value: depth(value) <= MAX_DEPTH))
def test_values_come_out_as_they_went_in(value):
    assert same(value, CODEC.decode(CODEC.encode(value)))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data):
    with contextlib.suppress(ChannelError):
        CODEC.decode(data)


@given(values, st.data())
def test_a_value_that_is_cut_off_or_goes_on_is_an_error(value, data):
    encoded = CODEC.encode(value)
    with pytest.raises(ChannelError):
        CODEC.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(ChannelError):
        CODEC.decode(encoded + b"\0")


def test_sizes_are_not_believed():
    for huge in (
        bytes([6]) + struct.pack("<I", 2**32 - 1),  # a tuple
        bytes([5, 2, 2]) + struct.pack("<2I", 2**31, 2**31),  # an array
        bytes([5, 2, 200]),
        bytes([4]) + struct.pack("<I", 2**32 - 1),  # a text
        bytes([6, 1, 0, 0, 0]) * 1000,  # depth
        bytes([7, 99]),  # a dataclass that there is not
        b"\x80\x04\x95",  # how pickle begins
    ):
        with pytest.raises(ChannelError):
            CODEC.decode(huge)


def test_what_is_not_listed_cannot_be_sent():
    for value in (object(), {"a": 1}, [1], b"bytes", np.array(["a"]), np.array([1j])):
        with pytest.raises((TypeError, KeyError)):
            CODEC.encode(value)


def test_the_wire_needs_no_jax():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise ImportError("jax is not installed here")
sys.meta_path.insert(0, Refuse())
import quire.distributed.channel, quire.distributed.codec
print("ok")
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stdout == "ok\n", out.stderr
