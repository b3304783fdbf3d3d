"""The CPU of this machine as a slice of one chip: its free memory and its measured speed."""

import jax

from quire.capacity.chips import Chip
from quire.capacity.measure import matmul_speed, memory_bandwidth
from quire.capacity.topology import Topology
from quire.device.mesh import make_mesh
from quire.engine.pool_size import HOST_RESERVE
from quire.machine import limit_threads, read_memory

ARRAY_BYTES = 1 << 28
"""Bytes of the array by which bandwidth is measured: more than the caches of a CPU hold."""
GIB = 1 << 30


def machine_topology(dtype: str) -> Topology:
    """Return the CPU of this machine, measured now, which takes seconds. `dtype` is that of the matmuls."""
    memory = read_memory()
    limit_threads()
    (device,) = jax.local_devices(backend="cpu")[:1]
    bandwidth = memory_bandwidth(device, ARRAY_BYTES, passes=2)
    flops = matmul_speed(make_mesh([device]), dtype)
    free = f"{memory.available / GIB:.2f} GiB free of {memory.limit / GIB:.2f} GiB ({memory.source})"
    chip = Chip(
        name="cpu",
        kind=device.device_kind,
        platform="cpu",
        memory=max(memory.available - HOST_RESERVE, 0),
        bandwidth=bandwidth,
        flops=flops,
        link=0.0,
        num_axes=1,
        full_axis=1,
        sources=(
            f"memory: {free}, less {HOST_RESERVE / GIB:.2f} GiB for compiling and requests",
            f"memory bandwidth: {bandwidth / 1e9:,.1f} GB/s, measured now",
            f"arithmetic: {flops / 1e9:,.0f} GFLOP/s in matmuls of {dtype}, measured now",
        ),
    )
    return Topology(chip, (1,))
