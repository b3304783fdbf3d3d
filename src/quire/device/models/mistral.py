"""Mistral: Llama whose tokens may see only a sliding window."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import decoder_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.llama import layer_weights


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "mistral", layers=lambda plain, n: (replace(plain, window=hf.get("sliding_window")),) * n)


ARCHITECTURE = Architecture(
    name="mistral",
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=decoder_layer,
)
