"""GGUF weights: every quantisation against a reading of its own, names and rotary order against the same model as
safetensors."""

import gguf
import jax
import numpy as np
import pytest

from quire.checkpoint.gguf_file import MAX_ENTRIES, SUPPORTED, GgufFile, _StrictReader
from quire.config import RopeScaling, RotaryConfig
from quire.device.mesh import make_mesh
from quire.device.models import ARCHITECTURES
from quire.device.models.layers import rotary_frequencies
from quire.device.models.weights import load_params, params_from_tensors, weight_specs
from tests.tiny import tiny_config, tiny_tensors

MatmulKind = gguf.GGMLQuantizationType


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does: halves become pairs."""
    head = values.shape[0] // num_heads
    return values.reshape(num_heads, 2, head // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def tensor_specs(config):
    """Every tensor of a model, by its Hugging Face name."""
    specs = [tensor for spec in jax.tree.leaves(weight_specs(config)) for tensor in spec.tensors]
    assert len({tensor.name for tensor in specs}) == len({tensor.gguf_name for tensor in specs}) == len(specs)
    return {tensor.name: tensor for tensor in specs}


def write(path, config, tensors, kind=MatmulKind.F32, **metadata):
    attention, specs = config.attention[0], tensor_specs(config)
    writer = gguf.GGUFWriter(path, config.architecture)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(attention.rotary.theta)
    for key, value in metadata.items():
        writer.add_uint32(f"{config.architecture}.{key}", value)
    for name, values in tensors.items():
        if name not in ("rope_freqs.weight",):
            if ".q_proj." in name or ".k_proj." in name:
                values = permute(values, attention.num_heads if ".q_proj." in name else attention.num_kv_heads)
            name = specs[name].gguf_name
        if kind is MatmulKind.F32 or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def test_the_same_model_as_safetensors(tmp_path):
    config = tiny_config(eos_ids=())
    tensors = tiny_tensors(config)
    file = write(tmp_path / "model.gguf", config, tensors)
    assert file.config() == tiny_config(eos_ids=(), norm_eps=float(np.float32(config.norm_eps)))
    mesh = make_mesh()
    ours = load_params(file.config(), file.read, mesh=mesh, dtype="float32")
    theirs = params_from_tensors(config, tensors, mesh=mesh, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("F16", 1e-3), ("BF16", 4e-3), ("Q8_0", 5e-3), ("Q4_0", 0.13), ("Q4_1", 0.07), ("Q5_0", 0.05), ("Q5_1", 0.04)],
)
def test_a_quantised_tensor_is_close_to_what_went_in(tmp_path, kind, error):
    config = tiny_config(hidden_size=64, intermediate_size=64, eos_ids=())
    tensors = tiny_tensors(config)
    file = write(tmp_path / "model.gguf", config, tensors, MatmulKind[kind])
    for name, values in tensors.items():
        if values.ndim == 2:
            got = file.read(tensor_specs(config)[name])
            assert np.abs(got - values).max() < error * np.abs(values).max(), name


# The K quantisations, read one value at a time from the format's own description: 256 values in a super-block.


def scale_min(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (
        (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4),
        (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4),
    )


def read_q4_k(block: bytes) -> list[float]:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    out = []
    for i in range(256):
        scale, minimum = scale_min(block[4:16], i // 32)
        byte = block[16 + 32 * (i // 64) + i % 32]
        out.append(d * scale * (byte >> 4 if i % 64 >= 32 else byte & 15) - dmin * minimum)
    return out


def read_q5_k(block: bytes) -> list[float]:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float64)
    out = []
    for i in range(256):
        scale, minimum = scale_min(block[4:16], i // 32)
        high = (block[16 + i % 32] >> (i // 32)) & 1
        byte = block[48 + 32 * (i // 64) + i % 32]
        out.append(d * scale * ((byte >> 4 if i % 64 >= 32 else byte & 15) + 16 * high) - dmin * minimum)
    return out


def read_q6_k(block: bytes) -> list[float]:
    (d,) = np.frombuffer(block[208:210], np.float16).astype(np.float64)
    scales = np.frombuffer(block[192:208], np.int8)
    out = []
    for i in range(256):
        half, within = divmod(i, 128)
        low = block[64 * half + within % 64]
        low = low >> 4 if within >= 64 else low & 15
        high = (block[128 + 32 * half + within % 32] >> (2 * (within // 32))) & 3
        out.append(d * int(scales[i // 16]) * ((low | high << 4) - 32))
    return out


@pytest.mark.parametrize(
    ("kind", "size", "read", "halves"),
    [("Q4_K", 144, read_q4_k, [0, 2]), ("Q5_K", 176, read_q5_k, [0, 2]), ("Q6_K", 210, read_q6_k, [208])],
)
def test_k_quantisations_against_their_description(tmp_path, kind, size, read, halves):
    rng = np.random.default_rng(3)
    rows, columns = 4, 512
    data = rng.integers(0, 256, size=(rows, columns // 256 * size), dtype=np.uint8)
    for row in range(rows):
        for start in range(0, data.shape[1], size):
            for at in halves:  # the super-block's scales are sane half-precision numbers
                data[row, start + at : start + at + 2] = np.frombuffer(
                    np.float16(rng.uniform(0.01, 0.1)).tobytes(), np.uint8
                )
    config = tiny_config(hidden_size=columns, vocab_size=rows, num_heads=64, num_kv_heads=64, head_dim=8)
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
    writer.add_context_length(8)
    writer.add_embedding_length(columns)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", data, raw_dtype=MatmulKind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GgufFile(path).tensor("token_embd.weight")
    assert values.shape == (config.vocab_size, columns)
    expected = [
        [v for b in range(columns // 256) for v in read(data[r, b * size : (b + 1) * size].tobytes())]
        for r in range(rows)
    ]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("endian", gguf.GGUFEndian)
def test_arrays_of_metadata_are_read_as_the_package_reads_them(tmp_path, endian):
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama", endianess=endian)
    arrays = {
        "strings": ["a", "", "größer", "x" * 300],
        "ints": [1, -2, 3],
        "floats": [0.5, 2.0],
        "flags": [True, False],
    }
    for name, values in arrays.items():
        writer.add_array(name, values)
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_uint32("after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = _StrictReader(path), gguf.GGUFReader(path)
    assert ours.fields.keys() == theirs.fields.keys()
    for name, field in theirs.fields.items():
        found = ours.fields[name]
        assert (found.contents(), found.types) == (field.contents(), field.types), name
        assert len(found.data) == len(field.data), name
    for name, values in arrays.items():
        assert ours.fields[name].contents() == values


def test_a_long_array_of_metadata_is_refused(tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
    writer.add_array("zeros", bytes(MAX_ENTRIES + 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"arrays of 4194305 entries in all; at most 4194304 are allowed"):
        GgufFile(path)


def test_an_unsupported_quantisation_is_named(tmp_path):
    config = tiny_config(hidden_size=256, eos_ids=())
    file = write(tmp_path / "model.gguf", config, {"model.embed_tokens.weight": np.zeros((8, 256), np.float32)})
    tensor = file._tensors["token_embd.weight"]
    file._tensors["token_embd.weight"] = tensor._replace(tensor_type=MatmulKind.IQ2_XXS)
    with pytest.raises(ValueError, match=r"IQ2_XXS; supported are F32, F16, BF16, Q8_0"):
        file.tensor("token_embd.weight")
    assert {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"} <= set(SUPPORTED)


def test_llama_31_scaling_arrives_as_factors(tmp_path):
    llama3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=64)
    plain, scaled = RotaryConfig(), RotaryConfig(scaling=llama3)
    factors = rotary_frequencies(plain, 32) / rotary_frequencies(scaled, 32)
    config = tiny_config(head_dim=32)
    tensors = tiny_tensors(config) | {"rope_freqs.weight": factors.astype(np.float32)}
    file = write(tmp_path / "model.gguf", config, tensors)
    assert len(set(factors.tolist())) > 2
    for attention in file.config().attention:
        np.testing.assert_allclose(rotary_frequencies(attention.rotary, 32), rotary_frequencies(scaled, 32), rtol=1e-6)


def test_a_window_in_the_metadata_is_every_layers(tmp_path):
    config = tiny_config("mistral")
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config), **{"attention.sliding_window": 17})
    assert [attention.window for attention in file.config().attention] == [17, 17]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_tensor_has_one_name_in_either_kind_of_file(architecture):
    specs = tensor_specs(tiny_config(architecture))
    assert specs["model.layers.1.self_attn.q_proj.weight"].gguf_name == "blk.1.attn_q.weight"
    assert specs["lm_head.weight"].gguf_name == "output.weight"
    if architecture == "qwen2":
        assert specs["model.layers.0.self_attn.q_proj.bias"].gguf_name == "blk.0.attn_q.bias"
