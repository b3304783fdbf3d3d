"""Model files are strangers: a broken or hostile one is a clean ValueError, at once, and runs nothing."""

import ast
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quire.checkpoint.gguf_file import GgufFile
from quire.checkpoint.load import find_model, load_model
from quire.checkpoint.safetensors_folder import SafetensorsFolder, config_of_folder
from quire.device.mesh import make_mesh
from quire.device.models import ARCHITECTURES
from tests.tiny import tiny_config, tiny_tensors

SRC = Path(__file__).resolve().parents[1] / "src"

HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def folder(tmp_path):
    save_file(tiny_tensors(tiny_config()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    return tmp_path


def load(path):
    return load_model(path, mesh=make_mesh(), dtype="float32")


def small_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.strings", ["one", "", "three"])
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_good_folder_loads(folder):
    loaded = load(folder)
    assert loaded.config.num_layers == 2
    assert loaded.tokenizer is None


@pytest.mark.parametrize("field", sorted(HF_CONFIG))
@pytest.mark.parametrize("value", [-1, 0, 1 << 31, 1 << 63, float("nan"), float("inf"), True, "8", [], None], ids=repr)
def test_a_hostile_config_is_refused(folder, field, value):
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | {field: value}))
    if value is None and field in ("head_dim", "rms_norm_eps"):
        load(folder)  # absent: 32 / 4 heads, and the usual eps
    else:
        with pytest.raises(ValueError, match=r"config\.json|must be|not supported|multiple|the config implies"):
            load(folder)


@pytest.mark.parametrize(
    "more",
    [
        {"rope_parameters": []},
        {"rope_parameters": ""},
        {"rope_scaling": 5},
        {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2}},
        {"rope_theta": "x"},
        {"tie_word_embeddings": "false"},
        {"eos_token_id": 97},
        {"eos_token_id": [1 << 40]},
        {"eos_token_id": -77},
        {"eos_token_id": "x"},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"model_type": "qwen2", "layer_types": 5},
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        {"model_type": "qwen2", "max_window_layers": "x"},
        {"model_type": "mistral", "sliding_window": -3},
        {"num_attention_heads": 1 << 24, "num_key_value_heads": 1 << 24, "head_dim": 1 << 10},
        {"num_attention_heads": 1 << 20, "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_a_hostile_optional_field_is_refused(folder, more):
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | more))
    with pytest.raises(ValueError, match=r"config\.json|must be|not supported|multiple|the config implies|no tensor"):
        load(folder)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    "more",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "beta_fast": "x"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "mscale": 1}},
        {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 3, "original_max_position_embeddings": 8}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": "1234", "original_max_position_embeddings": 8}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 4, "original_max_position_embeddings": 1}},
        {"partial_rotary_factor": "x"},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 0.01},
        {"partial_rotary_factor": 0.4},
        {"model_type": "gemma3", "text_config": 5},
        {"model_type": "gemma3_text", "query_pre_attn_scalar": 0},
        {"model_type": "gemma3_text", "sliding_window_pattern": 0},
        {"model_type": "gemma3_text", "sliding_window": "x"},
        {"model_type": "gemma3_text", "layer_types": ["full_attention", 5]},
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 5}},
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        {"model_type": "gemma2", "attn_logit_softcapping": -1},
        {"model_type": "gemma2", "final_logit_softcapping": "x"},
        {"model_type": "gemma4", "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0},
        {"model_type": "gemma4", "per_layer_config": {"1": 5}, "hidden_size_per_layer_input": 0},
        {"model_type": "gemma4", "global_head_dim": -2, "hidden_size_per_layer_input": 0},
        EXPERTS | {"num_hidden_layers": 4096, "num_experts": 4096},
        EXPERTS | {"mlp_only_layers": [0] * 3},
        EXPERTS | {"decoder_sparse_step": 0},
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 1.0},
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": False},
        {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 5},
        {"model_type": "olmo3", "sliding_window": 4, "rope_parameters": {"rope_type": "linear", "factor": 2}},
        {"model_type": "granite", "residual_multiplier": -1},
        {"model_type": "granite", "logits_scaling": "x"},
        {"model_type": "granite", "attention_multiplier": float("inf")},
        {"model_type": "smollm3", "no_rope_layers": [1]},
        {"model_type": "smollm3", "no_rope_layers": ["x", "y"]},
        {"model_type": "smollm3", "no_rope_layer_interval": 0},
    ],
    ids=str,
)
def test_a_hostile_field_of_an_architecture_is_refused_before_any_tensor_is_looked_for(folder, more):
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | more))
    with pytest.raises(ValueError, match=r"must be|not supported|rope factors for"):
        config_of_folder(folder)


@pytest.mark.parametrize("weight_map", [[], None, 5])
def test_an_index_without_a_map_is_refused(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="weight_map must be an object"):
        load(folder)


def test_errors_name_the_file_and_not_where_it_lies(tmp_path):
    with pytest.raises(ValueError, match=r"none\.gguf") as caught:
        GgufFile(tmp_path / "secret-place" / "none.gguf")
    assert "secret-place" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"', "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load(folder)


def test_a_folder_with_code_is_never_imported(folder):
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    (folder / "config.json").write_text(
        json.dumps(HF_CONFIG | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}, "trust_remote_code": True})
    )
    load(folder)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | {"model_type": "evil"}))
    supported = ", ".join(sorted(ARCHITECTURES))
    with pytest.raises(ValueError, match=f"'evil' is not supported; supported are {supported}"):
        load(folder)


def test_a_tensor_of_the_wrong_shape_or_missing_is_named(folder):
    tensors = tiny_tensors(tiny_config())
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(31,\), the config implies \(32,\)"):
        load(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor 'model\.norm\.weight'"):
        load(folder)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=9))
def test_a_mangled_safetensors_header_is_a_clean_error(tmp_path_factory, at, junk):
    folder = tmp_path_factory.mktemp("mangled")
    path = folder / "model.safetensors"
    save_file({"a": np.zeros((4, 4), np.float32), "b": np.ones(3, np.float16)}, path)
    data = bytearray(path.read_bytes())
    at = min(at, len(data) - 1)
    data[at : at + len(junk)] = junk
    path.write_bytes(data)
    try:
        with SafetensorsFolder(folder) as weights:
            for name in ("a", "b"):
                assert weights.tensor(name).nbytes <= len(data)
    except ValueError:
        pass


@pytest.mark.parametrize("length", [0, 2, 1 << 40, (1 << 64) - 1])
def test_a_safetensors_header_of_absurd_length_is_refused(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ValueError, match=r"not a safetensors file|no tensor"), SafetensorsFolder(tmp_path) as weights:
        weights.tensor("a")


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 700),
    st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 8), st.just(b"\0" * 7 + b"\x7f")),
)
def test_a_mangled_gguf_header_is_a_clean_error(tmp_path_factory, at, junk):
    path = tmp_path_factory.mktemp("mangled") / "model.gguf"
    data = bytearray(small_gguf(path))
    at = min(at, len(data) - 1)
    data[at : at + len(junk)] = junk
    path.write_bytes(data)
    try:
        file = GgufFile(path)
        assert file.tensor("token_embd.weight").nbytes <= 4 * len(data)
    except ValueError:
        pass


@pytest.mark.parametrize("size", [0, 3, 4, 20, 100, 300])
def test_a_truncated_gguf_is_a_clean_error(tmp_path, size):
    path = tmp_path / "model.gguf"
    data = small_gguf(path)
    path.write_bytes(data[:size])
    with pytest.raises(ValueError, match="model"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("nowhere", "does not exist; give a folder, a GGUF file or a name on the hub"),
        ("no/such.gguf", "does not exist"),
        ("./nofolder", "does not exist"),
        ("org/name@../../x", "must be a commit"),
        ("org/name@", "must be a commit"),
        ("https://example.org/model", "does not exist"),
        ("a/b/c", "does not exist"),
    ],
)
def test_what_is_no_model_is_refused_with_what_would_be(model, match):
    with pytest.raises(ValueError, match=match):
        find_model(model)


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {
    "pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch", "yaml", "pty",
}  # fmt: skip
FORBIDDEN_METHODS = {
    "os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load", "builtins.eval", "builtins.exec",
    "asyncio.create_subprocess_shell", "asyncio.create_subprocess_exec",
}  # fmt: skip
FORBIDDEN_PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn")


def code_from_bytes(source: str) -> list[str]:
    """What in a file turns bytes into code, or runs another program."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            names = [ast.unparse(node.func)]
            if names[0] in FORBIDDEN_CALLS or names[0] in FORBIDDEN_METHODS:
                found.append(names[0])
            found += [f"{keyword.arg}=..." for keyword in node.keywords if keyword.arg in ("shell", "allow_pickle")]
            continue
        else:
            continue
        found += [name for name in names if name in FORBIDDEN_MODULES or name.split(".")[0] in FORBIDDEN_MODULES]
        found += [name for name in names if name in FORBIDDEN_METHODS or name.startswith(FORBIDDEN_PREFIXES)]
    return found


def test_nothing_in_the_source_turns_bytes_into_code():
    found = {path.name: bad for path in SRC.rglob("*.py") if (bad := code_from_bytes(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import dill as d", "import marshal", "eval('1')", "exec(x)",
        "compile(x, '', 'exec')", "import torch\ntorch.load(x)", "from yaml import load", "import os\nos.system('x')",
        "from os import system", "run('x', shell=True)", "np.load(x, allow_pickle=True)",
        "def f():\n    import cloudpickle", "from os import execv", "__import__('x')",
    ],
)  # fmt: skip
def test_such_source_would_be_found(source):
    assert code_from_bytes(source)
