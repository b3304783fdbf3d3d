"""gpt-oss in 4 bits: what the numbers are, and that nothing else passes for them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import ModelConfig
from quire.checkpoint.load import load_model
from quire.checkpoint.safetensors_folder import SafetensorsFolder
from quire.device.mesh import make_mesh
from tests.tiny import tiny_tensors

GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 97,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "quantization_config": {"quant_method": "mxfp4"},
}


def write_gpt_oss(folder, change=lambda tensors: None):
    """A folder whose experts are in MXFP4, of random bits; returns all tensors as they are stored."""
    (folder / "config.json").write_text(json.dumps(GPT_OSS))
    rng, tensors = np.random.default_rng(0), tiny_tensors(ModelConfig.from_folder(folder))
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, inner, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inner // 32)
        tensors[f"{name}_blocks"] = rng.integers(256, size=(*shape, 16), dtype=np.uint8)
        tensors[f"{name}_scales"] = rng.integers(100, 140, size=shape, dtype=np.uint8)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_experts_in_mxfp4_are_expanded(tmp_path):
    stored, name = write_gpt_oss(tmp_path), "model.layers.1.mlp.experts.down_proj"
    with SafetensorsFolder(tmp_path) as folder:
        got = folder.tensor(name)
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    assert got.shape == (6, 64, 32)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for expert, inner, output in np.random.default_rng(1).integers((6, 64, 32), size=(500, 3)):
        byte = int(blocks[expert, output, inner // 32, inner % 32 // 2])
        bits = byte >> 4 if inner % 2 else byte & 15
        value = magnitudes[bits & 7] * (-1) ** (bits >> 3) * 2.0 ** (int(scales[expert, output, inner // 32]) - 127)
        assert float(got[expert, inner, output]) == value


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        ("blocks", lambda array: array[..., :8].copy(), "16 bytes in a block"),
        ("scales", lambda array: array[:, :1].copy(), "and a scale for each"),
        ("blocks", lambda array: array.astype(np.float32), "has type F32; supported are U8"),
        ("blocks", lambda array: array[:, :1].copy(), "and a scale for each"),
    ],
)
def test_mxfp4_that_is_none_is_refused(tmp_path, end, change, message):
    name = f"model.layers.0.mlp.experts.gate_up_proj_{end}"
    write_gpt_oss(tmp_path, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, mesh=make_mesh(), dtype="float32")


def test_a_block_without_scales_is_named(tmp_path):
    write_gpt_oss(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_scales"))
    with pytest.raises(ValueError, match=r"no tensor 'model\.layers\.0\.mlp\.experts\.down_proj_scales'"):
        load_model(tmp_path, mesh=make_mesh(), dtype="float32")
