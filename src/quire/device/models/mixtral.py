"""Mixtral: Mistral with a mixture of experts for the feed-forward of every layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models import mistral
from quire.device.models.architecture import Architecture
from quire.device.models.dense import attention_weights, decoder_weights
from quire.device.models.experts import expert_weights, experts_mlp, read_experts
from quire.device.models.layers import decoder_layer
from quire.device.models.weight_specs import WeightSpec

TENSORS = {"gate": "w1", "down": "w2", "up": "w3"}
"""Their names in checkpoints."""


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    experts = read_experts(hf, intermediate_size="intermediate_size", normalize_weights=True)
    return replace(mistral.ARCHITECTURE.config(hf), architecture="mixtral", experts=experts)


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The arrays of layer i. llama.cpp's converter permutes the rows of q and k for this architecture."""
    experts = expert_weights(
        config,
        i,
        router="block_sparse_moe.gate.weight",
        name=lambda e, part: f"block_sparse_moe.experts.{e}.{TENSORS[part]}.weight",
    )
    return attention_weights(config, i, gguf_permuted=True) | experts


ARCHITECTURE = Architecture(
    name="mixtral",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=partial(decoder_layer, mlp=experts_mlp),
    gguf_name="llama",
)
