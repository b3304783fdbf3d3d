"""Many rounds in one program: forward, draw, advance, until every row has to go back to the host.

    round      0        1        2        3
    row 0   t -> a    a -> b   b -> c   c -> d     as many as it may
    row 1   t -> e    e -> .                       drew a stop id: it takes no part in what follows
    row 2   t -> f                                 its page was full, and no other was reserved
                                                   left when no row is active

A row's position, destination and length follow from its page tables and the round; what it drew is its next token. How
many rounds there are is data: the loop's trip count, not a shape.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from quire.device.inputs import INVALID, BatchLayout, RoundInputs, SampleInputs, StepOutput, WindowLayout
from quire.device.kv_cache import Caches, KVCache

Round = Callable[[Caches, jax.Array, BatchLayout, SampleInputs], tuple[Caches, StepOutput]]
"""Computes every row's one token and draws the next: one column."""


def run_rounds(
    run: Round,
    caches: Caches,
    tokens_B: jax.Array,
    layout: BatchLayout,
    samples: SampleInputs,
    rounds: RoundInputs,
    most: int,
    max_logprobs: int,
) -> tuple[Caches, StepOutput]:
    """Run until no row is active; `most` is the number of columns to fill, `max_logprobs` of alternatives in each."""
    page_size = caches[0].tokens_MZ.shape[1]

    def places[T: (BatchLayout, WindowLayout)](
        before: T, cache: KVCache, round_: jax.Array, is_active_B: jax.Array
    ) -> T:
        """Where each row's token goes, and how long it is then, in one pool."""
        end_B = before.kv_lens_B + round_
        last_B = jnp.maximum(end_B - 1, 0)
        pages_B = jnp.take_along_axis(before.page_table_BP, (last_B // page_size)[:, None], axis=1)[:, 0]
        destinations_B = pages_B * page_size + last_B % page_size
        return dataclasses.replace(
            before,
            destinations_T=jnp.where(is_active_B, destinations_B, cache.num_pages * page_size),
            kv_lens_B=jnp.where(is_active_B, end_B, 0),
        )

    def at(round_: jax.Array, is_active_B: jax.Array) -> BatchLayout:
        windows = zip(layout.windows, caches[1:], strict=True)
        return dataclasses.replace(
            places(layout, caches[0], round_, is_active_B),
            positions_T=layout.positions_T + round_,
            windows=tuple(places(window, cache, round_, is_active_B) for window, cache in windows),
        )

    def advance(state):
        round_, caches, tokens_B, is_active_B, output = state
        now = dataclasses.replace(samples, position_S=samples.position_S + round_)
        caches, drawn = run(caches, tokens_B, at(round_, is_active_B), now)
        tokens_B = drawn.tokens_SR[:, 0]
        # In the first round samples need not be rows: several may draw from one.
        counts_B = is_active_B | (round_ == 0)
        drawn = dataclasses.replace(drawn, tokens_SR=jnp.where(counts_B, tokens_B, INVALID)[:, None])
        output = jax.tree.map(
            lambda all_, new: lax.dynamic_update_slice_in_dim(all_, new, round_, axis=1), output, drawn
        )
        is_eos_B = jnp.any(tokens_B[:, None] == rounds.eos_ids_E[None, :], axis=1)
        is_stop_B = jnp.any(tokens_B[:, None] == rounds.stop_ids_BE, axis=1) | (is_eos_B & rounds.stops_at_eos_B)
        is_stop_B |= tokens_B < 0  # its logits are not finite
        is_active_B = is_active_B & ~is_stop_B & (round_ + 1 < rounds.max_rounds_B)
        return round_ + 1, caches, jnp.maximum(tokens_B, 0), is_active_B, output

    empty = StepOutput.empty(len(samples.position_S), most, max_logprobs)
    start = (jnp.zeros((), jnp.int32), caches, tokens_B, rounds.max_rounds_B > 0, empty)
    _, caches, _, _, output = lax.while_loop(lambda state: jnp.any(state[3]), advance, start)
    return caches, output
