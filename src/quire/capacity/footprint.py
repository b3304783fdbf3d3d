"""What lies in a device's memory, from shapes alone: weights, pool, and what a step needs beside them.

Shapes come from the device programs themselves, traced for devices that are only described. No compiler is asked.
"""

import math
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.capacity.roofline import LOGITS_ITEMSIZE, LayerKinds, Work
from quire.capacity.topology import Topology
from quire.config import EngineConfig, ModelConfig, WindowPoolSize
from quire.device.mesh import make_mesh
from quire.device.programs import Programs
from quire.engine.build import size_pool
from quire.engine.pool_size import sequences_that_fit
from quire.engine.step_shapes import step_shapes

LANES, SUBLANES = 128, 8
"""A TPU keeps arrays in tiles of so many numbers of the last axis and of the one before it."""
TPU_UNIT, GPU_UNIT = 512, 256
"""Bytes to a multiple of which an array's memory is rounded up."""
RESIDUAL_COPIES = 4
"""Vectors of the model's width that a step keeps for each token: the stream, what is added to it, its norm, and a sum
over devices."""
LOGITS_COPIES = 4
"""Vectors of the vocabulary's size that the sampler keeps for each sample."""


@dataclass(frozen=True)
class DescribedDevice:
    """Stands for a device that is not here in a mesh of which only shapes are asked."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0
    memory: int = 0
    """Bytes that programs may use."""

    def memory_stats(self) -> dict[str, int]:
        """What a device that is here says of its memory."""
        return {"bytes_limit": self.memory}


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device."""

    weights: int
    pool: int
    temporaries: int
    num_pages: int
    windows: tuple[WindowPoolSize, ...] = ()
    """The pools of layers that see a window."""

    def num_sequences(self, num_tokens: int, page_size: int) -> int:
        """Sequences of so many tokens that the pools hold at the same time."""
        return sequences_that_fit(num_tokens, page_size=page_size, num_pages=self.num_pages, windows=self.windows)


def described_programs(config: EngineConfig, model: ModelConfig, topology: Topology, *, max_model_len: int) -> Programs:
    """The programs of an engine on a slice that is not here, with a pool of one page."""
    chip = topology.chip
    mesh = make_mesh(
        [DescribedDevice(i, chip.platform, chip.kind, memory=chip.device_memory) for i in range(topology.num_devices)]
    )
    return programs_on(mesh, config, model, num_pages=1, max_model_len=max_model_len)


def programs_on(
    mesh: Any,
    config: EngineConfig,
    model: ModelConfig,
    *,
    num_pages: int,
    max_model_len: int,
    windows: tuple[WindowPoolSize, ...] = (),
) -> Programs:
    """The programs of an engine with these knobs, as it would make them."""
    return Programs(
        model=model,
        mesh=mesh,
        dtype=config.dtype,
        num_pages=num_pages,
        page_size=config.page_size,
        pages_per_row=min(-(-max_model_len // config.page_size), num_pages),
        max_num_rows=max(shape.num_rows for shape in step_shapes(config)),
        max_rounds=config.max_rounds,
        max_logprobs=config.max_logprobs,
        windows=windows,
        attention=config.attention,
        matmul=config.matmul,
        quantize=config.quantize,
    )


def footprint(programs: Programs, config: EngineConfig, topology: Topology, *, max_model_len: int) -> Footprint:
    """The memory of an engine that takes as many pages as it would there; no page if the weights fill the memory."""
    weights = weight_bytes(programs)
    free = max(topology.chip.device_memory - weights, 0) * topology.num_devices
    temporaries = temporary_bytes(programs, config)
    try:
        pool = size_pool(config, programs.model, max_model_len, programs.mesh, free)
    except ValueError:  # not a page fits
        return Footprint(weights, 0, temporaries, 0)
    sized = replace(programs, num_pages=pool.num_pages, windows=pool.windows)
    return Footprint(weights, device_bytes(sized.caches), temporaries, pool.num_pages, pool.windows)


def weight_bytes(programs: Programs) -> int:
    """Bytes of the weights on one device. A tied output head is the embedding, but where it has another form."""
    params = dict(programs.params)
    if programs.model.tie_embeddings and not programs.matmul_kind.converts(2, 1):
        del params["unembed"]
    return device_bytes(params)


def temporary_bytes(programs: Programs, config: EngineConfig) -> int:
    """What the largest step needs beside weights and pool: an estimate, with a few copies of each kind of array."""
    work = work_of(programs)
    heads = max(kind.num_heads * kind.head_dim for kind in work.layers)
    kv = max(kind.kv_bytes_per_token for kind in work.layers)
    ffn = programs.model.intermediate_size // programs.mesh.size
    if experts := programs.model.experts:
        rows = experts.num_experts_per_token  # of a token, each with a copy of it, and what its expert makes of it
        ffn = max(ffn, rows * (experts.intermediate_size + work.hidden_size))
    token = (RESIDUAL_COPIES * work.hidden_size + 2 * ffn + 2 * heads) * work.itemsize + kv + 4 * heads
    sample = LOGITS_COPIES * work.vocab_size * LOGITS_ITEMSIZE
    return max(shape.num_tokens * token + shape.num_samples * sample for shape in step_shapes(config))


def work_of(programs: Programs) -> Work:
    """What one device reads and computes in a step of these programs."""
    params, dense = programs.params, replace(programs, quantize=None).params  # a number of the latter is one element
    kinds: dict[Any, int] = {}
    for i, attention in enumerate(programs.model.attention):
        kinds.setdefault(attention, i)
    width = programs.model.hidden_size
    layers = tuple(
        LayerKinds(
            count=programs.model.attention.count(attention),
            kv_bytes_per_token=logical_bytes(programs.cache_of(1).layers[i]) // programs.page_size,
            num_heads=_num_elements(dense["layers"][i]["output"]) // width // attention.head_dim,
            head_dim=attention.head_dim,
            window=attention.window,
        )
        for attention, i in kinds.items()
    )
    experts = programs.model.experts
    return Work(
        expert_bytes=logical_bytes(_experts(params)),
        expert_params=_num_elements(_experts(dense)),
        expert_share=experts.num_experts_per_token / experts.num_experts if experts else 1.0,
        matmul_bytes=logical_bytes({name: value for name, value in params.items() if name != "embed"}),
        matmul_params=_num_elements({name: value for name, value in dense.items() if name != "embed"}),
        unembed_params=_num_elements(dense["unembed"]),
        vocab_size=_num_elements(dense["unembed"]) // width,
        hidden_size=width,
        itemsize=np.dtype(jnp.dtype(programs.dtype)).itemsize,
        layers=layers,
    )


def _experts(params: Any) -> list[Any]:
    return [layer[name] for layer in params["layers"] for name in layer if name.startswith("experts_")]


def device_bytes(arrays: Any) -> int:
    """Bytes that these arrays take on one device of the mesh they are placed on, as its memory is cut into tiles."""
    return sum(_stored_bytes(leaf) for leaf in jax.tree.leaves(arrays))


def logical_bytes(arrays: Any) -> int:
    """The same without what tiles add: what is read."""
    return sum(_bytes(math.prod(_shard(leaf)), leaf.dtype) for leaf in jax.tree.leaves(arrays))


def _stored_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = _shard(leaf)
    is_tpu = _platform(leaf) == "tpu"
    packed = 32 // _bits(leaf.dtype)
    size = min(_tiled_sizes(shape, packed)) if is_tpu and len(shape) > 1 else math.prod(shape)
    return _round_up(_bytes(size, leaf.dtype), TPU_UNIT if is_tpu else GPU_UNIT)


def _tiled_sizes(shape: tuple[int, ...], packed: int) -> list[int]:
    """Numbers that an array takes for each choice of its two last axes: XLA takes one that wastes the least.

    `packed` numbers along the axis before the last lie in one word of 32 bits.
    """
    sizes = []
    for last, before in permutations(range(len(shape)), 2):
        tile = max(packed, min(SUBLANES, 1 << (shape[before] - 1).bit_length()))
        rest = math.prod(size for i, size in enumerate(shape) if i not in (last, before))
        sizes.append(rest * _round_up(shape[before], tile) * _round_up(shape[last], LANES))
    return sizes


def _num_elements(arrays: Any) -> int:
    return sum(math.prod(_shard(leaf)) for leaf in jax.tree.leaves(arrays))


def _shard(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    assert leaf.sharding is not None, "every abstract array of a program is placed"
    return leaf.sharding.shard_shape(leaf.shape)


def _platform(leaf: Any) -> str:
    return leaf.sharding.mesh.devices.flat[0].platform


def _bytes(size: int, dtype: Any) -> int:
    return -(-size * _bits(dtype) // 8)


def _bits(dtype: Any) -> int:
    """Of one number: 4 for int4, of which two share a byte on the device and not in numpy."""
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else dtype.itemsize * 8


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
