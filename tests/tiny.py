"""A model small enough to step thousands of times, with weights that make every part of it matter."""

import functools

import numpy as np

from quire import LLM, AttentionConfig, ModelConfig
from quire.device.mesh import make_mesh
from quire.device.models.weights import params_from_tensors

VOCAB = 97


def tiny_config(
    architecture: str = "llama", *, windows: tuple[int | None, ...] = (None, None), head_dim: int = 8, **changes
) -> ModelConfig:
    """Two layers, or one for each of `windows`; `changes` are fields of ModelConfig or of every AttentionConfig."""
    attention = {"num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim}
    attention |= {name: changes.pop(name) for name in ("num_heads", "num_kv_heads", "rotary") if name in changes}
    fields = {
        "architecture": architecture,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "attention": tuple(AttentionConfig(window=window, **attention) for window in windows),
        "max_len": 256,
        "eos_ids": (0,),
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
            f"{prefix}mlp.gate_proj.weight": normal(ffn, width),
            f"{prefix}mlp.up_proj.weight": normal(ffn, width),
            f"{prefix}mlp.down_proj.weight": normal(width, ffn),
        }
    return tensors


@functools.cache
def tiny_params(config: ModelConfig, dtype: str = "float32", num_devices: int = 1):
    import jax

    return params_from_tensors(config, tiny_tensors(config), mesh=make_mesh(jax.devices()[:num_devices]), dtype=dtype)


def tiny_llm(config: ModelConfig | None = None, num_devices: int = 1, **knobs) -> LLM:
    """An LLM over the tiny model, in float32, quiet, with small shapes."""
    import jax

    config = config or tiny_config()
    defaults = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    knobs = defaults | knobs
    mesh = make_mesh(jax.devices()[:num_devices])
    return LLM.from_params(config, tiny_params(config, knobs["dtype"], num_devices), mesh=mesh, quiet=True, **knobs)
