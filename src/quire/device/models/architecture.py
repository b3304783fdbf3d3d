"""What an architecture's file says of it, and how a Hugging Face config is read.

Model files are strangers' input: every number is checked before it sizes anything, nothing in them is executed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import ModelConfig, RopeScaling
from quire.device.models.layers import LayerFunction


@dataclass(frozen=True)
class Architecture:
    """One kind of decoder."""

    name: str
    """As in config.json's `model_type` and GGUF's `general.architecture`."""
    config: Callable[[Mapping[str, Any]], ModelConfig]
    """Reads config.json."""
    layer: LayerFunction
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_permuted: bool = False
    """llama.cpp stores the rows of q and k in another rotary order for this architecture."""


def read_config(hf: Mapping[str, Any], name: str, *, windows: tuple[int | None, ...] = (), **extra: Any) -> ModelConfig:
    """The fields that every decoder's config.json has, in the old and the new spelling."""
    num_heads = _need(hf, "num_attention_heads", int)
    hidden_size = _need(hf, "hidden_size", int)
    rope = hf.get("rope_parameters") or {}
    scaling = rope or hf.get("rope_scaling")
    theta = rope.get("rope_theta", hf.get("rope_theta", 10_000.0))
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act={activation!r} is not supported, only 'silu'")
    for bias in ("mlp_bias", "attention_bias"):
        if hf.get(bias):
            raise ValueError(f"config.json: {bias}=true is not supported for {name}")
    return ModelConfig(
        architecture=name,
        vocab_size=_need(hf, "vocab_size", int),
        num_layers=_need(hf, "num_hidden_layers", int),
        hidden_size=hidden_size,
        intermediate_size=_need(hf, "intermediate_size", int),
        num_heads=num_heads,
        num_kv_heads=hf.get("num_key_value_heads") or num_heads,
        head_dim=hf.get("head_dim") or hidden_size // max(num_heads, 1),
        max_len=_need(hf, "max_position_embeddings", int),
        rope_theta=float(theta),
        rope_scaling=_rope_scaling(scaling),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        windows=windows,
        eos_ids=_ids(hf.get("eos_token_id")),
        **extra,
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


def _rope_scaling(scaling: Any) -> RopeScaling | None:
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(scaling["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_len=int(scaling["original_max_position_embeddings"]),
        )
    raise ValueError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3")
