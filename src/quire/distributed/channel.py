"""One connection between two processes of a group: signed frames, in one order. Knows no jax and executes nothing.

    leader                                     follower
    MAGIC, nonce                ->
                                <-             nonce, facts about itself, signed with the group's key
    welcome or refusal, signed  ->

Both nonces are new for every connection, and go into the two keys that sign its frames, one for each direction. A frame
carries its number; the receiver takes the next one and no other:

    number (8 bytes) | length of the payload (4) | payload | HMAC-SHA256 of all before (32)

So a frame that was changed, cut off, repeated, left out, sent back or kept from an earlier connection is refused before
anything of it is read. A connection that brought such a frame is of no more use.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from quire.distributed.errors import ChannelError, UnansweredError, WrongKeyError

MAGIC = b"quire group 1\n"
NONCE_LEN = MAC_LEN = 32
MAX_FACTS_LEN = 4096
"""Bytes that a stranger can make us read."""
MAX_FRAME_LEN = 256 << 20
"""Bytes of a payload: far above the largest step."""
SMALL_FRAME_LEN = 1 << 16
"""Up to here one copy is cheaper than three packets."""
SILENT_S = 5.0
"""A peer that has sent nothing for so long is gone: it beats five times as often."""
HANDSHAKE_S = 5.0
"""All of a handshake, however slowly a stranger sends."""

Facts = Mapping[str, Any]
_HEADER = struct.Struct(">QI")
_LENGTH = struct.Struct(">H")


class Connection:
    """A peer that has shown that it has the key. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, *, send_key: bytes, receive_key: bytes) -> None:
        sock.settimeout(SILENT_S)
        self._socket = sock
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self._lock = threading.Lock()

    def send(self, payload: bytes) -> None:
        """Send one frame. ChannelError if the peer is gone, or does not read."""
        if len(payload) > MAX_FRAME_LEN:
            raise ValueError(f"a frame of {len(payload):,} bytes; at most {MAX_FRAME_LEN:,} are allowed")
        with self._lock:
            header = _HEADER.pack(self._num_sent, len(payload))
            self._num_sent += 1
            if len(payload) <= SMALL_FRAME_LEN:
                frame = header + payload
                pieces = [frame + hmac.digest(self._send_key, frame, "sha256")]
            else:
                mac = hmac.new(self._send_key, header, hashlib.sha256)
                mac.update(payload)
                pieces = [header, payload, mac.digest()]
            try:
                for piece in pieces:
                    self._socket.sendall(piece)
            except OSError as error:
                raise ChannelError(_what_happened(error, SILENT_S)) from error

    def receive(self) -> bytes:
        """The payload of the next frame. ChannelError if the peer is gone or silent, or if it is not the next."""
        header = self._read(_HEADER.size)
        number, length = _HEADER.unpack(header)
        if length > MAX_FRAME_LEN:
            raise ChannelError(f"sent a frame of {length:,} bytes; at most {MAX_FRAME_LEN:,} are allowed")
        payload, given = self._read(length), self._read(MAC_LEN)
        mac = hmac.new(self._receive_key, header, hashlib.sha256)
        mac.update(payload)
        if not hmac.compare_digest(mac.digest(), given):
            raise ChannelError("sent a frame that is not signed with the key of this connection")
        if number != self._num_received:
            raise ChannelError(f"sent frame {number} where {self._num_received} was due")
        self._num_received += 1
        return payload

    def _read(self, length: int) -> bytes:
        return read_exactly(self._socket, length)

    def close(self) -> None:
        """End the connection; who receives at either end gets a ChannelError."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def read_exactly(sock: socket.socket, length: int, deadline: float | None = None) -> bytes:
    """So many bytes, all before `deadline` if there is one. Memory is taken as they come, whatever was announced."""
    data = bytearray()
    while len(data) < length:
        try:
            if deadline is not None:
                sock.settimeout(_seconds_until(deadline))
            piece = sock.recv(min(length - len(data), 1 << 20))
        except OSError as error:
            raise ChannelError(_what_happened(error, SILENT_S if deadline is None else HANDSHAKE_S)) from error
        if not piece:
            raise ChannelError("has ended, or closed the connection")
        data += piece
    return bytes(data)


def _seconds_until(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _what_happened(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"has not been heard of for {seconds:g} seconds: it hangs, or the network is cut"
    return "has ended, or closed the connection"


# -- the handshake -----------------------------------------------------------------------------------------------------


def welcome(sock: socket.socket, key: bytes, answer: Callable[[Facts], str | None]) -> tuple[Facts, Connection]:
    """The leader's end: what a follower says of itself, and the connection to it.

    `answer(facts)` returns why it is refused, or None. It is called once the follower has shown the key. ChannelError
    if it is refused, and WrongKeyError if it has another key; both after it has been told.
    """
    sock.settimeout(HANDSHAKE_S)
    deadline = time.monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(NONCE_LEN)
    sock.sendall(MAGIC + ours)
    theirs = read_exactly(sock, NONCE_LEN, deadline)
    told = _read_signed(sock, key, b"follower" + ours + theirs, deadline)
    if told is None:
        _send_signed(sock, key, b"leader" + ours + theirs, {"refused": "another key"})
        raise WrongKeyError("came with another key")
    refusal = answer(told)
    _send_signed(sock, key, b"leader" + ours + theirs, {"refused": refusal})
    if refusal is not None:
        raise ChannelError(refusal)
    to_follower, to_leader = _session_keys(key, ours + theirs)
    return told, Connection(sock, send_key=to_follower, receive_key=to_leader)


def introduce(sock: socket.socket, key: bytes, facts: Facts) -> Connection:
    """The follower's end: the connection to the leader.

    ChannelError if it refuses us, and UnansweredError if it goes away before it has said that it is one.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    try:
        magic = read_exactly(sock, len(MAGIC), deadline)
    except ChannelError as error:
        raise UnansweredError(str(error)) from error
    if magic != MAGIC:
        raise ChannelError("is not a leader of this version of Quire")
    theirs, ours = read_exactly(sock, NONCE_LEN, deadline), secrets.token_bytes(NONCE_LEN)
    sock.sendall(ours)
    _send_signed(sock, key, b"follower" + theirs + ours, facts)
    told = _read_signed(sock, key, b"leader" + theirs + ours, deadline)
    if told is None:
        raise WrongKeyError("has another key")
    if told.get("refused") is not None:
        raise ChannelError(f"refuses this process: {told['refused']}")
    to_follower, to_leader = _session_keys(key, theirs + ours)
    return Connection(sock, send_key=to_leader, receive_key=to_follower)


def _session_keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    return (
        hmac.digest(key, b"frames to the follower" + nonces, "sha256"),
        hmac.digest(key, b"frames to the leader" + nonces, "sha256"),
    )


def _send_signed(sock: socket.socket, key: bytes, context: bytes, facts: Facts) -> None:
    body = json.dumps(facts).encode()
    if len(body) > MAX_FACTS_LEN:
        raise ValueError(f"{len(body)} bytes of facts; at most {MAX_FACTS_LEN} are allowed")
    sock.sendall(_LENGTH.pack(len(body)) + body + hmac.digest(key, context + body, "sha256"))


def _read_signed(sock: socket.socket, key: bytes, context: bytes, deadline: float) -> dict[str, Any] | None:
    """What the peer says; None if it is signed with another key, and then nothing of it has been looked at."""
    (length,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size, deadline))
    if length > MAX_FACTS_LEN:
        raise ChannelError(f"sent {length} bytes of facts; at most {MAX_FACTS_LEN} are allowed")
    body, given = read_exactly(sock, length, deadline), read_exactly(sock, MAC_LEN, deadline)
    if not hmac.compare_digest(hmac.digest(key, context + body, "sha256"), given):
        return None
    facts = json.loads(body)
    if not isinstance(facts, dict):
        raise ChannelError("sent facts that are no object")
    return facts
