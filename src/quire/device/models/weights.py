"""From a checkpoint's tensors to the arrays a model runs on, as its architecture declares them.

Tensors are read, joined and cast by a few threads, a layer at a time, and put on the mesh one after another: beside the
model itself, host memory holds the arrays of one layer.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import DEFAULT_DTYPE, ModelConfig
from quire.device.blocked import Blocked, StoredTensor, join_stored
from quire.device.linear import MatmulKind, Transposed, convert, convert_spec, restore
from quire.device.mesh import ArraySpec, make_row_major, place, row_major, sharding
from quire.device.models import get_architecture
from quire.device.models.layers import Params
from quire.device.models.padding import Padding, padded_specs
from quire.device.models.tensors import FLOATS, Tensors, check_tensors, dtype_name, is_wider, read_tensor
from quire.device.models.weight_specs import TensorSpec, WeightSpec, WeightSpecs

ReadTensor = Callable[[TensorSpec], np.ndarray]
"""Reads one tensor from wherever it is: a memory map, a dict."""
NUM_READERS = 2
"""Threads that read, widen and order the arrays of a layer, while one places them on devices."""
ReadStored = Callable[[TensorSpec], StoredTensor | None]
"""One tensor in the blocks in which a file has it; None if it is not in blocks that can be multiplied."""


def weight_specs(config: ModelConfig) -> WeightSpecs:
    """The arrays a model runs on, as its architecture declares them."""
    return get_architecture(config.architecture).weights(config)


def load_params(
    config: ModelConfig,
    read: ReadTensor,
    *,
    mesh: Mesh,
    dtype: str,
    progress: Callable[[int, int], None] | None = None,
    read_stored: ReadStored | None = None,
) -> Params:
    """Read every tensor of a model and place it. `progress(done, total)` is called after each layer.

    With `read_stored`, the embedding and what is multiplied are `Blocked` where the file has them in blocks.
    """

    def read_one(name: str, padding: Padding) -> np.ndarray | Blocked:
        spec = padding.public
        is_matrix = spec.contracted_axis is not None or name == "embed"
        if read_stored and is_matrix and (blocked := join_blocks(spec, read_stored)):
            return blocked
        return join_tensors(spec, read, dtype)

    def load(paddings: dict[str, Padding]) -> Params:
        arrays = pool.map(read_one, paddings, paddings.values())  # ahead of what is placed
        return {
            name: jax.tree.map(partial(place, mesh), array)
            if isinstance(array, Blocked)
            else place(mesh, array, *padding.axes)
            for (name, padding), array in zip(paddings.items(), arrays, strict=True)
        }

    paddings = _paddings(config, mesh)
    layers = paddings.pop("layers")
    with ThreadPoolExecutor(NUM_READERS) as pool:
        params = load(paddings)
        params["layers"] = []
        for i, layer in enumerate(layers):
            params["layers"].append(load(layer))
            if progress:
                progress(i + 1, config.num_layers)
    return params


def join_tensors(spec: WeightSpec, read: ReadTensor, dtype: str) -> np.ndarray:
    """One array of a model from the tensors it is made of: a copy, in the type it will have."""
    numpy_dtype = np.dtype(jnp.dtype(dtype))
    return np.ascontiguousarray(spec.join([_read(read, tensor).astype(numpy_dtype) for tensor in spec.tensors]))


def join_blocks(spec: WeightSpec, read_stored: ReadStored) -> Blocked | None:
    """The same of tensors in blocks, bit by bit; None where one is not, or where there is no such array."""
    if len(spec.tensors[0].shape) != 2 or (stored := _each_stored(spec, read_stored)) is None:
        return None
    starts = np.cumsum([0, *(len(tensor.rows) for tensor in stored)])
    outputs = [np.arange(*ends, dtype=np.int64)[:, None] for ends in pairwise(starts)]
    joined = np.asarray(spec.join(outputs))  # where each output comes from: an input of one number joins like any
    if joined.size != starts[-1]:
        return None  # experts: they are several matrices
    shape = spec.shape[1:] if spec.contracted_axis == 0 else spec.shape[:1]
    return join_stored(stored, joined.ravel(), shape)


def _each_stored(spec: WeightSpec, read_stored: ReadStored) -> list[StoredTensor] | None:
    found = []
    for tensor in spec.tensors:
        if (stored := read_stored(tensor)) is None:
            return None
        found.append(stored)
    return found


def _read(read: ReadTensor, tensor: TensorSpec) -> np.ndarray:
    values = read(tensor)
    if values.shape != tensor.shape:
        raise ValueError(f"tensor {tensor.name} has shape {values.shape}, the config implies {tensor.shape}")
    return values


def params_from_tensors(config: ModelConfig, tensors: Tensors, *, mesh: Mesh, dtype: str = DEFAULT_DTYPE) -> Params:
    """A model's arrays, cast and placed, from tensors already in this program under their Hugging Face names."""
    check_tensors(config, weight_specs(config), tensors)
    return load_params(config, partial(read_tensor, tensors), mesh=mesh, dtype=dtype)


def arrays_from_tensors(config: ModelConfig, tensors: Tensors, *, dtype: str) -> Params:
    """The same, one by one: a tree whose leaves are functions, each of which makes its array on the host."""
    specs = weight_specs(config)
    check_tensors(config, specs, tensors)
    return jax.tree.map(lambda spec: partial(join_tensors, spec, partial(read_tensor, tensors), dtype), specs)


def params_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """Where each array of the public layout lies on a mesh, in the place of the array."""
    return jax.tree.map(lambda padding: sharding(mesh, *padding.axes), _paddings(config, mesh))


def _is_blocked(weight: Any) -> bool:
    return isinstance(weight, Blocked)


def check_params(config: ModelConfig, params: Params, *, dtype: str, stored: bool = False) -> None:
    """Raise unless these are all the arrays of a model and no others, each of the right shape and alive, and of the
    engine's type or of a wider float, which `cast` rounds.

    `stored`: they may be `Blocked`, as `load_params` makes them.
    """
    wanted = dict(jax.tree_util.tree_leaves_with_path(weight_specs(config)))
    given = dict(jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_blocked))
    if other := [path for path in (*given, *wanted) if (path in given) != (path in wanted)]:
        path = other[0]
        state = "missing" if path in wanted else "not part of this model"
        raise ValueError(f"params{jax.tree_util.keystr(path)} is {state}; see docs/weights.md for the layout")
    for path, spec in wanted.items():
        array = given[path]
        if _is_blocked(array) and stored:
            continue
        if not hasattr(array, "dtype"):
            raise ValueError(f"params{jax.tree_util.keystr(path)} is of type {type(array).__name__}: give an array")
        if tuple(array.shape) != spec.shape:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {array.dtype}{list(array.shape)}, "
                f"expected {dtype}{list(spec.shape)}"
            )
        check_dtype(f"params{jax.tree_util.keystr(path)}", dtype_name(array), dtype)
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(f"params{jax.tree_util.keystr(path)} is deleted: it was donated to another program")


def check_dtype(name: str, given: str | None, wanted: str) -> None:
    """Raise ValueError unless numbers of one type can become another without that the caller lost some before."""
    if given == wanted or is_wider(given, wanted):
        return
    if given not in FLOATS:
        raise ValueError(f"{name} is {given}: weights are one of {', '.join(FLOATS)}")
    raise ValueError(
        f"{name} is {given} and the engine computes in {wanted}, which {given} cannot fill. If the rounding is meant, "
        f"cast: jax.tree.map(lambda array: array.astype({wanted!r}), params); otherwise convert float32 masters with "
        f"dtype={wanted!r}"
    )


def cast(array: Any, dtype: str) -> Any:
    """The array in the type of an engine: itself if it has that type."""
    return array if array.dtype == jnp.dtype(dtype) else array.astype(jnp.dtype(dtype))


def cast_later(params: Params, dtype: str) -> Params:
    """Weights that `check_params` accepted, with a function in the place of each array that has to be cast."""
    wanted = jnp.dtype(dtype)
    return jax.tree.map(
        lambda array: array if _is_blocked(array) or array.dtype == wanted else partial(cast, array, dtype),
        params,
        is_leaf=_is_blocked,
    )


def place_params(config: ModelConfig, params: Params, *, mesh: Mesh, dtype: str) -> Params:
    """Check weights that are in this program already, cast wider floats, and put them on the mesh.

    An array of the right type that is in its place stays there, without a copy.
    """
    check_params(config, params, dtype=dtype)
    paddings = dict(jax.tree_util.tree_leaves_with_path(_paddings(config, mesh)))
    return jax.tree_util.tree_map_with_path(
        lambda path, array: place(mesh, cast(array, dtype), *paddings[path].axes), params
    )


# -- from the public layout to what runs -------------------------------------------------------------------------


def prepare(config: ModelConfig, params: Params, *, mesh: Mesh, kind: MatmulKind) -> Params:
    """The weights a model runs on, from those of the public layout as they were placed on this mesh.

    What does not divide over the devices is padded; a tied output head gets an entry of its own.

    Takes the arrays out of `params` one at a time: memory that nobody else holds is free before the next is made. What
    stays as it is shares memory with the caller's.
    """
    ready: Params = {"layers": [{} for _ in params["layers"]]}
    for name, padding, given, made in _each_array(config, mesh, params, ready):
        made[name] = _prepare_array(padding, given.pop(name), kind)
    params.clear()
    if config.tie_embeddings:
        ready["unembed"] = _tied_head(ready["embed"], kind)
    return jax.block_until_ready(ready)


def abstract_params(config: ModelConfig, *, mesh: Mesh, dtype: str, kind: MatmulKind) -> Params:
    """The shape, type and placement of every array that `prepare` makes, in the place of the array."""

    def abstract(spec: WeightSpec) -> Any:
        array = ArraySpec(spec.shape, np.dtype(jnp.dtype(dtype)), spec.axes)
        if spec.contracted_axis is None:
            placed = row_major(sharding(mesh, *array.axes), len(array.shape))
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)
        arrays = convert_spec(array, spec.contracted_axis, kind, mesh)
        return jax.tree.map(lambda array: array.on(mesh), arrays, is_leaf=lambda x: isinstance(x, ArraySpec))

    specs = padded_specs(config, mesh)
    params = jax.tree.map(abstract, specs)
    if config.tie_embeddings:
        is_new = kind.converts(len(specs["embed"].shape), 1)
        params["unembed"] = (
            abstract(replace(specs["embed"], contracted_axis=1)) if is_new else Transposed(params["embed"])
        )
    return params


def is_stored(params: Params) -> bool:
    """Whether `load_params` found any of these in blocks."""
    return any(map(_is_blocked, jax.tree.leaves(params, is_leaf=_is_blocked)))


def abstract_like(params: Params) -> Params:
    """The shape, type and placement of arrays, each in the place of the array."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), params)


def replace_params(
    config: ModelConfig, ready: Params, params: Params, *, mesh: Mesh, kind: MatmulKind, copy: bool = True
) -> None:
    """Put other weights into the place of those in `ready`, which `prepare` made.

    `params` are arrays of the engine's type that `check_params` accepts, or functions that make them, as
    `arrays_from_tensors` and `cast_later` return. What is packed or quantised is
    made in the memory of its predecessor. Any other old array is released as soon as its successor is there: beside
    `ready` and the caller's arrays there is never more than one, and a second while it is padded or one of the caller's
    is put on the mesh. With `copy` the caller's stay the caller's; without, those that need no change are used as they
    are. When this ends in the middle (no memory, Ctrl-C), `ready` has some of either and must be replaced again before
    it is of use.
    """
    for name, padding, given, made in _each_array(config, mesh, params, ready):
        if isinstance(given[name], Blocked):
            made[name] = given[name]
            if name == "embed" and config.tie_embeddings:
                made["unembed"] = made["embed"]
            continue
        is_ours = callable(given[name])
        placed = place(mesh, given[name]() if is_ours else given[name], *padding.axes)
        axis = padding.public.contracted_axis
        is_converted = axis is not None and kind.converts(len(padding.public.shape), axis)
        must_copy = copy or isinstance(given[name], np.ndarray)  # numpy's memory may be written to unseen
        if must_copy and not (is_ours or padding.is_needed or is_converted):
            placed = jnp.copy(placed)
        made[name] = jax.block_until_ready(_prepare_array(padding, placed, kind, made.pop(name, None)))
        del placed  # before the next one is there
        if name == "embed" and config.tie_embeddings:
            made["unembed"] = _tied_head(made["embed"], kind, made.pop("unembed", None))


def restore_params(config: ModelConfig, ready: Params, *, mesh: Mesh) -> Params:
    """The weights of the public layout from which `prepare` made `ready`, as copies; ValueError if quantised."""
    restored: Params = {"layers": [{} for _ in ready["layers"]]}
    for name, padding, given, made in _each_array(config, mesh, ready, restored):
        axis, shape = padding.padded.contracted_axis, padding.padded.shape
        is_as_given = axis is None and not _is_blocked(given[name])
        array = jnp.copy(given[name]) if is_as_given else restore(given[name], axis or 0, shape)
        made[name] = jax.block_until_ready(padding.undo(array))
        del array  # before the next one is there
    return restored


def _paddings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """A tree like that of the params, with a `Padding` for each array."""
    return jax.tree.map(partial(Padding, mesh), weight_specs(config), padded_specs(config, mesh))


def _each_array(
    config: ModelConfig, mesh: Mesh, given: Params, made: Params
) -> Iterator[tuple[str, Padding, Params, Params]]:
    """Every array of a model: its name, its padding, and the dicts of two trees that have it or will."""
    paddings = _paddings(config, mesh)
    trees = ([tree, *tree["layers"]] for tree in (paddings, given, made))
    for wanted, from_, to in zip(*trees, strict=True):
        for name in [name for name in wanted if name != "layers"]:
            yield name, wanted[name], from_, to


def _tied_head(embed: Any, kind: MatmulKind, into: Any = None) -> Any:
    """The output head of a model that has its embedding for one; in blocks they are one array."""
    return embed if isinstance(embed, Blocked) else convert(embed, 1, kind, into)


def _prepare_array(padding: Padding, array: Any, kind: MatmulKind, into: Any = None) -> Any:
    if isinstance(array, Blocked):
        return array
    padded, axis = padding.apply(array), padding.padded.contracted_axis
    return make_row_major(padded) if axis is None else convert(padded, axis, kind, into)
