"""Every backend equals dense attention, reads only what a row owns, and writes only where it is told.

The pool is poisoned: pages nobody holds, and the rest of a partly filled page, are NaN or Inf. Any stray read shows.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import AttentionConfig
from quire.device.attention import PALLAS, LayerKV, get_backend, paged_attention
from quire.device.attention.native import NativeBackend
from quire.device.attention.pallas_blocks import Blocks, head_lanes
from quire.device.attention.pallas_tpu import PallasBackend
from quire.device.inputs import BatchLayout
from quire.device.mesh import make_mesh
from tests.effort import FLOAT_ISAS, daily, examples, nightly, slow

NATIVE = [f"native {isa}" for isa in FLOAT_ISAS]
BACKENDS = ["reference", "xla", "xla-rows", *NATIVE]
DAILY_BACKENDS = [slow("reference"), "xla", slow("xla-rows"), *daily(NATIVE)]
NUM_HEADS, NUM_KV_HEADS = 6, 2


jitted = jax.jit(paged_attention, static_argnames=("backend", "mesh", "attention"))


@functools.cache
def attention(name, window, scale, soft_cap, head_dim, group, num_devices=1):
    """A backend and its jitted entry point."""
    backend, mesh = backend_of(name), make_mesh(jax.devices()[:num_devices])
    config = attention_config(head_dim, group * NUM_KV_HEADS, window=window, softmax_scale=scale, soft_cap=soft_cap)
    return backend, jax.jit(
        lambda kv, q, k, v, layout, sinks=None: paged_attention(backend, mesh, kv, q, k, v, layout, config, sinks)
    )


def attention_config(head_dim, num_heads, num_kv_heads=NUM_KV_HEADS, **more):
    return AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **more)


def layer_kv(backend, config, num_pages, page_size, value):
    """The arrays of a layer in float32, filled with one value."""
    specs = backend.arrays(config, num_pages, page_size, jnp.dtype("float32"))
    return LayerKV(tuple(jnp.full(spec.shape, value, spec.dtype) for spec in specs), tuple(s.axes for s in specs))


def backend_of(name):
    if name in PALLAS:  # in the TPU interpreter, cut so small that a few pages are many chunks and tiles
        blocks = Blocks(chunk_pages=4, tile_tokens=32, part_tokens=16)
        return PallasBackend(int8=name == "pallas-int8", detect_races=True, blocks=blocks)
    name, _, isa = name.partition(" ")
    return NativeBackend(isa) if isa else get_backend(name)


def to_pages(backend, axes, k_MZKH, v_MZKH):
    """The backend's arrays from arrays with a page's positions in order."""
    if isinstance(backend, PallasBackend):
        pads = ((0, 0), (0, 0), (0, 0), (0, head_lanes(k_MZKH.shape[-1]) - k_MZKH.shape[-1]))
        return (np.concatenate([np.pad(x, pads) for x in (k_MZKH, v_MZKH)], axis=-1).swapaxes(1, 2),)
    if not isinstance(backend, NativeBackend):
        order = [("pages", "offset", "kv_heads", "head").index(axis) for axis in axes]
        return k_MZKH.transpose(order), v_MZKH.transpose(order)
    num_pages, page_size, num_kv_heads, head_dim = k_MZKH.shape
    pair = 4 // k_MZKH.dtype.itemsize
    k = k_MZKH.reshape(num_pages, page_size, num_kv_heads, head_dim // pair, pair).transpose(0, 2, 3, 1, 4)
    # The second half of an odd page's last pair belongs to nobody.
    last = np.full((num_pages, -page_size % pair, num_kv_heads, head_dim), np.nan, v_MZKH.dtype)
    v = np.concatenate([v_MZKH, last], axis=1).reshape(num_pages, -1, pair, num_kv_heads, head_dim)
    return k, v.transpose(0, 3, 1, 4, 2)


def from_pages(backend, kv, page_size, head_dim=8):
    """The other way: K and V as `[M, Z, K, H]`."""
    if isinstance(backend, PallasBackend):
        return tuple(x[..., :head_dim] for x in np.split(np.asarray(kv.arrays[0]).swapaxes(1, 2), 2, axis=-1))
    k, v = (np.asarray(x) for x in kv.arrays)
    if not isinstance(backend, NativeBackend):
        order = [kv.axes[0].index(axis) for axis in ("pages", "offset", "kv_heads", "head")]
        return k.transpose(order), v.transpose(order)
    k, v = k.transpose(0, 3, 1, 2, 4), v.transpose(0, 2, 4, 1, 3)
    return k.reshape(*k.shape[:3], -1), v.reshape(len(v), -1, *v.shape[3:])[:, :page_size]


class Case:
    """Rows of (kv_len, q_len) over a shuffled, poisoned pool, padded to a shape."""

    def __init__(
        self,
        rows,
        *,
        page_size=4,
        num_pages=64,
        pad_tokens=3,
        pad_rows=2,
        width=None,
        decode=False,
        seed=0,
        poison=np.nan,
        head_dim=8,
        group=NUM_HEADS // NUM_KV_HEADS,
        dtype=np.float32,
    ):
        rng = np.random.default_rng(seed)
        self.rows, self.page_size, self.num_pages, self.poison, self.decode = rows, page_size, num_pages, poison, decode
        self.head_dim, self.group = head_dim, group

        def normal(*shape):
            return rng.standard_normal(shape).astype(dtype)

        width = width or max(-(-kv_len // page_size) for kv_len, _ in rows) + 1
        self.keys = [normal(kv_len, NUM_KV_HEADS, head_dim) for kv_len, _ in rows]
        self.values = [normal(kv_len, NUM_KV_HEADS, head_dim) for kv_len, _ in rows]
        self.num_tokens = sum(q_len for _, q_len in rows)
        total = self.num_tokens + pad_tokens
        self.q = normal(total, group * NUM_KV_HEADS, head_dim)
        pages = rng.permutation(num_pages)
        tables = np.full((len(rows) + pad_rows, width), pages[-1], np.int32)  # padding may name anybody's page
        positions, destinations = np.zeros(total, np.int32), np.full(total, num_pages * page_size, np.int32)
        kv_lens, cu_q_lens = np.zeros(len(tables), np.int32), np.full(len(tables) + 1, self.num_tokens, np.int32)
        self.new_k, self.new_v = (normal(total, NUM_KV_HEADS, head_dim) for _ in range(2))
        start = used = 0
        for i, (kv_len, q_len) in enumerate(rows):
            count = -(-kv_len // page_size)
            tables[i, :count] = pages[used : used + count]
            used += count
            kv_lens[i], cu_q_lens[i] = kv_len, start
            span = slice(start, start + q_len)
            positions[span] = np.arange(kv_len - q_len, kv_len)
            destinations[span] = tables[i, positions[span] // page_size] * page_size + positions[span] % page_size
            self.new_k[span], self.new_v[span] = self.keys[i][kv_len - q_len :], self.values[i][kv_len - q_len :]
            start += q_len
        assert used < num_pages
        self.tables = tables
        self.layout = BatchLayout(positions, destinations, tables, kv_lens, cu_q_lens, decode=decode)

    def pool(self, backend):
        """The KV arrays before the step."""
        config = attention_config(self.head_dim, self.q.shape[1])
        specs = backend.arrays(config, self.num_pages, self.page_size, self.q.dtype)
        axes = tuple(spec.axes for spec in specs)
        pages = to_pages(backend, axes[0], self.dense(self.keys), self.dense(self.values))
        assert [x.shape for x in pages] == [spec.shape for spec in specs]
        return LayerKV(tuple(jnp.asarray(x) for x in pages), axes)

    def dense(self, which):
        """As `[M, Z, K, H]`: history written, everything else poison."""
        flat = np.full((self.num_pages * self.page_size, *which[0].shape[1:]), self.poison, which[0].dtype)
        for i, ((kv_len, q_len), data) in enumerate(zip(self.rows, which, strict=True)):
            old = np.arange(kv_len - q_len)
            flat[self.tables[i, old // self.page_size] * self.page_size + old % self.page_size] = data[old]
        return flat.reshape(self.num_pages, self.page_size, *flat.shape[1:])

    def expected(self, scale, window, soft_cap=None, sinks=None):
        out = np.zeros((self.num_tokens, *self.q.shape[1:]), np.float64)
        q = self.q.astype(np.float64)
        token = 0
        for (kv_len, q_len), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            k, v = (x.astype(np.float64) for x in (keys, values))
            for position in range(kv_len - q_len, kv_len):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(len(q[token])):
                    scores = k[first : position + 1, head // self.group] @ q[token, head] * scale
                    scores = scores if soft_cap is None else np.tanh(scores / soft_cap) * soft_cap
                    sink = -np.inf if sinks is None else np.float64(sinks[head])
                    top = max(scores.max(), sink)
                    weights = np.exp(scores - top)
                    total = weights.sum() + np.exp(sink - top)
                    out[token, head] = weights @ v[first : position + 1, head // self.group] / total
                token += 1
        return out

    def run(self, name, *, window=None, scale=None, soft_cap=None, sinks=None, atol=2e-6, rtol=2e-5, num_devices=1):
        scale = scale or self.head_dim**-0.5
        backend, call = attention(name, window, scale, soft_cap, self.head_dim, self.group, num_devices)
        out, kv = call(self.pool(backend), self.q, self.new_k, self.new_v, self.layout, sinks)
        got = np.asarray(out[: self.num_tokens], np.float64)
        np.testing.assert_allclose(got, self.expected(scale, window, soft_cap, sinks), atol=atol, rtol=rtol)
        return backend, kv


MIXES = {
    "decode": ([(1, 1), (4, 1), (5, 1), (33, 1), (130, 1)], True),
    "prompts": ([(7, 7), (70, 70), (16, 16)], False),
    "chunk of a longer prompt": ([(150, 80)], False),
    "mixed": ([(9, 1), (100, 90), (1, 1), (40, 2), (140, 1)], False),
}


def case_of(mix, **more):
    rows, decode = MIXES[mix]
    pads = {"pad_tokens": 2, "pad_rows": 2} if decode else {}
    return Case(rows, num_pages=128, decode=decode, **pads, **more)


@pytest.mark.parametrize("name", DAILY_BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [slow(None), slow(1), 5, slow(100)])
@pytest.mark.parametrize("poison", [np.nan, nightly(np.inf), nightly(-np.inf)])
def test_equals_dense_attention_over_a_poisoned_pool(name, mix, window, poison):
    case_of(mix, poison=poison).run(name, window=window)


@pytest.mark.parametrize("name", [*DAILY_BACKENDS, slow("pallas")])
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_scores_are_capped_softly(name, mix):
    """Scores are some times the cap. Pages of 5 positions leave gaps between them in the native kernel's columns."""
    case = case_of(mix, page_size=8 if name == "pallas" else 5)
    assert np.abs(case.expected(2.0, 20, 1.5) - case.expected(2.0, 20)).max() > 0.1
    for window in (None, 20):
        case.run(name, window=window, scale=2.0, soft_cap=1.5, atol=1e-5)


SINKS = np.array([-1e4, -1.0, 0.0, 1.0, 4.0, 1e4], np.float32)
"""Of each head: one that takes nothing, one that leaves nothing to others, and some between."""


@pytest.mark.parametrize("name", [*DAILY_BACKENDS, slow("pallas")])
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_a_sink_takes_its_share_of_every_softmax(name, mix):
    case = case_of(mix, page_size=8 if name == "pallas" else 5)
    for window in (None, 20):
        case.run(name, window=window, sinks=SINKS)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_sinks_go_with_their_heads_to_devices(name):
    Case([(9, 1), (40, 30), (1, 1)]).run(name, sinks=SINKS, num_devices=2)


@pytest.mark.parametrize("name", DAILY_BACKENDS)
def test_a_context_visited_in_parts_has_its_sink_once(name):
    """Long enough for the native kernel to share it out among threads."""
    Case([(5000, 1), (3000, 2)], page_size=16, num_pages=520, group=3).run(name, sinks=SINKS, atol=1e-5)


@pytest.mark.parametrize("name", DAILY_BACKENDS)
@pytest.mark.parametrize("page_size", [slow(1), 3, slow(16), slow(128), 256])
def test_any_page_size(name, page_size):
    Case([(150, 1), (90, 70), (17, 17)], page_size=page_size, num_pages=300 // page_size + 8).run(name)


@pytest.mark.parametrize("name", DAILY_BACKENDS)
def test_only_the_destinations_are_written(name):
    case = Case([(6, 3), (9, 1), (70, 65)])
    backend, kv = case.run(name)
    pages = from_pages(backend, kv, case.page_size)
    written = case.layout.destinations_T[: case.num_tokens]
    for after, before, new in zip(pages, (case.keys, case.values), (case.new_k, case.new_v), strict=True):
        after, before = (x.reshape(-1, *x.shape[2:]) for x in (after, case.dense(before)))
        np.testing.assert_array_equal(after[written], new[: case.num_tokens])
        others = np.setdiff1d(np.arange(len(after)), written)
        np.testing.assert_array_equal(after[others], before[others])


@examples(50)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=5),
    st.sampled_from([None, 3, 40]),
    st.sampled_from([np.nan, np.inf]),
)
def test_random_ragged_batches(rows, window, poison):
    rows = [(max(a, b), min(a, b)) for a, b in rows]
    pads = {"pad_tokens": 460 - sum(q_len for _, q_len in rows), "pad_rows": 6 - len(rows), "width": 13}
    Case(rows, page_size=8, num_pages=80, poison=poison, **pads).run("xla", window=window)


@pytest.mark.parametrize("name", DAILY_BACKENDS)
def test_the_toy_example_of_the_seeds(name):
    """Section 5.1: page size 4, pages [2, 7], length 6; position 5 lands in page 7 at offset 1, 6 and 7 stay unseen."""
    backend = backend_of(name)
    config = attention_config(8, 1, 1, softmax_scale=1.0)
    empty = layer_kv(backend, config, 10, 4, jnp.nan)
    layout = BatchLayout(
        np.arange(6, dtype=np.int32),
        np.array([8, 9, 10, 11, 28, 29], np.int32),
        np.array([[2, 7, 0]], np.int32),
        np.array([6], np.int32),
        np.array([0, 6], np.int32),
        decode=False,
    )
    tokens = jnp.arange(48, dtype=jnp.float32).reshape(6, 1, 8)
    q = jnp.zeros((6, 1, 8), jnp.float32)
    out, kv = jitted(backend, make_mesh(), empty, q, tokens, tokens, layout, config)
    pages, _ = from_pages(backend, kv, 4)
    np.testing.assert_array_equal(pages[7, 1, 0], np.arange(40, 48))
    assert np.isnan(pages[7, 2:]).all()
    np.testing.assert_allclose(out[5, 0], tokens[:, 0].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", DAILY_BACKENDS)
def test_prefill_then_decode_as_the_seeds_test_it(name):
    """JetStream's tests: 16 tokens over two pages of 8, then one more at page 16 // 8, offset 16 % 8."""
    backend = backend_of(name)
    config = attention_config(8, 2, 2, softmax_scale=1.0)
    cache = layer_kv(backend, config, 3, 8, 0)
    table = np.array([[1, 0, 2]], np.int32)

    def step(cache, positions, value):
        ones = jnp.full((len(positions), 2, 8), value, jnp.float32)
        destinations = table[0, positions // 8] * 8 + positions % 8
        layout = BatchLayout(
            positions.astype(np.int32),
            destinations.astype(np.int32),
            table,
            np.array([positions[-1] + 1], np.int32),
            np.array([0, len(positions)], np.int32),
            decode=len(positions) == 1,
        )
        return jitted(backend, make_mesh(), cache, ones, ones, ones, layout, config)

    out, cache = step(cache, np.arange(16), 1.0)
    pages, _ = from_pages(backend, cache, 8)
    assert (pages[:2] == 1).all()
    assert (pages[2] == 0).all()
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    out, cache = step(cache, np.arange(16, 17), 3.0)
    page, offset = divmod(16, 8)
    pages, _ = from_pages(backend, cache, 8)
    assert (pages[table[0, page], offset] == 3).all()
    assert (pages[table[0, page], offset + 1 :] == 0).all()
    weights = np.exp([24.0] * 16 + [72.0] - np.float64(72))
    np.testing.assert_allclose(out, (weights @ ([1.0] * 16 + [3.0])) / weights.sum(), rtol=1e-5)


def test_indices_of_another_integer_type_are_refused():
    """Pitfall 2.8.4 of the seeds: indexing with the wrong integer type misbehaves silently."""
    case = Case([(9, 1), (30, 20)])
    case.layout = jax.tree.map(lambda x: x.astype(np.uint32), case.layout)
    with pytest.raises(ValueError, match="promotion"):
        case.run("xla")


HALF = jnp.bfloat16.dtype
HALF_ERROR = {"atol": 1e-2, "rtol": 1e-2}
"""Weights and outputs are rounded to 8 bits of fraction, 2^-9 each; values here are averages of numbers around 1."""


@pytest.mark.parametrize("name", daily(NATIVE))
@pytest.mark.parametrize("dtype", [np.dtype("float32"), HALF], ids=str)
@pytest.mark.parametrize("head_dim", [slow(8), 24, 64, slow(80), slow(128)])
@pytest.mark.parametrize("group", [3, 70])
def test_any_head_size_and_group(name, dtype, head_dim, group):
    error = HALF_ERROR if dtype == HALF else {"atol": 1e-5, "rtol": 1e-5}
    case = Case([(40, 1), (170, 90), (33, 33)], page_size=16, num_pages=32, head_dim=head_dim, group=group, dtype=dtype)
    for window in (None, 20):
        case.run(name, window=window, **error)


@pytest.mark.parametrize("name", daily(NATIVE))
@pytest.mark.parametrize("page_size", [slow(1), 5, 16, slow(17), slow(48), 131, slow(144)])
def test_any_page_size_in_bfloat16(name, page_size):
    rows = [(300, 1), (190, 170), (17, 17), (1, 1)]
    pads = {"page_size": page_size, "num_pages": 540 // page_size + 9}
    for head_dim in (24, 64):
        case = Case(rows, head_dim=head_dim, dtype=HALF, **pads)
        for window in (None, 7, 140):
            case.run(name, window=window, **HALF_ERROR)


ragged = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=6)


@examples(120)
@given(
    rows=ragged,
    window=st.sampled_from([None, 1, 16, 129]),
    page_size=st.sampled_from([3, 16]),
    poison=st.sampled_from([np.nan, np.inf]),
    name=st.sampled_from(NATIVE),
    dtype=st.sampled_from([np.dtype("float32"), HALF]),
    seed=st.integers(0, 1000),
)
def test_random_ragged_batches_in_the_native_kernel(rows, window, page_size, poison, name, dtype, seed):
    rows = [(max(a, b), min(a, b)) for a, b in rows]
    error = HALF_ERROR if dtype == HALF else {"atol": 1e-5, "rtol": 1e-5}
    pads = {
        "pad_tokens": 1810 - sum(q_len for _, q_len in rows),
        "pad_rows": 7 - len(rows),
        "width": 300 // page_size + 2,
    }
    num_pages = 1810 // page_size + 16
    case = Case(
        rows, page_size=page_size, num_pages=num_pages, poison=poison, head_dim=32, dtype=dtype, seed=seed, **pads
    )
    case.run(name, window=window, **error)


@pytest.mark.parametrize("name", daily(NATIVE))
@pytest.mark.parametrize("dtype", [np.dtype("float32"), HALF], ids=str)
def test_one_long_context_is_shared_by_the_threads(name, dtype):
    error = HALF_ERROR if dtype == HALF else {"atol": 1e-5, "rtol": 1e-5}
    for rows in ([(9000, 1)], [(9000, 40)], [(5000, 2), (3, 1)]):
        case = Case(rows, page_size=16, num_pages=600, head_dim=64, dtype=dtype)
        for window in (None, 3000):
            case.run(name, window=window, **error)


@pytest.mark.parametrize("name", daily(NATIVE))
@pytest.mark.parametrize("dtype", [np.dtype("float32"), HALF], ids=str)
@pytest.mark.parametrize("company", [[], [(3000, 1)]], ids=["alone", "cut into tasks"])
def test_what_only_a_later_part_of_a_context_holds_reaches_no_earlier_query(name, dtype, company):
    """Parts begin at 256: of six queries in one tile, two end before it."""
    case = Case([(260, 6), *company], page_size=16, num_pages=256, head_dim=64, dtype=dtype)
    case.new_v[5] = np.inf
    backend, call = attention(name, None, 64**-0.5, None, 64, case.group)
    out, _ = call(case.pool(backend), case.q, case.new_k, case.new_v, case.layout)
    assert np.isfinite(np.asarray(out[:2], np.float32)).all()


def last_token(name, dtype, length, window, *, num_queries=1, company=(), pages_before=0, head_dim=64):
    """What the last token of one sequence gets, whatever else is in the step."""
    rng, page_size = np.random.default_rng(7), 16
    keys, values = (rng.standard_normal((length, NUM_KV_HEADS, head_dim)).astype(dtype) for _ in range(2))
    q = rng.standard_normal((length, NUM_HEADS, head_dim)).astype(dtype)
    left = length - pages_before * page_size
    rows = [*company[:1], (left, num_queries), *company[1:]]
    num_pages = sum(-(-kv_len // page_size) for kv_len, _ in rows) + 3
    case = Case(rows, page_size=page_size, num_pages=num_pages, head_dim=head_dim, dtype=dtype)
    row = len(company[:1])
    case.keys[row], case.values[row] = keys[length - left :], values[length - left :]
    end = case.layout.cu_q_lens_B1[row + 1]
    span = slice(end - num_queries, end)
    case.q[span], case.new_k[span], case.new_v[span] = (x[length - num_queries :] for x in (q, keys, values))
    case.layout.positions_T[span] += pages_before * page_size
    backend, call = attention(name, window, head_dim**-0.5, None, head_dim, case.group)
    out, _ = call(case.pool(backend), case.q, case.new_k, case.new_v, case.layout)
    assert np.isfinite(np.asarray(out[span], np.float32)).all()
    return np.asarray(out[end - 1])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("length", [100, 700, slow(5000)])
@pytest.mark.parametrize("name", daily(NATIVE))
def test_a_token_gets_the_same_bits_in_every_step(name, length, window, dtype):
    """Alone, as the end of a longer chunk, beside others, and where its table has lost pages that its window left."""
    alone = last_token(name, dtype, length, window)
    longer, others = {"num_queries": 50}, {"company": [(40, 3), (3000, 1), (900, 60)]}
    for way in (longer, others, longer | others):
        np.testing.assert_array_equal(last_token(name, dtype, length, window, **way), alone, err_msg=str(way))
    if window and length > window + 100:
        for pages in range((length - window - 60) // 16)[:9]:
            for way in (longer, others):
                got = last_token(name, dtype, length, window, pages_before=pages, **way)
                np.testing.assert_array_equal(got, alone, err_msg=f"{way}, {pages} pages less")


@pytest.mark.parametrize("name", NATIVE[-1:])
def test_each_device_has_its_own_heads(name):
    for dtype, error in ((np.dtype("float32"), {}), (HALF, HALF_ERROR)):
        Case([(40, 1), (170, 90), (33, 33)], page_size=16, num_pages=32, dtype=dtype).run(name, num_devices=2, **error)


@pytest.mark.parametrize("name", daily(NATIVE))
def test_pages_outside_the_pool_are_neither_read_nor_written(name):
    """The host never sends such; a kernel that believed it would read anybody's memory."""
    case = Case([(40, 1), (100, 70)], page_size=16, num_pages=32)
    backend, call = attention(name, None, 0.3, None, case.head_dim, case.group)
    wild = np.array([-1, 32, 2**31 - 1, -(2**31)], np.int32)
    table = case.layout.page_table_BP.copy()
    table.flat[: table.size // 4 * 4] = np.tile(wild, table.size // 4)
    destinations = np.resize(np.array([-1, 32 * 16, 2**31 - 1, -(2**31)], np.int32), case.layout.destinations_T.shape)
    wild_lens = [2**31 - 1, -5, 17, 2**31 - 1]
    layout = dataclasses.replace(
        case.layout, page_table_BP=table, destinations_T=destinations, kv_lens_B=np.array(wild_lens, np.int32)
    )
    before = [np.asarray(x) for x in case.pool(backend).arrays]
    out, kv = call(case.pool(backend), case.q, case.new_k, case.new_v, layout)
    for old, new in zip(before, kv.arrays, strict=True):
        np.testing.assert_array_equal(old, new)
    assert not np.isnan(out[case.num_tokens :]).any()
    wild_rows = dataclasses.replace(case.layout, cu_q_lens_B1=np.array([50, -3, 2**31 - 1, 4, -9], np.int32))
    jax.block_until_ready(call(case.pool(backend), case.q, case.new_k, case.new_v, wild_rows))


@pytest.mark.parametrize("name", NATIVE[-1:])
def test_the_pool_is_updated_in_place_also_in_a_loop(name):
    case, backend = Case([(40, 1), (100, 1)], page_size=16, num_pages=32, decode=True), backend_of(name)
    config = attention_config(case.head_dim, NUM_HEADS)

    def rounds(kv, q, k, v, layout):
        def one(_, carry):
            kv, layout, total = carry
            out, kv = paged_attention(backend, make_mesh(), kv, q, k, v, layout, config)
            return kv, dataclasses.replace(layout, kv_lens_B=layout.kv_lens_B), total + out.sum()

        return jax.lax.fori_loop(0, 3, one, (kv, layout, jnp.zeros((), jnp.float32)))

    program = jax.jit(rounds, donate_argnums=0)
    kv = case.pool(backend)
    text = program.lower(kv, case.q, case.new_k, case.new_v, case.layout).compile().as_text()
    pool = ",".join(map(str, kv.arrays[0].shape))
    copies = [line for line in text.splitlines() if f"[{pool}]" in line and re.search(r"= \S+ copy\(", line)]
    assert not copies, "the pool is copied"
    before = [x.unsafe_buffer_pointer() for x in kv.arrays]
    kv, *_ = program(kv, case.q, case.new_k, case.new_v, case.layout)
    assert [x.unsafe_buffer_pointer() for x in kv.arrays] == before
