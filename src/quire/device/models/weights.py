"""From a checkpoint's tensors to the arrays a model runs on.

A source reads one tensor by its Hugging Face name, `[out, in]`, from wherever it is (a memory map, a dict). Here they
are joined, turned to `[in, out]`, cast and put on the mesh, one array at a time: beside the model itself, host memory
holds one array.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import ModelConfig
from quire.device.mesh import place
from quire.device.models import get_architecture
from quire.device.models.layers import Params

Source = Callable[[str], np.ndarray]


def load_params(
    config: ModelConfig, source: Source, *, mesh: Mesh, dtype: str, progress: Callable[[int, int], None] | None = None
) -> Params:
    """Read every tensor of a model and place it. `progress(done, total)` is called after each layer."""
    read = _Reader(config, source, mesh, np.dtype(jnp.dtype(dtype)))
    params: Params = {
        "embed": read.array("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), "vocab", None)
    }
    if not config.tie_embeddings:
        params["unembed"] = read.array("lm_head.weight", (config.vocab_size, config.hidden_size), "vocab", None)
    params["norm"] = read.array("model.norm.weight", (config.hidden_size,), None)
    params["layers"] = []
    for i in range(config.num_layers):
        params["layers"].append(read.layer(i))
        if progress:
            progress(i + 1, config.num_layers)
    return params


def params_from_tensors(
    config: ModelConfig, tensors: Mapping[str, Any], *, mesh: Mesh, dtype: str = "bfloat16"
) -> Params:
    """The same from arrays already in this program, under their Hugging Face names."""

    def source(name: str) -> np.ndarray:
        if name not in tensors:
            raise ValueError(f"tensors has no {name!r}")
        return np.asarray(tensors[name])

    return load_params(config, source, mesh=mesh, dtype=dtype)


class _Reader:
    def __init__(self, config: ModelConfig, source: Source, mesh: Mesh, dtype: np.dtype) -> None:
        self.config, self.source, self.mesh, self.dtype = config, source, mesh, dtype
        self.architecture = get_architecture(config.architecture)

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor, its shape checked against what the config says."""
        tensor = self.source(name)
        if tensor.shape != shape:
            raise ValueError(f"tensor {name} has shape {tensor.shape}, config.json implies {shape}")
        return tensor

    def array(self, name: str, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        """One tensor as it is."""
        return place(self.mesh, self.tensor(name, shape).astype(self.dtype), *axes)

    def transposed(self, name: str, shape: tuple[int, int], *axes: str | None) -> jax.Array:
        """One tensor turned to `[in, out]`; `shape` is that of the file, `[out, in]`."""
        return place(self.mesh, np.ascontiguousarray(self.tensor(name, shape).T.astype(self.dtype)), *axes)

    def layer(self, i: int) -> Params:
        """The arrays of layer i."""
        config, prefix = self.config, f"model.layers.{i}."
        width, ffn = config.hidden_size, config.intermediate_size
        weights: Params = {
            "attention_norm": self.array(f"{prefix}input_layernorm.weight", (width,), None),
            "mlp_norm": self.array(f"{prefix}post_attention_layernorm.weight", (width,), None),
            "qkv": self.qkv(f"{prefix}self_attn."),
            "output": self.transposed(
                f"{prefix}self_attn.o_proj.weight", (width, config.num_heads * config.head_dim), "heads", None
            ),
            "gate_up": self.gate_up(f"{prefix}mlp."),
            "down": self.transposed(f"{prefix}mlp.down_proj.weight", (width, ffn), "ffn", None),
        }
        if self.architecture.qkv_bias:
            weights["qkv_bias"] = self.qkv_bias(f"{prefix}self_attn.")
        if self.architecture.qk_norm:
            weights["q_norm"] = self.array(f"{prefix}self_attn.q_norm.weight", (config.head_dim,), None)
            weights["k_norm"] = self.array(f"{prefix}self_attn.k_norm.weight", (config.head_dim,), None)
        return weights

    def qkv(self, prefix: str) -> jax.Array:
        """`[D, K, (G+2)*H]`: for each KV head its query heads, its key, its value."""
        config = self.config
        width, kv_heads, head = config.hidden_size, config.num_kv_heads, config.head_dim
        joined = np.empty((width, kv_heads, config.group_size + 2, head), self.dtype)
        for name, part, heads in self._qkv_parts():
            tensor = self.tensor(f"{prefix}{name}_proj.weight", (heads * head, width))
            joined[:, :, part] = tensor.T.reshape(width, kv_heads, -1, head)
        return place(self.mesh, joined.reshape(width, kv_heads, -1), None, "kv_heads", None)

    def qkv_bias(self, prefix: str) -> jax.Array:
        """`[K, (G+2)*H]`, in the order of qkv."""
        config = self.config
        joined = np.empty((config.num_kv_heads, config.group_size + 2, config.head_dim), self.dtype)
        for name, part, heads in self._qkv_parts():
            tensor = self.tensor(f"{prefix}{name}_proj.bias", (heads * config.head_dim,))
            joined[:, part] = tensor.reshape(config.num_kv_heads, -1, config.head_dim)
        return place(self.mesh, joined.reshape(config.num_kv_heads, -1), "kv_heads", None)

    def gate_up(self, prefix: str) -> jax.Array:
        """`[D, 2, F]`."""
        width, ffn = self.config.hidden_size, self.config.intermediate_size
        joined = np.empty((width, 2, ffn), self.dtype)
        for i, name in enumerate(("gate", "up")):
            joined[:, i] = self.tensor(f"{prefix}{name}_proj.weight", (ffn, width)).T
        return place(self.mesh, joined, None, None, "ffn")

    def _qkv_parts(self) -> list[tuple[str, slice, int]]:
        group, config = self.config.group_size, self.config
        return [
            ("q", slice(0, group), config.num_heads),
            ("k", slice(group, group + 1), config.num_kv_heads),
            ("v", slice(group + 1, group + 2), config.num_kv_heads),
        ]
