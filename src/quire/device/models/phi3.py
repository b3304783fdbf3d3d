"""Phi-3, Phi-4 and Phi-4-mini: Llama whose files keep q, k and v in one tensor, and gate and up in another.

Models for long contexts (LongRoPE) run up to the length they were first trained on: beyond it all of a context is
rotated otherwise, what is in the pages too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from quire.config import ModelConfig
from quire.device.models.architecture import Architecture, get_object, read_config, with_defaults
from quire.device.models.dense import attention_weights, decoder_weights, join_qkv, layer_tensor, mlp_weights
from quire.device.models.layers import decoder_layer
from quire.device.models.weight_specs import Tensor, WeightSpec, array_module

OLD_NAMES_OF_LONGROPE = ("su", "yarn")


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    hf = with_defaults(hf, {"rms_norm_eps": 1e-5})
    scaling = get_object(hf, "rope_scaling")
    if scaling.get("type", scaling.get("rope_type")) in OLD_NAMES_OF_LONGROPE:
        hf = {**hf, "rope_scaling": {**scaling, "rope_type": "longrope"}}
    return read_config(hf, "phi3", layers=lambda plain, n: (replace(plain, window=hf.get("sliding_window")),) * n)


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    specs = attention_weights(config, i) | mlp_weights(config, i)
    D, F, attention = config.hidden_size, config.intermediate_size, config.attention[i]
    K, H = attention.num_kv_heads, attention.head_dim
    rows = (attention.num_heads + 2 * K) * H
    specs["qkv"] = replace(
        specs["qkv"],
        tensors=(layer_tensor(i, "self_attn.qkv_proj.weight", "attn_qkv.weight", (rows, D)),),
        join=partial(_split_qkv, num_kv_heads=K, head_dim=H),
    )
    specs["gate_up"] = replace(
        specs["gate_up"],
        tensors=(layer_tensor(i, "mlp.gate_up_proj.weight", "ffn_up.weight", (2 * F, D)),),
        join=_split_gate_up,
    )
    return specs


def _split_qkv(tensors: Sequence[Tensor], *, num_kv_heads: int, head_dim: int) -> Tensor:
    (tensor,) = tensors
    kv_rows = num_kv_heads * head_dim
    parts = array_module(tensors).split(tensor, [len(tensor) - 2 * kv_rows, len(tensor) - kv_rows])
    return join_qkv(parts, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _split_gate_up(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    xp = array_module(tensors)
    return xp.stack([part.T for part in xp.split(tensor, 2)], axis=1)


ARCHITECTURE = Architecture(
    name="phi3",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=decoder_layer,
    gguf_name="phi3",
)
