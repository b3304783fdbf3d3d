"""What crosses from host to device and back: the device column's contract.

`StepInputs` is a fixed schema of padded numpy arrays, built by `quire.engine.packer` from a plan. Padding is harmless
by construction: a padded token's destination lies outside the pool and its write is dropped, a padded row has no
tokens and no KV, a padded sample draws from token 0 and nobody reads it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

INVALID = -1
"""Nothing here: the one marker inside arrays."""

MAX_STOP_IDS = 80
"""Token ids that end one sequence: up to 64 of its own and the model's end tokens."""
MAX_BIASES = 384
"""Token ids whose logit one sample may change: 300 biases, up to 64 stop ids and the model's end tokens."""
NUM_TOP_LOGPROBS = 20
"""Alternatives reported beside a token, at most."""


def mask_words(vocab_size: int) -> int:
    """Words of 32 bits that have one for each token."""
    return -(-vocab_size // 32)


class StepShape(NamedTuple):
    """The padded sizes of a step; one program is compiled for each."""

    num_tokens: int
    num_rows: int
    num_samples: int
    decode: bool
    """Every row has one token, token i is row i's."""

    def __str__(self) -> str:
        kind = "decode" if self.decode else "mixed"
        return f"{kind} {self.num_tokens} tokens, {self.num_rows} rows, {self.num_samples} samples"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchLayout:
    """Which token is whose, and where its KV goes. All attention needs to know of a batch."""

    positions_T: Any
    """Position of each token in its sequence."""
    destinations_T: Any
    """Where its KV is written: page * page_size + offset; the pool's size for none."""
    page_table_BP: Any
    """Pages of each row, in order. Entries past kv_len are never read unmasked and may be anything in range."""
    kv_lens_B: Any
    """Positions of each row that exist once this step's tokens are written; 0 for padding."""
    cu_q_lens_B1: Any
    """Row b has the tokens cu_q_lens[b] .. cu_q_lens[b+1]-1."""
    decode: bool = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """What to draw, and how."""

    packed_index_S: Any
    """The token whose logits are drawn from."""
    row_S: Any
    """The row that token is in."""
    prompt_len_S: Any
    """Where the output begins; penalties tell it from the prompt."""
    temperature_S: Any
    """0 for the most likely token."""
    top_k_S: Any
    """0 for all."""
    top_p_S: Any
    min_p_S: Any
    seed_S2: Any
    """The request's seed, as two words."""
    index_S: Any
    """Which sequence of its request."""
    position_S: Any
    """The position of the token drawn."""
    target_S: Any
    """The token to score instead of drawing one, or INVALID."""
    repetition_S: Any
    """Penalties; 1, 0 and 0 for none."""
    presence_S: Any
    frequency_S: Any
    bias_ids_SE: Any
    """Token ids whose logit is changed, or INVALID."""
    bias_SE: Any
    """What is added to it."""
    mask_SW: Any
    """The tokens that may be drawn: bit t % 32 of word t // 32. None on the host where all samples may draw all."""
    has_mask: Any
    """Whether any sample may not draw all."""
    want_logprobs: Any
    """Whether any sample's log-probability will be read."""
    want_top: Any
    """Whether any alternatives will be read."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundInputs:
    """How far each row of a decode step may go on by itself. More than one round only if sample b draws for row b."""

    max_rounds_B: Any
    """Tokens the row may produce: by its budget, and by its pages; 0 for padding."""
    stop_ids_BE: Any
    """Token ids after which it need not go on, or INVALID. The host judges again."""


@dataclass(frozen=True)
class PageCommands:
    """Whole pages to touch before a step's writes, in this order."""

    swap_out: np.ndarray
    """`[n, 2]`: page, host page."""
    copy: np.ndarray
    """`[n, 2]`: from, to."""
    swap_in: np.ndarray
    """`[n, 2]`: host page, page."""
    poison: np.ndarray
    """`[n]`."""


@dataclass(frozen=True)
class StepInputs:
    """One step, as arrays. A second process that runs the same inputs comes to the same state."""

    tokens_T: np.ndarray
    layout: BatchLayout
    samples: SampleInputs
    rounds: RoundInputs
    pages: PageCommands

    @property
    def shape(self) -> StepShape:
        """The program this step needs."""
        return StepShape(
            len(self.tokens_T), len(self.layout.kv_lens_B), len(self.samples.temperature_S), self.layout.decode
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step produced; one column a round."""

    tokens_SR: Any
    """INVALID in rounds that the row did not take part in."""
    logprobs_SR: Any
    """Raw log-probability of the token, before everything else; 0 where nobody asked, as in all that follows."""
    top_ids_SRX: Any
    top_logprobs_SRX: Any
    processed_logprobs_SR: Any
    """Log-probability of the token under what it was drawn from."""
    processed_top_ids_SRX: Any
    processed_top_logprobs_SRX: Any
    """-inf for a token that could not be drawn."""

    @classmethod
    def empty(cls, num_samples: int, num_rounds: int) -> "StepOutput":
        """No round has been run."""
        shape = (num_samples, num_rounds)
        zeros_SR, zeros_SRX = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, NUM_TOP_LOGPROBS), jnp.float32)
        ids_SRX = jnp.zeros(zeros_SRX.shape, jnp.int32)
        tokens_SR = jnp.full(shape, INVALID, jnp.int32)
        return cls(tokens_SR, zeros_SR, ids_SRX, zeros_SRX, zeros_SR, ids_SRX, zeros_SRX)
