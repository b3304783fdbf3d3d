"""Many rounds in one program: forward, draw, advance, until every row has to go back to the host.

    round      0        1        2        3
    row 0   t -> a    a -> b   b -> c   c -> d     as many as it may
    row 1   t -> e    e -> .                       drew a stop id: it takes no part in what follows
    row 2   t -> f                                 its page was full, and no other was reserved
                                                   left when no row is active

A row's position, destination and length follow from its page table and the round; what it drew is its next token. How
many rounds there are is data: the loop's trip count, not a shape.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from quire.device.inputs import INVALID, BatchLayout, RoundInputs, SampleInputs, StepOutput
from quire.device.kv_cache import KVCache

Round = Callable[[KVCache, jax.Array, BatchLayout, SampleInputs], tuple[KVCache, StepOutput]]
"""Computes every row's one token and draws the next: one column."""


def run_rounds(
    run: Round,
    cache: KVCache,
    tokens_B: jax.Array,
    layout: BatchLayout,
    samples: SampleInputs,
    rounds: RoundInputs,
    most: int,
) -> tuple[KVCache, StepOutput]:
    """Run until no row is active; `most` is the number of columns there are to fill."""
    num_pages, page_size = cache.tokens_MZ.shape

    def at(round_: jax.Array, is_active_B: jax.Array) -> BatchLayout:
        positions_B = layout.positions_T + round_
        pages_B = jnp.take_along_axis(layout.page_table_BP, (positions_B // page_size)[:, None], axis=1)[:, 0]
        destinations_B = pages_B * page_size + positions_B % page_size
        return dataclasses.replace(
            layout,
            positions_T=positions_B,
            destinations_T=jnp.where(is_active_B, destinations_B, num_pages * page_size),
            kv_lens_B=jnp.where(is_active_B, positions_B + 1, 0),
        )

    def advance(state):
        round_, cache, tokens_B, is_active_B, output = state
        now = dataclasses.replace(samples, position_S=samples.position_S + round_)
        cache, drawn = run(cache, tokens_B, at(round_, is_active_B), now)
        tokens_B = drawn.tokens_SR[:, 0]
        # In the first round samples need not be rows: several may draw from one.
        counts_B = is_active_B | (round_ == 0)
        drawn = dataclasses.replace(drawn, tokens_SR=jnp.where(counts_B, tokens_B, INVALID)[:, None])
        output = jax.tree.map(
            lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, round_, axis=1), output, drawn
        )
        is_eos_B = jnp.any(tokens_B[:, None] == rounds.eos_ids_E[None, :], axis=1)
        is_stop_B = jnp.any(tokens_B[:, None] == rounds.stop_ids_BE, axis=1) | (is_eos_B & rounds.stops_at_eos_B)
        is_active_B = is_active_B & ~is_stop_B & (round_ + 1 < rounds.max_rounds_B)
        return round_ + 1, cache, tokens_B, is_active_B, output

    empty = StepOutput.empty(len(samples.position_S), most)
    start = (jnp.zeros((), jnp.int32), cache, tokens_B, rounds.max_rounds_B > 0, empty)
    _, cache, _, _, output = lax.while_loop(lambda state: jnp.any(state[3]), advance, start)
    return cache, output
