"""Weights and config from one GGUF file, memory-mapped; quantised tensors are expanded as they are placed.

The `gguf` package reads the file and knows the quantisations. Which tensors there are, an architecture's file declares.
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFEndian, GGUFValueType

from quire.checkpoint.weight_index import why_not_weights
from quire.config import MAX_DIMENSION, MAX_LAYERS, ModelConfig, check_whole
from quire.device.blocked import Format, StoredTensor
from quire.device.models import get_gguf_architecture
from quire.device.models.architecture import with_defaults
from quire.device.models.weight_specs import TensorSpec
from quire.embedding import EmbeddingConfig

SUPPORTED = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "MXFP4",
)
SAMPLING_FIELDS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
MAX_ENTRIES = 1 << 22
"""Of all arrays of metadata: the tokens and merges of the largest vocabularies, a few times over."""
VALUES_AT_ONCE = 1 << 17
"""Expanded in one call: with what it takes meanwhile, as much as a core's cache holds."""


class GgufFile:
    """One checkpoint."""

    def __init__(self, path: Path) -> None:
        try:
            with np.errstate(all="raise"):  # sizes that overflow
                self.reader: gguf.GGUFReader = _StrictReader(path)
        except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else why_not_weights(path) or error
            if path.suffix in (".safetensors", ".bin", ".json"):
                reason = f"{reason}; give its folder, with config.json and .safetensors files"
            raise ValueError(f"{path.name} is not a GGUF file that can be read: {reason}") from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.name = str(self._field("general.architecture"))
        has_experts = bool(self._field(f"{self.name}.expert_count", 0))
        self._architecture = get_gguf_architecture(self.name, has_experts=has_experts)
        self._config = self._read_config()

    def config(self) -> ModelConfig:
        """What the file's metadata say."""
        return self._config

    def generation_config(self) -> dict[str, Any]:
        """How its authors sample from it, in the words of generation_config.json."""
        fields = {name: self._field(f"general.sampling.{key}", None) for name, key in SAMPLING_FIELDS.items()}
        return {name: value for name, value in fields.items() if value is not None}

    def embedding_config(self) -> EmbeddingConfig:
        """How it embeds; a pooling of none, and what is for other kinds of models, is the last token's."""
        is_mean = self._field(f"{self.name}.pooling_type", None) == gguf.PoolingType.MEAN
        return EmbeddingConfig("mean" if is_mean else "last")

    def check_types(self) -> None:
        """ValueError if a tensor has a type that is not read."""
        for tensor in self._tensors.values():
            _check_type(tensor)

    def read(self, tensor: TensorSpec) -> np.ndarray:
        """One tensor, in float32 or as stored when it is not quantised."""
        if tensor.gguf_join:
            return tensor.gguf_join([self.tensor(name) for name in tensor.gguf_parts])
        values = self.tensor(tensor.gguf_name, tensor.gguf_index)
        if tensor.gguf_added:
            values = values.astype(np.float32) - np.float32(tensor.gguf_added)
        heads = tensor.gguf_rotary_heads
        return values if heads is None or values.shape != tensor.shape else unpermute(values, heads)

    def read_stored(self, tensor: TensorSpec) -> StoredTensor | None:
        """One matrix in the blocks that the file has; None if those are not multiplied as they are, or are none."""
        found = self._tensors.get(tensor.gguf_name)
        is_other = tensor.gguf_join or tensor.gguf_added or tensor.gguf_index is not None
        if found is None or is_other or found.tensor_type.name not in Format.__members__:
            return None
        shape = tuple(int(n) for n in reversed(found.shape))
        if shape != tensor.shape:
            raise ValueError(f"tensor {tensor.name} has shape {shape}, the config implies {tensor.shape}")
        rows = np.arange(shape[0], dtype=np.int32)
        if tensor.gguf_rotary_heads is not None:
            rows = unpermute(rows, tensor.gguf_rotary_heads)
        return StoredTensor(Format[found.tensor_type.name], np.asarray(found.data), rows, shape[1])

    def tensor(self, name: str, index: int | None = None) -> np.ndarray:
        """One tensor by its name in the file, its rows in the file's order; or of a stack of tensors one."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"the GGUF file has no tensor {name!r}")
        _check_type(tensor)
        shape, data = tuple(int(n) for n in reversed(tensor.shape)), np.asarray(tensor.data)
        if index is not None:
            if len(shape) != 3 or index >= shape[0]:
                raise ValueError(f"tensor {name} has shape {shape}, the config implies {index + 1} matrices in it")
            shape, data = shape[1:], data[index]
        return _dequantize(data, tensor.tensor_type).reshape(shape)

    def _experts(self, num_layers: int) -> dict[str, Any]:
        """What is said of experts, in the words of config.json."""
        arch = self.name
        if not self._whole(f"{arch}.expert_count", 0):
            return {}
        if self._whole(f"{arch}.expert_shared_count", 0):
            raise ValueError(f"GGUF field {arch}.expert_shared_count: shared experts are not supported")
        width = self._whole(f"{arch}.feed_forward_length")
        dense = [i for i in range(num_layers) if f"blk.{i}.ffn_gate_exps.weight" not in self._tensors]
        return {
            "num_experts": self._whole(f"{arch}.expert_count"),
            "num_experts_per_tok": self._whole(f"{arch}.expert_used_count"),
            "moe_intermediate_size": self._whole(f"{arch}.expert_feed_forward_length", width),
            "mlp_only_layers": dense,
        }

    def _read_config(self) -> ModelConfig:
        """The metadata in the words of config.json, which the architecture reads."""
        architecture, hf = self._architecture, self._common_fields()
        for key, name in architecture.gguf_fields.items():
            hf[key] = self._field(f"{self.name}.{name}", None)
        return architecture.config(with_defaults(hf, architecture.gguf_knows(hf)))

    def _common_fields(self) -> dict[str, Any]:
        arch = self.name
        num_heads = self._whole(f"{arch}.attention.head_count")
        check_whole(f"{arch}.attention.head_count", num_heads, 1, MAX_DIMENSION)
        hidden_size = self._whole(f"{arch}.embedding_length")
        num_layers = self._whole(f"{arch}.block_count")
        check_whole(f"{arch}.block_count", num_layers, 1, MAX_LAYERS)  # before it sizes anything
        if "token_embd.weight" not in self._tensors or len(self._tensors["token_embd.weight"].shape) != 2:
            raise ValueError("the GGUF file has no matrix 'token_embd.weight'")
        head_dim = self._whole(f"{arch}.attention.key_length", hidden_size // num_heads)
        check_whole(f"{arch}.attention.key_length", head_dim, 1, MAX_DIMENSION)
        return {
            "num_hidden_layers": num_layers,
            "hidden_size": hidden_size,
            "intermediate_size": self._whole(f"{arch}.feed_forward_length"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._whole(f"{arch}.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            **self._windows(),
            "rope_theta": self._field(f"{arch}.rope.freq_base", None),
            "rope_scaling": self._rope_scaling(),
            "partial_rotary_factor": self._whole(f"{arch}.rope.dimension_count", head_dim) / head_dim,
            "max_position_embeddings": self._whole(f"{arch}.context_length"),
            "rms_norm_eps": self._field(f"{arch}.attention.layer_norm_rms_epsilon"),
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **self._experts(num_layers),
        }

    def _windows(self) -> dict[str, Any]:
        """The window, and which layers have it: every so many, or each by itself; or the architecture knows it."""
        pattern = self._field(f"{self.name}.attention.sliding_window_pattern", None)
        fields = {"sliding_window": self._whole(f"{self.name}.attention.sliding_window", 0) or None}
        if isinstance(pattern, list):
            return fields | {"layer_types": ["sliding_attention" if one else "full_attention" for one in pattern]}
        return fields | {"sliding_window_pattern": pattern}

    def _rope_scaling(self) -> dict[str, Any]:
        """In the words of config.json."""
        arch = self.name
        for name in ("rope_freqs.weight", "rope_factors_short.weight"):
            if name in self._tensors:
                # llama.cpp ships Llama 3.1's scaling worked out, one divisor for each pair, as it does LongRoPE's.
                context = self._whole(f"{arch}.context_length")
                return {
                    "rope_type": "longrope",
                    "short_factor": self.tensor(name).ravel().tolist(),
                    "attention_factor": self._field(f"{arch}.rope.scaling.attn_factor", 1.0),
                    "original_max_position_embeddings": self._whole(
                        f"{arch}.rope.scaling.original_context_length", context
                    )
                    if name == "rope_factors_short.weight"
                    else context,
                }
        kind = self._field(f"{arch}.rope.scaling.type", "none")
        if kind == "none":
            return {}
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._field(f"{arch}.rope.scaling.factor")}
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": self._field(f"{arch}.rope.scaling.factor"),
                "original_max_position_embeddings": self._whole(f"{arch}.rope.scaling.original_context_length"),
                "attention_factor": self._field(f"{arch}.rope.scaling.attn_factor", None),
                "beta_fast": self._field(f"{arch}.rope.scaling.yarn_beta_fast", None),
                "beta_slow": self._field(f"{arch}.rope.scaling.yarn_beta_slow", None),
            }
        raise ValueError(f"{arch}.rope.scaling.type={kind!r} is not supported; supported are none, linear, yarn")

    def _field(self, key: str, *default: Any) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            if default:
                return default[0]
            raise ValueError(f"the GGUF file has no field {key!r}")
        return field.contents()

    def _whole(self, key: str, *default: Any) -> int:
        value = self._field(key, *default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"GGUF field {key}={value!r} must be a whole number")
        return value


def _check_type(tensor: gguf.ReaderTensor) -> None:
    kind = tensor.tensor_type.name
    if kind not in SUPPORTED:
        raise ValueError(f"tensor {tensor.name} has type {kind}; supported are {', '.join(SUPPORTED)}")


def _dequantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """As `gguf.dequantize`, but F16 stays as it is stored, and in larger steps: 16 rows are mostly numpy's calls."""
    if kind.name in ("F32", "F16"):
        return data
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, num_bytes)
    out, step = np.empty((len(blocks), values), np.float32), VALUES_AT_ONCE // values
    for start in range(0, len(blocks), step):
        out[start : start + step] = getattr(gguf.quants, kind.name).dequantize_blocks(blocks[start : start + step])
    return out


class _StrictReader(gguf.GGUFReader):
    """The package's reader, which takes what lies past the end of a file for empty; here that is an error.

    Otherwise a header that claims 2**60 entries would be read until memory ends. It also reads arrays element by
    element, each through a memory map: four seconds for a vocabulary and its merges, so flat arrays are read here.
    """

    def _get(self, offset, dtype, count=1, override_order=None):
        if not 0 <= int(offset) + int(count) * np.dtype(dtype).itemsize <= len(self.data) or int(count) < 0:
            raise ValueError(f"{int(count)} values at byte {int(offset)} reach past the end of the file")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs, raw_type):
        kind = GGUFValueType.ARRAY
        if raw_type != kind:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_element, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        element, count, begin = GGUFValueType(raw_element[0]), int(length[0]), orig_offs + 12
        self._num_entries = getattr(self, "_num_entries", 0) + count
        if self._num_entries > MAX_ENTRIES:
            raise ValueError(f"arrays of {self._num_entries} entries in all; at most {MAX_ENTRIES} are allowed")
        types = [kind, element] if count else [kind]
        if element in self.gguf_scalar_to_np:
            values = np.asarray(self._get(begin, self.gguf_scalar_to_np[element], count))
            parts = [raw_element, length, *(values[i : i + 1] for i in range(count))]
            return 12 + values.nbytes, parts, list(range(2, 2 + count)), types
        if element == GGUFValueType.STRING:
            end, strings = self._strings(begin, count)
            return end - orig_offs, [raw_element, length, *strings], list(range(2, 2 + count)), types
        return super()._get_field_parts(orig_offs, raw_type)

    def _strings(self, offset: int, count: int) -> tuple[int, list[np.ndarray]]:
        """So many strings from here on, and where they end."""
        data = np.asarray(self.data)
        text, read_length = memoryview(data), struct.Struct("<Q" if self.endianess == GGUFEndian.LITTLE else ">Q")
        strings = []
        for _ in range(count):
            begin = offset + read_length.size
            if begin > len(data) or (end := begin + read_length.unpack_from(text, offset)[0]) > len(data):
                raise ValueError(f"a string at byte {offset} reaches past the end of the file")
            strings.append(data[begin:end])
            offset = end
        return offset, strings


def unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """From llama.cpp's rotary order (pairs side by side) to Hugging Face's (halves)."""
    head = values.shape[0] // num_heads
    return values.reshape(num_heads, head // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
