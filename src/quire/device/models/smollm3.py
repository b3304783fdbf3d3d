"""SmolLM3: Llama in which every fourth layer does not rotate q and k."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import AttentionConfig, ModelConfig, check_whole
from quire.device.models.architecture import Architecture, get, layer_kinds, read_config, read_rotary, with_defaults
from quire.device.models.dense import decoder_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.llama import layer_weights


def _layers(hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int) -> tuple[AttentionConfig, ...]:
    plain = replace(plain, rotary=read_rotary(hf, theta=2e6))
    rotates = _rotates(hf, num_layers)
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    windowed = layer_kinds(hf, num_layers, lambda i: not rotates[i])
    return tuple(
        replace(plain, rotary=plain.rotary if rotates[i] else None, window=window if windowed[i] else None)
        for i in range(num_layers)
    )


def _rotates(hf: Mapping[str, Any], num_layers: int) -> list[bool]:
    """For each layer whether it rotates: a number other than 0 in `no_rope_layers`, or all but every so many."""
    given = hf.get("no_rope_layers")
    if given is None:
        period = get(hf, "no_rope_layer_interval", 4)
        check_whole("no_rope_layer_interval", period, 1, num_layers + 4)
        return [(i + 1) % period != 0 for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or any(not isinstance(one, int) for one in given):
        raise ValueError(f"config.json: no_rope_layers must be a list of {num_layers} numbers, 0 or 1")
    return [one != 0 for one in given]


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    hf = with_defaults(hf, {"tie_word_embeddings": True, "num_key_value_heads": 4})
    return read_config(hf, "smollm3", layers=partial(_layers, hf))


ARCHITECTURE = Architecture(
    name="smollm3",
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=decoder_layer,
    gguf_name="smollm3",
)
