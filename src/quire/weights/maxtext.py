"""Weights of MaxText's decoders: Llama, Qwen3, Gemma 3 (text), with layers scanned or not."""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import DEFAULT_DTYPE, AttentionConfig, ModelConfig
from quire.weights.mapping import Leaf, Leaves, Source, add, convert, flatten, kernel, unsupported, whole

SCAN_AXIS = 1
"""The axis along which MaxText stacks layers (`param_scan_axis`)."""
GEMMA3_PERIOD = 6
"""Layers of Gemma 3 that MaxText scans as one block."""


def from_maxtext(
    params: Any,
    config: ModelConfig,
    *,
    dtype: str = DEFAULT_DTYPE,
    mesh: Mesh | str | None = None,
    rotary_pairs_adjacent: bool | None = None,
) -> Any:
    """Weights for `LLM.set_weights`, or for `LLM.from_params`, from the parameters of a MaxText model.

    Llama, Qwen3 and Gemma 3, scanned (along axis 1) or not. One program casts and joins the arrays on the devices where
    they are, so that this may run under `jax.transfer_guard("disallow_explicit")`. `mesh` is the engine's, by default
    one device. `rotary_pairs_adjacent` says whether the two numbers that are rotated together are neighbours in a head
    of q and k, as where MaxText's `rope_type` or model is llama3.1; by default they are if a Llama has that scaling.
    LoRA factors are not merged: have MaxText merge them.

    Every leaf that is missing, left over or of another shape or type is named in a ValueError.
    """
    if rotary_pairs_adjacent is None:
        scaling = config.attention[0].rotary and config.attention[0].rotary.scaling
        rotary_pairs_adjacent = config.architecture == "llama" and scaling is not None and scaling.kind == "llama3"
    given: dict[str, Any] = {}
    for path, array in flatten(params).items():
        add(given, re.sub(r"^(params\.)+", "", path), array)
    is_scanned = not any(path.startswith("decoder.layers_0.") for path in given)
    source = _source(is_scanned, rotary_pairs_adjacent)
    return convert(source, given, config, mesh=mesh, dtype=dtype, lora_alpha=None)


@lru_cache
def _source(is_scanned: bool, pairs_adjacent: bool) -> Source:
    return Source(partial(_leaves, is_scanned=is_scanned, pairs_adjacent=pairs_adjacent))


def _leaves(config: ModelConfig, *, is_scanned: bool, pairs_adjacent: bool) -> Leaves:
    if config.architecture not in _LAYERS:
        raise unsupported("MaxText", config, list(_LAYERS))
    D, V = config.hidden_size, config.vocab_size
    is_gemma = config.architecture == "gemma3"
    embedding = whole("model.embed_tokens.weight", V, D)
    norm = whole("model.norm.weight", D)
    leaves = {
        "token_embedder.embedding": _changed(embedding, partial(_unscaled, size=D)) if is_gemma else embedding,
        "decoder.decoder_norm.scale": _changed(norm, _without_one) if is_gemma else norm,
    }
    if not config.tie_embeddings:
        leaves["decoder.logits_dense.kernel"] = kernel("lm_head.weight", (D,), (V,))
    layers = [
        _LAYERS[config.architecture](config, attention, f"model.layers.{i}.", pairs_adjacent)
        for i, attention in enumerate(config.attention)
    ]
    if not is_scanned:
        each = enumerate(layers)
        return leaves | {f"decoder.layers_{i}.{path}": leaf for i, layer in each for path, leaf in layer.items()}
    period = GEMMA3_PERIOD if is_gemma else 1
    rest = len(layers) % period
    for i in range(min(period, len(layers) - rest)):
        block = f"decoder.layers.layers_{i}" if is_gemma else "decoder.layers"
        leaves |= {f"{block}.{path}": leaf for path, leaf in _stacked(layers[i : len(layers) - rest : period]).items()}
    for i, layer in enumerate(layers[len(layers) - rest :]):
        leaves |= {f"decoder.layers_remainder.layers_{i}.{path}": leaf for path, leaf in layer.items()}
    return leaves


def _stacked(layers: list[Leaves]) -> Leaves:
    """The leaves of scanned layers, from those of each."""

    def stack(each: list[Leaf]) -> Leaf:
        shape = each[0].shape

        def split(array: jax.Array) -> dict[str, jax.Array]:
            tensors = {}
            for i, leaf in enumerate(each):
                tensors |= leaf.split(jax.lax.index_in_dim(array, i, SCAN_AXIS, keepdims=False))
            return tensors

        return Leaf((*shape[:SCAN_AXIS], len(each), *shape[SCAN_AXIS:]), split)

    return {path: stack([layer[path] for layer in layers]) for path in layers[0]}


def _llama(config: ModelConfig, attention: AttentionConfig, hf: str, pairs_adjacent: bool) -> Leaves:
    """Queries come divided by the root of the head's size."""
    leaves = _projections(config, attention, hf) | _mlp(config, hf) | _norms(config, hf)
    order: Callable[[jax.Array], jax.Array] = _pairs_apart if pairs_adjacent else lambda array: array
    scale = attention.head_dim**0.5
    query, key = "self_attention.query.kernel", "self_attention.key.kernel"
    return leaves | {
        query: _changed(leaves[query], lambda array: order(array.astype(jnp.float32) * scale)),
        key: _changed(leaves[key], order),
    }


def _qwen3(config: ModelConfig, attention: AttentionConfig, hf: str, pairs_adjacent: bool) -> Leaves:
    _refuse(config, pairs_adjacent)
    size = attention.head_dim
    return {
        **_projections(config, attention, hf),
        **_mlp(config, hf),
        **_norms(config, hf),
        "self_attention.query_norm.scale": whole(f"{hf}self_attn.q_norm.weight", size),
        "self_attention.key_norm.scale": whole(f"{hf}self_attn.k_norm.weight", size),
    }


def _gemma3(config: ModelConfig, attention: AttentionConfig, hf: str, pairs_adjacent: bool) -> Leaves:
    """Norms come with the one added that Hugging Face leaves to the model's code."""
    _refuse(config, pairs_adjacent)
    D, H = config.hidden_size, attention.head_dim
    norms = {
        "pre_self_attention_norm.scale": whole(f"{hf}input_layernorm.weight", D),
        "post_self_attention_norm.scale": whole(f"{hf}post_attention_layernorm.weight", D),
        "pre_ffw_norm.scale": whole(f"{hf}pre_feedforward_layernorm.weight", D),
        "post_ffw_norm.scale": whole(f"{hf}post_feedforward_layernorm.weight", D),
        "self_attention.query_norm.scale": whole(f"{hf}self_attn.q_norm.weight", H),
        "self_attention.key_norm.scale": whole(f"{hf}self_attn.k_norm.weight", H),
    }
    changed = {path: _changed(leaf, _without_one) for path, leaf in norms.items()}
    return {**_projections(config, attention, hf), **_mlp(config, hf), **changed}


def _refuse(config: ModelConfig, pairs_adjacent: bool) -> None:
    if pairs_adjacent:
        raise ValueError(f"rotary_pairs_adjacent=True is for Llama: MaxText has no such {config.architecture}")


def _projections(config: ModelConfig, attention: AttentionConfig, hf: str) -> dict[str, Leaf]:
    D, N, K, H = config.hidden_size, attention.num_heads, attention.num_kv_heads, attention.head_dim
    return {
        "self_attention.query.kernel": kernel(f"{hf}self_attn.q_proj.weight", (D,), (N, H)),
        "self_attention.key.kernel": kernel(f"{hf}self_attn.k_proj.weight", (D,), (K, H)),
        "self_attention.value.kernel": kernel(f"{hf}self_attn.v_proj.weight", (D,), (K, H)),
        "self_attention.out.kernel": kernel(f"{hf}self_attn.o_proj.weight", (N, H), (D,)),
    }


def _mlp(config: ModelConfig, hf: str) -> dict[str, Leaf]:
    D, F = config.hidden_size, config.intermediate_size
    return {
        "mlp.wi_0.kernel": kernel(f"{hf}mlp.gate_proj.weight", (D,), (F,)),
        "mlp.wi_1.kernel": kernel(f"{hf}mlp.up_proj.weight", (D,), (F,)),
        "mlp.wo.kernel": kernel(f"{hf}mlp.down_proj.weight", (F,), (D,)),
    }


def _norms(config: ModelConfig, hf: str) -> dict[str, Leaf]:
    D = config.hidden_size
    return {
        "pre_self_attention_layer_norm.scale": whole(f"{hf}input_layernorm.weight", D),
        "post_self_attention_layer_norm.scale": whole(f"{hf}post_attention_layernorm.weight", D),
    }


def _changed(leaf: Leaf, change: Callable[[jax.Array], jax.Array]) -> Leaf:
    """A leaf whose numbers are changed before it is split."""
    return Leaf(leaf.shape, lambda array: leaf.split(change(array)), leaf.inputs)


def _pairs_apart(array: jax.Array) -> jax.Array:
    """Heads in which the numbers of a rotary pair are half a head apart, from heads in which they are neighbours."""
    return jnp.concatenate([array[..., 0::2], array[..., 1::2]], axis=-1)


def _without_one(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) - 1.0


def _unscaled(array: jax.Array, *, size: int) -> jax.Array:
    """Embeddings without the root of the model's width, which MaxText has rounded to bfloat16."""
    return array.astype(jnp.float32) / np.asarray(size**0.5, jnp.bfloat16).astype(np.float32)


_LAYERS = {"llama": _llama, "qwen3": _qwen3, "gemma3": _gemma3}
