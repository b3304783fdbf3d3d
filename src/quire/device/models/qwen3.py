"""Qwen 3: q and k are normalised per head before they are rotated; no biases."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models import dense
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import decoder_weights, mlp_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.qwen2 import windows_on_upper_layers
from quire.device.models.weight_specs import WeightSpec


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "qwen3", layers=partial(windows_on_upper_layers, hf))


def attention_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """Those of every decoder, and the norms of q and k."""
    return dense.attention_weights(config, i) | dense.head_norm_weights(config, i)


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    return attention_weights(config, i) | mlp_weights(config, i)


ARCHITECTURE = Architecture(
    name="qwen3",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=decoder_layer,
    gguf_name="qwen3",
)
