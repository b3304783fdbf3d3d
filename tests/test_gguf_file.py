"""GGUF weights: every quantisation against a reading of its own, names and rotary order against the same model as
safetensors."""

import dataclasses
from functools import partial

import gguf
import jax
import numpy as np
import pytest

from quire.checkpoint.gguf_file import MAX_ENTRIES, SUPPORTED, GgufFile, _StrictReader
from quire.config import ExpertsConfig, RopeScaling, RotaryConfig
from quire.device.mesh import make_mesh
from quire.device.models import ARCHITECTURES
from quire.device.models.rotary import rotary_frequencies
from quire.device.models.weights import load_params, params_from_tensors, weight_specs
from tests.tiny import tiny_config, tiny_tensors

READ_FROM_GGUF = sorted(name for name, known in ARCHITECTURES.items() if known.gguf_name)
PERMUTED = ("llama", "mixtral", "granite", "smollm3")
"""Architectures whose q and k llama.cpp's converter permutes."""
MatmulKind = gguf.GGMLQuantizationType


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter does: halves become pairs."""
    head = values.shape[0] // num_heads
    return values.reshape(num_heads, 2, head // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def tensor_specs(config):
    """Every tensor of a model, by its Hugging Face name."""
    specs = [tensor for spec in jax.tree.leaves(weight_specs(config)) for tensor in spec.tensors]
    places = {(tensor.gguf_parts or tensor.gguf_name, tensor.gguf_index) for tensor in specs}
    assert len({tensor.name for tensor in specs}) == len(places) == len(specs)
    return {tensor.name: tensor for tensor in specs}


def write(path, config, tensors, kind=MatmulKind.F32, sampling=None, **metadata):
    attention, specs = config.attention[0], tensor_specs(config)
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.architecture].gguf_name or config.architecture)
    writer.add_context_length(config.max_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base([layer.rotary for layer in config.attention if layer.rotary][-1].theta)
    for key, value in metadata.items():
        writer.add_key_value(f"{writer.arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    for key, value in (sampling or {}).items():
        writer.add_key_value(f"general.sampling.{key}", value, gguf.GGUFValueType.get_type(value))
    if config.experts:
        writer.add_expert_count(config.experts.num_experts)
        writer.add_expert_used_count(config.experts.num_experts_per_token)
        writer.add_expert_feed_forward_length(config.experts.intermediate_size)
        stacks: dict[str, list[np.ndarray]] = {}
        for name in [name for name in tensors if name in specs and specs[name].gguf_index is not None]:
            stacks.setdefault(specs[name].gguf_name, []).append(tensors[name])
        for name, stack in stacks.items():
            values = np.stack(stack)
            plain = kind is MatmulKind.F32
            writer.add_tensor(name, values if plain else gguf.quantize(values, kind), raw_dtype=None if plain else kind)
        tensors = {
            name: values for name, values in tensors.items() if name not in specs or specs[name].gguf_index is None
        }
    for name, values in tensors.items():
        if name in specs:
            if config.architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
                values = permute(values, attention.num_heads if ".q_proj." in name else attention.num_kv_heads)
            if config.architecture.startswith("gemma") and name.endswith("norm.weight"):
                values = values + 1
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


METADATA = {
    "gemma2": {"attention.sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 12.0},
    "gemma3": {"attention.sliding_window": 5, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0},
    "granite": {"attention.scale": 0.2, "embedding_scale": 2.0, "residual_scale": 0.5, "logit_scale": 0.5},
    "olmo2": {},
    "phi3": {"rope.dimension_count": 6, "attention.sliding_window": 0},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
}
"""What llama.cpp's converter writes for the tiny model of an architecture, beside what all have."""


def in_single_precision(value):
    """Fields of a config, numbers as a GGUF file keeps them."""
    if dataclasses.is_dataclass(value):
        return {field.name: in_single_precision(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [in_single_precision(one) for one in value]
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("architecture", METADATA)
def test_the_same_model_as_safetensors_of_other_architectures(tmp_path, architecture):
    changes = {"smollm3": {"rotaries": (RotaryConfig(),) * 2}}  # the fourth layer would be the first that does not
    stated = {"softmax_scale": 8**-0.5} if architecture.startswith("gemma") else {}
    config = tiny_config(architecture, eos_ids=(), **stated, **changes.get(architecture, {}))
    tensors = tiny_tensors(config)
    file = write(tmp_path / "model.gguf", config, tensors, **METADATA[architecture])
    assert in_single_precision(file.config()) == in_single_precision(config)
    mesh = make_mesh()
    ours = load_params(config, file.read, mesh=mesh, dtype="float32")
    theirs = params_from_tensors(config, tensors, mesh=mesh, dtype="float32")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=2e-7), ours, theirs)


@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
def test_experts_of_gpt_oss_have_gate_and_up_apart(tmp_path, kind):
    """llama.cpp's converter takes the columns of gate and up apart, and turns every matrix."""
    experts = ExpertsConfig(num_experts=4, num_experts_per_token=2, intermediate_size=64, normalize_weights=True)
    yarn = RopeScaling(
        kind="yarn", factor=32.0, original_max_len=64, truncate=False, attention_factor=float(np.float32(1.25))
    )
    changes = {"experts": experts, "intermediate_size": 64, "rotaries": (RotaryConfig(scaling=yarn),) * 2}
    config = tiny_config("gpt_oss", eos_ids=(), **changes)
    config = dataclasses.replace(config, norm_eps=float(np.float32(config.norm_eps)))
    tensors, stored = tiny_tensors(config), {}
    for i in range(config.num_layers):
        for part in ("weight", "bias"):
            name, end = f"model.layers.{i}.mlp.experts.", "" if part == "weight" else "_bias"
            gate_up, down = tensors.pop(f"{name}gate_up_proj{end}"), tensors.pop(f"{name}down_proj{end}")
            for gguf_name, values in (("gate", gate_up[..., ::2]), ("up", gate_up[..., 1::2]), ("down", down)):
                values = values.swapaxes(1, 2) if part == "weight" else values
                stored[f"blk.{i}.ffn_{gguf_name}_exps.{part}"] = np.ascontiguousarray(values)
    scaling = {"type": "yarn", "factor": 32.0, "original_context_length": 64, "attn_factor": 1.25}
    metadata = {"attention.sliding_window": 5} | {f"rope.scaling.{key}": value for key, value in scaling.items()}
    file = write(tmp_path / "model.gguf", config, tensors | stored, MatmulKind[kind], **metadata)
    assert file.config() == config
    expected, rounding = tiny_tensors(config), 0 if kind == "F32" else 0.25
    for name, tensor in tensor_specs(config).items():
        limit = rounding * np.abs(expected[name]).max()
        np.testing.assert_allclose(file.read(tensor), expected[name], rtol=0, atol=limit, err_msg=name)


def test_layers_that_do_not_rotate_are_every_fourth_of_smollm3(tmp_path):
    config = tiny_config("smollm3", windows=(None,) * 9)
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config))
    assert [i for i, attention in enumerate(file.config().attention) if attention.rotary is None] == [3, 7]


def test_longrope_of_phi3_holds_up_to_the_original_length(tmp_path):
    config = tiny_config("phi3")
    factors = np.array([1.0, 1.5, 2.0], np.float32)
    tensors = tiny_tensors(config) | {"rope_factors_short.weight": factors, "rope_factors_long.weight": 4 * factors}
    metadata = {"rope.dimension_count": 6, "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    got = write(tmp_path / "model.gguf", config, tensors, **metadata).config()
    rotary = got.attention[0].rotary
    assert (got.max_len, rotary.dims, rotary.scaling.factors) == (64, 6, (1.0, 1.5, 2.0))
    assert rotary.scaling.attention_factor == 1.25


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {*READ_FROM_GGUF}))
def test_an_architecture_without_a_gguf_name_is_refused(tmp_path, architecture):
    """Its weights would be read in an order that was never compared with llama.cpp's converter."""
    config = tiny_config(architecture)
    says = f"GGUF files of model type '{architecture}' are not supported; use the model's safetensors"
    with pytest.raises(ValueError, match=says):
        write(tmp_path / "model.gguf", config, tiny_tensors(config))


def test_a_file_of_an_unknown_model_type_is_refused(tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    says = r"GGUF files of model type 'mamba' are not supported; supported are gemma2, .*qwen3moe, .* safetensors"
    with pytest.raises(ValueError, match=says):
        GgufFile(path)


MIXTURES = [("mixtral", "F32"), ("olmoe", "F32"), ("qwen3_moe", "Q8_0")]


def test_every_architecture_with_a_gguf_name_is_written_and_read_back_here():
    assert {"llama", "gpt_oss", *METADATA, *(name for name, _ in MIXTURES)} == {*READ_FROM_GGUF}


@pytest.mark.parametrize(("architecture", "kind"), MIXTURES)
def test_experts_are_one_tensor_for_all_of_them(tmp_path, architecture, kind):
    experts = ExpertsConfig(
        num_experts=6,
        num_experts_per_token=2,
        intermediate_size=32,
        normalize_weights=architecture != "olmoe",
        dense_layers=(1,) if architecture == "qwen3_moe" else (),
    )
    config = tiny_config(architecture, eos_ids=(), experts=experts, intermediate_size=32)
    config = dataclasses.replace(config, norm_eps=float(np.float32(config.norm_eps)))
    tensors = tiny_tensors(config)
    file = write(tmp_path / "model.gguf", config, tensors, kind=MatmulKind[kind])
    assert file.config() == config
    for name, tensor in tensor_specs(config).items():
        np.testing.assert_allclose(file.read(tensor), tensors[name], atol=0 if kind == "F32" else 0.02, err_msg=name)


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


@pytest.mark.slow
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
    config = tiny_config("phi3")
    file = write(tmp_path / "model.gguf", config, tiny_tensors(config), **{"attention.sliding_window": 17})
    assert [attention.window for attention in file.config().attention] == [17, 17]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_tensor_has_one_name_in_either_kind_of_file(architecture):
    specs = tensor_specs(tiny_config(architecture))
    assert specs["model.layers.1.self_attn.o_proj.weight"].gguf_name == "blk.1.attn_output.weight"
    assert specs["lm_head.weight"].gguf_name == "output.weight"
    if architecture == "qwen2":
        assert specs["model.layers.0.self_attn.q_proj.bias"].gguf_name == "blk.0.attn_q.bias"


def test_sampling_that_a_file_states_is_read_in_the_words_of_generation_config(tmp_path):
    config = tiny_config()
    file = write(tmp_path / "plain.gguf", config, tiny_tensors(config))
    assert file.generation_config() == {}
    stated = {"temp": 0.5, "top_k": 20, "penalty_repeat": 1.25, "mirostat": 2}
    file = write(tmp_path / "stated.gguf", config, tiny_tensors(config), sampling=stated)
    assert file.generation_config() == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}


@pytest.mark.parametrize("architecture", READ_FROM_GGUF)
def test_names_of_tensors_are_those_of_the_gguf_package(architecture):
    """The table is llama.cpp's own, not ours: no other program would read a name that only ours has."""
    config = tiny_config(architecture)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    number = numbers[ARCHITECTURES[architecture].gguf_name]
    table = gguf.get_tensor_name_map(number, len(config.attention))
    allowed = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]]
    allowed = {name.format(bid=i) for name in allowed for i in range(len(config.attention))}
    wrong = {}
    for name, spec in tensor_specs(config).items():
        expected = table.get_name(name.rpartition(".")[0])
        for full_name in spec.gguf_parts or (spec.gguf_name,):
            stem, _, suffix = full_name.rpartition(".")
            if stem not in allowed or (expected is not None and stem != expected):
                wrong[name] = f"{stem}.{suffix}", expected
    if architecture == "gemma2":  # its files have no output matrix: it is the embedding
        del wrong["lm_head.weight"]
    assert not wrong
