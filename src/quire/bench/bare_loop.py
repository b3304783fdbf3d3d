"""The fastest thing one would write by hand for a fixed batch: the limit of the engine.

The weights, matmuls and attention of a runner, pages laid out once; all prompts in one forward, then every decode step
in one jitted loop, greedy. No scheduler, no allocator, no host round trip, nobody arrives and nobody leaves early.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from quire.device import kv_cache
from quire.device.inputs import BatchLayout
from quire.device.models.layers import Params, decoder, unembed
from quire.device.runner import ModelRunner
from quire.device.sampler import take_likeliest


class BareLoop:
    """Continues `rows` prompts of one length by `new_tokens` each."""

    def __init__(self, runner: ModelRunner, *, rows: int, prompt_len: int, new_tokens: int) -> None:
        self._runner = runner
        self._rows, self._prompt_len, self._new_tokens = rows, prompt_len, new_tokens
        pages_per_row = -(-(prompt_len + new_tokens) // runner.page_size)
        self._table_BP = np.arange(rows * pages_per_row, dtype=np.int32).reshape(rows, pages_per_row)
        self._caches = (runner.create_cache(rows * pages_per_row),)
        self._program = jax.jit(self._loop, donate_argnums=1)

    def generate(self, prompts_BT: np.ndarray) -> np.ndarray:
        """The greedy tokens `[rows, new_tokens]`."""
        self._caches, tokens_BR = self._program(self._runner.params, self._caches, prompts_BT)
        return np.asarray(tokens_BR)

    def _loop(self, params: Params, caches: kv_cache.Caches, prompts_BT: Int[Array, "B T"]):
        prompt_len = self._prompt_len
        logits_BV, caches = self._forward(params, caches, prompts_BT.reshape(-1), jnp.int32(0), prompt_len)
        tokens_BR = jnp.zeros((self._rows, self._new_tokens), jnp.int32).at[:, 0].set(take_likeliest(logits_BV)[0])

        def step(round_, state):
            caches, tokens_BR = state
            logits_BV, caches = self._forward(params, caches, tokens_BR[:, round_ - 1], prompt_len + round_ - 1, 1)
            return caches, tokens_BR.at[:, round_].set(take_likeliest(logits_BV)[0])

        return jax.lax.fori_loop(1, self._new_tokens, step, (caches, tokens_BR))

    def _forward(self, params: Params, caches: kv_cache.Caches, tokens_T: jax.Array, start: jax.Array, count: int):
        """Compute `count` positions of every row from `start` on; returns the logits of each row's last one."""
        rows, size = self._rows, self._runner.page_size
        positions_BC = start + jnp.arange(count)[None, :] + jnp.zeros((rows, 1), jnp.int32)
        table_BP = jnp.asarray(self._table_BP)
        pages_BC = jnp.take_along_axis(table_BP, positions_BC // size, axis=1)
        layout = BatchLayout(
            positions_T=positions_BC.reshape(-1),
            destinations_T=(pages_BC * size + positions_BC % size).reshape(-1),
            page_table_BP=table_BP,
            kv_lens_B=positions_BC[:, -1] + 1,
            cu_q_lens_B1=jnp.arange(rows + 1, dtype=jnp.int32) * count,
            decode=count == 1,
        )
        statics = replace(self._runner.programs.statics, windows=())
        hidden_TD, caches = decoder(self._runner.programs.layer, params, caches, tokens_T, layout, statics)
        return unembed(params, hidden_TD[count - 1 :: count], statics.config), caches
