"""Qwen 2 and 2.5: biases on q, k and v; where windows are used, only the upper layers have one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import AttentionConfig, ModelConfig
from quire.device.models.architecture import Architecture, layer_kinds, read_config
from quire.device.models.dense import attention_weights, decoder_weights, mlp_weights, qkv_bias_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.weight_specs import WeightSpec


def windows_on_upper_layers(
    hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int
) -> tuple[AttentionConfig, ...]:
    """Each layer's attention: a window where `layer_types` says so, or without it from `max_window_layers` on."""
    windowed = replace(plain, window=hf.get("sliding_window") if hf.get("use_sliding_window") else None)
    first = hf.get("max_window_layers", num_layers)
    if not isinstance(first, int):
        raise ValueError(f"config.json: max_window_layers={first!r} must be a whole number")
    return tuple(
        windowed if is_windowed else plain for is_windowed in layer_kinds(hf, num_layers, lambda i: i >= first)
    )


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "qwen2", layers=partial(windows_on_upper_layers, hf))


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    return attention_weights(config, i) | qkv_bias_weights(config, i) | mlp_weights(config, i)


ARCHITECTURE = Architecture(
    name="qwen2",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=decoder_layer,
    gguf_name="qwen2",
)
