"""Refcounts and the free list of one pool of pages.

Knows no sequence, no token and no device. Every operation is O(1) a page and all or nothing: a call that raises has
changed nothing. A page is free when nobody holds it; there is no null page.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from quire.core.errors import AuditError, DoubleFreeError, ForeignPageError, OutOfPagesError


class PageAllocator:
    """Hands out the pages `0 .. num_pages-1`, lowest first from a fresh pool, last freed first after that."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self._refcounts = array("i", bytes(4 * num_pages))
        self._free = array("i", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def refcounts(self) -> np.ndarray:
        """How many holders each page has: a read-only view, not a copy."""
        view = np.frombuffer(self._refcounts, dtype=np.int32)
        view.flags.writeable = False
        return view

    def refcount(self, page: int) -> int:
        """How many holders one page has."""
        return self._refcounts[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each held once by the caller."""
        free = self._free
        if not 0 <= count <= len(free):
            raise OutOfPagesError(f"{count} pages asked for, {len(free)} of {self.num_pages} free")
        if count == 0:
            return []
        pages = free[-count:].tolist()
        del free[-count:]
        pages.reverse()
        refcounts = self._refcounts
        for page in pages:
            refcounts[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Add one holder to each page; a page that nobody holds cannot be shared."""
        self._check_held(pages)
        for page in pages:
            self._refcounts[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drop one holder of each page; returns the pages that are free now."""
        self._check_held(pages)
        refcounts = self._refcounts
        freed = []
        for page in pages:
            refcounts[page] -= 1
            if refcounts[page] == 0:
                freed.append(page)
        self._free.extend(freed)
        return freed

    def audit(self, holders: Iterable[int]) -> None:
        """Check that `holders`, every held page once for each holder, and the free list explain every refcount."""
        held = np.fromiter(holders, dtype=np.int64)
        free = np.array(self._free)  # a copy: an array with a live view cannot grow
        for name, pages in (("a holder", held), ("the free list", free)):
            outside = pages[(pages < 0) | (pages >= self.num_pages)]
            if outside.size:
                raise AuditError(f"{name} names page {outside[0]}, the pool has {self.num_pages}")
        holders_of = np.bincount(held, minlength=self.num_pages)
        wrong = np.flatnonzero(holders_of != self.refcounts)
        if wrong.size:
            page = wrong[0]
            raise AuditError(f"page {page}: refcount {self.refcounts[page]}, holders {holders_of[page]}")
        times_free = np.bincount(free, minlength=self.num_pages)
        wrong = np.flatnonzero(times_free != (self.refcounts == 0))
        if wrong.size:
            page = wrong[0]
            raise AuditError(f"page {page}: refcount {self.refcounts[page]}, {times_free[page]} times in the free list")

    def _check_held(self, pages: Sequence[int]) -> None:
        refcounts, num_pages = self._refcounts, self.num_pages
        for page in pages:
            if not 0 <= page < num_pages:
                raise ForeignPageError(f"page {page} is not one of the pool's {num_pages} pages")
            if refcounts[page] == 0:
                raise DoubleFreeError(f"page {page} is free already")
        if len(pages) > 1 and len(set(pages)) != len(pages):
            raise DoubleFreeError(f"one call names a page twice: {list(pages)}")
