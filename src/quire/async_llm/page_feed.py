"""Tells who listens which pages an engine's prefix cache publishes and gives up, by their names.

It costs nothing while nobody listens. Whoever begins to gets a snapshot first, and then every change, numbered.
"""

from collections.abc import Callable
from typing import NamedTuple

from quire.async_llm.errors import notify
from quire.core.sequence import Weights
from quire.engine.engine import Engine


class PageBatch(NamedTuple):
    """The full pages that became findable, and those that are so no more, since the batch before."""

    number: int
    """One more than that of the batch before; a snapshot has the number of the last batch that is in it."""
    published: list[bytes]
    removed: list[bytes]
    weights: Weights
    """What the engine computes with: a part of every page's name."""
    is_snapshot: bool = False
    """Whether `published` is all that there is, whatever came before."""


Listener = Callable[[PageBatch], object]
"""Called on the engine's thread: it returns at once, and does not raise."""


class PageFeed:
    """What an engine's prefix cache publishes and gives up. For the engine's thread."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._number = 0

    def add(self, engine: Engine, listener: Listener) -> None:
        """Begin to tell somebody; at once, of all pages there are."""
        self.tell(engine)
        self._listeners.append(listener)
        tables = engine.scheduler.tables
        cache, names = tables.pool.prefix_cache, []
        if cache is not None:
            cache.changes, names = [], cache.full_names
        listener(PageBatch(self._number, names, [], tables.weights, is_snapshot=True))

    def remove(self, engine: Engine, listener: Listener) -> None:
        """Tell somebody no more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        cache = engine.scheduler.tables.pool.prefix_cache
        if cache is not None and not self._listeners:
            cache.changes = None

    def tell(self, engine: Engine) -> None:
        """Tell of what has changed since the last call; called between two steps."""
        tables = engine.scheduler.tables
        cache = tables.pool.prefix_cache
        if cache is None or not cache.changes:
            return
        is_there = dict(cache.changes)  # of a page that came and went, the end counts
        cache.changes = []
        self._number += 1
        published = [name for name, there in is_there.items() if there]
        removed = [name for name, there in is_there.items() if not there]
        for listener in self._listeners:
            notify(listener, PageBatch(self._number, published, removed, tables.weights))
