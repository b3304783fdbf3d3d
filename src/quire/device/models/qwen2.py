"""Qwen 2 and 2.5: biases on q, k and v; where windows are used, only the upper layers have one."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import AttentionConfig, ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import attention_weights, decoder_weights, join_qkv, mlp_weights, qkv_tensors
from quire.device.models.layers import decoder_layer
from quire.device.models.weight_specs import WeightSpec


def windows_on_upper_layers(
    hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int
) -> tuple[AttentionConfig, ...]:
    """Each layer's attention: a window where `layer_types` says so, or without it from `max_window_layers` on."""
    windowed = replace(plain, window=hf.get("sliding_window") if hf.get("use_sliding_window") else None)
    kinds, first = hf.get("layer_types"), hf.get("max_window_layers", num_layers)
    if kinds is None:
        if not isinstance(first, int):
            raise ValueError(f"config.json: max_window_layers={first!r} must be a whole number")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"config.json: layer_types must be a list of {num_layers} names")
    return tuple(windowed if kind == "sliding_attention" else plain for kind in kinds)


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "qwen2", layers=partial(windows_on_upper_layers, hf))


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    attention = config.attention[i]
    K, H = attention.num_kv_heads, attention.head_dim
    bias = WeightSpec(
        (K, (attention.group_size + 2) * H),
        ("kv_heads", None),
        qkv_tensors(config, i, "bias"),
        partial(join_qkv, num_kv_heads=K, head_dim=H),
    )
    return attention_weights(config, i) | {"qkv_bias": bias} | mlp_weights(config, i)


ARCHITECTURE = Architecture(
    name="qwen2",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=decoder_layer,
)
