"""Keeps a router informed of one replica, from the events of its `GET /v1/kv_events`.

It brings no client: it is given each event's kind and its decoded data, and believes neither.
"""

from collections.abc import Mapping
from typing import Any

from quire.routing.router import Load, Router

MAX_ENGINES = 1024
_HASH_LEN = 64
"""Hex digits."""


class ReplicaFeed:
    """What one replica tells a router. Its engines are called `replica/0`, `replica/1` and so on there."""

    def __init__(self, router: Router, replica: str) -> None:
        self._router = router
        self._replica = replica
        self._numbers: dict[str, int] = {}
        """Of each engine that has sent a snapshot, the number of its last event."""

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take in one event. After an error, `close` it, connect again and begin anew: something is missing.

        ValueError if an event is not one that a server sends, or does not follow the one before. ConnectionError if the
        server cut the reader off.
        """
        if kind == "cut":
            raise ConnectionError(f"{self._replica} sent more than was read: connect again")
        engine = f"{self._replica}/{_whole(data, 'engine', MAX_ENGINES)}"
        if kind == "load":
            flags = [_flag(data, name) for name in ("has_room", "is_draining")]
            self._router.report(engine, Load(_whole(data, "queued_tokens"), *flags))
        elif kind == "snapshot":
            number = _whole(data, "number")
            if self._numbers.get(engine) != number:  # else another piece of the same
                self._router.pages.clear(engine)
            self._numbers[engine] = number
            self._router.pages.add(engine, _hashes(data, "hashes"))
        elif kind == "pages":
            number = _whole(data, "number")
            if engine not in self._numbers or number != self._numbers[engine] + 1:
                raise ValueError(f"number={number} of engine {engine} does not follow {self._numbers.get(engine)}")
            self._numbers[engine] = number
            self._router.pages.add(engine, _hashes(data, "published"))
            self._router.pages.remove(engine, _hashes(data, "removed"))

    def close(self) -> None:
        """The replica is gone, or its events are."""
        for engine in [name for name in self._router.engines if name.rpartition("/")[0] == self._replica]:
            self._router.forget(engine)
        for engine in self._numbers:
            self._router.forget(engine)
        self._numbers.clear()


def _whole(data: Mapping[str, Any], name: str, most: int = 1 << 62) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most:,}")
    return value


def _flag(data: Mapping[str, Any], name: str) -> bool:
    if not isinstance(data.get(name), bool):
        raise ValueError(f"{name} must be true or false")
    return data[name]


def _hashes(data: Mapping[str, Any], name: str) -> list[bytes]:
    values = data.get(name)
    if not isinstance(values, list) or not all(isinstance(one, str) and len(one) == _HASH_LEN for one in values):
        raise ValueError(f"{name} must be a list of hashes of {_HASH_LEN} hex digits")
    return [bytes.fromhex(one) for one in values]
