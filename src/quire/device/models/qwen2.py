"""Qwen 2 and 2.5: biases on q, k and v; where windows are used, only the upper layers have one."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.layers import decoder_layer


def upper_layer_windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window: from `layer_types` when the config has it, else from `max_window_layers` on."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds, first = hf.get("layer_types"), hf.get("max_window_layers", num_layers)
    if kinds is None:
        if not isinstance(first, int):
            raise ValueError(f"config.json: max_window_layers={first!r} must be a whole number")
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"config.json: layer_types must be a list of {num_layers} names")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    return read_config(hf, "qwen2", windows=partial(upper_layer_windows, hf))


ARCHITECTURE = Architecture(name="qwen2", config=_config, layer=decoder_layer, qkv_bias=True)
