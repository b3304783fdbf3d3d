"""Where requests go: by prefix, by load, together where they belong together; and what is never done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.core.prefix_cache import PrefixCache
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence, Weights
from quire.routing import Choice, Load, PrefixIndex, Router, prompt_hashes

NAMES = ("a", "b", "c")
PROMPT = prompt_hashes(range(64), page_size=4)


def router(*names: str, **limits) -> Router:
    made = Router(**limits)
    for name in names or NAMES:
        made.report(name, Load())
    return made


def test_hashes_are_those_of_the_engines_prefix_cache():
    request = Request(id="r", prompt_token_ids=tuple(range(11)), params=SamplingParams(), cache_salt="tenant")
    sequence = Sequence(request, index=0, arrival=0, seed=0, max_tokens=1)
    cache = PrefixCache(None, 4)  # pyright: ignore[reportArgumentType]
    of_engine = cache.hashes(sequence, Weights("v2", 3), 2)
    assert of_engine == prompt_hashes(range(11), page_size=4, cache_salt="tenant", version="v2", change=3)
    assert not set(of_engine) & set(prompt_hashes(range(11), page_size=4, version="v2", change=3))


def test_the_longest_known_prefix_wins_over_less_load():
    r = router()
    r.pages.add("a", PROMPT[:3])
    r.pages.add("b", PROMPT[:7])
    r.report("b", Load(queued_tokens=100))
    assert r.choose(PROMPT) == Choice("b", 7)
    r.pages.remove("b", PROMPT[:1])
    assert r.choose(PROMPT) == Choice("a", 3), "pages behind one that is gone cannot be found"
    r.forget("a")
    assert r.choose(PROMPT) == Choice("c", 0)


def test_without_a_prefix_it_is_the_least_load_and_then_in_turn():
    r = router()
    assert [r.choose().engine for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    r.report("a", Load(queued_tokens=7))
    assert [r.choose().engine for _ in range(4)] == ["b", "c", "b", "c"]


def test_what_was_sent_counts_until_the_next_report():
    r = router("a", "b")
    assert [r.choose(num_tokens=100).engine for _ in range(4)] == ["a", "b", "a", "b"]
    r.report("a", Load(queued_tokens=200))
    r.report("b", Load())
    assert [r.choose(num_tokens=100).engine for _ in range(2)] == ["b", "b"]


def test_a_group_stays_together_until_its_engine_has_too_much_to_do_or_drains():
    r = router(max_imbalance_tokens=1000)
    first = r.choose(group="session").engine
    assert {r.choose(num_tokens=10, group="session").engine for _ in range(9)} == {first}
    r.report(first, Load(queued_tokens=1001))
    second = r.choose(group="session").engine
    assert second != first
    r.report(first, Load())
    assert r.choose(group="session").engine == second, "it has moved"
    r.report(second, Load(is_draining=True))
    assert r.choose(group="session").engine != second


def test_a_full_engine_is_chosen_only_if_all_are_full():
    r = router("a", "b")
    r.pages.add("a", PROMPT)
    r.report("a", Load(has_room=False))
    assert r.choose(PROMPT) == Choice("b", 0)
    r.report("b", Load(has_room=False))
    assert r.choose(PROMPT) == Choice("a", 16), "it refuses with its own reason"


def test_none_is_chosen_where_none_takes_requests():
    r = router("a", "b")
    r.report("a", Load(is_draining=True))
    assert r.choose(exclude=["b"]) is None
    assert Router().choose(PROMPT) is None


def test_what_is_remembered_is_bounded_and_the_beginning_of_what_is_used_stays():
    index = PrefixIndex(max_pages=4)
    index.add("a", PROMPT[:3])
    index.touch("a", PROMPT[:3])
    index.add("a", prompt_hashes(range(100, 108), page_size=4))
    assert index.num_pages("a") == len(index) == 4
    assert index.match(PROMPT) == {"a": 2}
    r = router("a", "b", max_groups=2)
    for name in ("x", "y", "z"):
        r.choose(group=name)
    assert len(r._group_engines) == 2


OTHER = PROMPT[:5] + prompt_hashes([*range(20), *range(100, 144)], page_size=4)[5:]
"""A prompt that begins as PROMPT does."""


@given(
    max_pages=st.integers(1, 20),
    calls=st.lists(st.tuples(st.booleans(), st.sampled_from([PROMPT, OTHER]), st.integers(1, 16)), min_size=1),
)
def test_beyond_the_bound_ends_are_forgotten_before_their_beginnings(max_pages, calls):
    """Pages behind one that is forgotten cannot be found: they would only take room."""
    index = PrefixIndex(max_pages)
    for is_used, prompt, length in calls:
        known = index.match(prompt).get("a", 0)
        if is_used:
            index.touch("a", prompt[:known])
        else:
            index.add("a", prompt[:length])
            assert index.match(prompt[:length]) == {"a": min(length, max_pages)}
        found = {name for one in (PROMPT, OTHER) for name in one[: index.match(one).get("a", 0)]}
        assert index.num_pages("a") == len(found) <= max_pages


class Routing(RuleBasedStateMachine):
    """Engines that publish, evict, report, drain and go, against a model of what each has."""

    pages = st.lists(st.sampled_from(PROMPT), max_size=8)

    @initialize(max_imbalance_tokens=st.integers(0, 500))
    def start(self, max_imbalance_tokens: int) -> None:
        self.router = Router(max_imbalance_tokens=max_imbalance_tokens, max_groups=2)
        self.cached: dict[str, set[bytes]] = {}
        self.loads: dict[str, Load] = {}
        self.queued: dict[str, int] = {}
        self.groups: dict[str, str] = {}

    @rule(engine=st.sampled_from(NAMES), tokens=st.integers(0, 1000), room=st.booleans(), draining=st.booleans())
    def report(self, engine: str, tokens: int, room: bool, draining: bool) -> None:
        self.loads[engine], self.queued[engine] = Load(tokens, room, draining), tokens
        self.router.report(engine, self.loads[engine])

    @rule(engine=st.sampled_from(NAMES))
    def forget(self, engine: str) -> None:
        for known in (self.loads, self.queued, self.cached):
            known.pop(engine, None)
        self.router.forget(engine)

    @rule(engine=st.sampled_from(NAMES), hashes=pages)
    def publish(self, engine: str, hashes: list[bytes]) -> None:
        self.cached.setdefault(engine, set()).update(hashes)
        self.router.pages.add(engine, hashes)

    @rule(engine=st.sampled_from(NAMES), hashes=pages)
    def evict(self, engine: str, hashes: list[bytes]) -> None:
        self.cached.get(engine, set()).difference_update(hashes)
        self.router.pages.remove(engine, hashes)

    @rule(engine=st.sampled_from(NAMES))
    def clear(self, engine: str) -> None:
        self.cached.pop(engine, None)
        self.router.pages.clear(engine)

    @rule(
        num_pages=st.integers(0, len(PROMPT)),
        tokens=st.integers(0, 300),
        group=st.sampled_from([None, "x", "y"]),
        exclude=st.sets(st.sampled_from(NAMES)),
    )
    def choose(self, num_pages: int, tokens: int, group: str | None, exclude: set[str]) -> None:
        choice = self.router.choose(PROMPT[:num_pages], num_tokens=tokens, group=group, exclude=exclude)
        open_ = {name for name, load in self.loads.items() if not load.is_draining} - exclude
        if choice is None:
            assert not open_
            return
        name = choice.engine
        assert name in open_
        able = {name for name in open_ if self.loads[name].has_room} or open_
        assert name in able
        least = min(self.queued[one] for one in able)
        assert self.queued[name] <= least + self.router.max_imbalance_tokens
        assert choice.num_pages == self.longest(name, num_pages)
        near = {one for one in able if self.queued[one] <= least + self.router.max_imbalance_tokens}
        if group is not None and self.groups.get(group) in near:
            assert name == self.groups[group]
        else:
            best = max(self.longest(one, num_pages) for one in near)
            assert choice.num_pages == best
            assert self.queued[name] == min(self.queued[one] for one in near if self.longest(one, num_pages) == best)
        self.queued[name] += tokens
        if group is not None:
            self.groups[group] = name

    def longest(self, engine: str, num_pages: int) -> int:
        cached = self.cached.get(engine, set())
        return next((i for i, name in enumerate(PROMPT[:num_pages]) if name not in cached), num_pages)

    @invariant()
    def knows_exactly_what_is_cached(self) -> None:
        if hasattr(self, "router"):
            pages = self.router.pages
            assert {name: pages.num_pages(name) for name in NAMES} == {
                name: len(self.cached.get(name, ())) for name in NAMES
            }
            assert pages._holders.keys() == set().union(*self.cached.values())


TestRouting = Routing.TestCase


@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=60), limit=st.integers(0, 2000))
def test_a_hot_prefix_does_not_overload_one_engine(sizes, limit):
    """Everybody wants the one engine that has the prefix: no engine is ahead by more than the limit and one request."""
    r = router(max_imbalance_tokens=limit)
    r.pages.add("a", PROMPT)
    queued = dict.fromkeys(NAMES, 0)
    for size in sizes:
        queued[r.choose(PROMPT, num_tokens=size).engine] += size
        assert max(queued.values()) - min(queued.values()) <= limit + max(sizes)


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 9])
def test_only_full_pages_have_names(num_tokens):
    assert len(prompt_hashes(range(num_tokens), page_size=4)) == num_tokens // 4
