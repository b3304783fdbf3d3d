"""Weights go out of an engine and into it: in the public layout, or under Hugging Face names."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, ModelConfig, SamplingParams
from quire.checkpoint.load import load_model
from quire.device import native
from quire.device.linear import MatmulKind, convert, restore
from quire.device.mesh import make_mesh
from quire.device.models import ARCHITECTURES
from quire.device.models.tensors import MAX_NAMED
from quire.device.models.weights import (
    arrays_from_tensors,
    check_params,
    params_from_tensors,
    prepare,
    replace_params,
    restore_params,
)
from tests.server.tiny_folder import write_tiny_folder
from tests.tiny import tiny_config, tiny_llm, tiny_params, tiny_tensors

PROMPT = [(5 * i) % 90 + 1 for i in range(21)]
MATMULS = ["xla", *(["native"] if native.unavailable_reason_on(make_mesh()) is None else [])]
FEW = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_rounds": 1}
"""Few and small programs."""
KNOBS = {"dtype": "float32", "page_size": 4, "num_pages": 64, **FEW}


def draw(llm: LLM) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, computed afresh."""
    llm.engine.clear_prefix_cache()
    params = SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=0)
    (out,) = llm.generate([PROMPT], params, progress=False)[0].outputs
    return out.token_ids, [entry.logprob for entry in out.logprobs or ()]


def copied(params):
    """A tree of its own with the same arrays: `prepare` takes it apart."""
    return jax.tree.map(lambda array: array, params)


# -- out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("matmul", MATMULS)
def test_restored_weights_are_those_that_went_in(architecture, tied, matmul):
    """Bit by bit, though they may be packed in between; an odd vocabulary leaves padding behind."""
    config = tiny_config(architecture, tie_embeddings=tied)
    given = tiny_params(config, "bfloat16")
    ready = prepare(config, copied(given), mesh=make_mesh(), kind=MatmulKind(native=matmul == "native", int8=False))
    jax.tree.map(np.testing.assert_array_equal, restore_params(config, ready, mesh=make_mesh()), given)


@pytest.mark.parametrize("shape", [(1, 1), (31, 17), (32, 16), (48, 2, 24), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("matmul", MATMULS)
def test_packing_loses_nothing(shape, axis, matmul):
    if axis == 1:
        shape = (shape[0], int(np.prod(shape[1:])))
    array = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.bfloat16)
    weight = convert(array, axis, MatmulKind(native=matmul == "native", int8=False))
    np.testing.assert_array_equal(restore(weight, axis, shape), array)


@pytest.mark.parametrize("matmul", MATMULS)
def test_int8_does_not_keep_what_it_was_made_from_and_says_so(matmul):
    config = tiny_config()
    ready = prepare(
        config, copied(tiny_params(config)), mesh=make_mesh(), kind=MatmulKind(native=matmul == "native", int8=True)
    )
    with pytest.raises(ValueError, match="quantize=None keeps it"):
        restore_params(config, ready, mesh=make_mesh())


@pytest.mark.slow
def test_params_of_an_llm_are_the_same_model_and_copies():
    """A training step may donate them, and the engine does not notice; nor does it change them."""
    given = tiny_params(tiny_config(), "bfloat16")
    with tiny_llm(dtype="bfloat16", **FEW) as llm:
        assert llm.model_config == tiny_config()
        expected, params = draw(llm), llm.params
        jax.tree.map(np.testing.assert_array_equal, params, given)
        llm.set_weights(params)
        assert draw(llm) == expected
        with LLM.from_params(llm.model_config, llm.params, quiet=True, **KNOBS | {"dtype": "bfloat16"}) as other:
            assert draw(other) == expected
        jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params))
        assert draw(llm) == expected
        kept = llm.params
        llm.set_weights(jax.tree.map(lambda x: x * 2, kept))
        jax.tree.map(np.testing.assert_array_equal, kept, given)
        assert llm.engine.stats().weight_version == 2, "versions are counted unless they are given"
        llm.set_weights(kept, "policy")
        assert llm.engine.stats().weight_version == "policy"


def test_params_stay_where_they_are_on_a_mesh():
    config = tiny_config()
    given = tiny_params(config, "float32", 2)
    mesh = make_mesh(jax.devices()[:2])
    ready = prepare(config, copied(given), mesh=mesh, kind=MatmulKind(native=False, int8=False))
    restored = restore_params(config, ready, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, restored, given)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, given)


# -- in, under Hugging Face names --------------------------------------------------------------------------------


class Foreign:
    """A tensor of another library, of which nothing is known but DLPack."""

    def __init__(self, array: np.ndarray | jax.Array) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, f"torch.{array.dtype}"

    def __dlpack__(self, **how):
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def as_bfloat16(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array, jnp.bfloat16)


KINDS = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "bfloat16": as_bfloat16,
    "float64": np.float64,
    "dlpack": Foreign,
    "dlpack of another device": lambda values: OnAnotherDevice(values),
    "bfloat16 by dlpack": lambda values: Foreign(as_bfloat16(values)),  # numpy reads none
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_replace_weights(architecture, kind):
    config = tiny_config(architecture)
    tensors = {name: KINDS[kind](values) for name, values in tiny_tensors(config, seed=9).items()}
    exact = {name: np.asarray(getattr(value, "_array", value), np.float32) for name, value in tensors.items()}
    expected = params_from_tensors(config, exact, mesh=make_mesh(), dtype="float32")
    plain = MatmulKind(native=False, int8=False)
    ready = prepare(config, copied(tiny_params(config)), mesh=make_mesh(), kind=plain)
    arrays = arrays_from_tensors(config, tensors, dtype="float32")
    replace_params(config, ready, arrays, mesh=make_mesh(), kind=plain)
    jax.tree.map(np.testing.assert_array_equal, restore_params(config, ready, mesh=make_mesh()), expected)


@pytest.mark.slow
def test_an_llm_takes_tensors_under_hugging_face_names():
    config = tiny_config()
    tensors = tiny_tensors(config, seed=9)
    with tiny_llm(config, fail_on_compile=True, **FEW) as llm:
        before = draw(llm)
        llm.set_weights(tensors, version="hf")
        after = draw(llm)
        assert before != after
        assert llm.engine.stats().weight_version == "hf"
        with pytest.raises(ValueError, match=r"1 missing: model\.norm\.weight$"):
            llm.set_weights({name: tensors[name] for name in tensors if name != "model.norm.weight"})
        assert draw(llm) == after, "nothing has changed"
        assert llm.engine.stats().weight_version == "hf"
    with LLM.from_params(config, tensors, quiet=True, **KNOBS) as llm:
        assert llm.engine.config.dtype == "float32"
        assert draw(llm) == after


def test_a_tied_head_may_come_along_if_it_is_the_embedding():
    config = tiny_config(tie_embeddings=True)
    tensors = tiny_tensors(config, seed=9)
    make = partial(params_from_tensors, config, mesh=make_mesh(), dtype="float32")
    expected, embedding = make(tensors), tensors["model.embed_tokens.weight"]
    for head in (embedding, embedding.copy(), jnp.asarray(embedding)):
        jax.tree.map(np.testing.assert_array_equal, make(tensors | {"lm_head.weight": head}), expected)
    with pytest.raises(ValueError, match=r"lm_head.weight is not model.embed_tokens.weight.*tie_embeddings=True"):
        make(tensors | {"lm_head.weight": 2 * embedding})


def test_every_wrong_tensor_is_named():
    config = tiny_config()
    tensors = tiny_tensors(config, seed=9)
    layer = "model.layers.1."
    del tensors["model.norm.weight"], tensors[f"{layer}mlp.down_proj.weight"]
    tensors |= {f"{layer}self_attn.q_norm.weight": np.ones(8), "model.layers.2.mlp.up_proj.weight": np.ones((48, 32))}
    tensors[f"{layer}self_attn.k_proj.weight"] = tensors[f"{layer}self_attn.k_proj.weight"].T
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:96]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)  # beside the weights, in old checkpoints
    with pytest.raises(ValueError, match="these tensors are not those of the model") as error:
        arrays_from_tensors(config, tensors, dtype="float32")
    assert str(error.value).partition(": ")[2] == (
        "2 missing: model.layers.1.mlp.down_proj.weight, model.norm.weight; "
        "2 not part of this model: model.layers.1.self_attn.q_norm.weight, model.layers.2.mlp.up_proj.weight; "
        "2 of another shape: model.layers.1.self_attn.k_proj.weight is [32, 16], expected [16, 32], "
        "lm_head.weight is [96, 32], expected [97, 32]"
    )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "complex64", "<U3"])
def test_what_is_no_weight_is_refused_before_anything_changes(dtype):
    """Integers are those of a quantised model: cast without their scales they would be noise."""
    config = tiny_config()
    tensors = tiny_tensors(config)
    kind = np.dtype(dtype if dtype == "<U3" else jnp.dtype(dtype))
    tensors["model.norm.weight"] = np.zeros(tensors["model.norm.weight"].shape, kind)
    with pytest.raises(ValueError, match=rf"1 of another type than bfloat16, .*: model\.norm\.weight is {dtype}$"):
        arrays_from_tensors(config, tensors, dtype="float32")


class OnAnotherDevice(Foreign):
    """As PyTorch has it: what is not in the host's memory is handed out only after `cpu()`."""

    def cpu(self) -> Foreign:
        return Foreign(self._array)

    def __dlpack__(self, **how):
        raise BufferError("not in the host's memory")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda params: {**params, "nope": jnp.ones(1)}, r"params\['nope'\] is not part of this model"),
        (lambda params: {"nope": 1}, r"params\['nope'\] is not part of this model"),
        (lambda params: {key: params[key] for key in params if key != "norm"}, r"params\['norm'\] is missing"),
    ],
    ids=["one too many", "another tree", "one too few"],
)
def test_params_that_are_not_those_of_the_model_are_named_as_they_were_given(wrong, says):
    params = tiny_params(tiny_config(), "float32")
    with pytest.raises(ValueError, match=says):
        check_params(tiny_config(), wrong(params), dtype="float32")


def test_a_wholly_other_model_is_told_in_bounded_length():
    config = tiny_config(windows=(None,) * 40)
    with pytest.raises(ValueError, match=f"and {40 * 9 + 2 - MAX_NAMED} more") as error:
        LLM.from_params(config, {"model.embed_tokens.weight": np.ones((97, 32), np.float32)}, quiet=True, **KNOBS)
    assert len(str(error.value)) < 2000


def test_a_donated_tensor_is_told_by_name():
    tensors = {name: jnp.asarray(values) for name, values in tiny_tensors(tiny_config()).items()}
    tensors["model.norm.weight"].delete()
    with pytest.raises(ValueError, match=r"model\.norm\.weight is deleted"):
        arrays_from_tensors(tiny_config(), tensors, dtype="float32")


@pytest.mark.parametrize("params", [None, "weights", np.ones(3)], ids=lambda params: type(params).__name__)
def test_what_is_no_mapping_is_told_by_its_type(params):
    with pytest.raises(ValueError, match=f"params is of type {type(params).__name__}: give a dict of arrays"):
        LLM.from_params(tiny_config(), params, quiet=True, **KNOBS)


def test_a_number_in_the_place_of_an_array_is_named():
    params = tiny_params(tiny_config()) | {"embed": 1.0}
    with pytest.raises(ValueError, match=r"params\['embed'\] is of type float: give an array"):
        check_params(tiny_config(), params, dtype="float32")


# -- the shape alone ---------------------------------------------------------------------------------------------


def test_a_config_is_read_from_a_folder_that_has_nothing_else(tmp_path):
    write_tiny_folder(tmp_path / "model")
    expected = load_model(tmp_path / "model", mesh=make_mesh(), dtype="float32").config
    for path in (tmp_path / "model").iterdir():
        if path.name != "config.json":
            path.unlink()
    assert ModelConfig.from_folder(tmp_path / "model") == ModelConfig.from_folder(str(tmp_path / "model")) == expected


def test_what_is_no_folder_of_a_model_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere' is no folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match=r"architecture 'mamba' is not supported; supported are gemma2, gemma3"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(ValueError, match=r"config.json has no model_type"):
        ModelConfig.from_folder(tmp_path)
