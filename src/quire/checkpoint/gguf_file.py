"""Weights and config from one GGUF file, memory-mapped; quantised tensors are expanded as they are placed.

The `gguf` package reads the file and knows the quantisations. Which tensors there are, an architecture's file declares.
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFEndian, GGUFValueType

from quire.config import MAX_LAYERS, AttentionConfig, ModelConfig, RopeScaling, RotaryConfig, check_whole
from quire.device.models import get_architecture
from quire.device.models.weight_specs import TensorSpec

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
MAX_ENTRIES = 1 << 22
"""Of all arrays of metadata: the tokens and merges of the largest vocabularies, a few times over."""


class GgufFile:
    """One checkpoint."""

    def __init__(self, path: Path) -> None:
        try:
            with np.errstate(all="raise"):  # sizes that overflow
                self.reader: gguf.GGUFReader = _StrictReader(path)
        except (ValueError, LookupError, ArithmeticError, TypeError, RecursionError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{path.name} is not a GGUF file that can be read: {reason}") from error
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.name = str(self._field("general.architecture"))
        get_architecture(self.name)  # raises where there is none of this name
        self._config = self._read_config()

    def config(self) -> ModelConfig:
        """What the file's metadata say."""
        return self._config

    def read(self, tensor: TensorSpec) -> np.ndarray:
        """One tensor, in float32 or as stored when it is not quantised."""
        values = self.tensor(tensor.gguf_name)
        heads = tensor.gguf_rotary_heads
        return values if heads is None or values.shape != tensor.shape else unpermute(values, heads)

    def tensor(self, name: str) -> np.ndarray:
        """One tensor by its name in the file, its rows in the file's order."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"the GGUF file has no tensor {name!r}")
        if tensor.tensor_type.name not in SUPPORTED:
            raise ValueError(
                f"tensor {tensor.name} has type {tensor.tensor_type.name}; supported are {', '.join(SUPPORTED)}"
            )
        shape = tuple(int(n) for n in reversed(tensor.shape))
        # Rows are taken by sixteens: views of a memory map would cost as much as the arithmetic.
        return gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(shape)

    def _read_config(self) -> ModelConfig:
        arch = self.name
        num_heads = self._whole(f"{arch}.attention.head_count")
        hidden_size = self._whole(f"{arch}.embedding_length")
        num_layers = self._whole(f"{arch}.block_count")
        check_whole(f"{arch}.block_count", num_layers, 1, MAX_LAYERS)  # before it sizes anything
        if "token_embd.weight" not in self._tensors or len(self._tensors["token_embd.weight"].shape) != 2:
            raise ValueError("the GGUF file has no matrix 'token_embd.weight'")
        rotary = RotaryConfig(theta=self._field(f"{arch}.rope.freq_base", 10_000.0), scaling=self._rope_scaling())
        attention = AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=self._whole(f"{arch}.attention.head_count_kv", num_heads),
            head_dim=self._whole(f"{arch}.attention.key_length", hidden_size // max(num_heads, 1)),
            window=self._whole(f"{arch}.attention.sliding_window", 0) or None,
            rotary=rotary,
        )
        return ModelConfig(
            architecture=arch,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            hidden_size=hidden_size,
            intermediate_size=self._whole(f"{arch}.feed_forward_length"),
            attention=(attention,) * num_layers,
            max_len=self._whole(f"{arch}.context_length"),
            norm_eps=self._field(f"{arch}.attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in self._tensors,
        )

    def _rope_scaling(self) -> RopeScaling | None:
        if "rope_freqs.weight" in self._tensors:
            # Llama 3.1 and later: llama.cpp ships the scaling worked out, one divisor for each pair.
            tensor = self._tensors["rope_freqs.weight"]
            factors = gguf.dequantize(tensor.data, tensor.tensor_type)
            return RopeScaling(kind="factors", factors=tuple(float(f) for f in factors.ravel()))
        kind = self._field(f"{self.name}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling(kind="linear", factor=self._field(f"{self.name}.rope.scaling.factor"))
        raise ValueError(f"{self.name}.rope.scaling.type={kind!r} is not supported; supported are none, linear")

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
