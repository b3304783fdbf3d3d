"""Memory of the host: whether a model's weights fit, and how far a running engine can grow, in words."""

import logging
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from quire.config import EngineConfig, ModelConfig
from quire.device import memory
from quire.device.models.weights import weight_specs
from quire.engine.pool_size import HOST_RESERVE
from quire.field_error import FieldError
from quire.machine import Memory, read_memory

GIB = 1 << 30

_log = logging.getLogger("quire")


def check_room_for_weights(config: EngineConfig, model: ModelConfig, path: Path, mesh: Mesh) -> None:
    """Raise FieldError if a control group's limit cannot hold a model's weights while they are read and packed.

    Beyond such a limit the kernel kills the process. Without one the estimate may be wrong, and there may be swap: the
    same message is a warning. In a group of processes each holds an equal part of the weights.

    Weights are read in the engine's dtype, whatever `quantize` makes of them, but for the blocks of a GGUF file. A tied
    output head gets an entry of its own.
    """
    if not memory.is_host_memory(mesh):
        return
    specs = weight_specs(model)
    tied = math.prod(specs["embed"].shape) if model.tie_embeddings else 0
    num_weights = tied + sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))
    keeps_blocks = config.quantize == "gguf"
    weights = path.stat().st_size if keeps_blocks else num_weights * jnp.dtype(config.dtype).itemsize
    weights //= config.num_processes
    needed, available, limit = weights + HOST_RESERVE, memory.available_host_bytes(), read_memory()
    if needed <= available:
        return
    ways = ["raise that limit" if limit.limit_path else "free more memory", "take a smaller model"]
    if path.suffix == ".gguf" and not keeps_blocks:
        ways.append("set quantize='gguf'")
    message = (
        f"MODEL {path.name} needs {weights / GIB:.2f} GiB for weights and {HOST_RESERVE / GIB:.2f} GiB beside them, "
        f"and {available / GIB:.2f} GiB are free of {limit.limit / GIB:.2f} GiB ({limit.source}), which is "
        f"{(needed - available) / GIB:.2f} GiB too few; {', or '.join(ways)}"
    )
    if limit.limit_path:
        raise FieldError(message, field="model")
    _log.warning(message)


def describe_memory(growth_bytes: int, host: Memory, resident_bytes: int) -> str:
    """How much of the host's memory a process occupies, and how far that can grow, in words."""
    text = (
        f"memory {resident_bytes / GIB:.2f} GiB now, and up to {growth_bytes / GIB:.2f} GiB more for pages and steps; "
        f"{host.available / GIB:.2f} GiB are free of {host.limit / GIB:.2f} GiB ({host.source})"
    )
    if growth_bytes > host.available:
        text += ": that may not be enough; lower memory_budget or num_host_pages"
    return text
