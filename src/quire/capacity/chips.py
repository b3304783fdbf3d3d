"""The accelerators that `quire plan` knows: what their makers say of them, and where they say it.

Bandwidths and flops are peaks of one chip. A chip is what is sold and counted in a topology; a device is what JAX sees.
They are the same but for tpu7x, where a chip is two devices with half of everything each.
"""

from dataclasses import dataclass
from typing import Literal

TB, GB, GIB = 10**12, 10**9, 1 << 30

GPU_SHARE = 0.75
"""Of a GPU's memory: what JAX takes at its first operation. https://docs.jax.dev/en/latest/gpu_memory_allocation.html"""
ICI_HOP_SECONDS = 1e-6
"""From one TPU to its neighbour. https://jax-ml.github.io/scaling-book/sharding/, "A note on ICI latency"."""


@dataclass(frozen=True)
class Chip:
    """One kind of accelerator."""

    name: str
    """As in a topology: `v6e` in `v6e:2x4`."""
    kind: str
    """JAX's `device_kind` of its devices. Cards of the same name with other memory have another."""
    platform: Literal["tpu", "gpu", "cpu"]
    memory: int
    """Bytes of one chip that programs may use: less than is built in."""
    bandwidth: float
    """Bytes of its memory read or written in a second."""
    flops: float
    """Multiplications and additions in a second: dense matmuls of bfloat16."""
    link: float
    """Bytes a second that one port sends to a neighbour; on a GPU, what all ports send to the switch."""
    num_axes: int
    """Dimensions of a topology: 2 or 3 for a torus, 1 for a switch."""
    full_axis: int
    """A torus's axis closes to a ring when its length is a multiple of this; others are lines."""
    sources: tuple[str, ...]
    devices_per_chip: int = 1
    compiler_name: str = ""
    """What libtpu calls it, where that differs."""

    @property
    def device_memory(self) -> int:
        """Bytes that programs may use on one device."""
        return self.memory // self.devices_per_chip


LIBTPU = "usable memory: what libtpu 0.0.50.1 says when a program does not fit"
MEMORY_OF_GPU = "https://docs.jax.dev/en/latest/gpu_memory_allocation.html (of 80 GB, JAX takes 75%)"
BOOK = "https://jax-ml.github.io/scaling-book/tpus/ (rings, bandwidth of a port)"

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            kind="TPU v5 lite",
            platform="tpu",
            memory=int(15.75 * GIB),
            bandwidth=819 * GB,
            flops=197e12,
            link=50 * GB,
            num_axes=2,
            full_axis=16,
            sources=("https://docs.cloud.google.com/tpu/docs/v5e", BOOK, LIBTPU),
        ),
        Chip(
            name="v5p",
            kind="TPU v5",
            platform="tpu",
            memory=int(95.73 * GIB),
            bandwidth=2765 * GB,
            flops=459e12,
            link=100 * GB,
            num_axes=3,
            full_axis=4,
            sources=("https://docs.cloud.google.com/tpu/docs/v5p", BOOK, LIBTPU),
        ),
        Chip(
            name="v6e",
            kind="TPU v6 lite",
            platform="tpu",
            memory=int(31.24 * GIB),
            bandwidth=1638 * GB,
            flops=918e12,
            link=100 * GB,
            num_axes=2,
            full_axis=16,
            sources=("https://docs.cloud.google.com/tpu/docs/v6e", BOOK, LIBTPU),
        ),
        Chip(
            name="v7x",
            kind="TPU7x",
            platform="tpu",
            memory=int(94.74 * GIB) * 2,
            bandwidth=7380 * GB,
            flops=2307e12,
            link=100 * GB,
            num_axes=3,
            full_axis=4,
            sources=("https://docs.cloud.google.com/tpu/docs/tpu7x", BOOK, LIBTPU),
            devices_per_chip=2,
            compiler_name="tpu7x",
        ),
        Chip(
            name="h100",
            kind="NVIDIA H100 80GB HBM3",
            platform="gpu",
            memory=int(80 * GB * GPU_SHARE),
            bandwidth=3.35 * TB,
            flops=989.4e12,
            link=450 * GB,
            num_axes=1,
            full_axis=1,
            sources=(
                "https://glennklockwood.com/garden/processors/h100 (SXM5, dense, from NVIDIA's white paper)",
                "https://jax-ml.github.io/scaling-book/gpus/ (memory bandwidth)",
                MEMORY_OF_GPU,
            ),
        ),
        Chip(
            name="a100",
            kind="NVIDIA A100-SXM4-80GB",
            platform="gpu",
            memory=int(80 * GB * GPU_SHARE),
            bandwidth=2039 * GB,
            flops=312e12,
            link=300 * GB,
            num_axes=1,
            full_axis=1,
            sources=(
                "https://glennklockwood.com/garden/processors/A100 (80 GB SXM4, dense, from NVIDIA's data sheet)",
                MEMORY_OF_GPU,
            ),
        ),
    )
}
ALIASES = {"tpu7x": "v7x"}


def chip_of_device(kind: str) -> Chip | None:
    """The chip whose devices JAX calls so; None for one that is not in the table."""
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)
