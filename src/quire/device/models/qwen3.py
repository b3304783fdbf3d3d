"""Qwen 3: q and k are normalised per head before they are rotated; no biases."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import attention_weights, decoder_weights, layer_tensor, mlp_weights, vector
from quire.device.models.layers import decoder_layer
from quire.device.models.qwen2 import windows_on_upper_layers
from quire.device.models.weight_specs import WeightSpec


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "qwen3", layers=partial(windows_on_upper_layers, hf))


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    shape = (config.attention[i].head_dim,)
    norms = {
        "q_norm": vector(layer_tensor(i, "self_attn.q_norm.weight", "attn_q_norm.weight", shape)),
        "k_norm": vector(layer_tensor(i, "self_attn.k_norm.weight", "attn_k_norm.weight", shape)),
    }
    return attention_weights(config, i) | norms | mlp_weights(config, i)


ARCHITECTURE = Architecture(
    name="qwen3",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=decoder_layer,
)
