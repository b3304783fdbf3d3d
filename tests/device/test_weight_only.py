"""Weights alone in int8 or int4: how far a product is from the exact one, and that a mesh makes no difference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.device.linear import MatmulKind, Transposed, WeightOnly, choose_kind, convert, linear
from quire.device.mesh import make_mesh
from quire.device.models.weights import abstract_params, params_from_tensors, prepare
from tests.device.test_linear import greedy
from tests.effort import slow
from tests.tiny import check_schema, tiny_config, tiny_llm, tiny_tensors

KINDS = {
    f"{quantize}{' as on accelerators' if input_second else ''}": MatmulKind(
        native=False, int8=False, weight_bits=bits, input_second=input_second
    )
    for quantize, bits in (("int8-weights", 8), ("int4-weights", 4))
    for input_second in (False, True)
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_quantize = pytest.mark.parametrize("quantize", ["int8-weights", "int4-weights"])


def wide_config(**changes):
    """A tiny model whose inputs are whole groups of 128, on one device and on two."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_heads": 8, "num_kv_heads": 2}
    return tiny_config("llama", **(sizes | changes))


def half_steps(matrix: np.ndarray, axis: int, size: int, limit: int) -> np.ndarray:
    """The largest rounding of each number: half of what the largest of its group is worth, over the largest value."""
    inner_last = np.moveaxis(np.abs(matrix), axis, -1)
    largest = inner_last.reshape(*inner_last.shape[:-1], -1, size).max(axis=-1)
    return np.moveaxis(np.repeat(largest / limit / 2, size, axis=-1), -1, axis)


@each_kind
@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [((256, 40), 0, 128), ((192, 2, 24), 0, 64), ((96, 3, 5), 0, 32), ((40, 100), 1, 100)],
    ids=["[in, out]", "[in, n, out]", "groups of 32", "[out, in]"],
)
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_only_the_weights_are_rounded_and_by_half_a_step_at_most(kind, shape, axis, size, dtype):
    rng = np.random.default_rng(0)
    array = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[axis])).reshape(
        [-1 if i == axis else 1 for i in range(len(shape))]
    )
    weight = jnp.asarray(array, dtype)
    x = jnp.asarray(rng.standard_normal((7, shape[axis])), dtype).at[:, 3].set(100)  # an outlier costs nothing
    made = convert(weight, axis, kind)
    got = np.asarray(linear(x, made, jnp.float32), np.float64)

    x64, weight64 = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    is_int4 = kind.weight_bits == 4 and axis == 0
    steps = half_steps(weight64, axis, size if is_int4 else shape[axis], 7 if is_int4 else 127)
    expected = np.tensordot(x64, weight64, (1, axis))
    allowed = np.tensordot(np.abs(x64), steps + 1e-6 * np.abs(weight64), (1, axis))
    assert got.shape == expected.shape
    assert (np.abs(got - expected) <= allowed).all()

    assert isinstance(made, WeightOnly)
    values = made.values.array if isinstance(made.values, Transposed) else made.values
    assert values.dtype == (jnp.int4 if is_int4 else jnp.int8)
    assert made.scale.shape[0] == (shape[0] // size if is_int4 else 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_zeros(bits):
    kind = MatmulKind(native=False, int8=False, weight_bits=bits)
    made = convert(jnp.zeros((64, 3), jnp.bfloat16), 0, kind)
    assert not np.asarray(linear(jnp.ones((2, 64), jnp.bfloat16), made), np.float32).any()


@pytest.mark.slow
def test_two_devices_give_the_tokens_of_one():
    quantize = "int4-weights"
    with (
        tiny_llm(wide_config(), quantize=quantize, max_num_seqs=1) as one,
        tiny_llm(wide_config(), num_devices=2, quantize=quantize, max_num_seqs=1) as two,
    ):
        assert greedy(one) == greedy(two)
        prompt = list(range(1, 20))
        np.testing.assert_allclose(one.score(prompt), two.score(prompt), atol=1e-4)


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_programs_are_traced_for_the_arrays_that_there_are(kind, num_devices, tied):
    # 3 KV heads over 2 and over 4 devices are padded.
    config = wide_config(num_kv_heads=3, num_heads=12, tie_embeddings=tied)
    mesh = make_mesh(jax.devices()[:num_devices])
    ready = prepare(config, params_from_tensors(config, tiny_tensors(config), mesh=mesh), mesh=mesh, kind=kind)
    schema = abstract_params(config, mesh=mesh, dtype="bfloat16", kind=kind)
    check_schema(ready, schema)
    assert ready["embed"].dtype == jnp.bfloat16
    assert ready["unembed"].values.array.dtype == jnp.int8


@pytest.mark.slow
@each_quantize
def test_new_weights_are_quantised_anew_and_are_not_given_back(quantize):
    config = wide_config()
    with tiny_llm(config, quantize=quantize, max_num_seqs=1, fail_on_compile=True) as llm:
        old = greedy(llm)
        params = params_from_tensors(config, tiny_tensors(config, seed=9), mesh=make_mesh(), dtype="float32")
        llm.engine.set_weights(params, version=1)
        new = greedy(llm)
        with pytest.raises(ValueError, match=r"quantised weights are rounded.*quantize=None keeps it"):
            _ = llm.params
    knobs = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_batched_tokens": 32, "quiet": True}
    with LLM.from_params(config, params, quantize=quantize, max_num_seqs=1, **knobs) as fresh:
        assert greedy(fresh) == new != old


@pytest.mark.slow
def test_inputs_that_are_no_whole_groups_are_refused():
    """48 columns of the feed-forward are no multiple of 32; nor are 4 heads of 8 when two devices share them."""
    with pytest.raises(ValueError, match=r"'int4-weights'.* none divides the 48 that each .* of 48; .*'int8-weights'"):
        tiny_llm(quantize="int4-weights")
    config = tiny_config(intermediate_size=64)
    with pytest.raises(ValueError, match="the 16 that each device has of 32"):
        tiny_llm(config, num_devices=2, quantize="int4-weights")
    tiny_llm(config, quantize="int4-weights").close()


@pytest.mark.slow
@each_quantize
def test_a_cpu_runs_them_in_plain_xla_and_says_what_is_faster(quantize):
    one = make_mesh()
    bits = {"int8-weights": 8, "int4-weights": 4}[quantize]
    assert choose_kind("auto", quantize, "bfloat16", one) == MatmulKind(native=False, int8=False, weight_bits=bits)
    with pytest.raises(ValueError, match=f"matmul='native': quantize='{quantize}' leaves activations as they are"):
        choose_kind("native", quantize, "bfloat16", one)
    with tiny_llm(wide_config(), quantize=quantize) as llm:
        assert (
            f"quantize='{quantize}' is for accelerators: on a CPU quantize='int8' has native code"
            in llm.engine.runner.notes
        )


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="quantize"):
        EngineConfig(quantize="int3")
