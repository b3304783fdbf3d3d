"""What an architecture's file says of it, and how a Hugging Face config is read.

Model files are strangers' input: every number is checked before it sizes anything, nothing in them is executed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config import MAX_DIMENSION, MAX_LAYERS, AttentionConfig, ModelConfig, RopeScaling, RotaryConfig, check_whole
from quire.device.models.layers import LayerFunction
from quire.device.models.weight_specs import WeightSpecs

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Hugging Face's name of an activation -> ours."""


@dataclass(frozen=True)
class Architecture:
    """One kind of decoder."""

    name: str
    """As in config.json's `model_type`."""
    config: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads config.json, and what GGUF files say in its words."""
    weights: Callable[[ModelConfig], WeightSpecs]
    """Declares the arrays it runs on and the tensors they come from."""
    layer: LayerFunction
    """Computes one layer."""
    model_types: tuple[str, ...] = ()
    """Other values of `model_type` that mean it."""
    gguf_name: str | None = None
    """The `general.architecture` of its GGUF files; `None` if Quire does not read this architecture from GGUF files.

    Without a name, `gguf_fields` and `gguf_knows` are not used.
    """
    gguf_fields: Mapping[str, str] = field(default_factory=dict)
    """What GGUF files say of this architecture alone: name in config.json -> name after the architecture's."""
    gguf_knows: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda hf: {}
    """What GGUF files leave to llama.cpp's code, in the words of config.json; from what a file says in them."""


def read_config(
    hf: Mapping[str, Any],
    name: str,
    *,
    layers: Callable[[AttentionConfig, int], tuple[AttentionConfig, ...]] = lambda plain, count: (plain,) * count,
    **more: Any,
) -> ModelConfig:
    """The fields that every decoder's config.json has, in the old and the new spelling.

    `layers` gives each layer's attention from the one that these fields describe and the number of layers; `more` are
    fields of the ModelConfig that are this architecture's own.
    """
    num_layers = _need(hf, "num_hidden_layers", int)
    check_whole("num_hidden_layers", num_layers, 1, MAX_LAYERS)  # before it sizes anything
    num_heads = _need(hf, "num_attention_heads", int)
    hidden_size = _need(hf, "hidden_size", int)
    head_dim = get(hf, "head_dim", hidden_size // max(num_heads, 1))
    max_len = _need(hf, "max_position_embeddings", int)
    check_whole("max_position_embeddings", max_len, 1, MAX_DIMENSION)
    activation = get(hf, "hidden_activation", get(hf, "hidden_act", "silu"))
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        supported = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"config.json: hidden_act={activation!r} is not supported, only {supported}")
    for bias in ("mlp_bias", "attention_bias"):
        if hf.get(bias):
            raise ValueError(f"config.json: {bias}=true is not supported for {name}")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=get(hf, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary=(rotary := read_rotary(hf)),
    )
    if rotary.scaling and rotary.scaling.kind == "factors":
        max_len = min(max_len, rotary.scaling.original_max_len)
    return ModelConfig(
        architecture=name,
        vocab_size=_need(hf, "vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=_need(hf, "intermediate_size", int),
        attention=layers(attention, num_layers),
        max_len=max_len,
        norm_eps=get(hf, "rms_norm_eps", 1e-6),
        activation=ACTIVATIONS[activation],
        tie_embeddings=get(hf, "tie_word_embeddings", False),
        eos_ids=_ids(hf.get("eos_token_id")),
        **more,
    )


def get(hf: Mapping[str, Any], key: str, default: Any) -> Any:
    """A field that may be absent or null; what is there is checked by ModelConfig."""
    value = hf.get(key)
    return default if value is None else value


def get_number(hf: Mapping[str, Any], key: str, default: float | int) -> float:
    """A field that may be absent or null, and otherwise is a number above 0."""
    value = get(hf, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key}={value!r} must be a number above 0")
    return float(value)


def get_object(hf: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A field that is absent, null or an object."""
    value = get(hf, key, {})
    if not isinstance(value, dict):
        raise ValueError(f"config.json: {key}={value!r} must be an object")
    return value


def with_defaults(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with what it leaves out because Hugging Face's code has it as a default."""
    return {**defaults, **{key: value for key, value in hf.items() if value is not None}}


def layer_kinds(hf: Mapping[str, Any], num_layers: int, default: Callable[[int], bool]) -> list[bool]:
    """For each layer whether it has a window, by `layer_types`; where there is none, as `default` says of layer i."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return [default(i) for i in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise ValueError(f"config.json: layer_types must be a list of {num_layers} names, each of {', '.join(known)}")
    return [kind == "sliding_attention" for kind in kinds]


def read_rotary(hf: Mapping[str, Any], kind: str | None = None, *, theta: float = 10_000.0) -> RotaryConfig:
    """The rotary embedding of a model, or of its layers of one kind; `theta` where none is stated.

    New files have it in `rope_parameters`, some of them for each kind of layers apart; old ones have `rope_theta`, and
    `rope_scaling` for the rest.
    """
    rope = get_object(hf, "rope_parameters")
    if kind is not None and kind in rope:
        rope = get_object(rope, kind)
    elif not rope:
        rope = {"rope_theta": hf.get("rope_theta"), **get_object(hf, "rope_scaling")}
    rope = {"partial_rotary_factor": hf.get("partial_rotary_factor"), **rope}
    dims, share = None, get_number(rope, "partial_rotary_factor", 1.0)
    if share != 1 and rope.get("rope_type") != "proportional":
        head_dim = get(hf, "head_dim", _need(hf, "hidden_size", int) // max(_need(hf, "num_attention_heads", int), 1))
        check_whole("head_dim", head_dim, 1, MAX_DIMENSION)
        dims = int(head_dim * share + 1e-6)
    return RotaryConfig(theta=get(rope, "rope_theta", theta), scaling=_rope_scaling(rope, hf), dims=dims)


def _rope_scaling(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling(kind="linear", factor=rope["factor"])
        if kind == "llama3":
            return RopeScaling(
                kind="llama3",
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_max_len=rope["original_max_position_embeddings"],
            )
        if kind == "yarn":
            return _yarn(rope)
        if kind == "longrope":
            return _longrope(rope, hf)
        if kind == "proportional":
            share = get_number(rope, "partial_rotary_factor", 1.0)
            return RopeScaling(kind="proportional", factor=get(rope, "factor", 1.0), proportion=share)
    except KeyError as error:
        raise ValueError(f"config.json: rope scaling of type {kind!r} lacks {error}") from error
    supported = "default, linear, llama3, yarn, longrope, proportional"
    raise ValueError(f"config.json: rope type {kind!r} is not supported; supported are {supported}")


def _yarn(rope: Mapping[str, Any]) -> RopeScaling:
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            raise ValueError(f"config.json: {name}={rope[name]!r} of rope type 'yarn' is not supported")
    factor = get_number(rope, "factor", 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_len=rope["original_max_position_embeddings"],
        beta_fast=get(rope, "beta_fast", 32.0),
        beta_slow=get(rope, "beta_slow", 1.0),
        truncate=get(rope, "truncate", True),
        attention_factor=get_number(rope, "attention_factor", 0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def _longrope(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> RopeScaling:
    """The factors for contexts up to the original length. Beyond it another set holds, for all of a context."""
    original = get(rope, "original_max_position_embeddings", hf.get("original_max_position_embeddings"))
    check_whole("original_max_position_embeddings", original, 2, MAX_DIMENSION)
    factors = rope["short_factor"]
    if not isinstance(factors, list) or len(factors) > MAX_DIMENSION:
        raise ValueError("config.json: short_factor must be a list of numbers")
    stretch = max(get_number(rope, "factor", _need(hf, "max_position_embeddings", int) / original), 1.0)
    default = math.sqrt(1 + math.log(stretch) / math.log(original))
    attention_factor = get_number(rope, "attention_factor", default)
    return RopeScaling(
        kind="factors", factors=tuple(factors), original_max_len=original, attention_factor=attention_factor
    )


def _need(hf: Mapping[str, Any], key: str, kind: type) -> Any:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"config.json: {key}={value!r} must be {kind.__name__}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"config.json: eos_token_id={value!r} must be a token id or a list of them")
    return ids
