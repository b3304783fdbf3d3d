"""Paged attention as one would explain it: every token looks up its row, gathers that row's pages and attends.

Cost follows the page table's width, so this is for tests and for reading. Pages are `[M, Z, K, H]`: page first, as in a
book.
"""

import jax
import jax.numpy as jnp

from quire.config import AttentionConfig
from quire.device.inputs import BatchLayout
from quire.device.mesh import ArraySpec
from quire.device.pointwise import soft_cap


class ReferenceBackend:
    """The oracle every other backend is held against."""

    def arrays(self, attention: AttentionConfig, num_pages: int, page_size: int, dtype: jnp.dtype):
        """K and V, each `[M, Z, K, H]`."""
        shape = (num_pages, page_size, attention.num_kv_heads, attention.head_dim)
        spec = ArraySpec(shape, dtype, ("pages", "offset", "kv_heads", "head"))
        return spec, spec

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout: BatchLayout, attention: AttentionConfig, sinks_N=None):
        """Write, then attend one token at a time."""
        scale, window = attention.scale, attention.window
        k_MZKH, v_MZKH = (
            _write(pages, new, layout.destinations_T) for pages, new in zip(kv, (k_TKH, v_TKH), strict=True)
        )
        num_tokens, num_heads, head_dim = q_TNH.shape
        num_kv_heads = k_TKH.shape[1]
        index_T = jnp.arange(num_tokens, dtype=jnp.int32)
        rows_T = jnp.searchsorted(layout.cu_q_lens_B1, index_T, side="right") - 1
        rows_T = jnp.minimum(rows_T, layout.page_table_BP.shape[0] - 1)
        positions_T = layout.kv_lens_B[rows_T] - layout.cu_q_lens_B1[rows_T + 1] + index_T

        def attend(args):
            q_NH, row, position = args
            k_CKH = k_MZKH[layout.page_table_BP[row]].reshape(-1, num_kv_heads, head_dim).astype(jnp.float32)
            v_CKH = v_MZKH[layout.page_table_BP[row]].reshape(-1, num_kv_heads, head_dim).astype(jnp.float32)
            q_KGH = q_NH.reshape(num_kv_heads, -1, head_dim).astype(jnp.float32) * scale
            column_C = jnp.arange(k_CKH.shape[0])
            seen_C = (column_C <= position) & (column_C < layout.kv_lens_B[row])
            if window is not None:
                seen_C &= column_C > position - window
            scores_KGC = jnp.einsum("kgh,ckh->kgc", q_KGH, k_CKH, precision="highest")
            scores_KGC = soft_cap(scores_KGC, attention.soft_cap)
            scores_KGC = jnp.where(seen_C[None, None, :], scores_KGC, -jnp.inf)
            if sinks_N is None:
                weights_KGC = jax.nn.softmax(scores_KGC, axis=-1)
            else:
                sinks_KG1 = sinks_N.reshape(num_kv_heads, -1, 1)
                weights_KGC = jax.nn.softmax(jnp.concatenate([scores_KGC, sinks_KG1], axis=-1), axis=-1)[..., :-1]
            # A masked weight is 0, and 0 x NaN is NaN: what is not seen is taken out of V as well.
            v_CKH = jnp.where(seen_C[:, None, None], v_CKH, 0.0)
            return jnp.einsum("kgc,ckh->kgh", weights_KGC, v_CKH, precision="highest").reshape(num_heads, head_dim)

        out_TNH = jax.lax.map(attend, (q_TNH, rows_T, positions_T))
        return out_TNH.astype(q_TNH.dtype), (k_MZKH, v_MZKH)


def _write(pages_MZKH: jax.Array, new_TKH: jax.Array, destinations_T: jax.Array) -> jax.Array:
    flat = pages_MZKH.reshape(-1, *pages_MZKH.shape[2:])
    return flat.at[destinations_T].set(new_TKH.astype(flat.dtype), mode="drop").reshape(pages_MZKH.shape)
