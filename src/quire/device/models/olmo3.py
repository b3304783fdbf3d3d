"""OLMo 3: OLMo 2 with windows on three layers of four, whose rotation is not scaled. GGUF files call it olmo2."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config, with_defaults
from quire.device.models.dense import decoder_weights
from quire.device.models.olmo2 import layer, layer_weights, windows_of_three_layers_in_four


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    hf = with_defaults(hf, {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096})
    return read_config(hf, "olmo3", layers=partial(windows_of_three_layers_in_four, hf))


ARCHITECTURE = Architecture(
    name="olmo3",
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=layer,
)
