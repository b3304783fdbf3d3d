"""From a checkpoint's tensors to the arrays a model runs on.

A source reads one tensor by its Hugging Face name, `[out, in]`, from wherever it is (a memory map, a dict). Here they
are joined, turned to `[in, out]`, cast and put on the mesh, one array at a time: beside the model itself, host memory
holds one array.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import ModelConfig
from quire.device.mesh import place
from quire.device.models import get_architecture
from quire.device.models.layers import Params

Source = Callable[[str], np.ndarray]


class Leaf(NamedTuple):
    """What one array of a model must be: its shape, and the names of its axes for the mesh."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def params_schema(config: ModelConfig) -> Params:
    """The arrays a model runs on, as a tree of leaves; `layers.py` explains the layout, `mesh.py` the letters."""
    D, F, V, H = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    N, K, qkv = config.num_heads, config.num_kv_heads, (config.group_size + 2) * config.head_dim
    architecture = get_architecture(config.architecture)
    layer = {
        "attention_norm": Leaf((D,), (None,)),
        "qkv": Leaf((D, K, qkv), (None, "kv_heads", None)),
        "output": Leaf((N * H, D), ("heads", None)),
        "mlp_norm": Leaf((D,), (None,)),
        "gate_up": Leaf((D, 2, F), (None, None, "ffn")),
        "down": Leaf((F, D), ("ffn", None)),
    }
    if architecture.qkv_bias:
        layer["qkv_bias"] = Leaf((K, qkv), ("kv_heads", None))
    if architecture.qk_norm:
        layer |= {"q_norm": Leaf((H,), (None,)), "k_norm": Leaf((H,), (None,))}
    schema: Params = {"embed": Leaf((V, D), ("vocab", None)), "norm": Leaf((D,), (None,))}
    if not config.tie_embeddings:
        schema["unembed"] = Leaf((V, D), ("vocab", None))
    return schema | {"layers": [layer] * config.num_layers}


def place_params(config: ModelConfig, params: Params, *, mesh: Mesh, dtype: str) -> Params:
    """Check weights that are in this program already against the schema and put them on the mesh.

    An array that is in its place stays there, without a copy.
    """
    wanted = dict(jax.tree_util.tree_leaves_with_path(params_schema(config), is_leaf=lambda x: isinstance(x, Leaf)))
    given = dict(jax.tree_util.tree_leaves_with_path(params))
    for path in wanted.keys() ^ given.keys():
        state = "missing" if path in wanted else "not part of this model"
        raise ValueError(f"params{jax.tree_util.keystr(path)} is {state}; see docs/weights.md for the layout")
    for path, leaf in wanted.items():
        array = given[path]
        if tuple(array.shape) != leaf.shape or array.dtype != jnp.dtype(dtype):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {array.dtype}{list(array.shape)}, "
                f"expected {dtype}{list(leaf.shape)}"
            )
    return jax.tree_util.tree_map_with_path(lambda path, array: place(mesh, array, *wanted[path].axes), params)


def load_params(
    config: ModelConfig, source: Source, *, mesh: Mesh, dtype: str, progress: Callable[[int, int], None] | None = None
) -> Params:
    """Read every tensor of a model and place it. `progress(done, total)` is called after each layer."""
    read = _Reader(config, source, np.dtype(jnp.dtype(dtype)))
    schema = params_schema(config)

    params: Params = {"layers": []}
    for name, tensor in MODEL_NAMES.items():
        if name in schema:
            array = read.tensor(tensor, schema[name].shape).astype(read.dtype)
            params[name] = place(mesh, array, *schema[name].axes)
    for i, leaves in enumerate(schema["layers"]):
        params["layers"].append(
            {name: place(mesh, read.layer_array(i, name), *leaf.axes) for name, leaf in leaves.items()}
        )
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


MODEL_NAMES = {"embed": "model.embed_tokens.weight", "unembed": "lm_head.weight", "norm": "model.norm.weight"}
"""Arrays outside the layers -> Hugging Face names."""
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "output": "self_attn.o_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
"""Arrays of a layer that are one tensor each."""


class _Reader:
    """Reads a layer's arrays, joined and turned to `[in, out]`."""

    def __init__(self, config: ModelConfig, source: Source, dtype: np.dtype) -> None:
        self.config, self.source, self.dtype = config, source, dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One tensor, its shape checked against what the config says."""
        tensor = self.source(name)
        if tensor.shape != shape:
            raise ValueError(f"tensor {name} has shape {tensor.shape}, the config implies {shape}")
        return tensor

    def layer_array(self, i: int, name: str) -> np.ndarray:
        """One array of layer i."""
        config, prefix = self.config, f"model.layers.{i}."
        width = config.hidden_size
        shapes = {"output": (width, config.num_heads * config.head_dim), "down": (width, config.intermediate_size)}
        if name in shapes:
            tensor = self.tensor(prefix + LAYER_NAMES[name], shapes[name])
            return np.ascontiguousarray(tensor.T.astype(self.dtype))
        if name in LAYER_NAMES:
            length = config.head_dim if name in ("q_norm", "k_norm") else width
            return self.tensor(prefix + LAYER_NAMES[name], (length,)).astype(self.dtype)
        return {"qkv": self.qkv, "qkv_bias": self.qkv_bias, "gate_up": self.gate_up}[name](prefix)

    def qkv(self, prefix: str) -> np.ndarray:
        """`[D, K, (G+2)*H]`: for each KV head its query heads, its key, its value."""
        config = self.config
        width, kv_heads, head = config.hidden_size, config.num_kv_heads, config.head_dim
        heads = {"q": config.num_heads, "k": kv_heads, "v": kv_heads}
        tensors = [self.tensor(f"{prefix}self_attn.{name}_proj.weight", (n * head, width)) for name, n in heads.items()]
        parts = [tensor.T.reshape(width, kv_heads, -1, head).astype(self.dtype) for tensor in tensors]
        return np.concatenate(parts, axis=2).reshape(width, kv_heads, -1)

    def qkv_bias(self, prefix: str) -> np.ndarray:
        """`[K, (G+2)*H]`, in the order of qkv."""
        config = self.config
        kv_heads, head = config.num_kv_heads, config.head_dim
        heads = {"q": config.num_heads, "k": kv_heads, "v": kv_heads}
        tensors = [self.tensor(f"{prefix}self_attn.{name}_proj.bias", (n * head,)) for name, n in heads.items()]
        parts = [tensor.reshape(kv_heads, -1, head).astype(self.dtype) for tensor in tensors]
        return np.concatenate(parts, axis=1).reshape(kv_heads, -1)

    def gate_up(self, prefix: str) -> np.ndarray:
        """`[D, 2, F]`."""
        width, ffn = self.config.hidden_size, self.config.intermediate_size
        tensors = [self.tensor(f"{prefix}mlp.{name}_proj.weight", (ffn, width)) for name in ("gate", "up")]
        return np.stack([tensor.T.astype(self.dtype) for tensor in tensors], axis=1)
