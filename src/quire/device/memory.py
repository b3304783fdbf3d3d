"""What memory there is and what one page takes: facts for whoever decides how large the pool is."""

import ctypes

import jax.numpy as jnp
from jax.sharding import Mesh

from quire.config import ModelConfig
from quire.device import kv_cache
from quire.device.attention import choose_backend, get_backend
from quire.device.models.padding import padded_config
from quire.machine import read_memory


def page_bytes(
    model: ModelConfig,
    *,
    mesh: Mesh,
    dtype: str,
    page_size: int,
    attention: str,
    windows: tuple[int, ...] = (),
    pool: int = 0,
) -> int:
    """Bytes of one page of a pool over its layers and all devices.

    With the attention backend that this knob means on the mesh, where layers with these windows have their own pools.
    """
    padded = padded_config(model, mesh)
    device = mesh.devices.flat[0]
    name, _ = choose_backend(attention, padded, device.platform, device.device_kind)
    layers = [
        layer for layer, its_pool in zip(padded.attention, padded.pools(windows), strict=True) if its_pool == pool
    ]
    return mesh.size * kv_cache.page_bytes(
        get_backend(name, device.device_kind),
        layers,
        page_size=page_size,
        dtype=jnp.dtype(dtype),
        mesh=mesh,
        has_tokens=pool == 0,
    )


def available_bytes(mesh: Mesh) -> int:
    """Bytes that nobody uses, over all devices of a mesh; where devices have no memory of their own, the host's."""
    if is_host_memory(mesh):
        return available_host_bytes()
    stats = mesh.devices.flat[0].memory_stats()
    return (stats["bytes_limit"] - stats.get("bytes_in_use", 0)) * mesh.size


def is_host_memory(mesh: Mesh) -> bool:
    """Whether the devices of a mesh use the host's memory, or do not say what they have."""
    device = mesh.devices.flat[0]
    return device.platform == "cpu" or "bytes_limit" not in (device.memory_stats() or {})


def available_host_bytes() -> int:
    """Bytes of host memory that this process can still allocate, within the limits of its control groups."""
    return read_memory().available


def return_freed_memory() -> None:
    """Give the system back what has been freed. glibc keeps it for the next allocation; other libraries do not."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (AttributeError, OSError, TypeError):  # not glibc
        return
