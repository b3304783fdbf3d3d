"""Weights of Tunix's models: Qwen3, Llama 3, Gemma 3 (text)."""

from typing import Any

import jax
from jax.sharding import Mesh

from quire.config import DEFAULT_DTYPE, AttentionConfig, ModelConfig
from quire.weights.mapping import Leaf, Leaves, Source, convert, kernel, unsupported, whole


def from_tunix(
    state: Any,
    config: ModelConfig,
    *,
    dtype: str = DEFAULT_DTYPE,
    mesh: Mesh | str | None = None,
    lora_alpha: float | None = None,
) -> Any:
    """Weights for `LLM.set_weights`, or for `LLM.from_params`, from a Tunix model: `nnx.state(model, nnx.Param)`.

    Qwen3, Llama 3 and Gemma 3. One program casts and joins the arrays on the devices where they are, so that this may
    run under `jax.transfer_guard("disallow_explicit")`. `mesh` is the engine's, by default one device. Qwix's LoRA
    factors are merged in float32, times `lora_alpha` over their rank.

    Every leaf that is missing, left over or of another shape or type is named in a ValueError.
    """
    return convert(_SOURCE, state, config, mesh=mesh, dtype=dtype, lora_alpha=lora_alpha)


def _leaves(config: ModelConfig) -> Leaves:
    if config.architecture not in _LAYERS:
        raise unsupported("Tunix", config, list(_LAYERS))
    D, V = config.hidden_size, config.vocab_size
    norm = "scale" if config.architecture == "gemma3" else "w"
    leaves = {
        "embedder.input_embedding": whole("model.embed_tokens.weight", V, D),
        f"final_norm.{norm}": whole("model.norm.weight", D),
    }
    if not config.tie_embeddings:
        leaves["lm_head.w"] = kernel("lm_head.weight", (D,), (V,))
    for i, attention in enumerate(config.attention):
        layer = _LAYERS[config.architecture](config, attention, f"model.layers.{i}.")
        leaves |= {f"layers.{i}.{path}": leaf for path, leaf in (layer | _mlp(config, i)).items()}
    return leaves


def _mlp(config: ModelConfig, i: int) -> Leaves:
    D, F, hf = config.hidden_size, config.intermediate_size, f"model.layers.{i}.mlp"
    return {
        "mlp.gate_proj.kernel": kernel(f"{hf}.gate_proj.weight", (D,), (F,)),
        "mlp.up_proj.kernel": kernel(f"{hf}.up_proj.weight", (D,), (F,)),
        "mlp.down_proj.kernel": kernel(f"{hf}.down_proj.weight", (F,), (D,)),
    }


def _llama(config: ModelConfig, attention: AttentionConfig, hf: str) -> Leaves:
    D, N, K, H = config.hidden_size, attention.num_heads, attention.num_kv_heads, attention.head_dim
    return {
        "input_layernorm.w": whole(f"{hf}input_layernorm.weight", D),
        "post_attention_layernorm.w": whole(f"{hf}post_attention_layernorm.weight", D),
        "attn.q_proj.w": kernel(f"{hf}self_attn.q_proj.weight", (D,), (N, H)),
        "attn.k_proj.w": kernel(f"{hf}self_attn.k_proj.weight", (D,), (K, H)),
        "attn.v_proj.w": kernel(f"{hf}self_attn.v_proj.weight", (D,), (K, H)),
        "attn.o_proj.w": kernel(f"{hf}self_attn.o_proj.weight", (N, H), (D,)),
    }


def _qwen3(config: ModelConfig, attention: AttentionConfig, hf: str) -> Leaves:
    return {
        **_llama(config, attention, hf),
        "attn.q_norm.w": whole(f"{hf}self_attn.q_norm.weight", attention.head_dim),
        "attn.k_norm.w": whole(f"{hf}self_attn.k_norm.weight", attention.head_dim),
    }


def _gemma3(config: ModelConfig, attention: AttentionConfig, hf: str) -> Leaves:
    D, N, K, H = config.hidden_size, attention.num_heads, attention.num_kv_heads, attention.head_dim
    q, k, v = (f"{hf}self_attn.{name}_proj.weight" for name in "qkv")
    if N == K:
        projections = {"attn.qkv_einsum.w": _projections((q, k, v), N, D, H)}
    else:
        projections = {
            "attn.q_einsum.w": Leaf((N, D, H), lambda array: {q: _heads(array)}, inputs=(1,)),
            "attn.kv_einsum.w": _projections((k, v), K, D, H),
        }
    return {
        **projections,
        "attn.attn_vec_einsum.w": kernel(f"{hf}self_attn.o_proj.weight", (N, H), (D,)),
        "attn._query_norm.scale": whole(f"{hf}self_attn.q_norm.weight", H),
        "attn._key_norm.scale": whole(f"{hf}self_attn.k_norm.weight", H),
        "pre_attention_norm.scale": whole(f"{hf}input_layernorm.weight", D),
        "post_attention_norm.scale": whole(f"{hf}post_attention_layernorm.weight", D),
        "pre_ffw_norm.scale": whole(f"{hf}pre_feedforward_layernorm.weight", D),
        "post_ffw_norm.scale": whole(f"{hf}post_feedforward_layernorm.weight", D),
    }


def _projections(names: tuple[str, ...], num_heads: int, hidden_size: int, head_dim: int) -> Leaf:
    """Several projections with equally many heads, stacked: `[C, N, D, H]`."""

    def split(array: jax.Array) -> dict[str, jax.Array]:
        return {name: _heads(array[i]) for i, name in enumerate(names)}

    return Leaf((len(names), num_heads, hidden_size, head_dim), split, inputs=(2,))


def _heads(array: jax.Array) -> jax.Array:
    """`[N*H, D]` from `[N, D, H]`."""
    return array.swapaxes(1, 2).reshape(-1, array.shape[1])


_LAYERS = {"qwen3": _qwen3, "llama": _llama, "gemma3": _gemma3}
_SOURCE = Source(_leaves, lambda path: (f"{path}_lora_a", f"{path}_lora_b"))
