"""The policy: an engine that has the longest beginning of the prompt cached, then the one with the least to do.

    those that take requests            not draining; with room, if any has room
    those that are not overloaded       at most `max_imbalance_tokens` more to do than the one with the least
    the one that has the group          else the one with the longest known prefix, the least to do, the longest unused

The second line bounds what a hot prefix, or a group, can do to one engine: `queued <= least + max_imbalance_tokens` for
every engine that is chosen.
"""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from quire.routing.prefix_index import MAX_PAGES, PrefixIndex

MAX_IMBALANCE_TOKENS = 8192
MAX_GROUPS = 1 << 14
"""Groups whose engine is remembered."""


class Load(NamedTuple):
    """What an engine reports of itself."""

    queued_tokens: int = 0
    """Tokens of the requests that it has, waiting or running, prompts and what may be generated."""
    has_room: bool = True
    """Whether it would take another request, or refuse it because its queue is full."""
    is_draining: bool = False
    """Whether it takes nothing new: it is about to stop, or does not respond."""


class Choice(NamedTuple):
    """Where a request goes."""

    engine: str
    num_pages: int
    """Pages of the prompt that the engine is known to have."""


class _Engine:
    def __init__(self) -> None:
        self.load = Load()
        self.sent_tokens = 0
        """Of requests that were sent there since it last reported."""
        self.last_chosen = 0

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens + self.sent_tokens


class Router:
    """Chooses engines for requests. For one thread at a time."""

    def __init__(
        self,
        *,
        max_imbalance_tokens: int = MAX_IMBALANCE_TOKENS,
        max_pages: int = MAX_PAGES,
        max_groups: int = MAX_GROUPS,
    ) -> None:
        """`max_pages` bounds what is remembered of each engine, `max_groups` of all groups together."""
        self.max_imbalance_tokens = max_imbalance_tokens
        """How many more tokens than the least busy engine has one may have and still be chosen."""
        self.pages = PrefixIndex(max_pages)
        """Told by whoever hears of it what engines publish and evict."""
        self._max_groups = max_groups
        self._engines: dict[str, _Engine] = {}
        self._group_engines: OrderedDict[str, str] = OrderedDict()
        """The engine of each group, the longest unused first."""
        self._turns = itertools.count(1)

    @property
    def engines(self) -> Collection[str]:
        """Those that have reported and are not forgotten."""
        return self._engines.keys()

    def report(self, engine: str, load: Load) -> None:
        """What an engine, new or known, says of itself; it knows what was sent to it before."""
        state = self._engines.setdefault(engine, _Engine())
        state.load, state.sent_tokens = load, 0

    def forget(self, engine: str) -> None:
        """An engine is gone, and its pages with it."""
        self._engines.pop(engine, None)
        self.pages.clear(engine)

    def choose(
        self,
        hashes: Sequence[bytes] = (),
        *,
        num_tokens: int = 0,
        group: str | None = None,
        exclude: Collection[str] = (),
    ) -> Choice | None:
        """The engine for one request; None if none takes any.

        `hashes` are those of the prompt's pages (`prompt_hashes`), `num_tokens` what it may come to, and `group` a name
        that requests have in common which should meet: a session, or samples of one prompt. Not one of `exclude`: they
        were tried, and refused.
        """
        open_ = {
            name: state for name, state in self._engines.items() if not state.load.is_draining and name not in exclude
        }
        able = {name: state for name, state in open_.items() if state.load.has_room} or open_
        if not able:
            return None
        most = min(state.queued_tokens for state in able.values()) + self.max_imbalance_tokens
        able = {name: state for name, state in able.items() if state.queued_tokens <= most}
        matched = self.pages.match(hashes)
        kept = None if group is None else self._group_engines.get(group)
        if kept in able:
            chosen = kept
        else:
            chosen = min(
                able, key=lambda name: (-matched.get(name, 0), able[name].queued_tokens, able[name].last_chosen)
            )
        able[chosen].sent_tokens += num_tokens
        able[chosen].last_chosen = next(self._turns)
        num_pages = matched.get(chosen, 0)
        self.pages.touch(chosen, hashes[:num_pages])
        if group is not None:
            self._remember(group, chosen)
        return Choice(chosen, num_pages)

    def _remember(self, group: str, engine: str) -> None:
        self._group_engines[group] = engine
        self._group_engines.move_to_end(group)
        if len(self._group_engines) > self._max_groups:
            self._group_engines.popitem(last=False)
