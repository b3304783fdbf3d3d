"""Gemma 4, text, its dense models: layers that see all have heads of another size, and K may be V before its norm.

Per-layer embeddings, KV shared between layers and experts, which other models of the family have, are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from quire.config import AttentionConfig, ModelConfig
from quire.device.attention import LayerKV
from quire.device.inputs import BatchLayout
from quire.device.models.architecture import (
    Architecture,
    get,
    get_object,
    layer_kinds,
    read_config,
    read_rotary,
    with_defaults,
)
from quire.device.models.dense import (
    attention_weights,
    decoder_weights,
    head_norm_weights,
    join_qkv,
    layer_tensor,
    vector,
)
from quire.device.models.gemma3 import embedding_multiplier, text_config, twice_normed_mlp_weights
from quire.device.models.layers import ModelStatics, Params, decoder_layer, normalise_once_more, project_qkv
from quire.device.models.weight_specs import Tensor, WeightSpec
from quire.device.pointwise import Rotary, rms_norm

DEFAULTS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}
"""Fields that a config.json may leave out."""
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
GLOBAL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
UNSUPPORTED = ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block")


def _layers(hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int) -> tuple[AttentionConfig, ...]:
    rope = {"sliding_attention": LOCAL_ROPE, "full_attention": GLOBAL_ROPE, **get_object(hf, "rope_parameters")}
    hf = {**hf, "rope_parameters": rope}
    kinds = layer_kinds(hf, num_layers, lambda i: (i + 1) % 6 != 0)
    kinds[-1] = False  # as Hugging Face forces it
    plain = replace(plain, softmax_scale=1.0)
    windowed = replace(plain, window=hf["sliding_window"], rotary=read_rotary(hf, "sliding_attention"))
    layers, others = [], get_object(hf, "per_layer_config")
    for i, is_windowed in enumerate(kinds):
        if is_windowed:
            layers.append(windowed)
            continue
        shared = bool(hf.get("attention_k_eq_v"))
        heads = {"head_dim": hf["global_head_dim"]}
        heads |= {"num_key_value_heads": hf.get("num_global_key_value_heads")} if shared else {}
        heads = with_defaults(get_object(others, str(i)), heads)
        layers.append(
            replace(
                plain,
                head_dim=heads["head_dim"],
                num_kv_heads=get(heads, "num_key_value_heads", plain.num_kv_heads),
                rotary=read_rotary(hf, "full_attention"),
                v_is_k=shared,
            )
        )
    return tuple(layers)


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    hf = with_defaults(text_config(hf), DEFAULTS)
    for name in UNSUPPORTED:
        if hf.get(name):
            raise ValueError(f"config.json: {name}={hf[name]!r} is not supported for gemma4, only 0: its dense models")
    if hf.get("use_bidirectional_attention") == "all":
        raise ValueError("config.json: use_bidirectional_attention='all' is not supported for gemma4")
    return read_config(
        hf,
        "gemma4",
        layers=partial(_layers, hf),
        embedding_multiplier=embedding_multiplier(hf),
        logits_soft_cap=hf.get("final_logit_softcapping"),
    )


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    specs = attention_weights(config, i) | head_norm_weights(config, i) | twice_normed_mlp_weights(config, i)
    specs["layer_scalar"] = vector(layer_tensor(i, "layer_scalar", "layer_output_scale.weight", (1,)))
    attention = config.attention[i]
    if attention.v_is_k:
        join = partial(_join_shared, num_kv_heads=attention.num_kv_heads, head_dim=attention.head_dim)
        specs["qkv"] = replace(specs["qkv"], tensors=specs["qkv"].tensors[:2], join=join)
    return specs


def _join_shared(tensors: Sequence[Tensor], *, num_kv_heads: int, head_dim: int) -> Tensor:
    q, k = tensors
    return join_qkv([q, k, k], num_kv_heads=num_kv_heads, head_dim=head_dim)


def _project(
    weights: Params, x_TD: Float[Array, "T D"], rotary: Rotary | None, attention: AttentionConfig, statics: ModelStatics
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v; v is normalised too, without weights."""
    q_TNH, k_TKH, v_TKH = project_qkv(weights, x_TD, rotary, attention, statics)
    return q_TNH, k_TKH, rms_norm(v_TKH, jnp.ones(v_TKH.shape[-1:], v_TKH.dtype), statics.config.norm_eps)


def _layer(
    weights: Params,
    x_TD: Float[Array, "T D"],
    delta_TD: Float[Array, "T D"],
    kv: LayerKV,
    rotary: Rotary | None,
    layout: BatchLayout,
    *,
    attention: AttentionConfig,
    statics: ModelStatics,
) -> tuple[jax.Array, jax.Array, LayerKV]:
    """As Gemma 3's, and at its end all of the residual stream is multiplied by a number."""
    static = {"attention": attention, "statics": statics, "project": _project, "finish": normalise_once_more}
    x_TD, delta_TD, kv = decoder_layer(weights, x_TD, delta_TD, kv, rotary, layout, **static)
    x_TD = (x_TD + delta_TD) * weights["layer_scalar"][None]
    return x_TD, jnp.zeros_like(x_TD), kv


ARCHITECTURE = Architecture(
    name="gemma4",
    model_types=("gemma4_text",),
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=_layer,
)
