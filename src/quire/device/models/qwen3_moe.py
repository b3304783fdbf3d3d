"""Qwen 3 with experts: its attention, and in most layers a mixture of experts for the feed-forward."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import decoder_weights, mlp_weights
from quire.device.models.experts import expert_weights, experts_mlp, read_experts
from quire.device.models.layers import decoder_layer
from quire.device.models.qwen3 import attention_weights
from quire.device.models.weight_specs import WeightSpec


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    config = read_config(hf, "qwen3_moe", layers=lambda plain, count: (replace(plain, window=window),) * count)
    experts = read_experts(
        hf,
        intermediate_size="moe_intermediate_size",
        dense_layers=_dense_layers(hf, config.num_layers),
    )
    return replace(config, experts=experts)


def _dense_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Those that `mlp_only_layers` lists, and all but every `decoder_sparse_step`-th."""
    listed, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    if not isinstance(listed, list) or len(listed) > num_layers or not all(isinstance(i, int) for i in listed):
        raise ValueError(f"config.json: mlp_only_layers must be a list of layers, of which there are {num_layers}")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"config.json: decoder_sparse_step={step!r} must be a whole number above 0")
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    return attention_weights(config, i) | (expert_weights if config.has_experts(i) else mlp_weights)(config, i)


ARCHITECTURE = Architecture(
    name="qwen3_moe",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=partial(decoder_layer, mlp=experts_mlp),
    gguf_name="qwen3moe",
    gguf_knows=lambda hf: {"norm_topk_prob": True},
)
