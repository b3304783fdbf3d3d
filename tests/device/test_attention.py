"""Every backend equals dense attention, reads only what a row owns, and writes only where it is told.

The pool is poisoned: pages nobody holds, and the rest of a partly filled page, are NaN or Inf. Any stray read shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.device import native
from quire.device.attention import get_backend, paged_attention
from quire.device.attention.native import NativeBackend
from quire.device.inputs import BatchLayout
from quire.device.mesh import make_mesh
from tests.tiny import tiny_config

BACKENDS = ["reference", "xla", *(f"native {isa}" for isa in native.instruction_sets())]
NUM_HEADS, NUM_KV_HEADS = 6, 2


@functools.cache
def attention(name, window, scale, num_devices=1):
    """A backend and its jitted entry point."""
    backend, mesh = backend_of(name), make_mesh(jax.devices()[:num_devices])
    return backend, jax.jit(
        lambda kv, q, k, v, layout: paged_attention(backend, mesh, kv, q, k, v, layout, scale=scale, window=window)
    )


def backend_of(name):
    name, _, isa = name.partition(" ")
    return NativeBackend(isa) if isa else get_backend(name)


def to_pages(backend, k_MZKH, v_MZKH):
    """The backend's arrays from arrays with a page's positions in order."""
    if not isinstance(backend, NativeBackend):
        order = [("pages", "offset", "kv_heads", "head").index(axis) for axis in backend.axes]
        return k_MZKH.transpose(order), v_MZKH.transpose(order)
    num_pages, page_size, num_kv_heads, head_dim = k_MZKH.shape
    pair = 4 // k_MZKH.dtype.itemsize
    k = k_MZKH.reshape(num_pages, page_size, num_kv_heads, head_dim // pair, pair).transpose(0, 2, 3, 1, 4)
    # The second half of an odd page's last pair belongs to nobody.
    last = np.full((num_pages, -page_size % pair, num_kv_heads, head_dim), np.nan, v_MZKH.dtype)
    v = np.concatenate([v_MZKH, last], axis=1).reshape(num_pages, -1, pair, num_kv_heads, head_dim)
    return k, v.transpose(0, 3, 1, 4, 2)


def from_pages(backend, kv, page_size):
    """The other way: K and V as `[M, Z, K, H]`."""
    k, v = (np.asarray(x) for x in kv)
    if not isinstance(backend, NativeBackend):
        order = [backend.axes.index(axis) for axis in ("pages", "offset", "kv_heads", "head")]
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
        return tuple(jnp.asarray(x) for x in to_pages(backend, self.dense(self.keys), self.dense(self.values)))

    def dense(self, which):
        """As `[M, Z, K, H]`: history written, everything else poison."""
        flat = np.full((self.num_pages * self.page_size, *which[0].shape[1:]), self.poison, which[0].dtype)
        for i, ((kv_len, q_len), data) in enumerate(zip(self.rows, which, strict=True)):
            old = np.arange(kv_len - q_len)
            flat[self.tables[i, old // self.page_size] * self.page_size + old % self.page_size] = data[old]
        return flat.reshape(self.num_pages, self.page_size, *flat.shape[1:])

    def expected(self, scale, window):
        out = np.zeros((self.num_tokens, *self.q.shape[1:]), np.float64)
        q = self.q.astype(np.float64)
        token = 0
        for (kv_len, q_len), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            k, v = (x.astype(np.float64) for x in (keys, values))
            for position in range(kv_len - q_len, kv_len):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(len(q[token])):
                    scores = k[first : position + 1, head // self.group] @ q[token, head] * scale
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ v[first : position + 1, head // self.group] / weights.sum()
                token += 1
        return out

    def run(self, name, *, window=None, scale=None, atol=2e-6, rtol=2e-5, num_devices=1):
        scale = scale or self.head_dim**-0.5
        backend, call = attention(name, window, scale, num_devices)
        out, kv = call(self.pool(backend), self.q, self.new_k, self.new_v, self.layout)
        got = np.asarray(out[: self.num_tokens], np.float64)
        np.testing.assert_allclose(got, self.expected(scale, window), atol=atol, rtol=rtol)
        return backend, kv


MIXES = {
    "decode": ([(1, 1), (4, 1), (5, 1), (33, 1), (130, 1)], True),
    "prompts": ([(7, 7), (70, 70), (16, 16)], False),
    "chunk of a longer prompt": ([(150, 80)], False),
    "mixed": ([(9, 1), (100, 90), (1, 1), (40, 2), (140, 1)], False),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_equals_dense_attention_over_a_poisoned_pool(name, mix, window, poison):
    rows, decode = MIXES[mix]
    pads = {"pad_tokens": 2, "pad_rows": 2} if decode else {}
    Case(rows, num_pages=128, decode=decode, poison=poison, **pads).run(name, window=window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 128, 256])
def test_any_page_size(name, page_size):
    Case([(150, 1), (90, 70), (17, 17)], page_size=page_size, num_pages=300 // page_size + 8).run(name)


@pytest.mark.parametrize("name", BACKENDS)
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


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=5),
    st.sampled_from([None, 3, 40]),
    st.sampled_from([np.nan, np.inf]),
)
def test_random_ragged_batches(rows, window, poison):
    rows = [(max(a, b), min(a, b)) for a, b in rows]
    pads = {"pad_tokens": 460 - sum(q_len for _, q_len in rows), "pad_rows": 6 - len(rows), "width": 13}
    Case(rows, page_size=8, num_pages=80, poison=poison, **pads).run("xla", window=window)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_toy_example_of_the_seeds(name):
    """Section 5.1: page size 4, pages [2, 7], length 6; position 5 lands in page 7 at offset 1, 6 and 7 stay unseen."""
    backend = backend_of(name)
    config = tiny_config(num_heads=1, num_kv_heads=1, head_dim=8)
    empty = [jnp.full(shape, jnp.nan, jnp.float32) for shape in backend.shapes(config, 10, 4, jnp.dtype("float32"))]
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
    out, kv = paged_attention(backend, make_mesh(), tuple(empty), q, tokens, tokens, layout, scale=1.0, window=None)
    pages, _ = from_pages(backend, kv, 4)
    np.testing.assert_array_equal(pages[7, 1, 0], np.arange(40, 48))
    assert np.isnan(pages[7, 2:]).all()
    np.testing.assert_allclose(out[5, 0], tokens[:, 0].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_prefill_then_decode_as_the_seeds_test_it(name):
    """JetStream's tests: 16 tokens over two pages of 8, then one more at page 16 // 8, offset 16 % 8."""
    backend = backend_of(name)
    config = tiny_config(num_heads=2, num_kv_heads=2, head_dim=8)
    cache = tuple(jnp.zeros(shape, jnp.float32) for shape in backend.shapes(config, 3, 8, jnp.dtype("float32")))
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
        return paged_attention(backend, make_mesh(), cache, ones, ones, ones, layout, scale=1.0, window=None)

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
