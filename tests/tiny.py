"""A model small enough to step thousands of times, with weights that make every part of it matter."""

import functools
from typing import Any

import jax
import numpy as np

from quire import LLM, AttentionConfig, ModelConfig
from quire.config import ExpertsConfig, RopeScaling, RotaryConfig
from quire.device.mesh import make_mesh
from quire.device.models.weights import params_from_tensors, weight_specs

VOCAB = 97
EXPERTS = ExpertsConfig(num_experts=6, num_experts_per_token=2, intermediate_size=24)
"""What mixtures of experts have by default."""

GEMMA = {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_multiplier": 32**0.5}
LOCAL, UNROTATED, PARTLY_ROTATED = RotaryConfig(theta=500.0), None, RotaryConfig(dims=6)
PROPORTIONAL = RotaryConfig(scaling=RopeScaling(kind="proportional", proportion=0.5))
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA | {"logits_soft_cap": 12.0, "soft_cap": 3.0, "windows": (5, None)},
    "gemma3": GEMMA | {"windows": (5, None), "rotaries": (LOCAL, RotaryConfig())},
    "gemma4": GEMMA
    | {"norm_offset": 0.0, "windows": (5, None), "rotaries": (LOCAL, PROPORTIONAL), "softmax_scale": 0.5},
    "gpt_oss": {"windows": (5, None), "activation": "swiglu_oai"},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_divisor": 0.5, "softmax_scale": 0.2},
    "ministral": {"windows": (5, None)},
    "olmo3": {"windows": (5, None), "rotaries": (LOCAL, RotaryConfig())},
    "phi3": {"rotaries": (PARTLY_ROTATED,) * 2},
    "smollm3": {"rotaries": (RotaryConfig(), UNROTATED)},
}
"""What is an architecture's own, in fields of ModelConfig and of every AttentionConfig; `rotaries` are the layers'."""


def tiny_config(
    architecture: str = "llama", *, windows: tuple[int | None, ...] | None = None, head_dim: int = 8, **changes
) -> ModelConfig:
    """Two layers, or one for each of `windows`; `changes` are fields of ModelConfig or of every AttentionConfig."""
    changes = FIELDS.get(architecture, {}) | changes
    windows = windows or changes.pop("windows", (None, None))
    changes.pop("windows", None)
    rotaries = changes.pop("rotaries", (RotaryConfig(),) * 2)
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim}
    of_attention = ("num_heads", "num_kv_heads", "rotary", "softmax_scale", "soft_cap")
    attention |= {name: changes.pop(name) for name in of_attention if name in changes}
    layers = [{"window": window, "rotary": rotaries[i % 2]} | attention for i, window in enumerate(windows)]
    fields = {
        "architecture": architecture,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "attention": tuple(AttentionConfig(**layer) for layer in layers),
        "max_len": 256,
        "eos_ids": (0,),
        "experts": EXPERTS if architecture in ("gpt_oss", "mixtral", "olmoe", "qwen3_moe") else None,
    }
    return ModelConfig(**(fields | changes))


def tiny_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    width, ffn = config.hidden_size, config.intermediate_size

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((config.vocab_size, width)).astype(np.float32),
        "lm_head.weight": 4 * normal(config.vocab_size, width),
        "model.norm.weight": 1 + 0.1 * rng.standard_normal(width).astype(np.float32),
    }
    for i, attention in enumerate(config.attention):
        prefix, head_dim = f"model.layers.{i}.", attention.head_dim
        q, kv = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
        tensors |= {
            f"{prefix}input_layernorm.weight": 1 + 0.1 * rng.standard_normal(width).astype(np.float32),
            f"{prefix}post_attention_layernorm.weight": 1 + 0.1 * rng.standard_normal(width).astype(np.float32),
            f"{prefix}self_attn.q_proj.weight": 2 * normal(q, width),
            f"{prefix}self_attn.k_proj.weight": 2 * normal(kv, width),
            f"{prefix}self_attn.v_proj.weight": normal(kv, width),
            f"{prefix}self_attn.o_proj.weight": normal(width, q),
        }
        if not config.has_experts(i):
            tensors |= {
                f"{prefix}mlp.gate_proj.weight": normal(ffn, width),
                f"{prefix}mlp.up_proj.weight": normal(ffn, width),
                f"{prefix}mlp.down_proj.weight": normal(width, ffn),
            }
        if config.architecture == "qwen2":
            tensors |= {
                f"{prefix}self_attn.{x}_proj.bias": normal(size) for x, size in zip("qkv", (q, kv, kv), strict=True)
            }
        if config.architecture in ("qwen3", "qwen3_moe"):
            tensors |= {f"{prefix}self_attn.{x}_norm.weight": 1 + 0.1 * normal(head_dim) for x in "qk"}
        if config.architecture == "olmoe":
            tensors |= {
                f"{prefix}self_attn.{x}_norm.weight": 1 + normal(size) for x, size in zip("qk", (q, kv), strict=True)
            }
    wanted = [tensor for array in jax.tree.leaves(weight_specs(config)) for tensor in array.tensors]
    for tensor in wanted:
        if tensor.name not in tensors:
            values = normal(*tensor.shape)
            is_factor = len(tensor.shape) == 1 and not tensor.name.endswith(("bias", "sinks"))
            tensors[tensor.name] = 1 + 0.1 * values if is_factor else values
        if "norm" in tensor.name:
            tensors[tensor.name] = tensors[tensor.name] - np.float32(config.norm_offset)
    return {tensor.name: tensors[tensor.name] for tensor in wanted}


@functools.cache
def tiny_params(config: ModelConfig, dtype: str = "float32", num_devices: int = 1):
    return params_from_tensors(config, tiny_tensors(config), mesh=make_mesh(jax.devices()[:num_devices]), dtype=dtype)


def tiny_llm(config: ModelConfig | None = None, num_devices: int = 1, **knobs) -> LLM:
    """An LLM over the tiny model, in float32, quiet, with small shapes."""
    config = config or tiny_config()
    defaults = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    knobs = defaults | knobs
    mesh = make_mesh(jax.devices()[:num_devices])
    return LLM.from_params(config, tiny_params(config, knobs["dtype"], num_devices), mesh=mesh, quiet=True, **knobs)


def check_schema(arrays: Any, schema: Any) -> None:
    """Every array has the shape, the type and the placement that stand in its place in the schema."""

    def check(array, expected):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert array.sharding.is_equivalent_to(expected.sharding, array.ndim)

    jax.tree.map(check, arrays, schema)
