"""OLMo 2: norms only after attention and feed-forward, and q and k are normalised over all heads together."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float

from quire.config import AttentionConfig, ModelConfig
from quire.device.attention import LayerKV
from quire.device.inputs import BatchLayout
from quire.device.models.architecture import (
    Architecture,
    get_object,
    layer_kinds,
    read_config,
    read_rotary,
    with_defaults,
)
from quire.device.models.dense import (
    attention_weights,
    decoder_weights,
    joint_norm_weights,
    mlp_weights,
    post_norm_weights,
)
from quire.device.models.layers import ModelStatics, Params, attend, gated_mlp, project_normed_together
from quire.device.models.weight_specs import WeightSpec
from quire.device.pointwise import Rotary, rms_norm


def windows_of_three_layers_in_four(
    hf: Mapping[str, Any], plain: AttentionConfig, num_layers: int
) -> tuple[AttentionConfig, ...]:
    """OLMo 3's layers, which GGUF files call OLMo 2 with a window. Where there is one, rotation is not scaled."""
    plain = replace(plain, rotary=read_rotary(hf, "full_attention"))
    if hf.get("sliding_window") is None:
        return (plain,) * num_layers
    rope = get_object(hf, "rope_parameters")
    if rope and "full_attention" not in rope:
        raise ValueError("config.json: rope_parameters must be stated for full_attention and sliding_attention apart")
    local = read_rotary({**hf, "rope_scaling": None}, "sliding_attention")
    windowed = replace(plain, window=hf["sliding_window"], rotary=local)
    kinds = layer_kinds(hf, num_layers, lambda i: (i + 1) % 4 != 0)
    return tuple(windowed if is_windowed else plain for is_windowed in kinds)


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    hf = with_defaults(hf, {"rms_norm_eps": 1e-5})
    return read_config(hf, "olmo2", layers=partial(windows_of_three_layers_in_four, hf))


def layer_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The arrays of layer i."""
    specs = attention_weights(config, i) | joint_norm_weights(config, i) | mlp_weights(config, i)
    specs |= post_norm_weights(config, i)
    return {name: spec for name, spec in specs.items() if name not in ("attention_norm", "mlp_norm")}


def layer(
    weights: Params,
    x_TD: Float[Array, "T D"],
    delta_TD: Float[Array, "T D"],
    kv: LayerKV,
    rotary: Rotary | None,
    layout: BatchLayout,
    *,
    attention: AttentionConfig,
    statics: ModelStatics,
) -> tuple[jax.Array, jax.Array, LayerKV]:
    """The residual stream plus the norm of its attention, then plus the norm of its feed-forward."""
    eps, x_TD = statics.config.norm_eps, x_TD + delta_TD
    delta_TD, kv = attend(
        weights,
        x_TD,
        kv,
        rotary,
        layout,
        attention=attention,
        statics=statics,
        project=project_normed_together,
    )
    x_TD += rms_norm(delta_TD, weights["post_attention_norm"], eps)
    return x_TD, rms_norm(gated_mlp(weights, x_TD, statics), weights["post_mlp_norm"], eps), kv


ARCHITECTURE = Architecture(
    name="olmo2",
    config=_config,
    weights=partial(decoder_weights, layer=layer_weights),
    layer=layer,
    gguf_name="olmo2",
)
