"""Granite 3: Llama with four numbers that scale embeddings, attention, what a layer adds, and logits."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, get_number, read_config
from quire.device.models.dense import decoder_weights
from quire.device.models.layers import ModelStatics, Params, decoder_layer
from quire.device.models.llama import layer_weights


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    scale = get_number(hf, "attention_multiplier", 1.0)
    return read_config(
        hf,
        "granite",
        layers=lambda plain, count: (replace(plain, softmax_scale=scale),) * count,
        embedding_multiplier=get_number(hf, "embedding_multiplier", 1.0),
        residual_multiplier=get_number(hf, "residual_multiplier", 1.0),
        logits_divisor=get_number(hf, "logits_scaling", 1.0),
    )


def _multiply(delta_TD: jax.Array, weights: Params, part: str, statics: ModelStatics) -> jax.Array:
    """What attention or feed-forward adds, scaled."""
    del weights, part
    return delta_TD * statics.config.residual_multiplier


ARCHITECTURE = Architecture(
    name="granite",
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=partial(decoder_layer, finish=_multiply),
    gguf_name="granite",
    gguf_fields={
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    gguf_knows=lambda hf: {"attention_multiplier": hf["head_dim"] ** -0.5},
)
