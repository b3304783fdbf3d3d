"""Tensors under Hugging Face names, with PEFT's LoRA factors among them."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from quire.config import DEFAULT_DTYPE, ModelConfig
from quire.device.models.tensors import EMBEDDING, NO_WEIGHTS, OUTPUT_HEAD, check_tied, to_array
from quire.device.models.weights import weight_specs
from quire.weights.mapping import Leaf, Leaves, Source, add, check_config, convert, whole

PEFT_PREFIX, PEFT_BASE = "base_model.model.", ".base_layer"
PEFT_ADAPTER = ".default"
"""Parts of names that PEFT adds to those of the model: before all, in the middle, and after the factor."""


def from_huggingface(
    tensors: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: str = DEFAULT_DTYPE,
    mesh: Mesh | str | None = None,
    lora_alpha: float | None = None,
) -> Any:
    """Weights for `LLM.set_weights`, or for `LLM.from_params`, from tensors under Hugging Face names, `[out, in]`.

    jax arrays stay on their devices: one program casts and joins them, so that this may run under
    `jax.transfer_guard("disallow_explicit")`. numpy's and PyTorch's are put there first. `mesh` is the engine's, by
    default one device. LoRA factors under PEFT's names (`...q_proj.lora_A.weight`) are merged in float32, times
    `lora_alpha` over their rank: all of one alpha, and not those of rsLoRA.

    Differentiable, and traceable by `jax.jit`: `quire.train.logprobs(from_huggingface(tree, config, dtype="float32"),
    ...)` has a gradient by `tree`. With dtype="float32" the gradient is not rounded on its way.

    Every tensor that is missing, left over or of another shape or type is named in a ValueError.
    """
    check_config(config)
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise ValueError(f"tensors is of type {kind}: give a dict of names and arrays, such as model.state_dict()")
    given: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not name.endswith(NO_WEIGHTS):
            add(given, _plain(name), tensor)
    if config.tie_embeddings and EMBEDDING in given and (head := given.get(OUTPUT_HEAD)) is not None:
        if isinstance(head, jax.Array) and head is not given[EMBEDDING]:  # to compare them is a transfer
            raise ValueError(
                f"{OUTPUT_HEAD} is given, and the config says tie_embeddings=True: leave it out, or untie them"
            )
        check_tied(given)
        del given[OUTPUT_HEAD]
    arrays = {name: tensor if isinstance(tensor, jax.Array) else to_array(tensor) for name, tensor in given.items()}
    made = convert(_SOURCE, arrays, config, mesh=mesh, dtype=dtype, lora_alpha=lora_alpha)
    is_shared = any(not isinstance(tensor, jax.Array) for tensor in given.values())
    return jax.block_until_ready(made) if is_shared else made  # its owner may write to the host's memory again


def _plain(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX).replace(PEFT_BASE, "").replace(PEFT_ADAPTER, "")


def _leaves(config: ModelConfig) -> Leaves:
    tensors = [tensor for spec in jax.tree.leaves(weight_specs(config)) for tensor in spec.tensors]
    return {tensor.name: _leaf(tensor.name, tensor.shape) for tensor in tensors}


def _leaf(name: str, shape: tuple[int, ...]) -> Leaf:
    leaf = whole(name, *shape)
    return Leaf(shape, leaf.split, inputs=(1,)) if name.endswith(".weight") and len(shape) == 2 else leaf


def _lora_names(path: str) -> tuple[str, str]:
    module = path.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


_SOURCE = Source(_leaves, _lora_names, lora_is_transposed=True)
