"""Budgets of memory as users write them, and sequence lengths that are never lowered silently."""

import re
from dataclasses import replace

import pytest

from quire.cli import build_parser, engine_knobs
from quire.config import AttentionConfig, EngineConfig, ModelConfig
from quire.device import memory
from quire.device.mesh import make_mesh
from quire.engine import build
from quire.engine.build import choose_pool
from quire.field_error import FieldError
from quire.machine import Memory
from quire.memory_budget import budget_bytes
from tests.tiny import tiny_config, tiny_llm

MIB, GIB = 1 << 20, 1 << 30
SHAPE = tiny_config(max_len=4096)
PAGE_BYTES = 16 * (2 * 2 * 2 * 8 * 4 + 4)
"""16 tokens: K and V, two layers, two heads of eight, float32; and an id of four bytes."""


@pytest.fixture
def free(monkeypatch):
    """Sets the host memory that is free beside what Quire leaves for other things."""

    def set_free(num_bytes: int) -> None:
        monkeypatch.setattr(memory, "available_host_bytes", lambda: num_bytes + build.HOST_RESERVE)
        limit = Memory(2 * GIB, 0, "/sys/fs/cgroup/memory.max")
        monkeypatch.setattr(build, "read_memory", lambda: limit)

    return set_free


def pool(shape=SHAPE, **knobs):
    config = EngineConfig(**{"dtype": "float32", "max_num_batched_tokens": 64} | knobs)
    return choose_pool(config, shape, config.max_model_len or shape.max_len, make_mesh())


def gemma():
    """Shaped as Gemma-3-4B: five layers with a window of 1,024 tokens to each that sees every position."""
    layer = AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=256)
    layers = tuple(layer if i % 6 == 5 else replace(layer, window=1024) for i in range(34))
    return ModelConfig(
        architecture="gemma3", attention=layers, eos_ids=(1,), vocab_size=262_208, hidden_size=2560,
        intermediate_size=10_240, max_len=131_072,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4 * GIB, 4 * GIB),
        ("4294967296", 4 * GIB),
        ("4GiB", 4 * GIB),
        ("4gib", 4 * GIB),
        ("4Gi", 4 * GIB),
        (" 4 GiB ", 4 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("512MiB", 512 * MIB),
        ("64KiB", 64 << 10),
        ("1GB", 10**9),
        ("1.5G", 1_500_000_000),
        ("20kB", 20_000),
        ("100B", 100),
        ("1TiB", 1 << 40),
        ("50%", 500),
        ("12.5 %", 125),
        ("100%", 1000),
    ],
)
def test_forms_of_a_budget(text, expected):
    assert budget_bytes(text, 1000) == expected
    assert EngineConfig(memory_budget=text).memory_budget == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "4 apples",
        "4GiBs",
        "-1",
        "1e9",
        "0x10",
        "50%%",
        "%",
        "4,5GiB",
        "٤GiB",
        0.5,
        True,
        [1],
        "inf",
        "nan%",
        "4i",
    ],
)
def test_other_forms_are_refused_with_those_that_are_allowed(text):
    with pytest.raises(FieldError, match=re.escape(f"memory_budget={text!r} must be bytes such as")) as refused:
        EngineConfig(memory_budget=text)
    assert refused.value.field == "memory_budget"
    for form in ("4GiB", "50%"):
        assert form in str(refused.value)


@pytest.mark.parametrize("text", [0, -5, "0GiB", "0%", "101%", "9999TiB", "0.1B"])
def test_budgets_out_of_bounds_are_refused(text):
    with pytest.raises(FieldError, match=re.escape(f"memory_budget={text!r}")):
        EngineConfig(memory_budget=text)


def test_the_flag_takes_every_form():
    for text in ("4GiB", "50%", "4294967296"):
        args = build_parser().parse_args(["serve", "model", "--memory-budget", text])
        assert EngineConfig(**engine_knobs(args)).memory_budget == text
    with pytest.raises(FieldError, match="memory_budget='half' must be bytes such as"):
        EngineConfig(**engine_knobs(build_parser().parse_args(["serve", "model", "--memory-budget", "half"])))


def test_help_shows_the_forms(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help-all"])
    assert re.search(r"4GiB, bytes,\s+or\s+50%\s+of\s+what\s+is\s+free", capsys.readouterr().out)


def test_a_size_in_the_library():
    with tiny_llm(num_pages=None, memory_budget="40KiB", max_num_seqs=32) as llm:
        assert llm.engine._pool.num_bytes <= 40 << 10


def test_a_share_is_of_the_free_memory(free):
    free(100 * MIB)
    assert 45 * MIB < pool(memory_budget="50%", max_num_seqs=64, preemption="recompute").num_bytes <= 50 * MIB


def test_the_pool_and_its_host_pages_fit_together(free):
    free(20 * MIB)
    sizes = pool(memory_budget="90%")
    assert sizes.num_bytes > 15 * MIB
    assert 0 < sizes.num_bytes + sizes.num_host_bytes <= 20 * MIB


def test_more_than_is_free_names_the_limit(free):
    free(20 * MIB)
    message = (
        r"memory_budget: .* are free beside 384 MiB for other things \(2.0 GiB: limit in /sys/fs/cgroup/memory.max\); "
    )
    with pytest.raises(FieldError, match=f"{message}lower memory_budget: "):
        pool(memory_budget="30MiB")


def test_an_explicit_length_is_honoured_where_memory_allows(free):
    """A quarter of the memory would hold fewer tokens than the longest sequence has."""
    free(PAGE_BYTES * 300)
    assert pool().num_pages * 16 < 2048, "without an explicit length: what the default share holds"
    assert (pool(max_model_len=2049).num_pages, pool(max_model_len=2050).num_pages) == (128, 129)


def test_an_explicit_length_without_memory_for_it_is_refused(free):
    free(PAGE_BYTES * 100)
    with pytest.raises(FieldError, match=r"max_model_len: 128 pages of .* limit in .* lower max_model_len"):
        pool(max_model_len=2048)


def test_an_explicit_length_and_a_budget_that_contradict_each_other_are_refused(free):
    free(GIB)
    with pytest.raises(FieldError) as refused:
        pool(max_model_len=2049, memory_budget=PAGE_BYTES * 64)
    assert str(refused.value) == (
        f"max_model_len=2,049 is more than the 1,024 tokens that memory_budget={PAGE_BYTES * 64} holds; "
        f"raise memory_budget to at least {PAGE_BYTES * 128:,} bytes, or lower max_model_len"
    )
    assert pool(max_model_len=2049, memory_budget=PAGE_BYTES * 128).num_pages == 128


def test_a_length_beyond_the_default_pool_raises_no_pool_of_a_window(free):
    """One sequence of 131,072 tokens takes 2.5 GiB in the first pool, and hardly anything in a window's."""
    free(8 * GIB)
    knobs = {"dtype": "bfloat16", "max_num_batched_tokens": 512, "preemption": "recompute"}
    default = pool(gemma(), **knobs)
    longest = pool(gemma(), max_model_len=131_072, **knobs)
    assert default.num_pages < longest.num_pages == 131_072 // 16
    assert longest.all_pages[1:] == default.all_pages[1:]
    assert longest.num_bytes < 5 * GIB


def test_a_budget_for_exactly_one_sequence_is_enough(free):
    """On the coarse grid of pool sizes it would be 6,144 pages."""
    free(GIB)
    assert pool(max_model_len=100_000, memory_budget=PAGE_BYTES * 6250).num_pages == 6250


@pytest.mark.parametrize("budget", [100 * MIB, GIB])
@pytest.mark.parametrize("shape", [SHAPE, gemma()], ids=["one pool", "windows"])
def test_the_budget_that_a_refusal_names_is_enough(free, shape, budget):
    free(64 * GIB)
    length = 6_000_000 if shape is SHAPE else 125_000
    with pytest.raises(FieldError, match="raise memory_budget to at least") as refused:
        pool(shape, max_model_len=length, memory_budget=budget)
    enough = int(re.findall(r"at least ([\d,]+) bytes", str(refused.value))[0].replace(",", ""))
    with pytest.raises(FieldError, match=f"at least {enough:,} bytes"):
        pool(shape, max_model_len=length, memory_budget=enough - 1)
    assert pool(shape, max_model_len=length, memory_budget=enough).num_bytes == enough


def test_what_one_sequence_leaves_of_a_budget_is_for_windows(free):
    free(64 * GIB)
    least, more = [
        pool(gemma(), max_model_len=125_000, memory_budget=num_bytes, max_num_seqs=32)
        for num_bytes in (6 * GIB, 7 * GIB)
    ]
    assert least.num_pages == more.num_pages == -(-124_999 // 16)
    assert least.windows[0].num_pages < more.windows[0].num_pages
    assert 6.5 * GIB < more.num_bytes <= 7 * GIB


@pytest.mark.parametrize("num_bytes", [0, PAGE_BYTES])
def test_too_little_free_memory_is_named_where_no_budget_was_given(free, num_bytes):
    free(num_bytes)
    with pytest.raises(FieldError, match="the share of the free memory that is for pages") as refused:
        pool()
    assert "memory_budget=" not in str(refused.value)
