"""From a checkpoint's tensors to the arrays a model runs on, as its architecture declares them.

Tensors are joined, cast and put on the mesh one array at a time: beside the model itself, host memory holds one array.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import ModelConfig
from quire.device.linear import MatmulKind, convert
from quire.device.mesh import place
from quire.device.models import get_architecture
from quire.device.models.layers import Params
from quire.device.models.weight_specs import TensorSpec, WeightSpec, WeightSpecs

ReadTensor = Callable[[TensorSpec], np.ndarray]
"""Reads one tensor from wherever it is: a memory map, a dict."""


def weight_specs(config: ModelConfig) -> WeightSpecs:
    """The arrays a model runs on, as its architecture declares them."""
    return get_architecture(config.architecture).weights(config)


def load_params(
    config: ModelConfig, read: ReadTensor, *, mesh: Mesh, dtype: str, progress: Callable[[int, int], None] | None = None
) -> Params:
    """Read every tensor of a model and place it. `progress(done, total)` is called after each layer."""
    numpy_dtype = np.dtype(jnp.dtype(dtype))

    def load(spec: WeightSpec) -> jax.Array:
        array = spec.join([_read(read, tensor).astype(numpy_dtype) for tensor in spec.tensors])
        return place(mesh, np.ascontiguousarray(array), *spec.axes)

    specs = weight_specs(config)
    layers = specs.pop("layers")
    params: Params = {name: load(spec) for name, spec in specs.items()}
    params["layers"] = []
    for i, layer in enumerate(layers):
        params["layers"].append({name: load(spec) for name, spec in layer.items()})
        if progress:
            progress(i + 1, config.num_layers)
    return params


def _read(read: ReadTensor, tensor: TensorSpec) -> np.ndarray:
    values = read(tensor)
    if values.shape != tensor.shape:
        raise ValueError(f"tensor {tensor.name} has shape {values.shape}, the config implies {tensor.shape}")
    return values


def params_from_tensors(
    config: ModelConfig, tensors: Mapping[str, Any], *, mesh: Mesh, dtype: str = "bfloat16"
) -> Params:
    """A model's arrays from tensors already in this program, under their Hugging Face names."""

    def read(tensor: TensorSpec) -> np.ndarray:
        if tensor.name not in tensors:
            raise ValueError(f"tensors has no {tensor.name!r}")
        return np.asarray(tensors[tensor.name])

    return load_params(config, read, mesh=mesh, dtype=dtype)


def check_params(config: ModelConfig, params: Params, *, dtype: str) -> None:
    """Raise unless these are all the arrays of a model and no others, each of the right shape and type and alive."""
    wanted = dict(jax.tree_util.tree_leaves_with_path(weight_specs(config)))
    given = dict(jax.tree_util.tree_leaves_with_path(params))
    for path in wanted.keys() ^ given.keys():
        state = "missing" if path in wanted else "not part of this model"
        raise ValueError(f"params{jax.tree_util.keystr(path)} is {state}; see docs/weights.md for the layout")
    for path, spec in wanted.items():
        array = given[path]
        if tuple(array.shape) != spec.shape or array.dtype != jnp.dtype(dtype):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {array.dtype}{list(array.shape)}, "
                f"expected {dtype}{list(spec.shape)}"
            )
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(f"params{jax.tree_util.keystr(path)} is deleted: it was donated to another program")


def place_params(config: ModelConfig, params: Params, *, mesh: Mesh, dtype: str) -> Params:
    """Check weights that are in this program already and put them on the mesh.

    An array that is in its place stays there, without a copy.
    """
    check_params(config, params, dtype=dtype)
    specs = dict(jax.tree_util.tree_leaves_with_path(weight_specs(config)))
    return jax.tree_util.tree_map_with_path(lambda path, array: place(mesh, array, *specs[path].axes), params)


# -- from the public layout to what runs -------------------------------------------------------------------------


def prepare(config: ModelConfig, params: Params, kind: MatmulKind) -> Params:
    """The weights a model runs on, from those of the public layout; a tied output head gets an entry of its own.

    Takes the arrays out of `params` one at a time: memory that nobody else holds is free before the next is made. What
    stays as it is shares memory with the caller's.
    """
    ready: Params = {"layers": [{} for _ in params["layers"]]}
    specs = weight_specs(config)
    for wanted, given, made in zip(*map(_dicts, (specs, params, ready)), strict=True):
        for name in [name for name in wanted if name != "layers"]:
            made[name] = _prepare_array(wanted[name], given.pop(name), kind)
    params.clear()
    if config.tie_embeddings:
        ready["unembed"] = convert(ready["embed"], 1, kind)
    return jax.block_until_ready(ready)


def replace_params(config: ModelConfig, ready: Params, params: Params, *, mesh: Mesh, kind: MatmulKind) -> None:
    """Put weights that `check_params` accepts into the place of those in `ready`, which `prepare` made.

    Each old array is released as soon as its successor is made: beside `ready` and the caller's arrays there is never
    more than one, and a second while one of the caller's that is not on the mesh is put there. The caller's are copied
    and stay the caller's. When this ends in the middle (no memory, Ctrl-C),
    `ready` has some of either and must be replaced again before it is of use.
    """
    for wanted, given, made in zip(*map(_dicts, (weight_specs(config), params, ready)), strict=True):
        for name in [name for name in wanted if name != "layers"]:
            spec = wanted[name]
            placed = place(mesh, given[name], *spec.axes)
            is_new = spec.contracted_axis is not None and kind.converts
            made[name] = jax.block_until_ready(_prepare_array(spec, placed if is_new else jnp.copy(placed), kind))
            del placed  # before the next one is there
            if name == "embed" and config.tie_embeddings:
                made["unembed"] = convert(made["embed"], 1, kind)


def _dicts(tree: Params) -> list[Params]:
    """The dicts of a tree that have arrays in them: the model's own, then each layer's."""
    return [tree, *tree["layers"]]


def _prepare_array(spec: WeightSpec, array: jax.Array, kind: MatmulKind) -> Any:
    return array if spec.contracted_axis is None else convert(array, spec.contracted_axis, kind)
