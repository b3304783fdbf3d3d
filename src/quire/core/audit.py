"""Is every page where the books say it is? Checked page by page, as a multiset of owners, never as a sum.

A finding is an AuditError that names the page or the sequence. `pool_stats` are the same facts as numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.core.errors import AuditError
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceState


def audit(scheduler: Scheduler) -> None:
    """Check every invariant of ownership; raises AuditError on the first that is broken."""
    tables = scheduler.tables
    for sequence in scheduler.running:
        _check_running(scheduler, sequence)
    if any(a.order > b.order for a, b in zip(scheduler.running, scheduler.running[1:], strict=False)):
        raise AuditError("the running list is out of order")
    for sequence in chain(scheduler.waiting, *scheduler.waiting_for_prompt.values()):
        _check_queued(scheduler, sequence)
    _check_families(scheduler)
    cached = tables.prefix_cache.pages if tables.prefix_cache else ()
    tables.allocator.audit(chain((page for s in scheduler.running for page in s.pages), cached))
    if tables.prefix_cache:
        tables.prefix_cache.audit()
    if tables.host:
        tables.host.audit(page for s in scheduler.waiting for page in s.host_pages)


def _check_running(scheduler: Scheduler, sequence: Sequence) -> None:
    tables, name = scheduler.tables, f"sequence {sequence.name}"
    if sequence.state is not SequenceState.RUNNING or sequence.host_pages:
        raise AuditError(f"{name} runs, is {sequence.state} and has {len(sequence.host_pages)} host pages")
    if scheduler.in_flight is None:
        expected = tables.pages_for(sequence.num_computed)
        if len(sequence.pages) != expected:
            raise AuditError(
                f"{name}: {len(sequence.pages)} pages for {sequence.num_computed} computed tokens, expected {expected}"
            )
        if sequence.num_computed >= sequence.num_tokens:
            raise AuditError(f"{name}: {sequence.num_computed} computed of {sequence.num_tokens} tokens")
        if sequence.num_computed % tables.page_size:
            last = sequence.pages[-1]
            if tables.allocator.refcount(last) != 1:
                raise AuditError(f"{name} will write to page {last}, refcount {tables.allocator.refcount(last)}")
    cache = tables.prefix_cache
    for i in range(sequence.num_published):
        if cache is None or cache.hash_of(sequence.pages[i]) != sequence.page_hashes[i]:
            raise AuditError(f"{name}: page {sequence.pages[i]} is published, and the prefix cache does not know it")


def _check_queued(scheduler: Scheduler, sequence: Sequence) -> None:
    name = f"sequence {sequence.name}"
    if sequence.pages:
        raise AuditError(f"{name} is {sequence.state} and holds {len(sequence.pages)} pages")
    swapped = sequence.state is SequenceState.SWAPPED
    expected = scheduler.tables.pages_for(sequence.num_computed)
    if swapped != bool(sequence.num_computed) or len(sequence.host_pages) != expected:
        raise AuditError(
            f"{name} is {sequence.state} with {len(sequence.host_pages)} host pages and {sequence.num_computed} "
            f"computed tokens, expected {expected} pages"
        )


def _check_families(scheduler: Scheduler) -> None:
    """Nobody is forgotten: of every family alive each member is somewhere, or has ended and holds nothing."""
    somewhere = set(chain(scheduler.running, scheduler.waiting, *scheduler.waiting_for_prompt.values()))
    for sequence in _members(somewhere):
        name = f"sequence {sequence.name}"
        if sequence.state is SequenceState.FINISHED:
            if sequence.pages or sequence.host_pages:
                raise AuditError(f"{name} is finished and holds {len(sequence.pages) + len(sequence.host_pages)} pages")
        elif sequence not in somewhere:
            raise AuditError(f"{name} is {sequence.state} and nobody knows it")


def _members(sequences: set[Sequence]) -> Iterator[Sequence]:
    for family in {id(s.family): s.family for s in sequences}.values():
        yield from family


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The seeds' checks as numbers: taken over time, they tell whether cleanup works."""

    free_pages: int
    cached_pages: int
    """Pages that only the prefix cache holds."""
    held_pages: int
    """Pages that a sequence holds; 0 when nothing runs, or a page has leaked."""
    shared_pages: int
    """Pages that more than one sequence holds."""
    min_refcount: int
    """Below 0 would be a double free."""
    max_refcount: int
    sum_refcounts: int
    table_pages: int
    """Entries of all page tables."""
    expected_table_pages: int
    """What they should be by the sequences' lengths: the same number between two steps."""
    leaked_pages: int
    """Pages that count as held and are in no table: always 0."""


def pool_stats(scheduler: Scheduler) -> PoolStats:
    """Count, without judging."""
    tables = scheduler.tables
    allocator, refcounts = tables.allocator, tables.allocator.refcounts
    entries = np.frombuffer(b"".join(sequence.pages for sequence in scheduler.running), np.int32)
    holders = np.bincount(entries, minlength=allocator.num_pages)
    held = allocator.num_pages - allocator.num_free - tables.num_cached
    return PoolStats(
        free_pages=allocator.num_free,
        cached_pages=tables.num_cached,
        held_pages=held,
        shared_pages=int(np.count_nonzero(holders > 1)),
        min_refcount=int(refcounts.min()),
        max_refcount=int(refcounts.max()),
        sum_refcounts=int(refcounts.sum()),
        table_pages=len(entries),
        expected_table_pages=sum(tables.pages_for(s.num_computed) for s in scheduler.running),
        leaked_pages=held - int(np.count_nonzero(holders)),
    )
