"""What lies between the matmuls is the same in C++ as in JAX, on every instruction set, for any width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.device import native
from quire.device.pointwise import add_norm, gate, split_rotated
from tests.effort import each_float_isa, examples

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
few = examples(8)
ROUNDING = {jnp.float32: 2e-6, jnp.bfloat16: 2**-7}
"""Relative; in bfloat16 a float32 just beside a tie may go either way."""
dtypes = st.sampled_from(list(ROUNDING))


def normal(dtype, *shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * 3, dtype)


def close(found: jax.Array, expected: jax.Array, roundings: int = 1) -> None:
    """A sum that cancels is only as good as its terms."""
    assert found.dtype == expected.dtype
    rounding = roundings * ROUNDING[jnp.dtype(found.dtype).type]
    found64, expected64 = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(found64, expected64, rtol=rounding, atol=rounding / 8)


@each_float_isa
@few
@given(rows=st.integers(1, 300), width=st.integers(1, 200), dtype=dtypes)
def test_residual_and_norm(isa, rows, width, dtype):
    x, delta, weight = normal(dtype, rows, width), normal(dtype, rows, width, seed=1), normal(dtype, width, seed=2)
    summed, normed = add_norm(x, delta, weight, 1e-5, native=True, instruction_set=isa)
    expected_sum, expected = add_norm(x, delta, weight, 1e-5, native=False)
    np.testing.assert_array_equal(summed, expected_sum)
    close(normed, expected, roundings=2)


@each_float_isa
@few
@given(rows=st.integers(1, 200), width=st.integers(1, 200), dtype=dtypes)
def test_gate(isa, rows, width, dtype):
    gate_up = normal(dtype, rows, 2, width) * 4
    close(gate(gate_up, native=True, instruction_set=isa), gate(gate_up, native=False))


@each_float_isa
def test_gate_of_what_is_far_out(isa):
    far = [0.0, -0.0, 80.0, -80.0, 100.0, -100.0, 1e30, -1e30, np.inf, -np.inf, np.nan]
    gate_up = jnp.stack([jnp.asarray(far, jnp.float32), jnp.ones(len(far))])[None]
    np.testing.assert_allclose(
        gate(gate_up, native=True, instruction_set=isa), gate(gate_up, native=False), rtol=2e-6, atol=1e-34
    )


@each_float_isa
@few
@given(
    tokens=st.integers(1, 60),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    half=st.integers(1, 40),
    dtype=dtypes,
)
def test_split_and_rotation(isa, tokens, kv_heads, group, half, dtype):
    qkv = normal(dtype, tokens, kv_heads, group + 2, 2 * half)
    angles = normal(jnp.float32, tokens, half, seed=1)
    rotary = jnp.cos(angles), jnp.sin(angles)
    found = split_rotated(qkv, rotary, native=True, instruction_set=isa)
    expected = split_rotated(qkv, rotary, native=False)
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    np.testing.assert_array_equal(found[2], expected[2])


@each_float_isa
def test_a_row_does_not_depend_on_how_many_there_are(isa):
    x, delta, weight = (normal(jnp.bfloat16, n, 576) for n in (300, 300, 1))
    normed = add_norm(x, delta, weight[0], 1e-5, native=True, instruction_set=isa)[1]
    alone = add_norm(x[77:78], delta[77:78], weight[0], 1e-5, native=True, instruction_set=isa)[1]
    np.testing.assert_array_equal(normed[77:78], alone)
    gate_up = x.reshape(300, 2, 288)
    gated = gate(gate_up, native=True, instruction_set=isa)
    np.testing.assert_array_equal(gated[77:78], gate(gate_up[77:78], native=True, instruction_set=isa))
    qkv, rotary = x.reshape(300, 3, 3, 64), tuple(normal(jnp.float32, 300, 32, seed=s) for s in (1, 2))
    rotated = split_rotated(qkv, rotary, native=True, instruction_set=isa)
    apart = split_rotated(qkv[77:78], tuple(t[77:78] for t in rotary), native=True, instruction_set=isa)
    for one, other in zip(rotated, apart, strict=True):
        np.testing.assert_array_equal(one[77:78], other)


def test_wrong_shapes_are_refused():
    x, weight = normal(jnp.float32, 4, 8), normal(jnp.float32, 9)
    call = jax.ffi.ffi_call("quire_add_norm", (jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2)
    with pytest.raises(Exception, match="the weight must be as long as a row"):
        jax.block_until_ready(call(x, x, weight, eps=np.float32(1e-5), isa=""))
    with pytest.raises(Exception, match="all must be float32, or all bfloat16"):
        jax.block_until_ready(call(x, x.astype(jnp.bfloat16), weight[:8], eps=np.float32(1e-5), isa=""))
