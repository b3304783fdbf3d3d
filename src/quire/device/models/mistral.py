"""Mistral: Llama whose tokens may see only a sliding window."""

from collections.abc import Mapping
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.layers import decoder_layer


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "mistral", windows=lambda num_layers: (hf.get("sliding_window"),) * num_layers)


ARCHITECTURE = Architecture(name="mistral", config=_config, layer=decoder_layer, gguf_permuted=True)
