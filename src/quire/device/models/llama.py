"""Llama 2 and 3, and what is built like them (SmolLM2): pre-norm, grouped-query attention, gated feed-forward."""

from quire.device.models.architecture import Architecture, read_config
from quire.device.models.layers import decoder_layer

ARCHITECTURE = Architecture(
    name="llama", config=lambda hf: read_config(hf, "llama"), layer=decoder_layer, gguf_permuted=True
)
