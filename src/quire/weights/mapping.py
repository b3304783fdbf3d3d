"""A trainer's tree as a table of leaves, each with the tensors of a checkpoint that it holds.

Every trainer keeps the same numbers in other shapes. A table for each says, leaf by leaf, which tensors under Hugging
Face names are in it; how those become the arrays of a model is what the architecture declares already
(`device/models/weight_specs.py`). All of it is one jitted function: XLA folds one reshaping into the next.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quire.config import DTYPES, ModelConfig
from quire.device.mesh import check_mesh, mesh_of
from quire.device.models.tensors import check_leaves, is_traced
from quire.device.models.weights import params_shardings, weight_specs


@dataclass(frozen=True)
class Leaf:
    """One array of a trainer's tree."""

    shape: tuple[int, ...]
    split: Callable[[jax.Array], Mapping[str, jax.Array]]
    """The tensors in it: Hugging Face name -> `[out, in]`."""
    inputs: tuple[int, ...] = ()
    """The axes that its matmul sums over; () if it is no matmul's."""


Leaves = dict[str, Leaf]
"""Path in the trainer's tree, such as "layers.0.attn.q_proj.w" -> leaf."""


@dataclass(frozen=True)
class Source:
    """A kind of trainer."""

    leaves: Callable[[ModelConfig], Leaves]
    lora_names: Callable[[str], tuple[str, str]] | None = None
    """The paths of a leaf's low-rank factors A and B, from its own; None where none are merged."""
    lora_is_transposed: bool = False
    """Whether they are `[rank, in]` and `[out, rank]`, and not `[*in, rank]` and `[rank, *out]`."""


def convert(
    source: Source, tree: Any, config: ModelConfig, *, mesh: Mesh | str | None, dtype: str, lora_alpha: float | None
) -> Any:
    """The arrays of a model, in the layout of docs/weights.md, from a trainer's tree.

    ValueError, naming every leaf, if some are missing, left over or of another shape or type.
    """
    check_config(config)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    leaves, given = source.leaves(config), flatten(tree)
    factors = _factors(source, leaves, given)
    if factors and lora_alpha is None:
        raise ValueError(f"{next(iter(factors))} is a LoRA factor: give lora_alpha, by which, over the rank, it counts")
    wanted = {path: leaf.shape for path, leaf in leaves.items()} | factors
    check_leaves(wanted, given)
    mesh = check_mesh(mesh) if isinstance(mesh, Mesh) else mesh_of(mesh)
    arrays = {path: given[path] for path in wanted}
    if _are_on(mesh, arrays.values()):
        return _program(source, config, mesh, dtype, lora_alpha)(arrays)
    made = _program(source, config, None, dtype, lora_alpha)(arrays)  # where the trainer has them
    return jax.device_put(made, params_shardings(config, mesh))


def check_config(config: Any) -> None:
    """Raise ValueError unless this is a ModelConfig."""
    if not isinstance(config, ModelConfig):
        kind = type(config).__name__
        raise ValueError(f"config is of type {kind}: give a ModelConfig after the weights, such as llm.model_config")


def _are_on(mesh: Mesh, arrays: Iterable[Any]) -> bool:
    """Whether a program over the devices of a mesh can take these: what is elsewhere has to be moved."""
    devices = list(mesh.devices.flat)
    concrete = [array for array in arrays if isinstance(array, jax.Array) and not is_traced(array)]
    placed = [array.sharding for array in concrete if array.committed]
    return all(list(sharding._device_assignment) == devices for sharding in placed)


def flatten(tree: Any) -> dict[str, Any]:
    """Path -> array of any pytree: dicts, lists, and what Flax makes of modules and their variables."""
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        if keys[-1:] in (["value"], ["raw_value"]):  # within a Flax variable
            keys.pop()
        add(found, ".".join(keys), array)
    return found


def add(arrays: dict[str, Any], name: str, array: Any) -> None:
    """Put an array under a name that no other has; ValueError if one has it."""
    if name in arrays:
        raise ValueError(f"two arrays are called {name}: give one of them")
    arrays[name] = array


def _factors(source: Source, leaves: Leaves, given: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the low-rank factors that are given, and of their partners; the rank is that of a given one."""
    shapes = {}
    for path, leaf in leaves.items():
        if source.lora_names is None or not leaf.inputs:
            continue
        a, b = source.lora_names(path)
        if not any(len(getattr(given.get(name), "shape", ())) >= 2 for name in (a, b)):
            continue  # what is no factor is left over
        inputs = [leaf.shape[axis] for axis in leaf.inputs]
        outputs = [length for axis, length in enumerate(leaf.shape) if axis not in leaf.inputs]
        if source.lora_is_transposed:
            rank = _length(given, (a, 0), (b, -1))
            shapes |= {a: (rank, *inputs), b: (*outputs, rank)}
        else:
            rank = _length(given, (a, -1), (b, 0))
            shapes |= {a: (*inputs, rank), b: (rank, *outputs)}
    return shapes


def _length(given: Mapping[str, Any], *axes: tuple[str, int]) -> int:
    """How long the first of these axes is that is there; at least 1."""
    shapes = [(getattr(given.get(name), "shape", ()), axis) for name, axis in axes]
    return next((max(shape[axis], 1) for shape, axis in shapes if len(shape) >= 2), 1)


@lru_cache(maxsize=16)
def _program(
    source: Source, config: ModelConfig, mesh: Mesh | None, dtype: str, lora_alpha: float | None
) -> Callable[[dict[str, jax.Array]], Any]:
    leaves, specs = source.leaves(config), weight_specs(config)

    def build(given: dict[str, jax.Array]) -> Any:
        tensors = {}
        for path, leaf in leaves.items():
            array = given[path]
            names = source.lora_names(path) if source.lora_names else ()
            if lora_alpha is not None and names and names[0] in given:
                a, b = (given[name].astype(jnp.float32) for name in names)
                low_rank = (a.T, b.T) if source.lora_is_transposed else (a, b)
                array = array.astype(jnp.float32) + _delta(leaf, *low_rank) * (lora_alpha / low_rank[0].shape[-1])
            tensors |= leaf.split(array)

        def join(spec: Any) -> jax.Array:
            return spec.join([tensors[tensor.name].astype(jnp.dtype(dtype)) for tensor in spec.tensors])

        return jax.tree.map(join, specs)

    return jax.jit(build, out_shardings=params_shardings(config, mesh) if mesh else None)


def _delta(leaf: Leaf, a: jax.Array, b: jax.Array) -> jax.Array:
    """What low-rank factors, `[*in, rank]` and `[rank, *out]`, add to a leaf."""
    delta = jnp.tensordot(a, b, axes=1, precision="highest")
    outputs = [axis for axis in range(delta.ndim) if axis not in leaf.inputs]
    return jnp.moveaxis(delta, range(delta.ndim), (*leaf.inputs, *outputs))


# -- what tables are made of ---------------------------------------------------------------------------------------


def whole(name: str, *shape: int) -> Leaf:
    """A leaf that is one tensor as it stands."""
    return Leaf(shape, lambda array: {name: array})


def kernel(name: str, inputs: Sequence[int], outputs: Sequence[int]) -> Leaf:
    """A leaf `[*inputs, *outputs]` that is one matrix, `[out, in]` in a checkpoint."""

    def split(array: jax.Array) -> dict[str, jax.Array]:
        return {name: array.reshape(-1, math.prod(outputs)).T}

    return Leaf((*inputs, *outputs), split, inputs=tuple(range(len(inputs))))


def unsupported(source: str, config: ModelConfig, known: Sequence[str]) -> ValueError:
    """For a table: an architecture that it does not have."""
    return ValueError(
        f"{source} weights of architecture {config.architecture!r} cannot be mapped, only {', '.join(known)}; "
        "give tensors under Hugging Face names instead (docs/weights.md)"
    )
