"""How the Pallas kernel cuts its work: plain arithmetic over what a chip has and a layer needs."""

from typing import NamedTuple

import jax
import numpy as np

MIB = 1 << 20
VMEM_BYTES = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5e": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v5p": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU v6e": 128 * MIB,
    "TPU7x": 64 * MIB,
    "cpu": 64 * MIB,  # the interpreter
}
"""Vector memory of a core, by what JAX calls the chip."""

FIRST_JAX = (0, 12, 0)
"""The oldest that the kernel was tried with; Pallas changes names from one to the next."""

LANES = 128
"""Numbers side by side in a register."""
PIECE = 128
"""Page ids fetched at a time."""
CHUNK = 512
"""KV columns visited at a time, at most."""
TILE = 128
"""Tokens in a tile of a mixed batch, at most."""
PART_QUERIES = 128
"""Queries (tokens x query heads of one KV head) multiplied at a time, about."""
PART_MULTIPLE = 16
"""Tokens of a part come in these: they are whole registers then, in every type."""


class Blocks(NamedTuple):
    """How the work is cut."""

    chunk_pages: int
    """Pages visited at a time; divides PIECE."""
    tile_tokens: int
    """Tokens in a tile; 1 when every row decodes."""
    part_tokens: int
    """Tokens of a tile that are multiplied at a time; divides it."""

    @property
    def is_decode(self) -> bool:
        """Whether a tile is one token."""
        return self.tile_tokens == 1


class Sizes(NamedTuple):
    """What of a layer, on one device, decides how much memory blocks take."""

    num_kv_heads: int
    group: int
    """Query heads of a KV head."""
    page_size: int
    head_lanes: int
    """Lanes that K of one head takes, and V."""
    kv_dtype: np.dtype
    q_dtype: np.dtype

    @property
    def is_split(self) -> bool:
        """Whether K and V are whole registers. Otherwise both are multiplied at once, and half is not used."""
        return self.head_lanes % LANES == 0

    @property
    def q_lanes(self) -> int:
        """Lanes of a query, and of an output."""
        return self.head_lanes if self.is_split else 2 * self.head_lanes

    def tile_shape(self, blocks: Blocks) -> tuple[int, int, int, int]:
        """Of a tile of queries or outputs: KV heads, query heads of each, tokens, lanes; of one token the group is the
        third axis.
        """
        if blocks.is_decode:
            return self.num_kv_heads, 1, self.group, self.q_lanes
        return self.num_kv_heads, self.group, blocks.tile_tokens, self.q_lanes


def head_lanes(head_dim: int) -> int:
    """Lanes that K of one head takes, and V: half a register, or whole ones."""
    return 64 if head_dim <= 64 else -(-head_dim // LANES) * LANES


def unavailable_reason(device_kind: str) -> str | None:
    """Why the kernel cannot run on such a device, in one sentence; None when it can."""
    if device_kind not in VMEM_BYTES:
        return f"how much vector memory a {device_kind} has is not in the Pallas kernel's table"
    if jax.__version_info__ < FIRST_JAX:
        return f"the Pallas kernel needs jax {'.'.join(map(str, FIRST_JAX))} or later, and this is {jax.__version__}"
    return None


def vmem_budget(device_kind: str) -> int:
    """Bytes of vector memory that the kernel may take: half; the rest is the compiler's."""
    return VMEM_BYTES[device_kind] // 2


def vmem_bytes(sizes: Sizes, blocks: Blocks) -> int:
    """Bytes of vector memory that the kernel takes, about: what it declares, and one part's scores."""
    columns, row = blocks.chunk_pages * sizes.page_size, 2 * sizes.head_lanes
    pages = 2 * columns * sizes.num_kv_heads * row * sizes.kv_dtype.itemsize
    if sizes.kv_dtype == np.int8:
        pages += 2 * columns * sizes.num_kv_heads * 2 * 4
    heads, group, queries, lanes = sizes.tile_shape(blocks)
    num_queries = heads * group * -(-queries // 8) * 8
    tiles = 2 * 2 * num_queries * lanes * sizes.q_dtype.itemsize
    state = num_queries * (lanes + 2 * LANES) * 4
    part = max(blocks.part_tokens * sizes.group, 8)
    return pages + tiles + state + 4 * (4 * part * columns + 2 * columns * row)


def choose_blocks(sizes: Sizes, *, pages_per_row: int, num_tokens: int, decode: bool, budget: int) -> Blocks:
    """The largest blocks that fit into so many bytes of vector memory."""
    chunk_pages = _power_of_two(min(max(CHUNK // sizes.page_size, 1), pages_per_row, PIECE))
    part = tile = 1
    if not decode:
        part = max(PART_QUERIES // sizes.group // PART_MULTIPLE, 1) * PART_MULTIPLE
        tile = part * max(min(TILE, num_tokens) // part, 1)
    while vmem_bytes(sizes, Blocks(chunk_pages, tile, part)) > budget:
        if tile > part:
            tile = part * max(tile // part // 2, 1)
        elif chunk_pages > 1:
            chunk_pages //= 2
        elif part > PART_MULTIPLE:
            part = tile = PART_MULTIPLE
        else:
            needed = vmem_bytes(sizes, Blocks(chunk_pages, tile, part)) / MIB
            raise ValueError(
                f"page_size={sizes.page_size}: the Pallas kernel needs {needed:.1f} MiB of vector memory for one page "
                f"of {sizes.num_kv_heads} KV heads of {sizes.head_lanes}, of {budget / MIB:.1f} that it may take; "
                "lower page_size, or use attention='xla'"
            )
    return Blocks(chunk_pages, tile, part)


def _power_of_two(number: int) -> int:
    """The largest that is not more."""
    return 1 << (number.bit_length() - 1)
