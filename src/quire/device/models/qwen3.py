"""Qwen 3: q and k are normalised per head before they are rotated; no biases."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.layers import decoder_layer
from quire.device.models.qwen2 import upper_layer_windows


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "qwen3", windows=partial(upper_layer_windows, hf))


ARCHITECTURE = Architecture(name="qwen3", config=_config, layer=decoder_layer, qk_norm=True)
