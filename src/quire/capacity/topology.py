"""A slice of accelerators by its name: `v6e:2x4`, `tpu7x:2x2x1`, `h100:8`."""

import math
from dataclasses import dataclass

from quire.capacity.chips import ALIASES, CHIPS, ICI_HOP_SECONDS, Chip
from quire.field_error import FieldError

MAX_CHIPS = 256
MAX_GPUS = 8
"""In one host, on one NVLink switch."""


@dataclass(frozen=True)
class Topology:
    """Chips of one kind, and how they are laid out."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The canonical name."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """What JAX sees of it: the size of the mesh."""
        return self.num_chips * self.chip.devices_per_chip

    @property
    def link_bandwidth(self) -> float:
        """Bytes a second that the chip with the fewest neighbours sends: one in a corner, where axes are lines."""
        if self.chip.platform == "gpu":
            return self.chip.link
        return self.chip.link * sum(2 if self._is_ring(size) else 1 for size in self.shape if size > 1)

    def all_reduce_seconds(self, num_bytes: int) -> float:
        """Summing an array of so many bytes over all chips: each sends it twice, less its own share, hop by hop."""
        if self.num_chips == 1:
            return 0.0
        sent = all_reduce_bytes(num_bytes, self.num_chips)
        return max(sent / self.link_bandwidth, self._all_reduce_hops * ICI_HOP_SECONDS)

    @property
    def _all_reduce_hops(self) -> int:
        """There and back along every axis; a switch's are not counted."""
        if self.chip.platform == "gpu":
            return 0
        return 2 * sum(size // 2 if self._is_ring(size) else size - 1 for size in self.shape)

    def _is_ring(self, size: int) -> bool:
        return size > 2 and size % self.chip.full_axis == 0


def all_reduce_bytes(num_bytes: int, num_chips: int) -> float:
    """What one chip sends when an array of so many bytes is summed by rings."""
    return 2 * (num_chips - 1) / num_chips * num_bytes


def parse_topology(text: str) -> Topology:
    """The topology of a name; FieldError says what is wrong with it and what would be right."""
    name, colon, shape = text.lower().partition(":")
    chip = CHIPS.get(ALIASES.get(name, name))
    if chip is None:
        what = f"{name!r} is none of the chips {', '.join(CHIPS)}, each with its chips along each axis"
        raise _error(text, what, example="v5e:2x2 for 4 chips, v6e:2x4 or h100:8")
    example = {1: f"{name}:8", 2: f"{name}:2x4", 3: f"{name}:2x2x1"}[chip.num_axes]
    sizes = shape.split("x")
    if not colon or not all(size.isascii() and size.isdigit() and len(size) < 5 for size in sizes):
        raise _error(text, "after a colon it needs the number of chips along each axis", example)
    if len(sizes) != chip.num_axes:
        axes = "axes" if chip.num_axes > 1 else "axis"
        raise _error(text, f"{name} has {chip.num_axes} {axes}, and this names {len(sizes)}", example)
    topology = Topology(chip, tuple(map(int, sizes)))
    most = MAX_GPUS if chip.platform == "gpu" else MAX_CHIPS
    if not 1 <= topology.num_chips <= most:
        raise _error(text, f"{topology.num_chips:,} chips: from 1 to {most} are allowed", example)
    return topology


def _error(text: str, what: str, example: str) -> FieldError:
    return FieldError(f"topology={text!r}: {what}; give one such as {example}", field="topology")
