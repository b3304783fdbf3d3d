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

from quire.device.attention import get_backend, paged_attention
from quire.device.inputs import BatchLayout
from quire.device.mesh import make_mesh
from tests.tiny import tiny_config

BACKENDS = ["reference", "xla"]
CONFIG = tiny_config(num_heads=6, num_kv_heads=2, head_dim=8)


@functools.cache
def attention(name, window, scale):
    """A backend and its jitted entry point."""
    backend = get_backend(name)
    return backend, jax.jit(
        lambda kv, q, k, v, layout: paged_attention(
            backend, make_mesh(), kv, q, k, v, layout, scale=scale, window=window
        )
    )


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
    ):
        rng = np.random.default_rng(seed)
        self.rows, self.page_size, self.num_pages, self.poison, self.decode = rows, page_size, num_pages, poison, decode
        width = width or max(-(-kv_len // page_size) for kv_len, _ in rows) + 1
        self.keys = [rng.standard_normal((kv_len, 2, 8)).astype(np.float32) for kv_len, _ in rows]
        self.values = [rng.standard_normal((kv_len, 2, 8)).astype(np.float32) for kv_len, _ in rows]
        self.num_tokens = sum(q_len for _, q_len in rows)
        total = self.num_tokens + pad_tokens
        self.q = rng.standard_normal((total, 6, 8)).astype(np.float32)
        pages = rng.permutation(num_pages)
        tables = np.full((len(rows) + pad_rows, width), pages[-1], np.int32)  # padding may name anybody's page
        positions, destinations = np.zeros(total, np.int32), np.full(total, num_pages * page_size, np.int32)
        kv_lens, cu_q_lens = np.zeros(len(tables), np.int32), np.full(len(tables) + 1, self.num_tokens, np.int32)
        self.new_k, self.new_v = (rng.standard_normal((total, 2, 8)).astype(np.float32) for _ in range(2))
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

    def pool(self, backend, which):
        """The KV arrays before the step: history written, everything else poison."""
        flat = np.full((self.num_pages * self.page_size, 2, 8), self.poison, np.float32)
        for i, ((kv_len, q_len), data) in enumerate(zip(self.rows, which, strict=True)):
            old = np.arange(kv_len - q_len)
            flat[self.tables[i, old // self.page_size] * self.page_size + old % self.page_size] = data[old]
        pages = flat.reshape(self.num_pages, self.page_size, 2, 8)
        order = [("pages", "offset", "kv_heads", "head").index(axis) for axis in backend.axes]
        return jnp.asarray(pages.transpose(order))

    def expected(self, scale, window):
        out = np.zeros((self.num_tokens, 6, 8), np.float32)
        token = 0
        for (kv_len, q_len), k, v in zip(self.rows, self.keys, self.values, strict=True):
            for position in range(kv_len - q_len, kv_len):
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(6):
                    scores = k[first : position + 1, head // 3] @ self.q[token, head] * scale
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ v[first : position + 1, head // 3] / weights.sum()
                token += 1
        return out

    def run(self, name, *, window=None, scale=0.35):
        backend, call = attention(name, window, scale)
        kv = (self.pool(backend, self.keys), self.pool(backend, self.values))
        out, kv = call(kv, self.q, self.new_k, self.new_v, self.layout)
        np.testing.assert_allclose(out[: self.num_tokens], self.expected(scale, window), atol=2e-6, rtol=2e-5)
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
    case = Case([(6, 3), (9, 1)])
    backend = get_backend(name)
    before = np.asarray(case.pool(backend, case.keys))
    _, (k, _) = case.run(name)
    k, axes = np.asarray(k), backend.axes
    order = [axes.index(axis) for axis in ("pages", "offset", "kv_heads", "head")]
    k, before = (x.transpose(order).reshape(-1, 2, 8) for x in (k, before))
    written = case.layout.destinations_T[: case.num_tokens]
    np.testing.assert_array_equal(k[written], case.new_k[: case.num_tokens])
    others = np.setdiff1d(np.arange(len(k)), written)
    np.testing.assert_array_equal(k[others], before[others])


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
    backend = get_backend(name)
    config = tiny_config(num_heads=1, num_kv_heads=1, head_dim=2)
    empty = jnp.full(backend.shape(config, 10, 4), jnp.nan, jnp.float32)
    layout = BatchLayout(
        np.arange(6, dtype=np.int32),
        np.array([8, 9, 10, 11, 28, 29], np.int32),
        np.array([[2, 7, 0]], np.int32),
        np.array([6], np.int32),
        np.array([0, 6], np.int32),
        decode=False,
    )
    tokens = jnp.arange(12, dtype=jnp.float32).reshape(6, 1, 2)
    q = jnp.zeros((6, 1, 2), jnp.float32)
    out, (k, _) = paged_attention(
        backend, make_mesh(), (empty, empty), q, tokens, tokens, layout, scale=1.0, window=None
    )
    order = [backend.axes.index(axis) for axis in ("pages", "offset", "kv_heads", "head")]
    pages = np.asarray(k).transpose(order)
    np.testing.assert_array_equal(pages[7, 1, 0], [10, 11])
    assert np.isnan(pages[7, 2:]).all()
    np.testing.assert_allclose(out[5, 0], tokens[:, 0].mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_prefill_then_decode_as_the_seeds_test_it(name):
    """JetStream's tests: 16 tokens over two pages of 8, then one more at page 16 // 8, offset 16 % 8."""
    backend = get_backend(name)
    config = tiny_config(num_heads=2, num_kv_heads=2, head_dim=8)
    cache = tuple(jnp.zeros(backend.shape(config, 3, 8), jnp.float32) for _ in range(2))
    table = np.array([[1, 0, 2]], np.int32)
    order = [backend.axes.index(axis) for axis in ("pages", "offset", "kv_heads", "head")]

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
    pages = np.asarray(cache[0]).transpose(order)
    assert (pages[:2] == 1).all()
    assert (pages[2] == 0).all()
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    out, cache = step(cache, np.arange(16, 17), 3.0)
    page, offset = divmod(16, 8)
    pages = np.asarray(cache[0]).transpose(order)
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
