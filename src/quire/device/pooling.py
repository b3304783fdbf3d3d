"""Hidden states -> embeddings, as far as one step has them: what a row's tokens add up to."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from quire.device.inputs import INVALID


def pool_rows(
    hidden_TD: Float[Array, "T D"], embed_first_B: Int[Array, " B"], cu_q_lens_B1: Int[Array, " B1"]
) -> Float[Array, "B D"]:
    """For each row that is embedded, the sum of its hidden states from one packed token on, in float32.

    What a stranger's row holds is added to nothing, even where it is not a number. Skipped where no row is embedded.
    """
    num_tokens, num_rows = hidden_TD.shape[0], embed_first_B.shape[0]

    def pool() -> jax.Array:
        token_T = jnp.arange(num_tokens, dtype=jnp.int32)
        row_T = jnp.searchsorted(cu_q_lens_B1, token_T, side="right").astype(jnp.int32) - 1
        first_T = embed_first_B.at[row_T].get(mode="fill", fill_value=INVALID)  # padding is behind the last row
        is_embedded_T = (first_T != INVALID) & (token_T >= first_T)
        # What is out of range is dropped.
        return jax.ops.segment_sum(hidden_TD.astype(jnp.float32), jnp.where(is_embedded_T, row_T, num_rows), num_rows)

    zeros_BD = jnp.zeros((num_rows, hidden_TD.shape[1]), jnp.float32)
    return lax.cond(jnp.any(embed_first_B != INVALID), pool, lambda: zeros_BD)
