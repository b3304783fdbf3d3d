"""Paged attention in plain XLA, for any platform. Cost follows the real lengths, not the page table's width.

Pages are head-major, `[K, M, Z, H]`: the dot products of one head read consecutive memory. Keys are visited in chunks
of about 128 positions with the softmax kept online (running maximum and sum), in loops whose trip counts are data:

- rows with one token (decoding) go through all together, as far as the longest of them;
- rows with more (prompts) go one tile of queries at a time, each as far as its own last token, and with a sliding
  window only from its first visible chunk on.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from quire.config import AttentionConfig
from quire.device.inputs import BatchLayout
from quire.device.mesh import ArraySpec
from quire.device.pointwise import soft_cap

CHUNK = 128
"""Key positions visited at a time."""
QUERY_TILE = 128
"""Query tokens of one prompt that share a visit."""

MASKED = -1e30
"""Finite, so that a row that sees nothing gives 0 / small and not NaN."""


class XlaBackend:
    """The portable backend."""

    def arrays(self, attention: AttentionConfig, num_pages: int, page_size: int, dtype: jnp.dtype):
        """K and V, each `[K, M, Z, H]`."""
        shape = (attention.num_kv_heads, num_pages, page_size, attention.head_dim)
        spec = ArraySpec(shape, dtype, ("kv_heads", "pages", "offset", "head"))
        return spec, spec

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout: BatchLayout, attention: AttentionConfig, sinks_N=None):
        """Write, then attend: decoding rows together, prompts tile by tile."""
        kv = tuple(_write(pages, new, layout.destinations_T) for pages, new in zip(kv, (k_TKH, v_TKH), strict=True))
        num_tokens, num_heads, head_dim = q_TNH.shape
        q_KTGH = q_TNH.reshape(num_tokens, k_TKH.shape[1], -1, head_dim).swapaxes(0, 1)
        sinks_KG = None if sinks_N is None else sinks_N.reshape(k_TKH.shape[1], -1)
        attend_rows = _decode_rows if layout.decode else _mixed_rows
        out_KTGH = attend_rows(kv, q_KTGH, layout, attention, sinks_KG)
        return out_KTGH.swapaxes(0, 1).reshape(num_tokens, num_heads, head_dim).astype(q_TNH.dtype), kv


class XlaRowsBackend(XlaBackend):
    """Every token by itself, as if its row had no other in the step: whatever its company, it is added up the same.

    Slower for prompts, whose tokens read the same keys one after another.
    """

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout: BatchLayout, attention: AttentionConfig, sinks_N=None):
        """Write, then attend with a row for each token."""
        tokens_T = jnp.arange(q_TNH.shape[0], dtype=jnp.int32)
        row_T = jnp.searchsorted(layout.cu_q_lens_B1, tokens_T, side="right").astype(jnp.int32) - 1
        is_real_T, row_T = row_T < len(layout.kv_lens_B), jnp.minimum(row_T, len(layout.kv_lens_B) - 1)
        num_behind_T = layout.cu_q_lens_B1[row_T + 1] - 1 - tokens_T
        alone = dataclasses.replace(
            layout,
            page_table_BP=layout.page_table_BP[row_T],
            kv_lens_B=jnp.where(is_real_T, layout.kv_lens_B[row_T] - num_behind_T, 0),
            cu_q_lens_B1=jnp.arange(len(tokens_T) + 1, dtype=jnp.int32),
            decode=True,
        )
        return super().write_and_attend(kv, q_TNH, k_TKH, v_TKH, alone, attention, sinks_N)


def _write(pages_KMZH: jax.Array, new_TKH: jax.Array, destinations_T: jax.Array) -> jax.Array:
    """Write each token's K or V at its destination in every head; one outside the pool is dropped.

    The head is part of the scatter's index: with an axis of its own, a TPU keeps the pool in one order for this and in
    another for the reading, and copies all of it between the two.
    """
    num_heads, num_pages, page_size, head_dim = pages_KMZH.shape
    places = num_pages * page_size
    heads_K1 = jnp.arange(num_heads, dtype=jnp.int32)[:, None]
    target_KT = jnp.where(destinations_T[None] < places, heads_K1 * places + destinations_T[None], num_heads * places)
    new_KTH = new_TKH.astype(pages_KMZH.dtype).swapaxes(0, 1)
    return pages_KMZH.reshape(-1, head_dim).at[target_KT].set(new_KTH, mode="drop").reshape(pages_KMZH.shape)


def _decode_rows(
    kv, q_KBGH: jax.Array, layout: BatchLayout, attention: AttentionConfig, sinks_KG: jax.Array | None
) -> jax.Array:
    """One query a row, all rows at once."""
    kv_lens_B, window = layout.kv_lens_B, attention.window
    positions_B = kv_lens_B - 1
    first = jnp.zeros((), jnp.int32)
    if window is not None:
        start_B = jnp.where(kv_lens_B > 0, jnp.maximum(kv_lens_B - window, 0), jnp.iinfo(jnp.int32).max)
        first = jnp.minimum(jnp.min(start_B), jnp.max(kv_lens_B))

    def seen(columns_C: jax.Array) -> jax.Array:
        seen_BC = columns_C[None, :] < kv_lens_B[:, None]
        if window is not None:
            seen_BC &= columns_C[None, :] > positions_B[:, None] - window
        return seen_BC[:, None, :]

    return _attend(kv, q_KBGH, layout.page_table_BP, attention, sinks_KG, seen, first, jnp.max(kv_lens_B))


def _mixed_rows(
    kv, q_KTGH: jax.Array, layout: BatchLayout, attention: AttentionConfig, sinks_KG: jax.Array | None
) -> jax.Array:
    """Rows of any length: the single tokens together, then each longer row in tiles of queries.

    packed tokens   | row 0 ........... | 1 | row 2 ...... | padding
    tiles           [- 128 --][- 128 --]      [- 128 --]
                                 ^ reaches past its row: what it computes there is not kept
    """
    num_kv_heads, num_tokens, group, head_dim = q_KTGH.shape
    cu_q_lens_B1, window = layout.cu_q_lens_B1, attention.window
    q_lens_B = cu_q_lens_B1[1:] - cu_q_lens_B1[:-1]
    single_B = q_lens_B == 1

    tokens_B = jnp.minimum(cu_q_lens_B1[:-1], num_tokens - 1)
    singles = dataclasses.replace(layout, kv_lens_B=jnp.where(single_B, layout.kv_lens_B, 0), decode=True)
    single_out_KBGH = _decode_rows(kv, q_KTGH[:, tokens_B], singles, attention, sinks_KG)
    out_KTGH = jnp.zeros((num_kv_heads, num_tokens + QUERY_TILE, group, head_dim), jnp.float32)
    target_B = jnp.where(single_B, tokens_B, num_tokens + QUERY_TILE)
    out_KTGH = out_KTGH.at[:, target_B].set(single_out_KBGH, mode="drop")

    # Padded so that a tile at the end is a plain slice.
    q_KTGH = jnp.pad(q_KTGH, ((0, 0), (0, QUERY_TILE), (0, 0), (0, 0)))
    tiles_B = jnp.where(single_B, 0, (q_lens_B + QUERY_TILE - 1) // QUERY_TILE)
    cu_tiles_B = jnp.cumsum(tiles_B)

    def tile(carry):
        i, out_KTGH = carry
        row = jnp.searchsorted(cu_tiles_B, i, side="right")
        offset = (i - (cu_tiles_B[row] - tiles_B[row])) * QUERY_TILE
        token = cu_q_lens_B1[row] + offset
        kv_len = layout.kv_lens_B[row]
        positions_Q = kv_len - q_lens_B[row] + offset + jnp.arange(QUERY_TILE)
        end = jnp.minimum(positions_Q[-1] + 1, kv_len)
        first = jnp.zeros((), jnp.int32) if window is None else jnp.maximum(positions_Q[0] + 1 - window, 0)

        def seen(columns_C: jax.Array) -> jax.Array:
            seen_QC = (columns_C[None, :] <= positions_Q[:, None]) & (columns_C[None, :] < kv_len)
            if window is not None:
                seen_QC &= columns_C[None, :] > positions_Q[:, None] - window
            return jnp.repeat(seen_QC, group, axis=0)[None]

        q_KQGH = lax.dynamic_slice_in_dim(q_KTGH, token, QUERY_TILE, axis=1)
        q_K1XH = q_KQGH.reshape(num_kv_heads, 1, QUERY_TILE * group, head_dim)
        pages_1P = lax.dynamic_slice_in_dim(layout.page_table_BP, row, 1, axis=0)
        new_KQGH = _attend(kv, q_K1XH, pages_1P, attention, sinks_KG, seen, first, end).reshape(q_KQGH.shape)
        old_KQGH = lax.dynamic_slice_in_dim(out_KTGH, token, QUERY_TILE, axis=1)
        inside_Q = offset + jnp.arange(QUERY_TILE) < q_lens_B[row]
        kept_KQGH = jnp.where(inside_Q[None, :, None, None], new_KQGH, old_KQGH)
        return i + 1, lax.dynamic_update_slice_in_dim(out_KTGH, kept_KQGH, token, axis=1)

    _, out_KTGH = lax.while_loop(lambda carry: carry[0] < cu_tiles_B[-1], tile, (jnp.zeros((), jnp.int32), out_KTGH))
    return out_KTGH[:, :num_tokens]


def _attend(
    kv,
    q_KBXH: jax.Array,
    page_table_BP: jax.Array,
    attention: AttentionConfig,
    sinks_KG: jax.Array | None,
    seen,
    first: jax.Array,
    end: jax.Array,
) -> jax.Array:
    """Softmax attention of X queries a row over the columns `first .. end-1`, chunk by chunk.

    `seen(columns_C)` gives, for each row, query and column, whether it counts; it broadcasts against `[B, X, C]`. The
    query heads of a token are next to each other in X.
    """
    k_KMZH, v_KMZH = kv
    num_kv_heads, num_rows, num_queries, head_dim = q_KBXH.shape
    page_size = k_KMZH.shape[2]
    chunk_pages = max(1, min(CHUNK // page_size, page_table_BP.shape[1]))
    chunk = chunk_pages * page_size
    short = -page_table_BP.shape[1] % chunk_pages
    page_table_BP = jnp.pad(page_table_BP, ((0, 0), (0, short)))

    def visit(carry):
        i, top_KBX, total_KBX, out_KBXH = carry
        pages_BC = lax.dynamic_slice_in_dim(page_table_BP, i * chunk_pages, chunk_pages, axis=1)
        k_KBCH = k_KMZH[:, pages_BC].reshape(num_kv_heads, num_rows, chunk, head_dim)
        v_KBCH = v_KMZH[:, pages_BC].reshape(num_kv_heads, num_rows, chunk, head_dim)
        seen_BXC = seen(i * chunk + jnp.arange(chunk, dtype=jnp.int32))
        # What no query of the row sees may be anything, NaN too, and 0 x NaN is NaN: take it out of V.
        v_KBCH = jnp.where(jnp.any(seen_BXC, axis=1)[None, :, :, None], v_KBCH, jnp.zeros((), v_KBCH.dtype))
        scores_KBXC = soft_cap(_dot("kbxh,kbch->kbxc", q_KBXH, k_KBCH) * attention.scale, attention.soft_cap)
        scores_KBXC = jnp.where(seen_BXC[None], scores_KBXC, MASKED)
        new_top_KBX = jnp.maximum(top_KBX, jnp.max(scores_KBXC, axis=-1))
        weights_KBXC = jnp.where(seen_BXC[None], jnp.exp(scores_KBXC - new_top_KBX[..., None]), 0.0)
        shrink_KBX = jnp.exp(top_KBX - new_top_KBX)
        total_KBX = total_KBX * shrink_KBX + jnp.sum(weights_KBXC, axis=-1)
        added_KBXH = _dot("kbxc,kbch->kbxh", weights_KBXC.astype(v_KBCH.dtype), v_KBCH)
        return i + 1, new_top_KBX, total_KBX, out_KBXH * shrink_KBX[..., None] + added_KBXH

    shape = (num_kv_heads, num_rows, num_queries)
    start = (
        first // chunk,
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    _, top_KBX, total_KBX, out_KBXH = lax.while_loop(lambda carry: carry[0] * chunk < end, visit, start)
    if sinks_KG is not None:
        sinks_K1X = jnp.tile(sinks_KG, (1, num_queries // sinks_KG.shape[1]))[:, None, :]
        total_KBX += jnp.exp(sinks_K1X - top_KBX)
    return out_KBXH / jnp.maximum(total_KBX, 1e-30)[..., None]


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision="highest", preferred_element_type=jnp.float32)
