"""Pages are counted exactly: none lost, none freed twice, none invented, and a refused call changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import AuditError, DoubleFreeError, ForeignPageError, OutOfPagesError
from quire.core.pages import PageAllocator


def test_a_fresh_pool_hands_out_the_lowest_pages_first():
    pool = PageAllocator(4)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(1) == [2]
    assert pool.num_free == 1


def test_the_last_freed_page_is_the_next_one_used():
    pool = PageAllocator(4)
    pages = pool.allocate(3)
    pool.release([pages[1]])
    assert pool.allocate(1) == [pages[1]]


def test_asking_for_more_than_is_free_takes_nothing():
    pool = PageAllocator(3)
    pool.allocate(1)
    with pytest.raises(OutOfPagesError, match="3 pages asked for, 2 of 3 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.audit([0])


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go():
    pool = PageAllocator(2)
    (page,) = pool.allocate(1)
    pool.retain([page])
    assert pool.refcounts.tolist() == [2, 0]
    assert pool.release([page]) == []
    assert pool.release([page]) == [page]
    assert pool.num_free == 2


def test_double_free_is_an_error_and_is_not_clamped():
    pool = PageAllocator(2)
    pages = pool.allocate(2)
    pool.release([pages[0]])
    with pytest.raises(DoubleFreeError, match="page 0 is free already"):
        pool.release(pages)
    assert pool.refcounts.tolist() == [0, 1], "the good page of a bad call was not touched"
    with pytest.raises(DoubleFreeError, match="twice"):
        pool.release([pages[1], pages[1]])
    pool.audit([1])


def test_a_free_page_cannot_be_shared():
    with pytest.raises(DoubleFreeError):
        PageAllocator(2).retain([0])


@pytest.mark.parametrize("page", [-1, 2, 1 << 40])
def test_a_foreign_page_is_an_error(page):
    pool = PageAllocator(2)
    pool.allocate(2)
    with pytest.raises(ForeignPageError, match=str(page)):
        pool.release([page])


def test_refcounts_cannot_be_written_from_outside():
    with pytest.raises(ValueError, match="read-only"):
        PageAllocator(2).refcounts[0] = 1


@pytest.mark.parametrize(
    ("holders", "finding"), [([], "page 0: refcount 1, holders 0"), ([0, 0], "holders 2"), ([7], "page 7")]
)
def test_audit_names_the_page(holders, finding):
    pool = PageAllocator(2)
    pool.allocate(1)
    with pytest.raises(AuditError, match=finding):
        pool.audit(holders)


def test_audit_sees_a_page_missing_from_the_free_list():
    pool = PageAllocator(3)
    pool._free.pop()
    with pytest.raises(AuditError, match="page 0: refcount 0, 0 times in the free list"):
        pool.audit([])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 4)), max_size=60))
def test_any_history_is_explained_page_by_page(history):
    pool = PageAllocator(5)
    holders: list[int] = []
    for action, number in history:
        if action == "allocate" and number <= pool.num_free:
            holders += pool.allocate(number)
        elif action == "retain" and number in holders:
            pool.retain([number])
            holders.append(number)
        elif action == "release" and number in holders:
            pool.release([number])
            holders.remove(number)
        pool.audit(holders)
        assert pool.num_free == 5 - len(set(holders))
