"""Paged attention in Pallas, for TPUs.

One array a layer, `[M, K, Z, 2X]`: a page is one stretch of memory, and of each head it holds K in the low lanes and V
in the high ones. X is the head size rounded up to 64 or to a multiple of 128, since a register has 128 lanes. In int8
another array has a scale for each token and head.

The packed tokens are cut into tiles. An item of work is one row's tokens inside one tile, so rows that meet in a tile
share it:

    packed tokens   | row 0 ................ | 1 | row 2 ...... | padding |
    tiles           [- 0 -----][- 1 -----][- 2 -----][- 3 -----][- 4 -----]
    items           [0        ][1        ][2 ][3 ][4][5        ][6 ][7    ]

When every row decodes, a tile is one token. Items run one after the other. Each visits the KV that it sees in chunks of
pages, with the softmax kept online. The chunks of all items are one sequence of steps: while one is computed, the pages
of the next arrive, and the page ids of the one after that. So the first chunk of an item is fetched during the last of
the item before, and the page table stays in HBM, however long it is.

The write is XLA's scatter, which is in place when the head is part of its index.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from quire.config import AttentionConfig
from quire.device.attention.pallas_blocks import LANES, PIECE, Blocks, Sizes, choose_blocks, head_lanes, vmem_budget
from quire.device.inputs import BatchLayout
from quire.device.mesh import ArraySpec
from quire.device.pointwise import soft_cap
from quire.field_error import FieldError

INT8_PAGE_SIZES = (8, 16)
"""With others the scatter and the kernel want the pool in two orders, and the compiler copies it at every step."""

PAGE_MULTIPLE = 8
"""Positions that a TPU keeps together: rows of its tiles."""
MASKED = -1e30
"""Finite, so that a query that sees nothing gives 0 / small and not NaN."""


@dataclass(frozen=True)
class PallasBackend:
    """The backend for TPUs."""

    device_kind: str = "cpu"
    """What JAX calls the chip; "cpu" runs the kernel in the TPU interpreter, for tests: it is very slow."""
    int8: bool = False
    """Keep KV in int8 with a scale for each token and head, instead of the engine's type."""
    detect_races: bool = False
    """In the interpreter: raise where two accesses of one place are not ordered."""
    blocks: Blocks | None = None
    """How a mixed batch is cut, instead of what `choose_blocks` says: for tests."""

    def arrays(self, attention: AttentionConfig, num_pages: int, page_size: int, dtype: jnp.dtype):
        """K and V together, `[M, K, Z, 2X]`; in int8 also scales, `[M, 1, K x (those of K, those of V)]`."""
        shape = (num_pages, attention.num_kv_heads, page_size, 2 * head_lanes(attention.head_dim))
        kv = ArraySpec(shape, jnp.dtype("int8") if self.int8 else dtype, ("pages", "kv_heads", "offset", "head"))
        if self.device_kind != "cpu" and page_size % PAGE_MULTIPLE:
            raise FieldError(
                f"page_size={page_size} on a TPU must be a multiple of {PAGE_MULTIPLE}, or its compiler copies all "
                "pages at every step: take 16",
                field="page_size",
            )
        if not self.int8:
            return (kv,)
        if page_size not in INT8_PAGE_SIZES:
            raise FieldError(
                f"page_size={page_size} with attention='pallas-int8' must be one of {INT8_PAGE_SIZES}",
                field="page_size",
            )
        shape = (num_pages, 1, attention.num_kv_heads * 2 * page_size)
        return kv, ArraySpec(shape, jnp.dtype("float32"), ("pages", None, "kv_heads"))

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout: BatchLayout, attention: AttentionConfig, sinks_N=None):
        """Write, then attend."""
        kv = _write(kv, k_TKH, v_TKH, layout.destinations_T)
        (num_tokens, num_heads, _), (_, num_kv_heads, page_size, lanes) = q_TNH.shape, kv[0].shape
        sizes = Sizes(num_kv_heads, num_heads // num_kv_heads, page_size, lanes // 2, kv[0].dtype, q_TNH.dtype)
        cut = {"pages_per_row": layout.page_table_BP.shape[1], "num_tokens": num_tokens, "decode": layout.decode}
        blocks = self.blocks or choose_blocks(sizes, **cut, budget=vmem_budget(self.device_kind))
        if layout.decode:
            blocks = blocks._replace(tile_tokens=1, part_tokens=1)
        items = _items(layout, num_tokens, blocks, attention.window)
        q = _to_tiles(q_TNH, sizes, blocks)
        in_tile = (num_kv_heads, 1, -1, 1) if layout.decode else (num_kv_heads, -1, 1, 1)
        sinks = () if sinks_N is None else (sinks_N.reshape(in_tile),)
        out = self._call(items, _pieces(layout.page_table_BP), q, kv, sinks, sizes, blocks, attention)
        return _from_tiles(out, sizes, blocks, q_TNH.shape), kv

    def _call(self, items, table, q, kv, sinks, sizes: Sizes, blocks: Blocks, attention: AttentionConfig):
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        shape = sizes.tile_shape(blocks)
        tile = pl.BlockSpec(
            shape, lambda i, items: (items.tile[i], 0, 0, 0) if blocks.is_decode else (0, 0, items.tile[i], 0)
        )
        buffers = tuple(pltpu.VMEM((2, blocks.chunk_pages, *array.shape[1:]), array.dtype) for array in kv)
        is_interpreted = self.device_kind == "cpu"
        call = pl.pallas_call(
            partial(_run, sizes=sizes, blocks=blocks, attention=attention),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(items.count[0],),
                in_specs=[anywhere, tile, (anywhere,) * len(kv), (pl.BlockSpec(),) * len(sinks)],
                out_specs=tile,
                scratch_shapes=[
                    pltpu.SMEM((1,), jnp.int32),
                    pltpu.SMEM((2, 1, PIECE), jnp.int32),
                    buffers,
                    pltpu.VMEM(shape, jnp.float32),
                    pltpu.VMEM((*shape[:-1], 1), jnp.float32),
                    pltpu.VMEM((*shape[:-1], 1), jnp.float32),
                    pltpu.SemaphoreType.DMA((2,)),
                    pltpu.SemaphoreType.DMA((2,)),
                ],
            ),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_budget(self.device_kind)
            ),
            interpret=pltpu.InterpretParams(detect_races=self.detect_races) if is_interpreted else False,
            name="paged_attention",
        )
        return call(items, table, q, kv, sinks)


# -- what surrounds the kernel -----------------------------------------------------------------------------------------


def _write(kv: tuple[jax.Array, ...], k_TKH: jax.Array, v_TKH: jax.Array, destinations_T: jax.Array):
    """Scatter what is new, in int8 after dividing it by its scale; a destination outside the pool is dropped."""
    num_pages, num_kv_heads, page_size, lanes = kv[0].shape
    pads = ((0, 0), (0, 0), (0, lanes // 2 - k_TKH.shape[-1]))
    new_TK2X = jnp.stack([jnp.pad(k_TKH, pads), jnp.pad(v_TKH, pads)], axis=2)
    page_T, offset_T = destinations_T // page_size, destinations_T % page_size
    head_K = jnp.arange(num_kv_heads, dtype=jnp.int32)
    scales = ()
    if kv[0].dtype == jnp.int8:
        new_TK2X = new_TK2X.astype(jnp.float32)
        scale_TK2 = jnp.max(jnp.abs(new_TK2X), axis=-1) / 127
        new_TK2X = jnp.round(new_TK2X / jnp.maximum(scale_TK2, 1e-30)[..., None])
        first_K2 = jnp.arange(2 * num_kv_heads, dtype=jnp.int32).reshape(-1, 2) * page_size
        lane_TK2 = first_K2[None] + offset_T[:, None, None]
        scales = (kv[1].at[page_T[:, None, None], 0, lane_TK2].set(scale_TK2, mode="drop"),)
    index_TK = (page_T[:, None] * num_kv_heads + head_K[None, :]) * page_size + offset_T[:, None]
    size = num_pages * num_kv_heads * page_size
    index_TK = jnp.where((page_T < num_pages)[:, None], index_TK, size)
    new_TKX = new_TK2X.reshape(*index_TK.shape, lanes).astype(kv[0].dtype)
    return kv[0].reshape(size, lanes).at[index_TK].set(new_TKX, mode="drop").reshape(kv[0].shape), *scales


class Items(NamedTuple):
    """One row's tokens inside one tile: for each field an array with an entry for each item."""

    count: Any
    """How many items there are, `[1]`."""
    tile: Any
    row: Any
    base: Any
    """Position of the tile's token 0, were it of this row."""
    first_token: Any
    """In the tile; so is the end."""
    end_token: Any
    first_column: Any
    """Of the KV that any of the tokens sees; so is the end."""
    end_column: Any


def _items(layout: BatchLayout, num_tokens: int, blocks: Blocks, window: int | None) -> Items:
    """An item for each pair of a row and a tile that have tokens in common. Padding is one more row, without KV."""
    kv_lens_B, size = layout.kv_lens_B, blocks.tile_tokens
    num_rows = kv_lens_B.shape[0]
    if blocks.is_decode:
        row = tile = jnp.arange(num_rows, dtype=jnp.int32)
        count, kv_len, row_start, row_end = jnp.full(1, num_rows, jnp.int32), kv_lens_B, row, row + 1
    else:
        num_tiles = -(-num_tokens // size)
        cu_q_lens = jnp.concatenate([layout.cu_q_lens_B1, jnp.full(1, num_tiles * size, jnp.int32)])
        starts, ends = cu_q_lens[:-1], cu_q_lens[1:]
        counts = jnp.where(ends > starts, (ends - 1) // size - starts // size + 1, 0)
        cu_counts = jnp.cumsum(counts, dtype=jnp.int32)
        item = jnp.arange(num_tiles + num_rows + 1, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(item[:, None] >= cu_counts[None, :], axis=1, dtype=jnp.int32), num_rows)
        row_start, row_end = starts[row], ends[row]
        tile = jnp.minimum(row_start // size + item - (cu_counts - counts)[row], num_tiles - 1)
        kv_len = jnp.where(row < num_rows, kv_lens_B[jnp.minimum(row, num_rows - 1)], 0)
        row, count = jnp.minimum(row, num_rows - 1), cu_counts[-1:]
    first_token, end_token = jnp.maximum(row_start - tile * size, 0), jnp.minimum(row_end - tile * size, size)
    base = kv_len - (row_end - tile * size)
    end_column = jnp.where(kv_len > 0, base + end_token, 0)
    first_column = jnp.zeros_like(base) if window is None else jnp.maximum(base + first_token + 1 - window, 0)
    return Items(count, tile, row, base, first_token, end_token, first_column, end_column)


def _pieces(table_BP: jax.Array) -> jax.Array:
    """The page table in rows of as many ids as are fetched at a time."""
    num_rows, pages_per_row = table_BP.shape
    return jnp.pad(table_BP, ((0, 0), (0, -pages_per_row % PIECE))).reshape(num_rows, -1, 1, PIECE)


def _to_tiles(q_TNH: jax.Array, sizes: Sizes, blocks: Blocks) -> jax.Array:
    """Queries so that a tile is a block, `[K, G, tokens, lanes]`; of one token `[K, 1, G, lanes]`."""
    num_tokens, _, head_dim = q_TNH.shape
    q_TNX = jnp.pad(q_TNH, ((0, -num_tokens % blocks.tile_tokens), (0, 0), (0, sizes.q_lanes - head_dim)))
    if blocks.is_decode:
        return q_TNX.reshape(-1, 1, sizes.group, sizes.q_lanes)
    return q_TNX.swapaxes(0, 1).reshape(sizes.num_kv_heads, sizes.group, -1, sizes.q_lanes)


def _from_tiles(out: jax.Array, sizes: Sizes, blocks: Blocks, shape: tuple[int, ...]) -> jax.Array:
    """The other way, for outputs."""
    num_tokens, num_heads, head_dim = shape
    if blocks.is_decode:
        out_TNX = out.reshape(num_tokens, num_heads, sizes.q_lanes)
    else:
        out_TNX = out.reshape(num_heads, -1, sizes.q_lanes).swapaxes(0, 1)
    start = 0 if sizes.is_split else sizes.head_lanes
    return out_TNX[:num_tokens, :, start : start + head_dim]


# -- the kernel --------------------------------------------------------------------------------------------------------


class Visit(NamedTuple):
    """What an item sees, as numbers; what there is to fetch."""

    item: Any
    row: Any
    first_column: Any
    end_column: Any
    first_chunk: Any
    end_chunk: Any
    """At least one chunk, even if nothing is seen: so each item has a step, and what comes next is easy to say."""


def _run(*refs, **constants) -> None:
    _Kernel(*refs, **constants).run()


@dataclass(frozen=True)
class _Kernel:
    """What is done for one item. Fields are references to memory, as Pallas gives them, and constants."""

    items: Items
    """In SMEM."""
    table: Any
    """In HBM."""
    q: Any
    """The item's tile, in VMEM."""
    kv: tuple
    """In HBM."""
    sinks: tuple
    """One array, in VMEM, or none: of each query head a score that every softmax has and that has no value."""
    out: Any
    """The item's tile, in VMEM."""
    step: Any
    """Of the first chunk of this item."""
    ids: Any
    """Page ids, in SMEM: for each parity of a step."""
    pages: tuple
    """Pages, in VMEM: for each parity of a step."""
    acc: Any
    """For each query the weighted sum of V so far, not yet divided by the sum of weights."""
    top: Any
    """The largest score so far."""
    total: Any
    """The sum of weights so far."""
    id_arrivals: Any
    page_arrivals: Any
    sizes: Sizes
    blocks: Blocks
    attention: AttentionConfig

    @property
    def chunk(self) -> int:
        """Columns of KV in a chunk."""
        return self.blocks.chunk_pages * self.sizes.page_size

    def run(self) -> None:
        """Attend for one item."""
        visit = self.visit(pl.program_id(0))

        @pl.when(visit.item == 0)
        def _():
            self.step[0] = 0
            self.copy_ids(visit, visit.first_chunk, 0).start()
            self.fetch_after(visit, visit.first_chunk - 1, 1)

        def take(chunk, step):
            parity = lax.rem(step, 2)
            self.fetch_after(visit, chunk, parity)
            self.for_pages(visit, chunk, lambda j: self.copy_page(0, parity, j, "wait"))
            if self.pages[0].dtype != jnp.int8:
                self.clear_unseen(visit, chunk, self.pages[0].at[parity])
            self.for_parts(tokens, partial(self.attend_part, self.items.base[visit.item], chunk, parity))
            return step + 1

        tokens = self.items.first_token[visit.item], self.items.end_token[visit.item]
        self.for_parts(tokens, self.clear_part)
        self.step[0] = lax.fori_loop(visit.first_chunk, visit.end_chunk, take, self.step[0])
        self.for_parts(tokens, partial(self.put_part, tokens))

    # Fetching. The ids and pages of a step are at its parity.

    def visit(self, item) -> Visit:
        """What an item sees."""
        first_column, end_column = self.items.first_column[item], self.items.end_column[item]
        first_chunk = first_column // self.chunk
        end_chunk = jnp.maximum(pl.cdiv(end_column, self.chunk), first_chunk + 1)
        return Visit(item, self.items.row[item], first_column, end_column, first_chunk, end_chunk)

    def after(self, visit: Visit, chunk):
        """Whether there is a step after this one, what its item sees, and its chunk."""
        is_same = chunk + 1 < visit.end_chunk
        item, count = jnp.where(is_same, visit.item, visit.item + 1), self.items.count[0]
        visit = self.visit(jnp.minimum(item, count - 1))
        return item < count, visit, jnp.where(is_same, chunk + 1, visit.first_chunk)

    def fetch_after(self, visit: Visit, chunk, parity) -> None:
        """Start the pages of the next step, whose ids have been started, and the ids of the one after it."""
        is_there, visit, chunk = self.after(visit, chunk)

        @pl.when(is_there)
        def _():
            self.copy_ids(visit, chunk, 1 - parity).wait()
            offset = lax.rem(chunk * self.blocks.chunk_pages, PIECE)
            self.for_pages(
                visit, chunk, lambda j: self.copy_page(self.ids[1 - parity, 0, offset + j], 1 - parity, j, "start")
            )
            is_next_there, next_visit, next_chunk = self.after(visit, chunk)

            @pl.when(is_next_there)
            def _():
                self.copy_ids(next_visit, next_chunk, parity).start()

    def copy_ids(self, visit: Visit, chunk, parity):
        """The copy of a chunk's page ids to SMEM."""
        piece = self.table.at[visit.row, chunk * self.blocks.chunk_pages // PIECE]
        return pltpu.make_async_copy(piece, self.ids.at[parity], self.id_arrivals.at[parity])

    def copy_page(self, page, parity, j, do: str) -> None:
        """Start the copy of a page to VMEM, or wait for one: which it was makes no difference then."""
        for array, buffer in zip(self.kv, self.pages, strict=True):
            copy = pltpu.make_async_copy(array.at[page], buffer.at[parity, j], self.page_arrivals.at[parity])
            copy.start() if do == "start" else copy.wait()

    def for_pages(self, visit: Visit, chunk, do) -> None:
        """Call `do(j)` for each page of a chunk that holds anything seen."""
        page_size, chunk_pages = self.sizes.page_size, self.blocks.chunk_pages
        begin = jnp.maximum(visit.first_column // page_size - chunk * chunk_pages, 0)
        end = jnp.clip(pl.cdiv(visit.end_column, page_size) - chunk * chunk_pages, 0, chunk_pages)
        lax.fori_loop(begin, end, lambda j, _: do(j), None)

    # Computing, one head and one part of the tile at a time.

    def for_parts(self, tokens, do) -> None:
        """Call `do(head, where, token)` for each head and each part of the tile that has tokens of the item.

        `where` are its queries; `token` is a column: for each of them its token in the tile.
        """
        _, group, num_queries, _ = self.acc.shape
        size = num_queries if self.blocks.is_decode else self.blocks.part_tokens

        def of_part(part, _):
            start = part * size if size == num_queries else pl.multiple_of(part * size, size)
            token = start + lax.broadcasted_iota(jnp.int32, (group, size, 1), 1).reshape(-1, 1)
            if self.blocks.is_decode:
                token = jnp.zeros_like(token)
            for head in range(self.sizes.num_kv_heads):
                do(head, (head, slice(None), pl.ds(start, size)), token)

        if size == num_queries:
            of_part(0, None)
        else:
            lax.fori_loop(tokens[0] // size, pl.cdiv(tokens[1], size), of_part, None)

    def clear_part(self, _, where, token) -> None:
        """Nothing seen yet."""
        for state, value in ((self.acc, 0.0), (self.top, MASKED), (self.total, 0.0)):
            self.store(state, where, jnp.full((token.shape[0], state.shape[-1]), value, jnp.float32))

    def load(self, ref, where) -> jax.Array:
        """A part, as rows of lanes."""
        part = ref[where]
        return part.reshape(-1, part.shape[-1])

    def store(self, ref, where, rows: jax.Array) -> None:
        """The other way."""
        ref[where] = rows.reshape(ref.shape[1], -1, rows.shape[-1]).astype(ref.dtype)

    def clear_unseen(self, visit: Visit, chunk, pages) -> None:
        """What no token of the item sees may be anything, NaN too, and 0 x NaN is NaN: take it out of V."""
        chunk_pages, _, page_size, _ = pages.shape
        start = chunk * self.chunk

        @pl.when((start < visit.first_column) | (start + self.chunk > visit.end_column))
        def _():
            page, offset = (lax.broadcasted_iota(jnp.int32, (chunk_pages, page_size, 1), axis) for axis in (0, 1))
            column = start + page * page_size + offset
            is_seen = (column >= visit.first_column) & (column < visit.end_column)
            values = pl.ds(self.sizes.head_lanes if self.sizes.is_split else 0, self.sizes.q_lanes)
            for head in range(self.sizes.num_kv_heads):
                v = pages[:, head, :, values].astype(jnp.float32)
                pages[:, head, :, values] = jnp.where(is_seen, v, 0.0).astype(pages.dtype)

    def attend_part(self, base, chunk, parity, head: int, where, token_R1) -> None:
        """Take one chunk into the softmax of a part's queries."""
        lanes = self.sizes.head_lanes
        column_1W = chunk * self.chunk + lax.broadcasted_iota(jnp.int32, (1, self.chunk), 1)
        is_seen_RW = column_1W <= base + token_R1
        if self.attention.window is not None:
            is_seen_RW &= column_1W > base + token_R1 - self.attention.window
        q_RX = self.load(self.q, where)
        kv_WX = self.pages[0][parity, :, head].astype(q_RX.dtype).reshape(self.chunk, 2 * lanes)
        k_WX, v_WX = (kv_WX[:, :lanes], kv_WX[:, lanes:]) if self.sizes.is_split else (kv_WX, kv_WX)
        k_scale, v_scale = (self.scales_of(parity, head, which) for which in (0, 1))
        scores_RW = soft_cap(_dot(q_RX, k_WX, 1) * (k_scale * self.attention.scale), self.attention.soft_cap)
        scores_RW = jnp.where(is_seen_RW, scores_RW, MASKED)
        old_top_R1 = self.load(self.top, where)
        top_R1 = jnp.maximum(old_top_R1, jnp.max(scores_RW, axis=1, keepdims=True))
        weights_RW = jnp.where(is_seen_RW, jnp.exp(scores_RW - top_R1), 0.0)
        shrink_R1 = jnp.exp(old_top_R1 - top_R1)
        total_R1 = self.load(self.total, where) * shrink_R1 + jnp.sum(weights_RW, axis=1, keepdims=True)
        weights_RW = jnp.where(is_seen_RW, weights_RW * v_scale, 0.0)
        acc_RX = self.load(self.acc, where) * shrink_R1 + _dot(weights_RW.astype(v_WX.dtype), v_WX, 0)
        for state, rows in ((self.top, top_R1), (self.total, total_R1), (self.acc, acc_RX)):
            self.store(state, where, rows)

    def scales_of(self, parity, head: int, which: int):
        """The scales of K (0) or V (1) of one head, as a row of lanes; 1 where there are none.

        A page's scales of them are a few lanes of its row. They are rolled to where the page's columns are.
        """
        if len(self.pages) == 1:
            return 1.0
        page_size, chunk_pages = self.sizes.page_size, self.blocks.chunk_pages
        num_pages = min(LANES // page_size, chunk_pages)  # that fill a register
        first, offset = divmod((2 * head + which) * page_size, LANES)
        rows = []
        for page in range(0, chunk_pages, num_pages):
            scales = self.pages[1][parity, page : page + num_pages, 0, first * LANES : (first + 1) * LANES]
            scales = jnp.pad(scales, ((0, 0), (0, LANES - scales.shape[1])))
            row, lane = (lax.broadcasted_iota(jnp.int32, scales.shape, axis) for axis in (0, 1))
            placed = jnp.zeros_like(scales)
            for j in range(num_pages):
                is_here = (row == j) & (lane >= j * page_size) & (lane < (j + 1) * page_size)
                placed = jnp.where(is_here, pltpu.roll(scales, (j * page_size - offset) % LANES, 1), placed)
            rows.append(jnp.sum(placed, axis=0, keepdims=True))
        return jnp.concatenate(rows, axis=1)[:, : self.chunk]

    def put_part(self, tokens, head: int, where, token_R1) -> None:
        """Write the output of the item's tokens; the rest of the tile is other items'."""
        total_R1 = self.load(self.total, where)
        if self.sinks:
            shape = self.acc.shape[1], token_R1.shape[0] // self.acc.shape[1], 1
            sinks_R1 = jnp.broadcast_to(self.sinks[0][head], shape).reshape(-1, 1)
            total_R1 += jnp.exp(sinks_R1 - self.load(self.top, where))
        out_RX = self.load(self.acc, where) / jnp.maximum(total_R1, 1e-30)
        if not self.blocks.is_decode:
            is_mine_R1 = (token_R1 >= tokens[0]) & (token_R1 < tokens[1])
            out_RX = jnp.where(is_mine_R1, out_RX, self.load(self.out, where).astype(jnp.float32))
        self.store(self.out, where, out_RX)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Multiply over the second axis of the one and the given axis of the other, in float32."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
