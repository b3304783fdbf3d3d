"""Each token meets its own experts and no other, nobody's rows cost nothing, and devices share the experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.config import ExpertsConfig
from quire.device import native
from quire.device.attention import get_backend
from quire.device.linear import (
    Int8,
    MatmulKind,
    Mxfp4,
    Packed,
    WeightOnly,
    convert,
    convert_spec,
    grouped_linear,
    pack,
    quantize,
    restore,
)
from quire.device.mesh import ArraySpec, make_mesh, place
from quire.device.models import experts
from quire.device.models.experts import mixture, route
from quire.device.models.layers import ModelStatics
from quire.device.models.weights import params_from_tensors
from tests.effort import each_float_isa, each_isa, examples, nightly, slow
from tests.tiny import check_schema, tiny_config, tiny_llm, tiny_tensors

needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
PLAIN = MatmulKind(native=False, int8=False)


@st.composite
def grouped(draw) -> tuple[list[int], int, int, int]:
    """Sizes of groups (many are empty, one may have all), rows behind them, inner and outer size."""
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=1, max_size=9))
    if draw(st.booleans()):
        only = draw(st.integers(0, len(sizes) - 1))
        sizes = [draw(st.sampled_from([1, 70])) if i == only else 0 for i in range(len(sizes))]
    return sizes, draw(st.integers(0, 5)), draw(st.integers(1, 150)), draw(st.integers(1, 70))


def arrays(sizes: list[int], behind: int, inner: int, columns: int, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows, matrices and sizes. Whoever reads a row behind the groups, or the matrix of an empty group, gets NaN."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sum(sizes) + behind, inner))
    weight = rng.standard_normal((len(sizes), inner, columns))
    x[sum(sizes) :] = np.nan
    weight[np.array(sizes) == 0] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype), jnp.asarray(sizes, jnp.int32)


def by_group(x: jax.Array, weight: jax.Array, sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Every group's product in float64, and how large the sum of its magnitudes is."""
    ends = np.cumsum(sizes)
    parts = [(np.asarray(x[end - n : end], np.float64), w) for end, n, w in zip(ends, sizes, weight, strict=True) if n]
    wide = [(rows, np.asarray(w, np.float64)) for rows, w in parts]
    empty = [np.zeros((0, weight.shape[2]))]
    return (
        np.concatenate([rows @ w for rows, w in wide] + empty),
        np.concatenate([np.abs(rows) @ np.abs(w) for rows, w in wide] + empty),
    )


@needs_native
@each_float_isa
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@examples(9)
@given(case=grouped())
def test_native_rows_meet_the_matrix_of_their_group(isa, dtype, case):
    sizes, *_ = case
    x, weight, group_sizes = arrays(*case, dtype)
    got = np.asarray(grouped_linear(x, Packed(pack(weight, 1), weight.shape[2:]), group_sizes, isa), np.float64)
    expected, magnitude = by_group(x, weight, sizes)
    rounding = np.abs(expected) * 2**-8 if dtype == jnp.bfloat16 else 0
    assert (np.abs(got[: sum(sizes)] - expected) <= 1e-6 * magnitude + rounding).all()
    assert not got[sum(sizes) :].any(), "rows behind the groups are zeros"


@needs_native
@each_isa
@examples(9)
@given(case=grouped(), wide=st.booleans())
def test_native_int8_is_that_of_each_matrix_alone(isa, case, wide):
    from quire.device.linear import linear

    sizes, *_ = case
    x, weight, group_sizes = arrays(*case, jnp.float32 if wide else jnp.bfloat16)
    values, scale = quantize(jnp.nan_to_num(weight), axis=1)
    scale = jnp.where((group_sizes == 0)[:, None], jnp.nan, scale)
    got = np.asarray(grouped_linear(x, Int8(pack(values, 1), scale, packed=True), group_sizes, isa), np.float32)
    for i, end in enumerate(np.cumsum(sizes)):
        alone = linear(x[end - sizes[i] : end], Int8(pack(values[i]), scale[i], packed=True), instruction_set=isa)
        np.testing.assert_array_equal(got[end - sizes[i] : end], np.asarray(alone, np.float32))
    assert not got[sum(sizes) :].any()


def round_to_mxfp4(weight: np.ndarray) -> np.ndarray:
    """The nearest in MXFP4 to matrices `[..., in, out]`, one weight at a time: 32 along the input share a scale."""
    magnitudes, rounded = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), np.zeros_like(weight)
    for *where, output in np.ndindex(*weight.shape[:-2], weight.shape[-1]):
        for start in range(0, weight.shape[-2], 32):
            place = (*where, slice(start, start + 32), output)
            block = weight[place]
            if block.any():
                scale = 2.0 ** (np.floor(np.log2(np.abs(block).max())) - 2)
                nearest = np.abs(np.abs(block)[:, None] / scale - magnitudes).argmin(axis=1)
                rounded[place] = np.sign(block) * magnitudes[nearest] * scale
    return rounded


MXFP4 = MatmulKind(native=False, int8=False, mxfp4_experts=True)


@pytest.mark.slow
@needs_native
@each_float_isa
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@examples(4, daily=2)
@given(case=grouped())
def test_experts_in_mxfp4_are_multiplied_as_if_they_were_expanded(isa, dtype, case):
    """In the native library bit by bit, in XLA as it rounds."""
    sizes, *_ = case
    x, weight, group_sizes = arrays(*case, jnp.float32)
    weight = jnp.asarray(round_to_mxfp4(np.nan_to_num(np.asarray(weight))), dtype)
    x = x.astype(dtype)
    packed = convert(weight, 1, dataclasses.replace(MXFP4, native_experts=True))
    assert isinstance(packed, Mxfp4)
    assert packed.packed
    got = np.asarray(grouped_linear(x, packed, group_sizes, isa), np.float64)
    expanded = grouped_linear(x, Packed(pack(weight, 1), weight.shape[2:]), group_sizes, isa)
    np.testing.assert_array_equal(got, np.asarray(expanded, np.float64))
    plain = np.asarray(grouped_linear(x, convert(weight, 1, MXFP4), group_sizes), np.float64)
    _, magnitude = by_group(x, weight, sizes)
    limit = (1e-6 if dtype == jnp.float32 else 2**-7) * magnitude
    assert (np.abs(plain - got)[: sum(sizes)] <= limit).all()


def test_other_weights_are_rounded_to_the_nearest_in_mxfp4():
    weight = np.random.default_rng(3).standard_normal((2, 70, 9)).astype(np.float32)
    weight[0, :32, 1], weight[1, 40, 2] = 0, 1e-30
    one_row_each = jnp.eye(70, dtype=jnp.float32)
    for expert in range(2):
        sizes = jnp.asarray([70, 0] if expert == 0 else [0, 70], jnp.int32)
        got = grouped_linear(one_row_each, convert(jnp.asarray(weight), 1, MXFP4), sizes)
        np.testing.assert_array_equal(np.asarray(got), round_to_mxfp4(weight)[expert])


@needs_native
@pytest.mark.parametrize("native_experts", [False, True])
def test_the_shapes_of_mxfp4_are_known_without_weights(native_experts):
    kind, array = dataclasses.replace(MXFP4, native_experts=native_experts), jnp.ones((4, 70, 37), jnp.bfloat16)
    mesh = make_mesh()
    placed = place(mesh, array, "experts", None, None)
    spec = convert_spec(ArraySpec(array.shape, array.dtype, ("experts", None, None)), 1, kind, mesh)
    schema = jax.tree.map(lambda one: one.on(mesh), spec, is_leaf=lambda x: isinstance(x, ArraySpec))
    check_schema(convert(placed, 1, kind), schema)


@needs_native
@each_float_isa
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_rows_of_its_group(isa, dtype):
    x, weight, _ = arrays([70], 0, 130, 100, dtype)
    packed = Packed(pack(weight, 1), (100,))
    whole = np.asarray(grouped_linear(x, packed, jnp.array([70], jnp.int32), isa))
    for first, count in ((0, 1), (3, 17), (5, 33)):
        part = grouped_linear(x[first : first + count], packed, jnp.array([count], jnp.int32), isa)
        np.testing.assert_array_equal(np.asarray(part), whole[first : first + count])


@needs_native
@pytest.mark.parametrize(("sizes", "message"), [([2, -1], "negative"), ([3, 4], "more rows than there are")])
def test_groups_that_cannot_be_are_refused(sizes, message):
    x, weight, _ = arrays([3, 3], 0, 8, 16, jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(grouped_linear(x, Packed(pack(weight, 1), (16,)), jnp.array(sizes, jnp.int32)))


@pytest.mark.parametrize("bits", [8, None])
def test_without_the_library_int8_has_the_same_meaning(bits):
    """Two terms for each activation, or the weights alone: each but for the rounding of the weights."""
    sizes = [3, 0, 5]
    x, weight, group_sizes = arrays(sizes, 2, 96, 20, jnp.float32)
    weight = jnp.nan_to_num(weight)  # stock XLA on a CPU multiplies every expert
    values, scale = quantize(weight, axis=1)
    kind = WeightOnly(values, scale[:, None]) if bits else Int8(values, scale, packed=False)
    expected, magnitude = by_group(x, values.astype(jnp.float32) * scale[:, None], sizes)
    got = np.asarray(grouped_linear(jnp.nan_to_num(x), kind, group_sizes))[: sum(sizes)]
    assert (np.abs(got - expected) <= magnitude * (1e-6 if bits else 1e-3)).all()


@pytest.mark.parametrize(
    "kind",
    [PLAIN, pytest.param(MatmulKind(native=True, int8=False, native_experts=True), marks=needs_native)],
    ids=["plain", "native"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_matrices_of_experts_come_back_bit_by_bit(kind, dtype):
    _, weight, _ = arrays([1, 1, 1], 0, 37, 21, dtype)
    array = place(make_mesh(), weight, "experts", None, None)
    np.testing.assert_array_equal(np.asarray(restore(convert(array, 1, kind), 1, array.shape)), np.asarray(weight))


# -- routing -----------------------------------------------------------------------------------------------------


def plain_mixture(x: np.ndarray, weights: dict[str, np.ndarray], config: ExpertsConfig) -> np.ndarray:
    """Token by token, in float64."""
    out, wide = np.zeros(x.shape), {name: np.asarray(w, np.float64) for name, w in weights.items()}
    for t, token in enumerate(np.asarray(x, np.float64)):
        scores = np.exp(wide["router"] @ token)
        best = np.argsort(-scores, kind="stable")[: config.num_experts_per_token]
        shares = scores[best] / (scores[best].sum() if config.normalize_weights else scores.sum())
        for share, e in zip(shares, best, strict=True):
            gate, up = np.split(token @ wide["experts_gate_up"][e], 2)
            out[t] += share * (gate / (1 + np.exp(-gate)) * up) @ wide["experts_down"][e]
    return out


def layer(config: ExpertsConfig, width: int = 32) -> dict[str, jax.Array]:
    rng, E, F = np.random.default_rng(1), config.num_experts, config.intermediate_size
    shapes = {"router": (E, width), "experts_gate_up": (E, width, 2 * F), "experts_down": (E, F, width)}
    return {name: jnp.asarray(rng.standard_normal(s) / np.sqrt(s[1]), jnp.float32) for name, s in shapes.items()}


def run(x, weights, is_token, config: ExpertsConfig, *, num_devices: int = 1, expert: int = 1, kind=PLAIN):
    mesh = make_mesh(jax.devices()[:num_devices], expert=expert)
    statics = ModelStatics(tiny_config("qwen3_moe", experts=config), get_backend("xla"), mesh)
    placed = {"router": place(mesh, weights["router"], None, None)}
    for name in ("experts_gate_up", "experts_down"):
        placed[name] = convert(place(mesh, weights[name], "experts", None, None), 1, kind)
    return jax.jit(mixture, static_argnums=3)(placed, x, is_token, statics)


NATIVE = MatmulKind(native=False, int8=False, native_experts=True)


@pytest.mark.parametrize("normalize", [slow(False), True])
@pytest.mark.parametrize(
    ("num_devices", "expert", "kind"),
    [
        (1, 1, PLAIN),
        pytest.param(1, 1, NATIVE, marks=needs_native),
        slow(4, 1, PLAIN),
        slow(4, 4, PLAIN),
        (4, 2, PLAIN),
    ],
)
def test_a_token_is_the_weighted_sum_of_its_experts(num_devices, expert, kind, normalize):
    config = ExpertsConfig(num_experts=8, num_experts_per_token=3, intermediate_size=24, normalize_weights=normalize)
    weights = layer(config)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((13, 32)), jnp.float32)
    got = run(x, weights, jnp.ones(13, bool), config, num_devices=num_devices, expert=expert, kind=kind)
    np.testing.assert_allclose(np.asarray(got), plain_mixture(x, weights, config), atol=2e-6)


@needs_native
def test_padding_and_experts_that_nobody_takes_are_never_looked_at():
    config = ExpertsConfig(num_experts=8, num_experts_per_token=2, intermediate_size=24)
    weights = layer(config)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 32)), jnp.float32)
    taken = np.unique(np.asarray(route(x, weights["router"], config)[1])[:3])
    assert len(taken) < 8
    unused = jnp.asarray(~np.isin(np.arange(8), taken))[:, None, None]
    poisoned = weights | {
        name: jnp.where(unused, jnp.nan, weights[name]) for name in ("experts_gate_up", "experts_down")
    }
    is_token = jnp.arange(4) < 3
    got = np.asarray(run(x.at[3].set(jnp.nan), poisoned, is_token, config, kind=NATIVE))
    np.testing.assert_array_equal(got[:3], np.asarray(run(x, weights, is_token, config, kind=NATIVE))[:3])
    assert not got[3].any(), "what is added to padding is zeros"


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("architecture", [nightly("mixtral"), "gpt_oss"])
def test_flops_are_those_of_the_tokens_that_are_routed(architecture, monkeypatch):
    """Rows that the library multiplies, counted over a prompt in chunks and decode steps with rows that end early."""
    counted = []

    def counting(x, weight, group_sizes):
        assert isinstance(weight, Packed), "the library multiplies in float32, too"
        jax.debug.callback(lambda sizes: counted.append(int(sizes.sum())), group_sizes)
        return grouped_linear(x, weight, group_sizes)

    monkeypatch.setattr(experts, "grouped_linear", counting)
    config = dataclasses.replace(tiny_config(architecture), eos_ids=())
    lengths = [3, 7, 21]
    with tiny_llm(config, max_rounds=4) as llm:
        counted.clear()
        params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
        llm.generate([[5] * n for n in lengths], params, progress=False)
        jax.effects_barrier()
    assert config.experts is not None
    tokens = sum(lengths) + sum(n - 1 for n in lengths)
    assert sum(counted) == tokens * config.experts.num_experts_per_token * 2 * config.num_layers


# -- the engine --------------------------------------------------------------------------------------------------

PROMPTS = [[(7 * i + j) % 90 + 1 for i in range(5 + 9 * j)] for j in range(4)]


def greedy(llm) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "num_devices"), [nightly("mixtral", 4), ("olmoe", 2)])
def test_tokens_are_the_same_on_any_number_of_devices(architecture, num_devices):
    """Six experts are padded to eight where four devices share them."""
    config = tiny_config(architecture)
    with tiny_llm(config, max_rounds=1) as llm:
        alone = greedy(llm)
    with tiny_llm(config, num_devices, max_rounds=1) as llm:
        assert greedy(llm) == alone


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, nightly(2)])
def test_gpt_oss_says_the_same_with_its_experts_in_4_bits(num_devices):
    config, mesh = tiny_config("gpt_oss"), make_mesh(jax.devices()[:num_devices])
    tensors = {
        name: round_to_mxfp4(array) if array.ndim == 3 else array for name, array in tiny_tensors(config).items()
    }
    said = []
    for kept in (None, "mxfp4"):
        params = params_from_tensors(config, tensors, mesh=mesh, dtype="float32")
        knobs = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_batched_tokens": 32, "max_rounds": 1}
        with LLM.from_params(config, params, mesh=mesh, quantize=kept, quiet=True, max_num_seqs=4, **knobs) as llm:
            said.append(greedy(llm))
            if kept:
                with pytest.raises(ValueError, match="quantize=None keeps it"):
                    _ = llm.params
    assert said[0] == said[1]


def test_mxfp4_is_refused_where_there_are_no_experts():
    with pytest.raises(ValueError, match="quantize='mxfp4' is for mixtures of experts, and llama has none"):
        tiny_llm(quantize="mxfp4")
