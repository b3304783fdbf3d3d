"""Weights in blocks of 4, 6 and 8 bits: multiplied as they are stored, on every instruction set, in any batch."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.device import native
from quire.device.blocked import BLOCK, Blocked, Format, StoredTensor, join_stored, look_up, nearest
from quire.device.linear import MatmulKind, convert, grouped_linear, linear
from tests.effort import each_isa, examples

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
each_format = pytest.mark.parametrize("kind", Format, ids=lambda kind: kind.name)
HALVES = {Format.Q4_0: [0], Format.Q4_1: [0, 2], Format.Q8_0: [0], Format.Q4_K: [0, 2], Format.Q6_K: [208]}
"""Where float16 numbers are in a stored block."""


def stored(kind: Format, outputs: int, inner: int, seed: int = 0) -> StoredTensor:
    """Every code and every scale that there can be, but for the float16 numbers, which are small."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
    assert inner % block == 0
    data = rng.integers(0, 256, (outputs, inner // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.uniform(-0.1, 0.1, (outputs, inner // block, 1)).astype(np.float16)
        data[:, :, at : at + 2] = halves.view(np.uint8).reshape(outputs, -1, 2)
    return StoredTensor(kind, data.reshape(outputs, -1), np.arange(outputs, dtype=np.int32), inner)


def expanded(tensor: StoredTensor) -> np.ndarray:
    """`[out, in]`, by the package that knows the formats."""
    return gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.format.name])[tensor.rows]


def blocked_on_host(*tensors: StoredTensor) -> Blocked:
    num_outputs = sum(len(tensor.rows) for tensor in tensors)
    weight = join_stored(tensors, np.arange(num_outputs), (num_outputs,))
    assert weight is not None
    return weight


def blocked(*tensors: StoredTensor) -> Blocked:
    return jax.tree.map(jnp.asarray, blocked_on_host(*tensors))


def test_jax_takes_panels_without_a_copy():
    for outputs in (16, 17, 480):
        weight = blocked_on_host(stored(Format.Q4_0, outputs, 96))
        assert jax.device_put(weight.panels).unsafe_buffer_pointer() == weight.panels.ctypes.data


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """Activations as the library rounds them: each 32 to int8 by their largest."""
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    largest = np.maximum(np.abs(padded).max(axis=2, keepdims=True), np.float32(1e-20))
    codes = np.rint(padded * (np.float32(127) / largest))
    values = codes.astype(np.float64) * np.float64(largest * np.float32(1 / 127))
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def check_product(x: jax.Array, weight: np.ndarray, got: np.ndarray) -> None:
    """That a product is the exact one of the rounded rows, `[out, in]` weights, but for float32 sums."""
    rows = rounded_rows(np.asarray(x, np.float32))
    # Codes and minima are added apart: what each adds up to is what float32 rounds, not what is left of both.
    slack = 3e-6 * np.abs(rows) @ (np.abs(weight) + np.abs(weight).max()).T.astype(np.float64)
    assert (np.abs(got - rows @ weight.T.astype(np.float64)) <= slack + 1e-6).all()


@each_isa
@each_format
@examples(4)
@given(sizes=st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 40)), wide=st.booleans())
def test_a_product_is_that_of_the_stored_weights(isa, kind, sizes, wide):
    num_rows, num_blocks, outputs = sizes
    inner = num_blocks * (256 if kind.name.endswith("K") else BLOCK)
    tensor = stored(kind, outputs, inner, seed=outputs)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, inner)), jnp.float32 if wide else jnp.bfloat16)
    got = np.asarray(linear(x, blocked(tensor), jnp.float32, isa), np.float64)
    check_product(x, expanded(tensor), got)


@each_isa
@each_format
@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa, kind, out):
    weight = blocked(stored(kind, 100, 768))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((70, 768)), jnp.bfloat16)
    whole = np.asarray(linear(x, weight, out, isa))
    for first, count in ((0, 1), (3, 17), (5, 33), (40, 16), (61, 7)):
        part = np.asarray(linear(x[first : first + count], weight, out, isa))
        np.testing.assert_array_equal(part, whole[first : first + count])


@each_isa
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_zeros_at_the_end_are_not_multiplied(isa, dtype):
    tensor = stored(Format.Q8_0, 40, 64)
    tensor.data[3, :2] = np.array([np.inf], np.float16).view(np.uint8)
    weight, x = blocked(tensor), jnp.asarray(np.random.default_rng(5).standard_normal((40, 64)), dtype)
    x = x.at[2].set(0).at[5:].set(0).at[30].set(-0.0)
    got = np.asarray(linear(x, weight, None, isa), np.float32)
    assert not got[5:].any()
    assert np.isnan(got[2, 3]), "what is before the last counts, whatever it is"
    np.testing.assert_array_equal(got[:5], np.asarray(linear(x[:5], weight, None, isa), np.float32))
    assert not np.asarray(linear(x[5:], weight, None, isa), np.float32).any(), "nothing but padding"


@each_isa
def test_many_rows_are_those_of_few(isa):
    weight = blocked(stored(Format.Q4_1, 48, 4096))
    x = jnp.asarray(np.random.default_rng(3).standard_normal((300, 4096)), jnp.float32)
    whole = np.asarray(linear(x, weight, None, isa))
    np.testing.assert_array_equal(np.asarray(linear(x[130:131], weight, None, isa)), whole[130:131])


@each_isa
@each_format
def test_a_bad_number_stays_in_its_row_and_is_heard(isa, kind):
    weight = blocked(stored(kind, 40, 256))
    x = jnp.ones((20, 256), jnp.bfloat16).at[7, 11].set(jnp.nan).at[9, 3].set(jnp.inf)
    got = np.asarray(linear(x, weight, None, isa), np.float32)
    assert np.isnan(got[7]).all()
    assert not np.isfinite(got[9]).any()
    assert np.isfinite(np.delete(got, [7, 9], axis=0)).all()


@each_isa
def test_panels_of_one_matrix_may_have_formats_of_their_own(isa):
    tensors = [stored(kind, 16 * count, 512, seed=count) for count, kind in enumerate(Format, 1)]
    x = jnp.asarray(np.random.default_rng(4).standard_normal((9, 512)), jnp.float32)
    got = np.asarray(linear(x, blocked(*tensors), None, isa), np.float64)
    check_product(x, np.concatenate([expanded(tensor) for tensor in tensors]), got)


def test_outputs_are_taken_in_any_order_and_a_panel_of_two_tensors_is_none():
    first, second = stored(Format.Q4_0, 64, 64), stored(Format.Q8_0, 32, 64)
    order = np.concatenate([np.arange(16)[::-1], 64 + np.arange(32), 16 + np.arange(48)])
    weight = join_stored([first, second], order, (96,))
    assert weight is not None
    x = jnp.asarray(np.random.default_rng(5).standard_normal((3, 64)), jnp.float32)
    got = np.asarray(linear(x, jax.tree.map(jnp.asarray, weight)), np.float64)
    check_product(x, np.concatenate([expanded(first), expanded(second)])[order], got)
    assert join_stored([first, second], np.roll(order, 8), (96,)) is None


@each_format
def test_panels_take_little_more_room_than_the_file(kind):
    tensor = stored(kind, 16, 4096)
    assert blocked(tensor).panels.nbytes == kind.panel_bytes(4096) <= 1.03 * tensor.data.nbytes


@each_format
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_embedding_is_looked_up_as_it_is_stored(kind, dtype):
    tensor = stored(kind, 90, 512)
    tokens = jnp.array([0, 17, 89, 3, 3], jnp.int32)
    got = look_up(blocked(tensor), tokens, like=jnp.zeros(512, dtype))
    expected = jnp.asarray(expanded(tensor)[np.asarray(tokens)], dtype)
    if dtype == jnp.float32:
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-6, atol=1e-7)
    else:
        differ = np.asarray(got, np.float32) != np.asarray(expected, np.float32)
        assert differ.mean() < 0.01  # beside a tie: the product and its sum are rounded once or twice


# -- from floats -----------------------------------------------------------------------------------------------------


def unpacked(weight: Blocked, inner: int) -> np.ndarray:
    """The matrix `[out, in]`."""
    num_outputs = weight.output_shape[-1]
    return np.asarray(look_up(weight, jnp.arange(num_outputs, dtype=jnp.int32), like=jnp.zeros(inner)), np.float64)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_nearest_is_nearer_than_the_packages_own(transposed, dtype):
    values = np.random.default_rng(6).standard_normal((50, 96)).astype(np.float32)  # [out, in]
    values = np.asarray(jnp.asarray(values, dtype), np.float32)
    matrix = jnp.asarray(values if transposed else values.T, dtype)
    for kind in (Format.Q4_1, Format.Q8_0):
        theirs_kind = gguf.GGMLQuantizationType[kind.name]
        theirs = gguf.dequantize(gguf.quantize(values, theirs_kind), theirs_kind)
        ours = unpacked(nearest(matrix, transposed=transposed, to=kind), 96)
        error, allowed = (np.square(each - values).sum() for each in (ours, theirs))
        assert error <= (0.95 if kind == Format.Q4_1 else 1.01) * allowed


@examples(10)
@given(sizes=st.tuples(st.integers(1, 90), st.integers(1, 40)), seed=st.integers(0, 9))
def test_a_weight_is_off_by_half_a_step_of_its_block_at_most(sizes, seed):
    inner, outputs = sizes
    values = np.random.default_rng(seed).uniform(-1, 1, (outputs, inner)).astype(np.float32)
    got = unpacked(nearest(jnp.asarray(values), transposed=True, to=Format.Q8_0), inner)
    assert np.abs(got - values).max() <= np.abs(values).max() * (0.5 / 127 + 2**-10)


def test_equal_weights_and_zeros_are_exact_and_a_bad_one_is_heard():
    values = np.zeros((32, 64), np.float32)
    values[1] = 0.25
    got = unpacked(nearest(jnp.asarray(values), transposed=True, to=Format.Q4_1), 64)
    np.testing.assert_array_equal(got, values)
    values[3, 40] = np.nan
    for kind in (Format.Q4_1, Format.Q8_0):
        weight = nearest(jnp.asarray(values), transposed=True, to=kind)
        product = np.asarray(linear(jnp.ones((1, 64)), weight))[0]
        assert np.isnan(product[3])
        assert np.isfinite(np.delete(product, 3)).all()


@each_isa
def test_experts_have_panels_of_their_own(isa):
    kind = MatmulKind(native=True, int8=False, native_experts=True, int4=True)
    rng = np.random.default_rng(7)
    matrices = jnp.asarray(rng.standard_normal((4, 96, 40)), jnp.float32)
    x = jnp.asarray(rng.standard_normal((30, 96)), jnp.float32)
    sizes = jnp.array([5, 0, 17, 2], jnp.int32)
    got = np.asarray(grouped_linear(x, convert(matrices, 1, kind), sizes, isa))
    first = 0
    for expert, size in enumerate([5, 0, 17, 2]):
        alone = linear(x[first : first + size], convert(matrices[expert], 0, kind), None, isa)
        np.testing.assert_array_equal(got[first : first + size], np.asarray(alone).reshape(size, 40))
        first += size
    assert (got[first:] == 0).all()


def test_the_library_refuses_weights_that_do_not_fit():
    weight = blocked(stored(Format.Q4_0, 32, 64))
    x = jnp.ones((2, 64), jnp.float32)
    for wrong in (
        Blocked(weight.panels[:-1], weight.formats, (32,)),
        Blocked(weight.panels, jnp.full(2, 9, jnp.uint8), (32,)),
        Blocked(weight.panels, jnp.full(2, Format.Q4_K, jnp.uint8), (32,)),
        Blocked(weight.panels, weight.formats, (48,)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="quire_blocked"):
            linear(x, wrong)
