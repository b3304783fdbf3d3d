"""Token prefix -> the pages that already hold its KV.

Pages are known here by a hash of their tokens and of everything before them:

    root    H(page size, tenant salt, weight version, how often weights have changed)
    page 0  H(root,   tokens 0 .. Z-1)
    page 1  H(page 0, tokens Z .. 2Z-1)         a page is found only behind its own beginning
    end     H(page 1, tokens 2Z .. 2Z+k)        the last page of what keeps its end; who finds it copies it

The cache is one holder of every page it knows. Pages that nobody else holds are idle: still findable, and evicted when
the pool runs dry, least recently used first. Who holds a page holds all before it and lets go of the last one first, so
that order also takes leaves before their parents.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Reversible
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import NamedTuple

from quire.core.errors import AuditError
from quire.core.pages import PageAllocator
from quire.core.sequence import Sequence, Weights


class PageChange(NamedTuple):
    """A full page became findable under a name, or cannot be found under it any more."""

    name: bytes
    is_there: bool


class PrefixCache:
    """Knows pages by their hash. Whether a page may be published is for its writer to say."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._num_tokens: dict[int, int] = {}
        """Tokens in pages that are not full."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages held by nobody else; the next to be evicted first."""
        self.num_evictions = 0
        self.changes: list[PageChange] | None = None
        """What was published and evicted, for somebody who takes it after every step; None while nobody does."""

    @property
    def num_pages(self) -> int:
        """Pages known here, idle or not."""
        return len(self._hash_of)

    @property
    def num_idle(self) -> int:
        """Pages that nobody else holds."""
        return len(self._idle)

    @property
    def pages(self) -> Iterable[int]:
        """Every page known here."""
        return self._hash_of.keys()

    @property
    def idle_pages(self) -> Reversible[int]:
        """Pages that nobody else holds; the next to be evicted first."""
        return self._idle.keys()

    @property
    def full_names(self) -> list[bytes]:
        """The names of the full pages known here."""
        return [name for page, name in self._hash_of.items() if page not in self._num_tokens]

    def hash_of(self, page: int) -> bytes | None:
        """The name a page is known by."""
        return self._hash_of.get(page)

    def page_of(self, name: bytes) -> int | None:
        """The page that is known by a name."""
        return self._page_of.get(name)

    def is_idle(self, page: int) -> bool:
        """Whether only the cache holds a page."""
        return page in self._idle

    def hashes(self, sequence: Sequence, weights: Weights, count: int) -> list[bytes]:
        """At least the first `count` page hashes of a sequence, kept with it so that each is computed once."""
        root = page_root(self._page_size, sequence.request.cache_salt, weights)
        if sequence.hash_root != root:
            sequence.hash_root, sequence.page_hashes = root, []
        hashes, size = sequence.page_hashes, self._page_size
        while len(hashes) < count:
            start = len(hashes) * size
            hashes.append(page_hash(hashes[-1] if hashes else root, sequence.tokens_between(start, start + size)))
        return hashes

    def end_hashes(self, sequence: Sequence, weights: Weights, num_full: int, end: int) -> list[bytes]:
        """The names of the page behind `num_full` full ones, were it to end with its first token, its second, ..."""
        hashes = self.hashes(sequence, weights, num_full)
        digest, names = hashlib.sha256(hashes[num_full - 1] if num_full else sequence.hash_root), []
        for token in sequence.tokens_between(num_full * self._page_size, end):
            digest.update(array("i", [token]).tobytes())
            names.append(digest.digest())
        return names

    def touch(self, page: int) -> None:
        """A page was used by somebody who does not hold it: of idle ones it is the last to be evicted."""
        if page in self._idle:
            self._idle.move_to_end(page)

    def num_tokens(self, page: int) -> int:
        """Tokens in a page that is known here."""
        return self._num_tokens.get(page, self._page_size)

    def match(self, hashes: SequenceOf[bytes], most: int) -> list[int]:
        """The pages of the longest known beginning, at most `most`. Nobody holds them yet: see `acquire`."""
        pages = []
        for page_id in hashes[:most]:
            page = self._page_of.get(page_id)
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, pages: SequenceOf[int]) -> None:
        """Become one more holder of pages that are known here."""
        self._allocator.retain(pages)
        for page in pages:
            self._idle.pop(page, None)

    def mark_idle(self, pages: SequenceOf[int]) -> None:
        """A sequence has released its table `pages`: those that only the cache holds are idle from now on."""
        refcount = self._allocator.refcount
        for page in reversed(pages):
            if page in self._hash_of and refcount(page) == 1:
                self._idle[page] = None

    def publish(self, page_id: bytes, page: int, num_tokens: int | None = None) -> int:
        """Make a page findable, full unless it says how many tokens it has.

        Returns the page known by that hash: another one, if somebody was first.
        """
        known = self._page_of.setdefault(page_id, page)
        if known == page and page not in self._hash_of:
            self._hash_of[page] = page_id
            self._allocator.retain([page])
            if num_tokens is not None:
                self._num_tokens[page] = num_tokens
            elif self.changes is not None:
                self.changes.append(PageChange(page_id, True))
        return known

    def evict(self, count: int) -> list[int]:
        """Forget the `count` least recently used idle pages; returns those, which are free now."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(min(count, len(self._idle)))]
        for page in evicted:
            name = self._hash_of.pop(page)
            del self._page_of[name]
            if self._num_tokens.pop(page, None) is None and self.changes is not None:
                self.changes.append(PageChange(name, False))
        self.num_evictions += len(evicted)
        return self._allocator.release(evicted)

    def audit(self) -> None:
        """Check that both directions agree and that exactly the pages nobody else holds are idle."""
        if {page: page_id for page_id, page in self._page_of.items()} != self._hash_of:
            raise AuditError("the prefix cache's two directions disagree")
        refcount = self._allocator.refcount
        for page in self._hash_of:
            if (page in self._idle) != (refcount(page) == 1):
                where = "is" if page in self._idle else "is not"
                raise AuditError(f"page {page} {where} idle in the prefix cache, refcount {refcount(page)}")
        if not self._num_tokens.keys() <= self._hash_of.keys():
            raise AuditError("the prefix cache counts the tokens of a page that it does not know")
        for page in self._idle:
            if page not in self._hash_of:
                raise AuditError(f"page {page} is idle in the prefix cache, which does not know it")


@lru_cache(maxsize=256)
def page_root(page_size: int, salt: str, weights: Weights) -> bytes:
    """Where the chain of a tenant under some weights begins."""
    return hashlib.sha256(json.dumps([page_size, salt, *weights]).encode()).digest()


def page_hash(before: bytes, tokens: SequenceOf[int]) -> bytes:
    """The name of a page: of its tokens, and of the name of what is before it."""
    return hashlib.sha256(before + array("i", tokens).tobytes()).digest()
