"""gpt-oss: a mixture of experts with biases everywhere, sinks in its attention, a window in every other layer.

Its experts come as bfloat16 or in 4 bits (MXFP4); Hugging Face checkpoints have the columns of gate and up by turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from quire.config import AttentionConfig, ModelConfig
from quire.device.models.architecture import Architecture, get_number, layer_kinds, read_config
from quire.device.models.dense import (
    as_it_is,
    attention_weights,
    decoder_weights,
    layer_norm,
    layer_tensor,
    qkv_bias_weights,
    vector,
)
from quire.device.models.experts import experts_mlp, read_experts
from quire.device.models.layers import decoder_layer
from quire.device.models.weight_specs import Tensor, TensorSpec, WeightSpec, array_module
from quire.device.pointwise import SWIGLU_ALPHA, SWIGLU_LIMIT


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("attention_bias") is False:
        raise ValueError("config.json: attention_bias=false is not supported for gpt_oss")
    for name, known in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        if get_number(hf, name, known) != known:
            raise ValueError(f"config.json: {name}={hf[name]!r} is not supported, only {known}")
    config = read_config({**hf, "attention_bias": None}, "gpt_oss", layers=partial(_layers, hf))
    experts = read_experts(hf, intermediate_size="intermediate_size", normalize_weights=True)
    return replace(config, experts=experts, activation="swiglu_oai")


def _layers(hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int) -> tuple[AttentionConfig, ...]:
    windowed = replace(plain, window=hf.get("sliding_window"))
    kinds = layer_kinds(hf, num_layers, lambda i: i % 2 == 0)
    return tuple(windowed if is_windowed else plain for is_windowed in kinds)


def _layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    attention, D = config.attention[i], config.hidden_size
    sinks = vector(layer_tensor(i, "self_attn.sinks", "attn_sinks.weight", (attention.num_heads,)))
    return (
        attention_weights(config, i)
        | qkv_bias_weights(config, i)
        | {
            "output_bias": vector(layer_tensor(i, "self_attn.o_proj.bias", "attn_output.bias", (D,))),
            "sinks": replace(sinks, axes=("heads",), attention=attention),
            "mlp_norm": layer_norm(config, i, "post_attention_layernorm", "post_attention_norm"),
        }
        | _expert_weights(config, i)
    )


def _expert_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    assert config.experts is not None, "every layer has them"
    E, D, F = config.experts.num_experts, config.hidden_size, config.experts.intermediate_size

    def tensor(name: str, parts: tuple[str, ...], kind: str, shape: tuple[int, ...]) -> TensorSpec:
        hf_name = f"mlp.experts.{name}" if kind == "weight" else f"mlp.experts.{name}_bias"
        gguf_parts = tuple(f"blk.{i}.ffn_{part}_exps.{kind}" for part in parts)
        join = _interleave if len(parts) == 2 else _turn
        return layer_tensor(i, hf_name, "", shape)._replace(gguf_parts=gguf_parts, gguf_join=join)

    gate_up, down = ("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))
    experts = ("experts", None, None)
    return {
        "router": vector(layer_tensor(i, "mlp.router.weight", "ffn_gate_inp.weight", (E, D))),
        "router_bias": vector(layer_tensor(i, "mlp.router.bias", "ffn_gate_inp.bias", (E,))),
        "experts_gate_up": WeightSpec(
            (E, D, 2 * F), experts, (tensor(*gate_up, "weight", (E, D, 2 * F)),), _separate, contracted_axis=1
        ),
        "experts_gate_up_bias": WeightSpec((E, 2 * F), experts[:2], (tensor(*gate_up, "bias", (E, 2 * F)),), _separate),
        "experts_down": WeightSpec(
            (E, F, D), experts, (tensor(*down, "weight", (E, F, D)),), as_it_is, contracted_axis=1
        ),
        "experts_down_bias": WeightSpec((E, D), experts[:2], (tensor(*down, "bias", (E, D)),), as_it_is),
    }


def _separate(tensors: Sequence[Tensor]) -> Tensor:
    """The columns of gate, then those of up, of a tensor that has them by turns."""
    (tensor,) = tensors
    return array_module(tensors).concatenate([tensor[..., 0::2], tensor[..., 1::2]], axis=-1)


def _turn(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The matrices of experts as Hugging Face checkpoints have them, `[E, in, out]`; biases as they are."""
    (tensor,) = tensors
    return tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor


def _interleave(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The same of gate and up, their columns by turns."""
    gate, up = (_turn([tensor]) for tensor in tensors)
    return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], -1)


def _gguf_knows(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = {"rope_theta": hf["rope_theta"], **hf["rope_scaling"]}
    return {"rope_parameters": rope | ({"truncate": False} if rope.get("rope_type") == "yarn" else {})}


ARCHITECTURE = Architecture(
    name="gpt_oss",
    config=_config,
    weights=partial(decoder_weights, layer=_layer_weights),
    layer=partial(decoder_layer, mlp=experts_mlp),
    gguf_name="gpt-oss",
    gguf_knows=_gguf_knows,
)
