"""A process of a group that only does what the leader sends it.

Its main thread may wait inside of jax for a process that is gone. So two other threads talk to the leader: one beats,
the other receives; when the leader is gone, or says that the group has failed, that one ends the process.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from quire.config import EngineConfig
from quire.device.models.weights import params_shardings, weight_specs
from quire.device.runner import ModelRunner
from quire.distributed.channel import Connection, Facts, introduce
from quire.distributed.errors import ChannelError, GroupError, UnansweredError
from quire.distributed.group import address_of, connect_jax, prepare_jax, read_key
from quire.distributed.messages import BEAT_S, CODEC, pieces_of, whole_index

RETRY_S = 0.2
CONNECT_S = 5.0


class Follower:
    """The leader as another process sees it."""

    def __init__(self, config: EngineConfig, facts: Facts, exit_process: Callable[[int], Any] = os._exit) -> None:
        """Find the leader. GroupError if it does not answer, or refuses us."""
        self._config, self._exit_process = config, exit_process
        self._connection = _connect(config, facts)
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        """What has come; the leader waits before it sends more than a step or an array."""
        self._num_done = 0
        self._is_over = False
        for target in (self._receive, self._beat):
            threading.Thread(target=target, name=f"group{target.__name__}", daemon=True).start()

    def connect(self) -> None:
        """Make one jax of all processes."""
        prepare_jax(self._config)
        (address,) = self.expect("connect")
        connect_jax(self._config, address)

    def expect(self, kind: str) -> tuple[Any, ...]:
        """What comes with the next command, which is of this kind."""
        given, *rest = self._next()
        if given != kind:
            self.leave(f"the leader sent {given!r} where {kind!r} was due")
        self._num_done += kind != "bytes"
        return tuple(rest)

    def _next(self) -> tuple[Any, ...]:
        return self._commands.get()

    def run(self, runner: ModelRunner, load: Callable[[], Any]) -> None:
        """Do what the leader sends, until it closes. `load` reads the weights of the model's file."""
        loaded: Any = None
        self.acknowledge()
        while True:
            kind, *rest = self._next()
            if kind == "close":
                self._is_over = True
                runner.close()
                self._connection.close()
                return None
            if kind == "run":
                runner.run(*rest)
                self._num_done += 1
                continue  # nobody waits for an answer but that of the devices
            if kind == "load":
                loaded = load()
            elif kind == "set_loaded":
                runner.set_weights(loaded, copy=False)
                loaded = None
            elif kind == "set_weights":
                runner.replace_weights(self._coming_weights(runner))
                self._num_done += 1
                continue  # each array has been acknowledged
            elif kind in ("sleep", "wake", "zero"):
                getattr(runner, kind)()
            else:
                return self.leave(f"the leader sent {kind!r}, which is no command")
            self._num_done += 1
            self.acknowledge()

    def _coming_weights(self, runner: ModelRunner) -> Any:
        """A tree whose leaves are functions: each receives this process's part of its array."""
        shardings = params_shardings(runner.model, runner.mesh)
        dtype = np.dtype(jax.numpy.dtype(runner.programs.dtype))
        return jax.tree.map(
            lambda spec, placed: partial(self._receive_array, spec.shape, dtype, placed),
            weight_specs(runner.model),
            shardings,
        )

    def _receive_array(self, shape: tuple[int, ...], dtype: np.dtype, placed: NamedSharding) -> jax.Array:
        pieces: dict[tuple[slice, ...], np.ndarray] = {}
        for index in pieces_of(self._config.process_id, placed, shape):
            piece = np.empty([one.stop - one.start for one in index], dtype)
            content, start = piece.reshape(-1).view(np.uint8), 0
            while start < len(content):
                (chunk,) = self.expect("bytes")
                content[start : start + len(chunk)] = chunk
                start += len(chunk)
            pieces[index] = piece
        array = jax.make_array_from_callback(shape, placed, lambda index: pieces[whole_index(index, shape)])
        self.acknowledge()
        return array

    # -- talking ------------------------------------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Tell the leader that the last command is done."""
        self._send("ack")

    def leave(self, why: str) -> None:
        """Tell the leader that this process cannot go on, and end it."""
        with contextlib.suppress(GroupError):  # it is gone, too
            self._send("error", why)
        self._end(why)

    def _send(self, *message: Any) -> None:
        self._connection.send(CODEC.encode(message))

    def _beat(self) -> None:
        while not self._is_over:
            try:
                self._send("beat", self._num_done)
            except GroupError:
                return  # whoever receives finds out
            time.sleep(BEAT_S)

    def _receive(self) -> None:
        try:
            while True:
                command = CODEC.decode(self._connection.receive())
                if command[0] == "failed":
                    return self._end(f"the group of processes has failed: {command[1]}")
                if command[0] != "beat":
                    self._commands.put(command)
                if command[0] == "close":
                    return None
        except (GroupError, TypeError, LookupError) as error:
            self._end(f"the leader at {self._config.coordinator} {error}")

    def _end(self, why: str) -> None:
        """The main thread may be where nothing else reaches it."""
        self._is_over = True
        print(f"quire: process {self._config.process_id} ends: {why}", file=sys.stderr, flush=True)
        self._exit_process(1)


def _connect(config: EngineConfig, facts: Facts) -> Connection:
    """The connection to the leader, tried until it answers: it may come later, or have no place for us just now."""
    key, deadline = read_key(config.group_key_file), time.monotonic() + config.join_timeout_s
    while True:
        try:
            return _try_to_connect(config, key, facts)
        except UnansweredError as error:
            if time.monotonic() > deadline:
                raise GroupError(
                    f"no leader has answered at {config.coordinator} in join_timeout_s={config.join_timeout_s}: {error}"
                ) from None
            time.sleep(RETRY_S)
        except (ChannelError, OSError) as error:
            raise GroupError(f"the leader at {config.coordinator} {error}") from None


def _try_to_connect(config: EngineConfig, key: bytes, facts: Facts) -> Connection:
    assert config.coordinator is not None
    try:
        sock = socket.create_connection(address_of(config.coordinator), CONNECT_S)
    except OSError as error:
        raise UnansweredError(str(error)) from None
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return introduce(sock, key, {**facts, "process_id": config.process_id})
    except BaseException:
        sock.close()
        raise
