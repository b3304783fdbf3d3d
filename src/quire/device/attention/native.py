"""Paged attention in C++, for CPUs: `native/attention.cc` through XLA's foreign function interface.

A page of one KV head is one stretch of memory, in the order in which a vector unit takes it:

    K  [M, K, H / pair, Z, pair]          V  [M, K, ceil(Z / pair), H, pair]

where `pair` is 2 for bfloat16, whose dot products take two at a time, and 1 for float32. The arrays are updated in
place.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import AttentionConfig, ModelConfig
from quire.device import native
from quire.device.inputs import BatchLayout
from quire.device.mesh import ArraySpec

HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True)
class NativeBackend:
    """The backend for CPUs."""

    instruction_set: str = ""
    """One of `native.instruction_sets()`; by default the last of them."""

    def arrays(self, attention: AttentionConfig, num_pages: int, page_size: int, dtype: jnp.dtype):
        """K `[M, K, H / pair, Z, pair]` and V `[M, K, ceil(Z / pair), H, pair]`."""
        pair, num_kv_heads, head_dim = 4 // dtype.itemsize, attention.num_kv_heads, attention.head_dim
        axes = ("pages", "kv_heads", None, None, None)
        return (
            ArraySpec((num_pages, num_kv_heads, head_dim // pair, page_size, pair), dtype, axes),
            ArraySpec((num_pages, num_kv_heads, -(-page_size // pair), head_dim, pair), dtype, axes),
        )

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout: BatchLayout, attention: AttentionConfig, sinks_N=None):
        """One call does it all: write, then attend."""
        k_pages, v_pages = kv
        sinks_N = jnp.zeros(0, jnp.float32) if sinks_N is None else sinks_N
        call = jax.ffi.ffi_call(
            "quire_attention",
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q_TNH, k_pages, v_pages)),
            input_output_aliases={8: 1, 9: 2},
        )
        out_TNH, k_pages, v_pages = call(
            q_TNH,
            k_TKH.astype(k_pages.dtype),
            v_TKH.astype(v_pages.dtype),
            layout.positions_T,
            layout.destinations_T,
            layout.page_table_BP,
            layout.kv_lens_B,
            layout.cu_q_lens_B1,
            k_pages,
            v_pages,
            sinks_N,
            scale=np.float32(attention.scale),
            soft_cap=np.float32(attention.soft_cap or 0),
            window=np.int64(attention.window or 0),
            isa=self.instruction_set,
        )
        return out_TNH, (k_pages, v_pages)


def unavailable_reason(model: ModelConfig) -> str | None:
    """Why this backend cannot run the model on this machine's CPU, in one sentence; None when it can."""
    for attention in model.attention:
        if attention.head_dim % HEAD_DIM_MULTIPLE:
            multiple = f"a multiple of {HEAD_DIM_MULTIPLE}, not {attention.head_dim}"
            return f"the native kernel needs a head size that is {multiple}"
    return native.unavailable_reason()
