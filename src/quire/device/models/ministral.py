"""Ministral: Mistral in which `layer_types` says which layers have the window."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import AttentionConfig, ModelConfig
from quire.device.models.architecture import Architecture, layer_kinds, read_config
from quire.device.models.dense import decoder_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.llama import layer_weights


def _layers(hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int) -> tuple[AttentionConfig, ...]:
    windowed = replace(plain, window=hf.get("sliding_window"))
    return tuple(windowed if is_windowed else plain for is_windowed in layer_kinds(hf, num_layers, lambda i: True))


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "ministral", layers=partial(_layers, hf))


ARCHITECTURE = Architecture(
    name="ministral",
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=decoder_layer,
)
