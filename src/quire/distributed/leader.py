"""Process 0 of a group: it waits for the others, sends them every command, and says so when one is lost.

A command is sent to all followers and then run here, so that every process launches the same programs in the same
order. When a process dies in the middle of a collective the others may wait in it for ever, inside of jax. So nobody
here waits for a device without watching the group: `Leader.wait` returns when the device has answered, or raises when
the group has failed.
"""

import atexit
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import jax

from quire.config import EngineConfig
from quire.distributed.channel import Connection, Facts, welcome
from quire.distributed.errors import ChannelError, GroupError, WrongKeyError
from quire.distributed.group import address_of, connect_jax, differences, free_port, prepare_jax, read_key
from quire.distributed.messages import BEAT, BEAT_S, CODEC
from quire.field_error import FieldError

HANG_S = 6.0
"""A follower that has not handed a step to its devices after so long hangs."""
SLOW_S = 120.0
"""Devices that have a step and do not answer for so long hang. No step is so large."""
GRACE_S = 2.0
"""Once the group has failed, how long a thread may stay inside of jax before the process ends."""
MAX_HANDSHAKES = 16
"""Connections of strangers at the same time; more are closed at once."""

_log = logging.getLogger("quire.distributed")


class Loaded(Protocol):
    """What was read from a model's file."""

    @property
    def params(self) -> Any: ...


class _Follower:
    def __init__(self, process_id: int, connection: Connection) -> None:
        self.process_id, self.connection = process_id, connection
        self.num_done = 0
        """Commands that it had done when it last beat: a step, once its devices have it."""
        self.num_acks = 0


class Leader:
    """The group as process 0 sees it. One thread commands; any may look at `failure`."""

    def __init__(self, config: EngineConfig, facts: Facts, exit_process: Callable[[int], Any] = os._exit) -> None:
        """Wait for every process. GroupError if one does not come, or does not belong here."""
        assert config.coordinator is not None
        self.failure: GroupError | None = None
        """Why the group has failed, once it has."""
        self._config, self._facts, self._key = config, facts, read_key(config.group_key_file)
        self._exit_process = exit_process
        self._changed = threading.Condition()
        """Held for what follows; notified when something of it has changed."""
        self._followers: dict[int, _Follower] = {}
        self._taken: set[int] = set()
        """Process ids that have come, or are about to."""
        self._num_sent = 0
        """Commands."""
        self._is_inside = False
        """Whether the commanding thread is inside of a call that may hang."""
        self._is_closed = False
        self._waiting_since: float | None = None
        self._to_wait_for: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._loaded: Any = None
        """The weights that `load` has read here, while the followers have theirs ready."""
        host, port = address_of(config.coordinator)
        self._listener = _listen(host, port)
        for target in (self._accept, self._beat, self._wait_for_devices):
            threading.Thread(target=target, name=f"group{target.__name__}", daemon=True).start()
        try:
            self._gather()
        except BaseException:
            self._stop_listening()
            raise

    def __repr__(self) -> str:
        return f"<Leader of {self._config.num_processes} processes{', failed' if self.failure else ''}>"

    def connect(self) -> None:
        """Make one jax of all processes."""
        config = self._config
        host, _ = address_of(str(config.coordinator))
        prepare_jax(config)
        address = f"{f'[{host}]' if ':' in host else host}:{free_port(host)}"
        self.send("connect", address)
        connect_jax(config, address)

    # -- coming together ----------------------------------------------------------------------------------------------

    @property
    def process_ids(self) -> list[int]:
        """Those of the followers."""
        return sorted(self._followers)

    @property
    def _num_followers(self) -> int:
        return self._config.num_processes - 1

    def _gather(self) -> None:
        seconds = self._config.join_timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self.failure or len(self._followers) == self._num_followers, seconds)
            missing = sorted(set(range(1, self._config.num_processes)) - self._followers.keys())
        if missing and not self.failure:
            names = f"process {missing[0]} has" if len(missing) == 1 else f"processes {_listed(missing)} have"
            self.fail(f"{names} not come to {self._config.coordinator} in join_timeout_s={seconds}")
        self.check()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._shake_hands, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _shake_hands(self, sock: socket.socket) -> None:
        """Take a process into the group, or tell it why not. What is no process of Quire's changes nothing."""
        claimed: set[int] = set()
        misfits: list[str] = []

        def answer(theirs: Facts) -> str | None:
            process_id = theirs.get("process_id")
            if not isinstance(process_id, int) or not 1 <= process_id < self._config.num_processes:
                return f"process_id={process_id} is none of 1 to {self._num_followers}"
            if why_not := differences(self._facts, theirs):
                misfits.append(f"process {process_id} has {why_not}")
                return f"it has {why_not}"
            with self._changed:
                if self.failure:
                    return f"{self.failure}"
                if process_id in self._taken:
                    return f"a process with process_id={process_id} is in the group already"
                self._taken.add(process_id)
                claimed.add(process_id)
            return None

        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            told, connection = welcome(sock, self._key, answer)
            follower = _Follower(told["process_id"], connection)
            threading.Thread(target=self._listen_to, args=(follower,), daemon=True).start()
            with self._changed:
                self._followers[follower.process_id] = follower
                self._changed.notify_all()
        except WrongKeyError:
            self._fail_to_gather("a process came with another key: give all of them the same")
        except (ChannelError, OSError, ValueError):
            with self._changed:
                self._taken -= claimed
            if misfits:
                self._fail_to_gather(misfits[0])
        finally:
            self._handshakes.release()
            if not claimed & self._followers.keys():
                sock.close()

    def _fail_to_gather(self, reason: str) -> None:
        """A group that is not complete cannot become so: say it now. One that is complete does not care."""
        if len(self._followers) < self._num_followers:
            self.fail(reason)

    # -- talking ------------------------------------------------------------------------------------------------------

    def send(self, *message: Any) -> None:
        """Send a command to every follower."""
        self.check()
        self._num_sent += 1
        payload = CODEC.encode(message)
        for follower in self._followers.values():
            self._send(follower, payload)

    def send_part(self, process_id: int, *message: Any) -> None:
        """Send to one follower what belongs to the command that all have been sent."""
        self._send(self._followers[process_id], CODEC.encode(message))

    def _send(self, follower: _Follower, payload: bytes) -> None:
        try:
            follower.connection.send(payload)
        except ChannelError as error:
            raise self.fail(f"process {follower.process_id} {error}") from error

    def wait_for_acks(self) -> None:
        """Until every follower has done what it was told."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure or all(one.num_acks for one in self._followers.values()))
            for follower in self._followers.values():
                follower.num_acks -= 1
        self.check()

    def _listen_to(self, follower: _Follower) -> None:
        try:
            while True:
                kind, *rest = CODEC.decode(follower.connection.receive())
                if kind == "beat":
                    (follower.num_done,) = rest
                elif kind == "ack":
                    with self._changed:
                        follower.num_acks += 1
                        self._changed.notify_all()
                else:
                    self.fail(f"process {follower.process_id}: {rest[0]}")
        except GroupError as error:
            self.fail(f"process {follower.process_id} {error}")
        except (TypeError, ValueError, LookupError):
            self.fail(f"process {follower.process_id} sent a message that is none")
        finally:
            follower.connection.close()

    def _beat(self) -> None:
        """Show the followers that this process lives, and look whether a step hangs."""
        while not self.failure and not self._is_closed:
            for follower in list(self._followers.values()):
                with contextlib.suppress(GroupError):  # whoever listens to it finds out
                    follower.connection.send(BEAT)
            self._check_step()
            time.sleep(BEAT_S)

    def _check_step(self) -> None:
        since = self._waiting_since
        seconds = 0.0 if since is None else time.monotonic() - since
        behind = [one.process_id for one in self._followers.values() if one.num_done < self._num_sent]
        if behind and seconds > HANG_S:
            self.fail(f"process {_listed(behind)} hangs: it has not begun a step in {HANG_S:g} seconds")
        elif seconds > SLOW_S:
            self.fail(f"the devices of all processes have a step, and have not ended it in {SLOW_S:g} seconds")

    # -- failing ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if the group has failed, or is closed."""
        if self.failure:
            raise GroupError(str(self.failure))
        if self._is_closed:
            raise GroupError("the group is closed")

    def fail(self, reason: str) -> GroupError:
        """The group has failed, for the first reason that is given: tell every process, and whoever waits here."""
        with self._changed:
            if self.failure or self._is_closed:
                return self.failure or GroupError(reason)
            self.failure = GroupError(f"the group of processes has failed: {reason}")
            self._changed.notify_all()
        _log.critical("%s", self.failure)
        payload = CODEC.encode(("failed", reason))
        for follower in list(self._followers.values()):  # one that hangs may hold up its own
            threading.Thread(target=_tell, args=(follower.connection, payload), daemon=True).start()
        threading.Thread(target=self._end_if_stuck, daemon=True).start()
        if jax.distributed.is_initialized():
            atexit.register(_leave)
        return self.failure

    def _end_if_stuck(self) -> None:
        """A thread that waits inside of jax for a process that is gone never comes back: nothing else would end it."""
        time.sleep(GRACE_S)
        if self._is_inside:
            print(f"quire: {self.failure}", file=sys.stderr, flush=True)
            self._exit_process(1)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around what every process does: when it fails in this one, the state of the others is not known."""
        self.check()
        self._is_inside = True
        try:
            yield
        except GroupError:
            raise
        except BaseException as error:
            self.fail(f"process 0: {type(error).__name__}: {error}")
            raise
        finally:
            self._is_inside = False

    def wait[T](self, function: Callable[[], T]) -> T:
        """What a call that waits for the device returns. GroupError as soon as the group fails."""
        future: Future[T] = Future()
        future.add_done_callback(self._wake)
        self._waiting_since = time.monotonic()
        self._to_wait_for.put((function, future))
        try:
            with self._changed:
                self._changed.wait_for(lambda: future.done() or self.failure)
        finally:
            self._waiting_since = None
        if not future.done():
            self.check()
        try:
            return future.result()
        except RuntimeError as error:
            raise self.fail(f"process 0: {type(error).__name__}: {error}") from error

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_for_devices(self) -> None:
        while job := self._to_wait_for.get():
            function, future = job
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    # -- the life of an engine ----------------------------------------------------------------------------------------

    def load[T: Loaded](self, load: Callable[[], T]) -> T:
        """Read the model's file in every process."""
        with self.inside():
            self.send("load")
            loaded = load()
            self.wait_for_acks()
        self._loaded = loaded.params
        return loaded

    def take_loaded(self, params: Any) -> bool:
        """Whether these are the weights that every process has read; they are taken once."""
        is_loaded = params is self._loaded and params is not None
        self._loaded = None
        return is_loaded

    def close(self) -> None:
        """Let the followers go."""
        with self._changed:  # before anybody is told: who then hangs up does as it should, and the group has not failed
            is_running = not self.failure and not self._is_closed
            self._is_closed = True
        if is_running:
            payload = CODEC.encode(("close",))
            for follower in self._followers.values():
                _tell(follower.connection, payload)
        self._to_wait_for.put(None)
        self._stop_listening()


def _leave() -> None:
    """When Python ends: jax would wait for a process that is gone, and then abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _tell(connection: Connection, payload: bytes) -> None:
    with contextlib.suppress(GroupError):
        connection.send(payload)


def _listed(process_ids: list[int]) -> str:
    return ", ".join(map(str, process_ids))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_HANDSHAKES)
    except OSError as error:
        raise FieldError(
            f"coordinator={host}:{port} cannot be listened on: {error.strerror or error}; give an address of the "
            "machine that process 0 runs on, and a port that is free",
            field="coordinator",
        ) from None
