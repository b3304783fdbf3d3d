"""Mixtures of experts: each token takes a few of many feed-forwards, and adds them up by weight.

    router            [E, D]       float32 scores of each token for each expert; the best few are its experts
    experts_gate_up   [E, D, 2*F]  of each expert the columns of its gate, then those of up
    experts_down      [E, F, D]

Where an architecture has biases they are beside these, under `router_bias` and so on.

Rows of tokens are sorted by expert, so that each expert multiplies the rows that are next to each other:

    tokens             0      1      2      -       the last is padding
    their experts     2 0    2 3    0 2    . .
    sorted rows       0 2 | | 0 1 2 | 1 | . .       group sizes 2 0 3 1
                      E0   E1  E2     E3  nobody's

Experts are split over devices, all tokens are on each: a device takes the rows of its own experts for its groups, the
rest is nobody's, and what devices add to a token is summed over all. Padding is nobody's, too: it costs no expert.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from quire.config import ExpertsConfig, ModelConfig
from quire.device.inputs import BatchLayout
from quire.device.linear import grouped_linear
from quire.device.mesh import mesh_axes_of
from quire.device.models.dense import layer_tensor, vector
from quire.device.models.layers import ModelStatics, Params, gated_mlp
from quire.device.models.weight_specs import Tensor, TensorSpec, WeightSpec, array_module
from quire.device.pointwise import gate

ExpertName = Callable[[int, str], str]
"""The name within a layer of the tensor of expert e that is called "gate", "up" or "down"."""


def read_experts(hf: Mapping[str, Any], *, intermediate_size: str, **known: Any) -> ExpertsConfig:
    """What config.json says of experts; the field of an expert's width has another name in each architecture.

    `known`: what the architecture decides by itself. The number of experts has two names: transformers 5 writes either.
    """
    for name in ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"):
        if hf.get(name):
            raise ValueError(f"config.json: {name}={hf[name]!r}: shared experts are not supported")
    normalize = hf.get("norm_topk_prob")
    fields = {
        "num_experts": hf.get("num_experts", hf.get("num_local_experts")),
        "num_experts_per_token": hf.get("num_experts_per_tok"),
        "intermediate_size": hf.get(intermediate_size),
        "normalize_weights": False if normalize is None else normalize,
    }
    return ExpertsConfig(**(fields | known))


def expert_weights(
    config: ModelConfig,
    i: int,
    *,
    router: str = "mlp.gate.weight",
    name: ExpertName = lambda e, part: f"mlp.experts.{e}.{part}_proj.weight",
) -> dict[str, WeightSpec]:
    """Norm, router and experts of layer i, under the names that their tensors have in Hugging Face checkpoints."""
    assert config.experts is not None, "only layers with experts ask"
    E, D, F = config.experts.num_experts, config.hidden_size, config.experts.intermediate_size

    def tensors(part: str, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
        stacked = f"ffn_{part}_exps.weight"
        return tuple(layer_tensor(i, name(e, part), stacked, shape)._replace(gguf_index=e) for e in range(E))

    return {
        "mlp_norm": vector(layer_tensor(i, "post_attention_layernorm.weight", "ffn_norm.weight", (D,))),
        "router": vector(layer_tensor(i, router, "ffn_gate_inp.weight", (E, D))),
        "experts_gate_up": WeightSpec(
            (E, D, 2 * F),
            ("experts", None, None),
            tensors("gate", (F, D)) + tensors("up", (F, D)),
            _join_gate_up,
            contracted_axis=1,
        ),
        "experts_down": WeightSpec(
            (E, F, D), ("experts", None, None), tensors("down", (D, F)), _stack, contracted_axis=1
        ),
    }


def _join_gate_up(tensors: Sequence[Tensor]) -> Tensor:
    xp = array_module(tensors)
    gates, ups = xp.split(xp.stack(tensors), 2)
    return xp.concatenate([gates, ups], axis=1).swapaxes(1, 2)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return array_module(tensors).stack(tensors).swapaxes(1, 2)


def experts_mlp(
    weights: Params, x_TD: Float[Array, "T D"], layout: BatchLayout, statics: ModelStatics
) -> Float[Array, "T D"]:
    """For `mlp` of `decoder_layer`: experts, and in layers that have none of them a plain feed-forward."""
    if "router" not in weights:
        return gated_mlp(weights, x_TD, statics)
    return mixture(weights, x_TD, layout.is_token_T, statics)


def mixture(
    weights: Params, x_TD: Float[Array, "T D"], is_token_T: Bool[Array, " T"], statics: ModelStatics
) -> Float[Array, "T D"]:
    """The weighted sum of what each token's experts make of it; zeros for padding."""
    experts = statics.config.experts
    assert experts is not None, "only layers with experts have a router"
    share_TX, expert_TX = route(x_TD, weights["router"], experts, weights.get("router_bias"))
    expert_TX = jnp.where(is_token_T[:, None], expert_TX, experts.num_experts)
    matrices = {name: array for name, array in weights.items() if name.startswith("experts_")}
    axes = mesh_axes_of(statics.mesh, "experts")
    whole, split = PartitionSpec(), PartitionSpec(axes)
    run = jax.shard_map(
        partial(_own_experts, statics=statics),
        mesh=statics.mesh,
        in_specs=(jax.tree.map(lambda _: split, matrices), whole, whole, whole),
        out_specs=whole,
        check_vma=False,
    )
    return run(matrices, x_TD, share_TX, expert_TX)


def route(
    x_TD: Float[Array, "T D"],
    router_ED: Float[Array, "E D"],
    experts: ExpertsConfig,
    bias_E: Float[Array, " E"] | None = None,
) -> tuple[Float[Array, "T X"], Int[Array, "T X"]]:
    """The experts of each token, best first, and their weights: in float32, whatever the model computes in."""
    wide_TD, wide_ED = x_TD.astype(jnp.float32), router_ED.astype(jnp.float32)
    scores_TE = jax.lax.dot_general(wide_TD, wide_ED, (((1,), (1,)), ((), ())), precision="highest")
    if bias_E is not None:
        scores_TE += bias_E.astype(jnp.float32)[None]
    share_TX, expert_TX = jax.lax.top_k(jax.nn.softmax(scores_TE), experts.num_experts_per_token)
    if experts.normalize_weights:
        share_TX /= jnp.sum(share_TX, axis=1, keepdims=True)
    return share_TX, expert_TX


def _own_experts(
    matrices: Params,
    x_TD: Float[Array, "T D"],
    share_TX: Float[Array, "T X"],
    expert_TX: Int[Array, "T X"],
    *,
    statics: ModelStatics,
) -> Float[Array, "T D"]:
    """What this device's experts add to each token, summed over devices."""
    axes = mesh_axes_of(statics.mesh, "experts")
    num_experts = jax.tree.leaves(matrices)[0].shape[0]
    first = jax.lax.axis_index(axes) * num_experts
    own_TX = jnp.where((expert_TX >= first) & (expert_TX < first + num_experts), expert_TX - first, num_experts)
    own_R = own_TX.reshape(-1)
    order_R = jnp.argsort(own_R, stable=True)
    place_R = jnp.zeros_like(order_R).at[order_R].set(jnp.arange(order_R.size, dtype=order_R.dtype))
    group_sizes_E = jnp.sum(own_R[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    sorted_R = jnp.minimum(own_R[order_R], num_experts - 1)  # what is nobody's may be taken for anybody's

    def multiply(rows: jax.Array, name: str) -> jax.Array:
        out = grouped_linear(rows, matrices[name], group_sizes_E)
        return out + matrices[f"{name}_bias"][sorted_R] if f"{name}_bias" in matrices else out

    gate_up_RX = multiply(x_TD[order_R // expert_TX.shape[1]], "experts_gate_up")
    hidden_RF = gate(gate_up_RX.reshape(order_R.size, 2, -1), statics.config.activation, native=statics.native)
    out_RD = multiply(hidden_RF, "experts_down")
    out_TXD = out_RD[place_R].reshape(*own_TX.shape, -1).astype(jnp.float32)
    # Selected, not multiplied by zero: what is nobody's may be anything.
    out_TXD = jnp.where((own_TX < num_experts)[:, :, None], out_TXD * share_TX[:, :, None], 0)
    return jax.lax.psum(jnp.sum(out_TXD, axis=1).astype(x_TD.dtype), axes)
