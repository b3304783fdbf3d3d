"""Which engines have which pages cached, by the names that their prefix caches give them.

    page    | p0  | p1  | p2  | p3        a prompt's pages; each name is a hash of all before it
    engines | a b | a b | a   |           a has 3 pages of it, b has 2

An engine's pages are bounded: beyond that its least recently used are forgotten, which costs a hit and nothing else.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.core.prefix_cache import page_hash, page_root
from quire.core.sequence import Version, Weights

MAX_PAGES = 1 << 17
"""Pages that are remembered of one engine."""


def prompt_hashes(
    token_ids: Sequence[int], *, page_size: int, cache_salt: str = "", version: Version = 0, change: int = 0
) -> list[bytes]:
    """The names under which an engine's prefix cache would know the full pages of a prompt.

    `version` and `change` are the engine's weights: their name, and how often weights had been set before.
    """
    name, names = page_root(page_size, cache_salt, Weights(version, change)), []
    for end in range(page_size, len(token_ids) + 1, page_size):
        name = page_hash(name, token_ids[end - page_size : end])
        names.append(name)
    return names


class PrefixIndex:
    """The names of the pages that engines have published and not evicted."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._pages: dict[str, OrderedDict[bytes, None]] = {}
        """Of each engine, the least recently used first."""
        self._holders: dict[bytes, dict[str, None]] = {}
        """The engines that have a page."""

    def __len__(self) -> int:
        return sum(map(len, self._pages.values()))

    def num_pages(self, engine: str) -> int:
        """How many pages are known of an engine."""
        return len(self._pages.get(engine, ()))

    def add(self, engine: str, hashes: Sequence[bytes]) -> None:
        """An engine has published pages, beginnings first: they are forgotten after what follows them."""
        pages = self._pages.setdefault(engine, OrderedDict())
        for name in reversed(hashes):
            pages[name] = None
            pages.move_to_end(name)
            self._holders.setdefault(name, {})[engine] = None
            if len(pages) > self._max_pages:
                self._drop(engine, pages.popitem(last=False)[0])

    def remove(self, engine: str, hashes: Iterable[bytes]) -> None:
        """An engine has evicted pages; those that are not known are ignored."""
        pages = self._pages.get(engine, {})
        for name in hashes:
            if name in pages:
                del pages[name]
                self._drop(engine, name)

    def clear(self, engine: str) -> None:
        """Nothing is known of an engine's pages any more."""
        for name in self._pages.pop(engine, ()):
            self._drop(engine, name)

    def touch(self, engine: str, hashes: Sequence[bytes]) -> None:
        """An engine uses these pages again: they are forgotten last, a beginning after what follows it."""
        pages = self._pages.get(engine, OrderedDict())
        for name in reversed(hashes):
            if name in pages:
                pages.move_to_end(name)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many pages of a prompt each engine has, from its beginning on; engines that have none are left out."""
        matched: dict[str, int] = {}
        left = self._holders.get(hashes[0], {}).keys() if hashes else set()
        for count, name in enumerate(hashes):
            holders = self._holders.get(name, {})
            if not left <= holders.keys():
                matched |= dict.fromkeys(left - holders.keys(), count)
                left &= holders.keys()
            if not left:
                return matched
        return matched | dict.fromkeys(left, len(hashes))

    def _drop(self, engine: str, name: bytes) -> None:
        holders = self._holders[name]
        del holders[engine]
        if not holders:
            del self._holders[name]
