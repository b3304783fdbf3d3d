"""The weights that dense decoders share; an architecture's file puts its layer together from these.

Weights are stored input x output, the layout in which stock XLA multiplies fast on a CPU, and what reads the same input
is one matmul:

    qkv      [D, K, (G+2)*H]   for each KV head: its G query heads, its key, its value (so heads split over a mesh)
    output   [N*H, D]
    gate_up  [D, 2, F]
    down     [F, D]
    embed    [V, D]            looked up by row; also the output head when tied
"""

from collections.abc import Callable, Sequence
from functools import partial

from quire.config import ModelConfig
from quire.device.models.heads import unpadded
from quire.device.models.weight_specs import Shape, Tensor, TensorSpec, WeightSpec, WeightSpecs, array_module

LayerWeights = Callable[[ModelConfig, int], dict[str, WeightSpec]]
"""Declares the arrays of layer i."""


def decoder_weights(config: ModelConfig, *, layer: LayerWeights) -> WeightSpecs:
    """A whole decoder: embedding, layers, final norm, and an output head unless it is tied to the embedding.

    GGUF files have the offset of norms, where there is one, in their weights.
    """
    D, V = config.hidden_size, config.vocab_size
    specs: WeightSpecs = {
        "embed": _vocabulary("model.embed_tokens.weight", "token_embd.weight", (V, D), contracted_axis=None),
        "norm": vector(TensorSpec("model.norm.weight", "output_norm.weight", (D,), gguf_added=config.norm_offset)),
        "layers": [layer(config, i) for i in range(config.num_layers)],
    }
    if not config.tie_embeddings:
        specs["unembed"] = _vocabulary("lm_head.weight", "output.weight", (V, D), contracted_axis=1)
    return specs


def attention_weights(config: ModelConfig, i: int, *, gguf_permuted: bool = False) -> dict[str, WeightSpec]:
    """Norm, q, k, v and output of layer i. `gguf_permuted`: GGUF files keep q and k in another rotary order."""
    D, attention = config.hidden_size, config.attention[i]
    N, K, H = attention.num_heads, attention.num_kv_heads, attention.head_dim
    return {
        "attention_norm": layer_norm(config, i, "input_layernorm", "attn_norm"),
        "qkv": WeightSpec(
            (D, K, (attention.group_size + 2) * H),
            (None, "kv_heads", None),
            qkv_tensors(config, i, "weight", gguf_permuted=gguf_permuted),
            partial(join_qkv, num_kv_heads=K, head_dim=H),
            contracted_axis=0,
            attention=attention,
        ),
        "output": WeightSpec(
            (N * H, D),
            ("heads", None),
            (layer_tensor(i, "self_attn.o_proj.weight", "attn_output.weight", (D, N * H)),),
            _transpose,
            contracted_axis=0,
            attention=attention,
        ),
    }


def qkv_bias_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """What is added to q, k and v of layer i."""
    attention = config.attention[i]
    K, H = attention.num_kv_heads, attention.head_dim
    bias = WeightSpec(
        (K, (attention.group_size + 2) * H),
        ("kv_heads", None),
        qkv_tensors(config, i, "bias"),
        partial(join_qkv, num_kv_heads=K, head_dim=H),
        attention=attention,
    )
    return {"qkv_bias": bias}


def mlp_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """Norm, gate, up and down of layer i."""
    D, F = config.hidden_size, config.intermediate_size
    return {
        "mlp_norm": layer_norm(config, i, "post_attention_layernorm", "ffn_norm"),
        "gate_up": WeightSpec(
            (D, 2, F),
            (None, None, "ffn"),
            (
                layer_tensor(i, "mlp.gate_proj.weight", "ffn_gate.weight", (F, D)),
                layer_tensor(i, "mlp.up_proj.weight", "ffn_up.weight", (F, D)),
            ),
            _stack_columns,
            contracted_axis=0,
        ),
        "down": WeightSpec(
            (F, D),
            ("ffn", None),
            (layer_tensor(i, "mlp.down_proj.weight", "ffn_down.weight", (D, F)),),
            _transpose,
            contracted_axis=0,
        ),
    }


def post_norm_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The norms of layer i that come after attention and after the feed-forward."""
    return {
        "post_attention_norm": layer_norm(config, i, "post_attention_layernorm", "post_attention_norm"),
        "post_mlp_norm": layer_norm(config, i, "post_feedforward_layernorm", "post_ffw_norm"),
    }


def head_norm_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The norms of q and k of layer i, each head by itself."""
    size = config.attention[i].head_dim
    return {
        "q_norm": layer_norm(config, i, "self_attn.q_norm", "attn_q_norm", size),
        "k_norm": layer_norm(config, i, "self_attn.k_norm", "attn_k_norm", size),
    }


def joint_norm_weights(config: ModelConfig, i: int) -> dict[str, WeightSpec]:
    """The norms of q and k of layer i, all heads together: whole on every device, whatever heads it has."""
    heads = unpadded(config.attention[i])
    return {
        "q_norm": layer_norm(config, i, "self_attn.q_norm", "attn_q_norm", heads.num_heads * heads.head_dim),
        "k_norm": layer_norm(config, i, "self_attn.k_norm", "attn_k_norm", heads.num_kv_heads * heads.head_dim),
    }


def layer_norm(config: ModelConfig, i: int, name: str, gguf_name: str, size: int | None = None) -> WeightSpec:
    """The weights of one norm of layer i, as many as the model is wide unless a size is given."""
    shape = (config.hidden_size if size is None else size,)
    tensor = layer_tensor(i, f"{name}.weight", f"{gguf_name}.weight", shape)
    return vector(tensor._replace(gguf_added=config.norm_offset))


def layer_tensor(i: int, name: str, gguf_name: str, shape: Shape, rotary_heads: int | None = None) -> TensorSpec:
    """A tensor of layer i by its names within the layer."""
    return TensorSpec(f"model.layers.{i}.{name}", f"blk.{i}.{gguf_name}", shape, rotary_heads)


def qkv_tensors(config: ModelConfig, i: int, kind: str, *, gguf_permuted: bool = False) -> tuple[TensorSpec, ...]:
    """The q, k and v of layer i, `kind` "weight" or "bias"."""
    attention = config.attention[i]
    inner = (config.hidden_size,) if kind == "weight" else ()
    heads = {"q": attention.num_heads, "k": attention.num_kv_heads, "v": attention.num_kv_heads}
    return tuple(
        layer_tensor(
            i,
            f"self_attn.{name}_proj.{kind}",
            f"attn_{name}.{kind}",
            (count * attention.head_dim, *inner),
            rotary_heads=count if gguf_permuted and name != "v" else None,
        )
        for name, count in heads.items()
    )


def vector(tensor: TensorSpec) -> WeightSpec:
    """An array that is one tensor as it stands, whole on every device."""
    return WeightSpec(tensor.shape, (None,) * len(tensor.shape), (tensor,), as_it_is)


def join_qkv(tensors: Sequence[Tensor], *, num_kv_heads: int, head_dim: int) -> Tensor:
    """`[*in, K, (G+2)*H]` from q, k and v, `[heads*H, *in]`: for each KV head its query heads, its key, its value."""
    inner = tensors[0].shape[1:]
    parts = [tensor.T.reshape(*inner, num_kv_heads, -1, head_dim) for tensor in tensors]
    return array_module(tensors).concatenate(parts, axis=-2).reshape(*inner, num_kv_heads, -1)


def _vocabulary(name: str, gguf_name: str, shape: Shape, *, contracted_axis: int | None) -> WeightSpec:
    tensor = TensorSpec(name, gguf_name, shape)
    return WeightSpec(shape, ("vocab", None), (tensor,), as_it_is, contracted_axis)


def as_it_is(tensors: Sequence[Tensor]) -> Tensor:
    """For `join`: an array that is one tensor."""
    (tensor,) = tensors
    return tensor


def _transpose(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor.T


def _stack_columns(tensors: Sequence[Tensor]) -> Tensor:
    return array_module(tensors).stack([tensor.T for tensor in tensors], axis=1)
