"""Gemma 3, text: windows on five layers of six, with a rotary base of their own; norms before and after; GeGLU.

Models that also see (4B and up) keep the text model in a part of their config and of their tensors' names; only that
part is read.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import AttentionConfig, ModelConfig, check_whole
from quire.device.models.architecture import (
    Architecture,
    get,
    get_number,
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
    layer_norm,
    mlp_weights,
    post_norm_weights,
)
from quire.device.models.layers import decoder_layer, normalise_once_more
from quire.device.models.weight_specs import WeightSpec

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Fields that a config.json may leave out."""
NUM_LAYERS_27B = 62


def text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model."""
    return {"eos_token_id": hf.get("eos_token_id"), **get_object(hf, "text_config")} if "text_config" in hf else hf


def scale(hf: Mapping[str, Any]) -> float:
    """What scores are multiplied by."""
    return get_number(hf, "query_pre_attn_scalar", 256) ** -0.5


def _layers(hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int) -> tuple[AttentionConfig, ...]:
    period = get(hf, "sliding_window_pattern", 6)
    check_whole("sliding_window_pattern", period, 1, num_layers + 6)
    plain = replace(plain, softmax_scale=scale(hf), soft_cap=hf.get("attn_logit_softcapping"))
    local_theta = get(hf, "rope_local_base_freq", 10_000.0)
    unscaled = {**hf, "rope_theta": local_theta, "rope_scaling": None}
    windowed = replace(plain, window=hf["sliding_window"], rotary=read_rotary(unscaled, "sliding_attention"))
    whole = replace(plain, rotary=read_rotary(hf, "full_attention", theta=1e6))
    return tuple(
        windowed if is_windowed else whole
        for is_windowed in layer_kinds(hf, num_layers, lambda i: (i + 1) % period != 0)
    )


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    hf = with_defaults(text_config(hf), DEFAULTS)
    if hf.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention=true is not supported for gemma3")
    return read_config(
        hf,
        "gemma3",
        layers=partial(_layers, hf),
        norm_offset=1.0,
        embedding_multiplier=embedding_multiplier(hf),
        logits_soft_cap=hf.get("final_logit_softcapping"),
    )


def embedding_multiplier(hf: Mapping[str, Any]) -> float:
    """What a token's embedding is multiplied by."""
    return get_number(hf, "hidden_size", 1) ** 0.5


def layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The arrays of layer i."""
    return attention_weights(config, i) | head_norm_weights(config, i) | twice_normed_mlp_weights(config, i)


def twice_normed_mlp_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The feed-forward of layer i, the norm before it, and those after attention and after the feed-forward."""
    before = layer_norm(config, i, "pre_feedforward_layernorm", "ffn_norm")
    return mlp_weights(config, i) | {"mlp_norm": before} | post_norm_weights(config, i)


def gguf_knows(hf: Mapping[str, Any], *, num_layers_27b: int) -> dict[str, Any]:
    """The scale of attention is by the size of a head, but for the largest model; without a window no layer has one."""
    is_27b = hf["num_hidden_layers"] == num_layers_27b
    size = hf["hidden_size"] // hf["num_attention_heads"] if is_27b else hf["head_dim"]
    return {"query_pre_attn_scalar": size} | ({} if hf["sliding_window"] else {"sliding_window_pattern": 1})


ARCHITECTURE = Architecture(
    name="gemma3",
    model_types=("gemma3_text",),
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=partial(decoder_layer, finish=normalise_once_more),
    gguf_name="gemma3",
    gguf_fields={
        "rope_local_base_freq": "rope.freq_base_swa",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    gguf_knows=partial(gguf_knows, num_layers_27b=NUM_LAYERS_27B),
)
