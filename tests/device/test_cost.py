"""Attention costs what the real lengths cost, in one and the same program."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.config import AttentionConfig
from quire.device import native
from quire.device.attention import LayerKV, get_backend, paged_attention
from quire.device.inputs import BatchLayout
from quire.device.mesh import make_mesh, place

ROWS, PAGE, LONGEST = 64, 16, 2048


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ["xla", "native"])
def test_64_rows_at_context_128_cost_a_fraction_of_2048(name):
    if name == "native" and native.unavailable_reason():
        pytest.skip(native.unavailable_reason())
    backend, attention = get_backend(name), AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=64)
    num_pages = ROWS * LONGEST // PAGE
    rng = np.random.default_rng(0)
    specs = backend.arrays(attention, num_pages, PAGE, jnp.dtype("bfloat16"))
    arrays = (place(make_mesh(), rng.standard_normal(spec.shape).astype(spec.dtype), *spec.axes) for spec in specs)
    kv = LayerKV(tuple(arrays), tuple(spec.axes for spec in specs))
    table = rng.permutation(num_pages).reshape(ROWS, -1).astype(np.int32)
    q, k, v = (jnp.asarray(rng.standard_normal((ROWS, n, 64)), jnp.bfloat16) for n in (9, 3, 3))
    program = jax.jit(
        lambda kv, q, k, v, layout: paged_attention(backend, make_mesh(), kv, q, k, v, layout, attention),
        donate_argnums=0,
    )

    def layout(length: int) -> BatchLayout:
        at = np.full(ROWS, length - 1, np.int32)
        places = table[:, (length - 1) // PAGE] * PAGE + (length - 1) % PAGE
        lens, starts = np.full(ROWS, length, np.int32), np.arange(ROWS + 1, dtype=np.int32)
        return BatchLayout(at, places.astype(np.int32), table, lens, starts, decode=True)

    times: dict[int, list[float]] = {128: [], LONGEST: []}
    for _ in range(12):
        for length, own in times.items():
            start = time.perf_counter()
            out, kv = program(kv, q, k, v, layout(length))
            jax.block_until_ready((out, kv))
            own.append(time.perf_counter() - start)
    short, long = (float(np.median(own[2:])) for own in times.values())
    print(f"64 rows: {short * 1e3:.2f} ms at context 128, {long * 1e3:.2f} ms at 2,048: {short / long:.2f}x")
    assert program._cache_size() == 1
    assert short < 0.35 * long
