"""OLMoE: q and k are normalised over all heads at once; a mixture of experts for the feed-forward of every layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import attention_weights, decoder_weights, joint_norm_weights
from quire.device.models.experts import expert_weights, experts_mlp, read_experts
from quire.device.models.layers import decoder_layer, project_normed_together
from quire.device.models.weight_specs import WeightSpec


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("clip_qkv") is not None:
        raise ValueError(f"config.json: clip_qkv={hf['clip_qkv']!r} is not supported for olmoe")
    experts = read_experts(hf, intermediate_size="intermediate_size")
    return replace(read_config(hf, "olmoe"), experts=experts)


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    return attention_weights(config, i) | joint_norm_weights(config, i) | expert_weights(config, i)


ARCHITECTURE = Architecture(
    name="olmoe",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=partial(decoder_layer, project=project_normed_together, mlp=experts_mlp),
    gguf_name="olmoe",
)
