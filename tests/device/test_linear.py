"""The native matmul multiplies as it should on every instruction set, and whoever runs has the weights it was given."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.perplexity import perplexity
from hypothesis import given
from hypothesis import strategies as st

from quire import SamplingParams
from quire.device import native
from quire.device.linear import (
    Int8,
    MatmulKind,
    Packed,
    Transposed,
    choose_kind,
    linear,
    one_term,
    pack,
    quantize,
)
from quire.device.mesh import make_mesh
from quire.device.models.weights import params_from_tensors, place_params, prepare, weight_specs
from tests.effort import each_isa, examples, nightly
from tests.tiny import tiny_config, tiny_llm, tiny_tensors

needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
SIZES = st.tuples(st.integers(1, 70), st.integers(1, 200), st.integers(1, 90))
PROMPT = [(5 * i) % 90 + 1 for i in range(21)]


def arrays(rows: int, inner: int, columns: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((rows, inner)), rng.standard_normal((inner, columns))
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


def exact(x: jax.Array, weight: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how large the sum of its magnitudes is."""
    x64, weight64 = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    return x64 @ weight64, np.abs(x64) @ np.abs(weight64)


@needs_native
@each_isa
@examples(6)
@given(sizes=SIZES)
def test_bfloat16_is_the_exact_product_but_for_float32_sums_and_one_rounding(isa, sizes):
    x, weight = arrays(*sizes)
    packed = Packed(pack(weight), weight.shape[1:])
    expected, magnitude = exact(x, weight)
    wide = np.asarray(linear(x, packed, jnp.float32, isa), np.float64)
    assert (np.abs(wide - expected) <= 1e-6 * magnitude).all()
    narrow = np.asarray(linear(x, packed, None, isa), np.float64)
    assert (np.abs(narrow - wide) <= np.abs(wide) * 2**-8).all()


@needs_native
@each_isa
@pytest.mark.parametrize("sizes", [(1, 576, 960), (64, 1536, 576), (513, 64, 48), (1500, 576, 17)])
def test_bfloat16_at_the_sizes_of_models(isa, sizes):
    x, weight = arrays(*sizes)
    expected, magnitude = exact(x, weight)
    got = np.asarray(linear(x, Packed(pack(weight), weight.shape[1:]), jnp.float32, isa), np.float64)
    assert (np.abs(got - expected) <= 1e-6 * magnitude).all()


@needs_native
@each_isa
@examples(6)
@given(sizes=SIZES, wide=st.booleans())
def test_native_int8_is_plain_int8_but_for_a_tie_of_the_second_term(isa, sizes, wide):
    x, weight = arrays(*sizes)
    x = x.astype(jnp.float32) * 1.1 if wide else x
    values, scale = quantize(weight, axis=0)
    expected = linear(x, Int8(values, scale, packed=False), jnp.float32)
    got = linear(x, Int8(pack(values), scale, packed=True), jnp.float32, isa)
    # A step of the second term, times the largest weight; a few of a row may lie beside a tie.
    step = np.abs(np.asarray(x, np.float32)).max(axis=1, keepdims=True) / 127**2
    allowed = 3 * step * 127 * np.asarray(scale) + 1e-5 * np.abs(np.asarray(expected))
    assert (np.abs(np.asarray(got) - np.asarray(expected)) <= allowed).all()


@needs_native
def test_native_int8_of_many_rows_is_that_of_few():
    x, weight = arrays(1500, 576, 17)
    values, scale = quantize(weight, axis=0)
    kind = Int8(pack(values), scale, packed=True)
    whole = np.asarray(linear(x, kind, jnp.float32))
    for rows in [slice(first, first + 250) for first in range(0, 1500, 250)] + [slice(7, 8), slice(9, 11)]:
        np.testing.assert_array_equal(np.asarray(linear(x[rows], kind, jnp.float32)), whole[rows])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_native)])
def test_two_terms_leave_only_the_rounding_of_the_weights(packed):
    x, weight = arrays(9, 300, 40)
    x = x.at[:, 7].set(jnp.bfloat16(100))  # an outlier takes most of 8 bits from the rest of its token
    values, scale = quantize(weight, axis=0)
    expected = np.asarray(x, np.float64) @ (np.asarray(values, np.float64) * np.asarray(scale, np.float64))
    kind = pack(values) if packed else values
    weight = Int8(kind, scale, packed)
    one = np.asarray(one_term(x, Int8(values, scale, packed=False)))
    two = np.asarray(linear(x, weight, jnp.float32))
    assert np.abs(two - expected).max() < 0.02 * np.abs(one - expected).max()


@needs_native
@each_isa
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(isa, int8, out):
    x, weight = arrays(70, 576, 100)
    values, scale = quantize(weight, axis=0)
    kind = Int8(pack(values), scale, packed=True) if int8 else Packed(pack(weight), weight.shape[1:])
    whole = np.asarray(linear(x, kind, out, isa))
    for first, count in ((0, 1), (3, 17), (5, 33), (40, 16)):
        part = np.asarray(linear(x[first : first + count], kind, out, isa))
        np.testing.assert_array_equal(part, whole[first : first + count])


@needs_native
@each_isa
def test_a_bad_number_stays_in_its_row_and_is_heard(isa):
    x, weight = arrays(20, 65, 40)
    x = x.at[7, 11].set(jnp.nan).at[9, 3].set(jnp.inf)
    values, scale = quantize(weight, axis=0)
    for kind in (Packed(pack(weight), weight.shape[1:]), Int8(pack(values), scale, packed=True)):
        got = np.asarray(linear(x, kind, jnp.bfloat16, isa), np.float32)
        assert np.isnan(got[7]).all()
        assert not np.isfinite(got[9]).any()
        assert np.isfinite(np.delete(got, [7, 9], axis=0)).all()


@needs_native
@each_isa
@pytest.mark.parametrize("int8", [False, True])
def test_rows_of_zeros_at_the_end_are_not_multiplied(isa, int8):
    """A step is padded with them, and costs what its other rows do. Infinite weights would make them NaN."""
    x, weight = arrays(70, 65, 40)
    x = x.at[2].set(0).at[5:].set(0).at[50].set(-0.0)
    values, scale = quantize(weight, axis=0)
    kind = Packed(pack(weight.at[:, 3].set(jnp.inf)), weight.shape[1:])
    if int8:
        kind = Int8(pack(values), scale.at[..., 3].set(jnp.inf), packed=True)
    for out in (jnp.float32, jnp.bfloat16):
        got = np.asarray(linear(x, kind, out, isa), np.float32)
        assert not got[5:].any()
        assert np.isnan(got[2, 3]), "what is before the last counts, whatever it is"
        np.testing.assert_array_equal(got[:5], np.asarray(linear(x[:5], kind, out, isa), np.float32))
        assert not np.asarray(linear(x[5:], kind, out, isa), np.float32).any(), "nothing but padding"


@needs_native
def test_a_row_of_zeros_is_zero_in_int8():
    values, scale = quantize(arrays(1, 32, 16)[1], axis=0)
    got = linear(jnp.zeros((3, 32), jnp.bfloat16), Int8(pack(values), scale, packed=True))
    assert not np.asarray(got, np.float32).any()


@needs_native
def test_a_transposed_matrix_packs_alike():
    for matrix in (arrays(1, 33, 50)[1], quantize(arrays(1, 33, 50)[1], axis=0)[0]):
        turned = jnp.asarray(np.ascontiguousarray(np.asarray(matrix).T))
        np.testing.assert_array_equal(np.asarray(pack(matrix)), np.asarray(pack(turned, contracted_axis=1)))


@needs_native
def test_weights_of_another_shape_are_refused():
    x, weight = arrays(4, 64, 32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not packed for this input"):
        jax.block_until_ready(linear(x, Packed(pack(weight), (64,))))


@needs_native
def test_inside_a_loop_and_from_many_threads_at_once():
    """Tasks of one call must never reach another's memory, however late a thread of the pool wakes up."""
    x, weight = arrays(16, 256, 256)
    packed = Packed(pack(weight * jnp.bfloat16(0.05)), weight.shape[1:])

    @jax.jit
    def loop(x):
        return jax.lax.fori_loop(0, 50, lambda _, x: linear(x, packed), x)

    expected = x
    for _ in range(50):
        expected = linear(expected, packed)
    wrong = []

    def work():
        for _ in range(5):
            if not np.array_equal(np.asarray(loop(x)), np.asarray(expected)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_plain_weights_multiply_along_the_public_layout(int8):
    config = tiny_config("qwen3", tie_embeddings=True)
    zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, jnp.bfloat16), weight_specs(config))
    params = place_params(config, zeros, mesh=make_mesh(), dtype="bfloat16")
    x, head = arrays(5, 32, config.vocab_size)
    qkv = arrays(5, 32, 64)[1]
    params["embed"], params["layers"][1]["qkv"] = head.T, qkv.reshape(32, 2, 32)
    ready = prepare(config, params, mesh=make_mesh(), kind=MatmulKind(native=False, int8=int8))
    assert not params
    for matrix, weight, shape in (
        (qkv, ready["layers"][1]["qkv"], (5, 2, 32)),
        (head, ready["unembed"], (5, config.vocab_size)),
    ):
        out = np.asarray(linear(x, weight, jnp.float32), np.float64)
        expected, magnitude = exact(x, matrix)
        assert out.shape == shape
        assert (np.abs(out.reshape(5, -1) - expected) <= (2e-2 if int8 else 1e-6) * magnitude).all()
    assert isinstance(ready["unembed"], Int8 if int8 else Transposed)
    assert ready["layers"][1]["q_norm"].shape == (8,)


def test_where_native_matmuls_are_not_the_config_says_why():
    one, two = make_mesh(), make_mesh(jax.devices()[:2])
    assert choose_kind("xla", None, "bfloat16", one) == MatmulKind(native=False, int8=False)
    assert choose_kind("auto", "int8", "bfloat16", two) == MatmulKind(native=False, int8=True)
    assert choose_kind("auto", None, "float32", one) == MatmulKind(native=False, int8=False, native_experts=True)
    with pytest.raises(ValueError, match="matmul='native': the native matmul runs on one device, not on 2"):
        choose_kind("native", None, "bfloat16", two)
    with pytest.raises(ValueError, match="takes bfloat16, or any type with quantize='int8', not float32"):
        choose_kind("native", None, "float32", one)


def other_params(dtype: str):
    config = tiny_config()
    return params_from_tensors(config, tiny_tensors(config, seed=9), mesh=make_mesh(), dtype=dtype)


def greedy(llm) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return llm.generate([PROMPT], params, progress=False)[0].outputs[0].token_ids


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("dtype", "quantize_"), [nightly("bfloat16", None), ("bfloat16", "int8"), nightly("float32", "int8")]
)
def test_new_weights_are_packed_and_nothing_compiles(dtype, quantize_):
    knobs = {"dtype": dtype, "quantize": quantize_, "debug": True, "matmul": "native", "max_num_seqs": 1}
    with tiny_llm(fail_on_compile=True, **knobs) as llm:
        old = greedy(llm)
        params = other_params(dtype)
        llm.engine.set_weights(params, version=1)
        new = greedy(llm)
        # A training step donates its parameters; the engine must not notice.
        jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params))
        llm.engine.clear_prefix_cache()
        assert greedy(llm) == new != old
        assert llm.engine.stats().compiles_after_warmup == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_int8_over_two_devices_is_int8_on_one():
    knobs = {"quantize": "int8", "max_num_seqs": 1}
    with tiny_llm(matmul="xla", **knobs) as one, tiny_llm(num_devices=2, **knobs) as two:
        scores = [np.array(llm.score(PROMPT)) for llm in (one, two)]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)


@pytest.mark.slow
@pytest.mark.nightly
@needs_native
def test_int8_costs_less_than_two_percent_of_perplexity(smollm2_gguf):
    whole, int8 = (perplexity(smollm2_gguf, quantize, num_tokens=512) for quantize in (None, "int8"))
    print(f"perplexity {whole:.3f}, in int8 {int8:.3f}: {int8 / whole:.4f}")
    assert int8 / whole < 1.02
