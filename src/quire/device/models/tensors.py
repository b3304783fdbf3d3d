"""Tensors that are in this program under their Hugging Face names: recognised, checked all at once, and read.

A tensor is anything with numbers in it: numpy's, jax's, or of whoever speaks DLPack (PyTorch).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from quire.config import ModelConfig
from quire.device.models.weight_specs import TensorSpec, WeightSpecs

EMBEDDING, OUTPUT_HEAD = "model.embed_tokens.weight", "lm_head.weight"
NO_WEIGHTS = ("rotary_emb.inv_freq",)
"""Ends of names that old checkpoints have beside the weights: worked out from the config, and left alone."""
FLOATS = ("bfloat16", "float16", "float32", "float64")
"""What weights are numbers of: integers, and floats of 8 bits, are those of a quantised model, without its scales."""
MAX_NAMED = 20
"""Tensors of one kind of mistake that an error names; of the others it gives the number."""

Tensors = Mapping[str, Any]
"""Hugging Face name -> tensor, `[out, in]`."""


def has_tensor_names(params: Any) -> bool:
    """Whether these are tensors under Hugging Face names; otherwise they are a tree as in docs/weights.md.

    ValueError if they are no mapping, and so neither.
    """
    if not isinstance(params, Mapping):
        raise ValueError(f"params is of type {type(params).__name__}: give a dict of arrays, as in docs/weights.md")
    return "layers" not in params and any("." in str(name) for name in params)


def is_wider(dtype: str | None, wanted: str) -> bool:
    """True if numbers of `dtype` are floats and have more bits than `wanted`: a cast rounds them."""
    return dtype in FLOATS and jnp.finfo(jnp.dtype(dtype)).bits > jnp.finfo(jnp.dtype(wanted)).bits


def check_tensors(config: ModelConfig, specs: WeightSpecs, tensors: Tensors) -> None:
    """Raise ValueError unless these are all the tensors of a model and no others: it names those that are wrong.

    A tied model may come with its output head or without; if with, it must be the embedding.
    """
    wanted = {tensor.name: tensor.shape for spec in jax.tree.leaves(specs) for tensor in spec.tensors}
    given = {name: tensor for name, tensor in tensors.items() if not str(name).endswith(NO_WEIGHTS)}
    if config.tie_embeddings:
        given.pop(OUTPUT_HEAD, None)
    check_leaves(wanted, given)
    if config.tie_embeddings and OUTPUT_HEAD in tensors:
        check_tied(tensors)


def check_leaves(wanted: Mapping[str, tuple[int, ...]], given: Tensors) -> None:
    """Raise ValueError unless these are the arrays wanted, by name and shape, and no others: it names what is wrong."""
    misshapen = [
        f"{name} is {_shape(given[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in given and _shape(given[name]) != list(shape)
    ]
    mistyped = [
        f"{name} is {kind}"
        for name in wanted
        if name in given and (kind := dtype_name(given[name])) is not None and kind not in FLOATS
    ]
    problems = [
        _named("missing", [name for name in wanted if name not in given]),
        _named("not part of this model", sorted(map(str, given.keys() - wanted.keys()))),
        _named("of another shape", misshapen),
        _named(f"of another type than {', '.join(FLOATS)}", mistyped),
    ]
    if any(problems):
        raise ValueError(f"these tensors are not those of the model: {'; '.join(filter(None, problems))}")
    for name, tensor in given.items():
        _check_alive(name, tensor)


def _check_alive(name: str, tensor: Any) -> None:
    if isinstance(tensor, jax.Array) and not is_traced(tensor) and tensor.is_deleted():
        raise ValueError(f"tensor {name} is deleted: it was donated to another program")


def is_traced(array: Any) -> bool:
    """Whether this stands for an array inside `jax.jit` or `jax.grad`: it has a shape and a type, and no memory."""
    return isinstance(array, Tracer)


def _named(problem: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(names)} {problem}: {', '.join(names[:MAX_NAMED])}{more}"


def _shape(tensor: Any) -> list[int]:
    return list(getattr(tensor, "shape", np.shape(tensor)))


def dtype_name(tensor: Any) -> str | None:
    """Type of a tensor's numbers, such as "float32"; None if the tensor does not state it."""
    dtype = getattr(tensor, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def check_tied(tensors: Tensors) -> None:
    """Raise ValueError unless the output head is the embedding, or equal to it."""
    head, embedding = tensors[OUTPUT_HEAD], tensors[EMBEDDING]
    _check_alive(OUTPUT_HEAD, head)
    if head is not embedding and not np.array_equal(to_array(head), to_array(embedding)):
        raise ValueError(
            f"{OUTPUT_HEAD} is not {EMBEDDING}, and the config says tie_embeddings=True: leave it out, or untie them"
        )


def read_tensor(tensors: Tensors, tensor: TensorSpec) -> np.ndarray:
    """One tensor of a model."""
    return to_array(tensors[tensor.name])


def to_array(tensor: Any) -> np.ndarray:
    """The numbers of a tensor on the host; by way of DLPack where numpy has no type for them (PyTorch's bfloat16)."""
    if not isinstance(tensor, np.ndarray | jax.Array) and hasattr(tensor, "__dlpack__"):
        for method in ("detach", "cpu", "contiguous"):  # of PyTorch: without gradient, on the host, in one piece
            tensor = getattr(tensor, method)() if hasattr(tensor, method) else tensor
        tensor = jnp.from_dlpack(tensor)
    return np.asarray(tensor)
