"""Llama 2 and 3, and what is built like them (SmolLM2): pre-norm, grouped-query attention, gated feed-forward."""

from functools import partial

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, read_config
from quire.device.models.dense import attention_weights, decoder_weights, mlp_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.weight_specs import WeightSpec


def layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The arrays of layer i. llama.cpp's converter permutes the rows of q and k for this architecture."""
    return attention_weights(config, i, gguf_permuted=True) | mlp_weights(config, i)


ARCHITECTURE = Architecture(
    name="llama",
    config=partial(read_config, name="llama"),
    weights=partial(decoder_weights, layer=layer_weights),
    layer=decoder_layer,
    gguf_name="llama",
)
