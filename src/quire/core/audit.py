"""Is every page where the books say it is? Checked page by page, as a multiset of owners, never as a sum.

A finding is an AuditError that names the page or the sequence. `pool_stats` are the same facts as numbers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from quire.core.errors import AuditError
from quire.core.preemption import place
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceState


def audit(scheduler: Scheduler) -> None:
    """Check every invariant of ownership; raises AuditError on the first that is broken."""
    tables = scheduler.tables
    for sequence in scheduler.running:
        _check_running(scheduler, sequence)
    if any(place(a) > place(b) for a, b in zip(scheduler.running, scheduler.running[1:], strict=False)):
        raise AuditError("the running list is out of order")
    for sequence in chain(scheduler.waiting, *scheduler.waiting_for_prompt.values()):
        _check_queued(scheduler, sequence)
    _check_families(scheduler)
    _check_tenants(scheduler)
    for i, pool in enumerate(tables.pools):
        cached = pool.prefix_cache.pages if pool.prefix_cache else ()
        pool.allocator.audit(chain((page for s in scheduler.running for page in s.tables[i]), cached))
        if pool.prefix_cache:
            pool.prefix_cache.audit()
        if pool.host:
            swapped = (s for s in scheduler.waiting if s.state is SequenceState.SWAPPED)
            pool.host.audit(page for s in swapped for page in s.host_tables[i])


def _check_running(scheduler: Scheduler, sequence: Sequence) -> None:
    tables, name = scheduler.tables, f"sequence {sequence.name}"
    num_host = sum(map(len, sequence.host_tables))
    if sequence.state is not SequenceState.RUNNING or num_host:
        raise AuditError(f"{name} runs, is {sequence.state} and has {num_host} host pages")
    if scheduler.in_flight is None:
        expected = tables.pages_for(sequence.num_computed)
        if len(sequence.pages) != expected:
            raise AuditError(
                f"{name}: {len(sequence.pages)} pages for {sequence.num_computed} computed tokens, expected {expected}"
            )
        if sequence.num_computed >= sequence.num_tokens:
            raise AuditError(f"{name}: {sequence.num_computed} computed of {sequence.num_tokens} tokens")
        unscored = sequence.first_unscored
        if unscored is not None and sequence.num_computed >= unscored:
            raise AuditError(f"{name}: {sequence.num_computed} computed, and token {unscored} was never scored")
        if sequence.num_computed % tables.page_size:
            for pool, pages in zip(tables.pools, sequence.tables, strict=True):
                refcount = pool.allocator.refcount(pages[-1])
                if refcount != 1:
                    raise AuditError(f"{name} will write to page {pages[-1]}, refcount {refcount}")
        _check_windows(scheduler, sequence)
    cache = tables.pool.prefix_cache
    for i in range(sequence.num_published):
        if cache is None or cache.hash_of(sequence.pages[i]) != sequence.page_hashes[i]:
            raise AuditError(f"{name}: page {sequence.pages[i]} is published, and the prefix cache does not know it")


def _check_windows(scheduler: Scheduler, sequence: Sequence) -> None:
    """Between two steps it holds what the next token sees, and no page more; what is known is known as what it is."""
    for window, table in zip(scheduler.tables.windows, sequence.windows, strict=True):
        name, first = f"sequence {sequence.name}, window {window.window}", window.first_seen(sequence.num_computed)
        held = (table.first, table.first + len(table.pages))
        expected = (first, scheduler.tables.pages_for(sequence.num_computed))
        if held != expected:
            raise AuditError(
                f"{name}: pages {held[0]} to {held[1]} of its table, expected {expected[0]} to {expected[1]}"
            )
        for i, page in enumerate(table.pages, table.first):
            known = window.prefix_cache.hash_of(page) if window.prefix_cache else None
            if known is not None and known not in sequence.page_hashes[i : i + 1]:
                raise AuditError(f"{name}: page {page} is known by another name than its {i}th")


def _check_queued(scheduler: Scheduler, sequence: Sequence) -> None:
    name = f"sequence {sequence.name}"
    num_held = sum(map(len, sequence.tables))
    if num_held:
        raise AuditError(f"{name} is {sequence.state} and holds {num_held} pages")
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
            num_held = sum(map(len, sequence.tables + sequence.host_tables))
            if num_held:
                raise AuditError(f"{name} is finished and holds {num_held} pages")
        elif sequence not in somewhere:
            raise AuditError(f"{name} is {sequence.state} and nobody knows it")


def _check_tenants(scheduler: Scheduler) -> None:
    """Each tenant counts its sequences; what is not counted has no share."""
    tenants = scheduler.tenants
    running, waiting = (Counter(s.tenant for s in part) for part in (scheduler.running, scheduler.waiting))
    for name, tenant in tenants.items():
        if (tenant.num_running, tenant.num_waiting) != (running[tenant], waiting[tenant]):
            raise AuditError(
                f"tenant {name!r} counts {tenant.num_running} running and {tenant.num_waiting} waiting sequences, and "
                f"has {running[tenant]} and {waiting[tenant]}"
            )
    active = running.keys() | waiting.keys()
    total = sum(tenant.weight for tenant in active)
    is_wrong = abs(tenants.active_weight - total) > 1e-6 * total or tenants.num_active != len(active)
    if is_wrong or tenants.running.keys() != running.keys():
        raise AuditError(
            f"{tenants.num_active} tenants of weight {tenants.active_weight} are active, not {len(active)}"
        )


def _members(sequences: set[Sequence]) -> Iterator[Sequence]:
    for family in {id(s.family): s.family for s in sequences}.values():
        yield from family


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The seeds' checks as numbers, over all pools: taken over time, they tell whether cleanup works."""

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
    usage_ratio: float
    """Of the fullest pool, the share of pages that sequences hold: near 1, somebody waits or gives way."""


def pool_stats(scheduler: Scheduler) -> PoolStats:
    """Count, without judging."""
    tables = scheduler.tables
    refcounts = np.concatenate([pool.allocator.refcounts for pool in tables.pools])
    holders = np.concatenate([_num_holders(scheduler, i) for i in range(len(tables.pools))])
    num_free = sum(pool.allocator.num_free for pool in tables.pools)
    num_cached = sum(pool.num_cached for pool in tables.pools)
    held = len(refcounts) - num_free - num_cached
    return PoolStats(
        free_pages=num_free,
        cached_pages=num_cached,
        held_pages=held,
        shared_pages=int(np.count_nonzero(holders > 1)),
        min_refcount=int(refcounts.min()),
        max_refcount=int(refcounts.max()),
        sum_refcounts=int(refcounts.sum()),
        table_pages=int(holders.sum()),
        expected_table_pages=sum(map(tables.expected_pages, scheduler.running)),
        leaked_pages=held - int(np.count_nonzero(holders)),
        usage_ratio=max(1 - pool.num_available / pool.allocator.num_pages for pool in tables.pools),
    )


def _num_holders(scheduler: Scheduler, pool: int) -> np.ndarray:
    """How many tables each page of a pool is in."""
    entries = np.frombuffer(b"".join(sequence.tables[pool] for sequence in scheduler.running), np.int32)
    return np.bincount(entries, minlength=scheduler.tables.pools[pool].allocator.num_pages)
