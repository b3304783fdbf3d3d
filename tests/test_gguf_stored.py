"""A GGUF file's own bits: a model's arrays in the blocks in which the file has its tensors, and what runs on them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.device import native
from quire.device.blocked import Blocked, Format
from quire.device.linear import choose_kind, linear
from quire.device.mesh import make_mesh
from quire.device.models.weights import join_blocks, join_tensors, load_params, weight_specs
from quire.engine.engine import Engine
from tests.device.test_blocked import check_product
from tests.effort import slow
from tests.test_gguf_file import METADATA, MatmulKind, write
from tests.tiny import tiny_config, tiny_llm, tiny_tensors

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "eos_ids": ()}
"""Inputs in whole blocks, and outputs of which 16 are always of one tensor."""
PROMPTS = [[(7 * i + 3 * k) % 90 + 1 for i in range(5 + 6 * k)] for k in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


def stored_engine(tmp_path, kind: str = "Q4_0", **knobs) -> Engine:
    config = tiny_config(**SIZES)
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config), MatmulKind[kind])
    mesh = make_mesh()
    params = load_params(file.config(), file.read, mesh=mesh, dtype="float32", read_stored=file.read_stored)
    sizes = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return Engine(file.config(), params, EngineConfig(quantize="gguf", **(sizes | knobs)), mesh=mesh)


def tokens_of(outputs) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.mark.parametrize("architecture", ["llama", *sorted(METADATA)])
def test_every_array_is_that_of_the_expanded_file(tmp_path, architecture):
    config = tiny_config(architecture, **SIZES)
    metadata = METADATA.get(architecture, {})
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config), MatmulKind.Q4_1, **metadata)
    specs = weight_specs(config)
    found = 0
    for name, spec in [*specs["layers"][1].items(), ("unembed", specs["unembed"])]:
        if spec.contracted_axis is None or (weight := join_blocks(spec, file.read_stored)) is None:
            continue
        found += 1
        whole = join_tensors(spec, file.read, "float32")
        axis = spec.contracted_axis
        matrix = whole if axis == 1 else whole.reshape(whole.shape[0], -1).T
        x = jnp.asarray(np.random.default_rng(0).standard_normal((3, matrix.shape[1])), jnp.float32)
        got = linear(x, jax.tree.map(jnp.asarray, weight))
        assert got.shape == (3, *(whole.shape[:1] if axis == 1 else whole.shape[1:])), name
        check_product(x, matrix, np.asarray(got, np.float64).reshape(3, -1))
    assert found == 5  # qkv, output, gate_up, down, and the output head


def test_tensors_of_one_array_may_be_stored_each_in_its_own_way(tmp_path):
    config = tiny_config(**SIZES)
    files = {
        kind: write(tmp_path / f"{kind}.gguf", config, tiny_tensors(config), MatmulKind[kind])
        for kind in ("Q4_0", "Q8_0")
    }

    def file_of(tensor):
        return files["Q8_0" if ".v_proj." in tensor.name else "Q4_0"]

    spec = weight_specs(config)["layers"][0]["qkv"]
    weight = join_blocks(spec, lambda tensor: file_of(tensor).read_stored(tensor))
    assert weight is not None
    assert set(np.asarray(weight.formats).tolist()) == {Format.Q4_0, Format.Q8_0}
    whole = join_tensors(spec, lambda tensor: file_of(tensor).read(tensor), "float32")
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64)), jnp.float32)
    got = np.asarray(linear(x, jax.tree.map(jnp.asarray, weight)), np.float64)
    check_product(x, whole.reshape(64, -1).T, got.reshape(3, -1))


def test_what_is_not_in_blocks_that_are_multiplied_is_expanded(tmp_path):
    config = tiny_config(**SIZES)
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config), MatmulKind.Q5_0)
    params = load_params(config, file.read, mesh=make_mesh(), dtype="float32", read_stored=file.read_stored)
    assert not any(
        isinstance(leaf, Blocked) for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Blocked))
    )


def test_a_tensor_of_another_shape_is_named(tmp_path):
    config = tiny_config(**SIZES)
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config), MatmulKind.Q4_0)
    spec = weight_specs(config)["layers"][0]["down"].tensors[0]
    with pytest.raises(ValueError, match=r"down_proj.weight has shape \(64, 96\), the config implies \(64, 128\)"):
        file.read_stored(spec._replace(shape=(64, 128)))


@pytest.mark.parametrize("quantize", ["gguf", slow("int4")])
def test_tokens_are_the_same_alone_batched_chunked_forked_and_preempted(tmp_path, quantize):
    def open_llm(**knobs) -> LLM:
        if quantize == "gguf":
            return LLM.from_engine(stored_engine(tmp_path, **knobs), quiet=True)
        return tiny_llm(tiny_config(**SIZES), quantize="int4", **knobs)

    with open_llm(debug=True) as llm:
        alone = [tokens_of(llm.generate([prompt], GREEDY, progress=False))[0] for prompt in PROMPTS]
        llm.engine.clear_prefix_cache()
        assert tokens_of(llm.generate(PROMPTS, GREEDY, progress=False)) == alone
        forked = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, n=3)
        assert tokens_of(llm.generate(PROMPTS[:1], forked, progress=False)) == [alone[0]] * 3
    with open_llm(debug=True, num_pages=14, max_num_batched_tokens=8, max_rounds=1, preemption="recompute") as llm:
        assert tokens_of(llm.generate(PROMPTS, GREEDY, progress=False)) == alone
        assert llm.engine.stats().preemptions > 0


def test_other_weights_are_refused_and_the_files_go_on(tmp_path):
    with LLM.from_engine(stored_engine(tmp_path), quiet=True) as llm:
        before = tokens_of(llm.generate(PROMPTS, GREEDY, progress=False))
        with pytest.raises(ValueError, match=r"quantize='gguf' computes with the blocks.*quantize=None or 'int4'"):
            llm.set_weights(tiny_tensors(tiny_config(**SIZES), seed=3))
        with pytest.raises(ValueError, match="quantize=None keeps it"):
            _ = llm.params
        llm.engine.clear_prefix_cache()
        assert tokens_of(llm.generate(PROMPTS, GREEDY, progress=False)) == before


def test_int4_takes_other_weights_and_nothing_compiles():
    config = tiny_config(**SIZES)
    with tiny_llm(config, quantize="int4", fail_on_compile=True) as llm:
        old = tokens_of(llm.generate(PROMPTS, GREEDY, progress=False))
        llm.set_weights(tiny_tensors(config, seed=9))
        assert tokens_of(llm.generate(PROMPTS, GREEDY, progress=False)) != old
        assert llm.engine.stats().compiles_after_warmup == 0


def test_where_blocks_cannot_be_multiplied_the_error_says_why(tmp_path):
    one, two = make_mesh(), make_mesh(jax.devices()[:2])
    for quantize in ("int4", "gguf"):
        with pytest.raises(
            ValueError, match=f"quantize='{quantize}' needs the native library: .* one device, not on 2"
        ):
            choose_kind("auto", quantize, "bfloat16", two)
        with pytest.raises(ValueError, match=r"matmul='xla' is without it; take quantize='int8'"):
            choose_kind("xla", quantize, "bfloat16", one)
    with pytest.raises(ValueError, match=r"these came from none: take quantize='int4', or None"):
        tiny_llm(quantize="gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a folder: take quantize='int4'"):
        LLM(tmp_path, quantize="gguf", quiet=True)


@pytest.mark.slow
def test_a_real_file_sleeps_and_wakes_with_its_bits(smollm2_gguf):
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(smollm2_gguf, quantize="gguf", max_num_seqs=1, max_model_len=128, quiet=True) as llm:
        text = llm.generate(["The capital of France is"], params, progress=False)[0].outputs[0].text
        assert text.startswith(" Paris")
        weights = {id(array): array.nbytes for array in jax.tree.leaves(llm.engine.runner.params)}
        assert sum(weights.values()) <= 1.01 * smollm2_gguf.stat().st_size  # a tied head is the embedding itself
        llm.sleep()
        llm.wake()
        again = llm.generate(["The capital of France is"], params, progress=False)[0].outputs[0].text
        assert again == text
