"""What an architecture's file says of it, and how a Hugging Face config is read.

Model files are strangers' input: every number is checked before it sizes anything, nothing in them is executed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import MAX_LAYERS, AttentionConfig, ModelConfig, RopeScaling, RotaryConfig, check_whole
from quire.device.models.layers import LayerFunction
from quire.device.models.weight_specs import WeightSpecs


@dataclass(frozen=True)
class Architecture:
    """One kind of decoder."""

    name: str
    """As in config.json's `model_type` and GGUF's `general.architecture`."""
    config: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads config.json."""
    weights: Callable[[ModelConfig], WeightSpecs]
    """Declares the arrays it runs on and the tensors they come from."""
    layer: LayerFunction
    """Computes one layer."""


def read_config(
    hf: Mapping[str, Any],
    name: str,
    *,
    layers: Callable[[AttentionConfig, int], tuple[AttentionConfig, ...]] = lambda plain, count: (plain,) * count,
) -> ModelConfig:
    """The fields that every decoder's config.json has, in the old and the new spelling.

    `layers` gives each layer's attention from the one that these fields describe and the number of layers.
    """
    num_layers = _need(hf, "num_hidden_layers", int)
    check_whole("num_hidden_layers", num_layers, 1, MAX_LAYERS)  # before it sizes anything
    num_heads = _need(hf, "num_attention_heads", int)
    hidden_size = _need(hf, "hidden_size", int)
    rope = _default(hf, "rope_parameters", {})
    scaling = _default(hf, "rope_scaling", {}) if rope == {} else rope
    for key, value in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ValueError(f"config.json: {key}={value!r} must be an object")
    theta = rope.get("rope_theta", _default(hf, "rope_theta", 10_000.0))
    activation = _default(hf, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act={activation!r} is not supported, only 'silu'")
    for bias in ("mlp_bias", "attention_bias"):
        if hf.get(bias):
            raise ValueError(f"config.json: {bias}=true is not supported for {name}")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=_default(hf, "num_key_value_heads", num_heads),
        head_dim=_default(hf, "head_dim", hidden_size // max(num_heads, 1)),
        rotary=RotaryConfig(theta=theta, scaling=_rope_scaling(scaling)),
    )
    return ModelConfig(
        architecture=name,
        vocab_size=_need(hf, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_need(hf, "intermediate_size", int),
        attention=layers(attention, num_layers),
        max_len=_need(hf, "max_position_embeddings", int),
        norm_eps=_default(hf, "rms_norm_eps", 1e-6),
        tie_embeddings=_default(hf, "tie_word_embeddings", False),
        eos_ids=_ids(hf.get("eos_token_id")),
    )


def _need(hf: Mapping[str, Any], key: str, kind: type) -> Any:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"config.json: {key}={value!r} must be {kind.__name__}")
    return value


def _default(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    """A field that may be absent or null; what is there is checked by ModelConfig."""
    value = hf.get(key)
    return default if value is None else value


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"config.json: eos_token_id={value!r} must be a token id or a list of them")
    return ids


def _rope_scaling(scaling: Mapping[str, Any]) -> RopeScaling | None:
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling(kind="linear", factor=scaling["factor"])
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=scaling["factor"],
                low_freq_factor=scaling["low_freq_factor"],
                high_freq_factor=scaling["high_freq_factor"],
                original_max_len=scaling["original_max_position_embeddings"],
            )
    except KeyError as error:
        raise ValueError(f"config.json: rope scaling of type {kind!r} lacks {error}") from error
    raise ValueError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3")
