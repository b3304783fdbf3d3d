"""Layers that see only a window have pages of their own, and give back what has left it: same tokens, less memory."""

import functools
from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import SamplingParams
from quire.config import AttentionConfig, ModelConfig, engine_config
from quire.core.errors import AuditError
from quire.core.request import Request
from quire.device import kv_cache, memory
from quire.device.mesh import make_mesh
from quire.engine.build import choose_pool, describe_capacity, size_pool
from quire.engine.pool_size import own_windows, pages_beside, pages_of_row, pool_pages, sequences_that_fit
from quire.field_error import FieldError
from quire.testing import fake_engine
from tests.effort import nightly, slow
from tests.tiny import tiny_config, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
DRAWN = SamplingParams(n=3, seed=5, max_tokens=16, ignore_eos=True, presence_penalty=0.5)
PROMPTS = [[(7 * i + j) % 90 + 1 for i in range(length)] for j, length in enumerate((3, 17, 30, 41))]
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "num_pages": 64, "max_rounds": 1, "debug": True}


def answers(llm, prompts=PROMPTS) -> list[list[list[int]]]:
    results = [
        [out.token_ids for out in result.outputs]
        for params in (GREEDY, DRAWN)
        for result in llm.generate(prompts, params, progress=False)
    ]
    stats = llm.engine.stats()
    assert (stats.held_pages, stats.free_host_pages, stats.compiles_after_warmup) == (0, stats.num_host_pages, 0)
    llm.engine.audit()
    return results


def model(*windows: int | None):
    return tiny_config(windows=windows)


@functools.cache
def expected(windows) -> list[list[list[int]]]:
    """With one pool for all layers: steps so large that no sequence outgrows a window and a step."""
    with tiny_llm(model(*windows), **SMALL | {"max_num_batched_tokens": 256}) as llm:
        assert not llm.engine.scheduler.tables.windows
        return answers(llm)


@pytest.mark.parametrize(
    ("windows", "knobs"),
    [
        slow((None, 9), {}),
        slow((3, None), {"max_rounds": 4, "page_size": 1, "num_pages": 256}),
        nightly((12, 5), {"attention": "xla", "page_size": 16, "num_pages": 16}),
        nightly((None, 9), {"attention": "reference", "max_num_seqs": 2}),
        ((3, None), {"preemption": "recompute", "num_pages": 24, "prefix_cache": False}),
        slow((12, 5), {"preemption": "swap", "num_pages": 24, "num_host_pages": 64, "max_rounds": 2}),
        nightly((None, 9), {"preemption": "swap", "num_pages": 24, "num_host_pages": 64, "max_rounds": 2}),
        slow((12, 5), {"preemption": "recompute", "num_pages": None, "memory_budget": 16_000}),
    ],
    ids=str,
)
def test_pools_of_their_own_change_no_token(windows, knobs):
    with tiny_llm(model(*windows), **SMALL | knobs) as llm:
        tables = llm.engine.scheduler.tables
        assert [pool.window for pool in tables.windows] == [window for window in windows if window]
        assert answers(llm) == expected(windows)
        if "preemption" in knobs:
            assert llm.engine.stats().preemptions > 0
        cached = llm.engine.stats().cached_tokens
        assert answers(llm) == expected(windows)
        assert llm.engine.stats().cached_tokens > cached, "the second time prompts are known, or families share"


@pytest.mark.slow
def test_two_devices_change_no_token():
    windows = (3, None)
    with tiny_llm(model(*windows), num_devices=2, **SMALL) as llm:
        assert llm.engine.scheduler.tables.windows
        assert answers(llm) == expected(windows)


def drain(engine, *sequences) -> None:
    while engine.has_work:
        engine.step()
    assert all(sequence.finish_reason for sequence in sequences)
    assert engine.stats().held_pages == 0


def ask(engine, name: str, prompt, max_tokens: int, priority: int = 0):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    (sequence,) = engine.add(Request(id=name, prompt_token_ids=tuple(prompt), params=params, priority=priority))
    return sequence


def test_a_prefix_hit_computes_exactly_the_new_tokens():
    engine = fake_engine(windows=(6, None), vocab_size=97, eos_ids=(), num_pages=40, page_size=4, max_model_len=100)
    assert engine.scheduler.tables.windows
    prompt = list(range(1, 31))
    first = ask(engine, "first", prompt, 7)
    drain(engine, first)
    assert first.num_computed == 0, "nothing is held"
    known = (len(prompt) + 7 - 1) // 4 * 4  # the last token drawn was never computed
    before = engine.stats().computed_tokens
    again = ask(engine, "again", [*prompt, *first.output_token_ids, 50, 51], 1)
    drain(engine, again)
    assert again.num_cached_tokens == known
    assert engine.stats().computed_tokens - before == len(prompt) + 7 + 2 - known


@pytest.mark.parametrize(("num_left", "num_cached"), [(7, 28), (2, 28), (1, 0), (0, 0)])
def test_a_prefix_is_found_as_far_as_every_window_can_serve_it(num_left, num_cached):
    """Seven full pages of a prompt are known in the first pool; a token behind them sees the last two in the window."""
    engine = fake_engine(windows=(6, None), vocab_size=97, eos_ids=(), num_pages=40, page_size=4, max_model_len=100)
    prompt = list(range(1, 31))
    drain(engine, ask(engine, "first", prompt, 1))
    (window,) = engine.scheduler.tables.windows
    assert (window.num_cached, engine.scheduler.tables.pool.num_cached) == (7, 7)
    window.evict(window.num_cached - num_left)
    again = ask(engine, "again", prompt, 1)
    drain(engine, again)
    assert again.num_cached_tokens == num_cached


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_a_fork_at_any_place_of_a_window_goes_on_as_its_parent(num_tokens):
    engine = fake_engine(
        windows=(6, None), vocab_size=97, eos_ids=(), num_pages=40, page_size=4, max_model_len=60, debug=True
    )
    parent = ask(engine, "parent", range(1, 8), 30)
    while parent.num_output < num_tokens:
        engine.step()
    child = engine.fork(parent)
    drain(engine, parent, child)
    assert child.output_token_ids == parent.output_token_ids


def test_a_sequence_holds_what_its_next_token_sees():
    engine = fake_engine(windows=(6, None), vocab_size=97, eos_ids=(), num_pages=40, page_size=4, max_model_len=100)
    sequence = ask(engine, "one", range(1, 31), 30)
    engine.step()
    while engine.has_work:
        computed = sequence.num_computed
        if computed:
            pages = [page for page in engine.page_map() if page.owners and page.window == 6]
            first, end = max(computed - 5, 0) // 4, -(-computed // 4)
            assert (sequence.windows[0].first, len(pages)) == (first, end - first)
        engine.step()


def test_a_table_that_keeps_a_page_too_long_is_found():
    engine = fake_engine(windows=(6, None), vocab_size=97, eos_ids=(), num_pages=40, page_size=4, max_model_len=100)
    sequence = ask(engine, "one", range(1, 31), 30)
    for _ in range(4):
        engine.step()
    sequence.windows[0].first -= 1
    sequence.windows[0].pages.insert(0, engine.scheduler.tables.windows[0].allocate(1)[0])
    with pytest.raises(AuditError, match="window 6: pages 5 to 8 of its table, expected 6 to 8"):
        engine.audit()


def test_memory_at_32k_tokens_is_that_of_the_windows():
    """Shaped as Gemma 3: five layers with a window of 512 to one that sees every position."""
    windows, length = (512, 512, 512, 512, 512, None), 32_000
    engine = fake_engine(
        windows=windows, vocab_size=97, eos_ids=(), page_size=16, num_pages=2100, max_model_len=33_000,
        max_num_batched_tokens=512, preemption="recompute",
    )  # fmt: skip
    sequence = ask(engine, "long", [i % 90 + 1 for i in range(length)], 2)
    while not sequence.num_output:
        engine.step()
    layers = {None: 1, 512: 5}
    held = sum(16 * layers[page.window] for page in engine.page_map() if page.owners)
    least = length + 5 * 512
    print(f"{held} layer positions, at least {least}, in one pool {6 * length}: {held / least:.3f} of the least")
    assert held <= 1.25 * least
    drain(engine, sequence)


@pytest.mark.parametrize("window", [1, 4, 5, 100])
def test_which_windows_have_pools_and_how_large(window):
    config = engine_config(page_size=4, max_num_seqs=3, max_num_batched_tokens=8, max_rounds=2, prefix_cache=False)
    longest = {1: 13, 4: 17, 5: 17, 100: 113}[window]
    assert own_windows(config, model(None, window), longest - 4) == ()
    assert own_windows(config, model(None, window), longest) == (window,)
    seen = {1: 2, 4: 3, 5: 3, 100: 27}[window]
    assert pages_beside(config, 1000, (window,)) == [1000, 3 * seen + 2]
    assert pages_beside(config, 7, (window,)) == [7, 7], "who has no more than 7 pages needs no more than 7"
    with_cache = replace(config, prefix_cache=True)
    assert pages_beside(with_cache, 1000, (window,)) == [1000, 2 * 3 * seen + 2]


def mistral():
    """Shaped as Mistral-7B: every layer sees a window of 4,096."""
    layer = AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, window=4096)
    sizes = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "max_len": 32_768}
    return ModelConfig(architecture="llama", attention=(layer,) * 32, eos_ids=(2,), **sizes)


def num_sequences(pool, num_tokens: int) -> int:
    return sequences_that_fit(num_tokens, page_size=16, num_pages=pool.num_pages, windows=pool.windows)


@pytest.mark.parametrize(("gib", "short", "long"), [(4, 64, 7), (16, 64, 29)])
def test_large_windows_leave_room_for_every_row(gib, short, long):
    """A row takes what its sequence has, and not what a longer one would."""
    config, shape = engine_config(memory_budget=gib << 30), mistral()
    pool = size_pool(config, shape, shape.max_len, make_mesh(), 0)
    assert gib * 0.9 < pool.num_bytes / 2**30 <= gib
    assert min(num_sequences(pool, 400), config.max_num_seqs) == short
    assert num_sequences(pool, 32_768) == long, "a long one takes its window, and hardly anything else"
    assert describe_capacity(config, pool, shape.max_len).endswith(f"; {long} requests of 32,768 at once")


def test_memory_for_less_than_a_window_holds_shorter_sequences():
    config, shape = engine_config(memory_budget=300 << 20), mistral()
    pool = size_pool(config, shape, shape.max_len, make_mesh(), 0)
    assert pool.all_pages == (144, 144)
    assert describe_capacity(config, pool, shape.max_len).endswith("; 1 request of 2,304 at once")


def test_memory_for_no_page_names_the_budget_and_the_page():
    shape = mistral()
    with pytest.raises(FieldError, match="memory_budget=2,000,000 bytes holds no page of 2,097,216 bytes") as refused:
        size_pool(engine_config(memory_budget=2_000_000), shape, shape.max_len, make_mesh(), 0)
    assert refused.value.field == "memory_budget"


@given(
    windows=st.lists(st.integers(1, 3000), min_size=1, max_size=3, unique=True),
    page_bytes=st.lists(st.integers(1, 5000), min_size=4, max_size=4),
    max_model_len=st.integers(1, 5000),
    rows=st.integers(1, 100),
    page_size=st.sampled_from((1, 4, 16)),
    pages=st.integers(1, 100_000),
)
def test_pools_keep_to_the_budget_and_each_holds_a_sequence(windows, page_bytes, max_model_len, rows, page_size, pages):
    config = engine_config(page_size=page_size, max_num_seqs=rows, max_num_batched_tokens=max(rows, 32), max_rounds=4)
    windows = own_windows(config, model(*windows), max_model_len)
    page_bytes = page_bytes[: len(windows) + 1]
    budget = pages * sum(page_bytes)
    first, *others = pool_pages(config, max_model_len, budget=budget, page_bytes=page_bytes, windows=windows)
    assert sum(count * size for count, size in zip((first, *others), page_bytes, strict=True)) <= budget
    for count, window in zip(others, windows, strict=True):
        assert min(first, pages_of_row(config, window)) <= count <= first


def test_a_window_without_room_for_one_sequence_is_refused():
    with pytest.raises(ValueError, match="4 pages for layers with a window of 6, and one sequence may need 7"):
        fake_engine(windows=(6, None), window_pages=(4,), num_pages=40, max_model_len=100)


def run_together(engine, prompts, max_tokens: int) -> tuple[list, int]:
    """Their outputs, and how many ran at once at most."""
    sequences, most = [ask(engine, f"r{i}", prompt, max_tokens) for i, prompt in enumerate(prompts)], 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().running)
    engine.audit()
    return [sequence.output_token_ids for sequence in sequences], most


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_short_sequences_run_together_where_long_ones_give_way(preemption):
    """A pool of a window that holds eight short sequences, and not two that fill the window."""
    knobs = {"vocab_size": 97, "eos_ids": (), "page_size": 4, "num_pages": 200, "max_num_seqs": 8, "debug": True}
    knobs |= {"max_model_len": 200, "preemption": preemption, "windows": (40, None)}
    engine = fake_engine(window_pages=(16,), **knobs)
    short, long = [[i, 1, 2] for i in range(1, 9)], [list(range(i, i + 20)) for i in range(1, 5)]
    assert run_together(engine, short, 3)[1] == 8
    assert engine.stats().preemptions == 0
    outputs, most = run_together(engine, long, 60)
    assert 1 < most < 4
    assert engine.stats().preemptions > 0
    assert (engine.stats().swaps > 0) == (preemption == "swap")
    ample = fake_engine(**knobs)
    assert outputs == run_together(ample, long, 60)[0]
    assert ample.stats().preemptions == 0


def test_a_request_of_higher_priority_gets_the_pages_of_a_window():
    knobs = {"vocab_size": 97, "eos_ids": (), "page_size": 4, "num_pages": 200, "max_model_len": 200, "debug": True}
    engine = fake_engine(window_pages=(16,), windows=(40, None), num_host_pages=200, preemption="swap", **knobs)
    background = ask(engine, "background", range(1, 31), 40)
    for _ in range(8):
        engine.step()
    urgent = ask(engine, "urgent", range(40, 75), 10, priority=1)
    engine.step()
    assert (str(background.state), str(urgent.state)) == ("swapped", "running")
    drain(engine, background, urgent)


GIB = 1 << 30


def free_memory(monkeypatch, *, device: int, host: int) -> None:
    monkeypatch.setattr(memory, "is_host_memory", lambda mesh: False)
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: device)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: host)


def test_pages_of_windows_count_against_the_memory_there_is(monkeypatch):
    free_memory(monkeypatch, device=20 * GIB, host=100 * GIB)
    shape = mistral()
    for knob, value in (("memory_budget", 1 << 40), ("num_pages", 20_000)):
        with pytest.raises(FieldError, match=f"{knob}: .* 20.0 GiB of memory are free; lower {knob}") as refused:
            choose_pool(engine_config(**{knob: value}), shape, shape.max_len, make_mesh())
        assert refused.value.field == knob


def test_pages_of_windows_count_against_the_memory_of_the_host(monkeypatch):
    free_memory(monkeypatch, device=20 * GIB, host=10 * GIB)
    shape, knobs = mistral(), {"memory_budget": 16 * GIB}
    pool = choose_pool(engine_config(**knobs), shape, shape.max_len, make_mesh())
    assert 2 * GIB < pool.num_host_bytes <= 2.6 * GIB, "a quarter of what is free"
    with pytest.raises(FieldError, match=r"num_host_pages: 131,072 pages of .* bytes are 15.0 GiB, and 9.6 GiB"):
        choose_pool(engine_config(num_host_pages=131_072, **knobs), shape, shape.max_len, make_mesh())


def test_what_survived_a_failure_is_gone_before_there_is_a_new_cache(monkeypatch):
    with tiny_llm(model(None, 9), **SMALL) as llm:
        runner, create = llm.engine.runner, kv_cache.create
        old = jax.tree.leaves(runner._caches)
        jax.tree.leaves(runner._caches[0])[0].delete()  # as if it had been donated to a step that failed

        def create_alone(shapes):
            assert all(array.is_deleted() for array in old)
            return create(shapes)

        monkeypatch.setattr(kv_cache, "create", create_alone)
        assert not runner.recover()
        monkeypatch.undo()
        assert runner.recover()
        assert len(llm.generate(PROMPTS, GREEDY, progress=False)) == len(PROMPTS)
