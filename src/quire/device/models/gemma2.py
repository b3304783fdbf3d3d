"""Gemma 2: windows on every other layer, soft caps of scores and logits; norms before and after, GeGLU."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import AttentionConfig, ModelConfig
from quire.device.models.architecture import Architecture, layer_kinds, read_config, with_defaults
from quire.device.models.dense import attention_weights, decoder_weights
from quire.device.models.gemma3 import embedding_multiplier, gguf_knows, scale, twice_normed_mlp_weights
from quire.device.models.layers import decoder_layer, normalise_once_more
from quire.device.models.weight_specs import WeightSpec

DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Fields that a config.json may leave out."""
SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""The same; but null means none."""
NUM_LAYERS_27B = 46


def _layers(hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int) -> tuple[AttentionConfig, ...]:
    plain = replace(plain, softmax_scale=scale(hf), soft_cap=hf["attn_logit_softcapping"])
    windowed = replace(plain, window=hf["sliding_window"])
    return tuple(
        windowed if is_windowed else plain for is_windowed in layer_kinds(hf, num_layers, lambda i: i % 2 == 0)
    )


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    caps = {key: hf.get(key, default) for key, default in SOFT_CAPS.items()}
    hf = with_defaults(hf, DEFAULTS) | caps
    if hf.get("use_bidirectional_attention"):
        raise ValueError("config.json: use_bidirectional_attention=true is not supported for gemma2")
    return read_config(
        hf,
        "gemma2",
        layers=partial(_layers, hf),
        norm_offset=1.0,
        embedding_multiplier=embedding_multiplier(hf),
        logits_soft_cap=hf["final_logit_softcapping"],
    )


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    return attention_weights(config, i) | twice_normed_mlp_weights(config, i)


ARCHITECTURE = Architecture(
    name="gemma2",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=partial(decoder_layer, finish=normalise_once_more),
    gguf_name="gemma2",
    gguf_fields={key: key for key in SOFT_CAPS},
    gguf_knows=lambda hf: gguf_knows(hf, num_layers_27b=NUM_LAYERS_27B) | SOFT_CAPS,
)
