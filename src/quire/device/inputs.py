"""What crosses from host to device and back: the device column's contract.

`StepInputs` is a fixed schema of padded numpy arrays, built by `quire.engine.packer` from a plan. Padding is harmless
by construction: a padded token's destination lies outside the pool and its write is dropped, a padded row has no
tokens and no KV, and nobody reads what a padded sample draws. It is cheap, too, where the native library multiplies: a
padded token's hidden state is zeros in every layer, and rows of zeros behind the last that has anything else are left
out.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import DEFAULT_MAX_LOGPROBS, MAX_EOS_IDS

INVALID = -1
"""Nothing here: the one marker inside arrays."""
NOT_FINITE = -2
"""In the place of a drawn token: the model's logits are NaN or infinite, and there is none. As in `core.plan`."""

MAX_STOP_IDS = 64
"""Token ids of its own that end one sequence, beside the model's end tokens."""
MAX_BIASES = 384
"""Token ids whose logit one sample may change: 300 biases, 64 stop ids and the model's end tokens."""


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
class WindowLayout:
    """Where tokens go in a pool of layers that see only a window: what differs there from `BatchLayout`.

    A row's table begins with the first page that it still has, and lengths count from the beginning of that page.
    """

    destinations_T: Any
    page_table_BP: Any
    kv_lens_B: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchLayout:
    """Which token is whose, and where its KV goes. All attention needs to know of a batch."""

    positions_T: Any
    """Position of each token in its sequence. Attention goes by `kv_lens_B`: a row's tokens are the last it has."""
    destinations_T: Any
    """Where its KV is written: page * page_size + offset; the pool's size for none."""
    page_table_BP: Any
    """Pages of each row, in order. Entries past kv_len are never read unmasked and may be anything in range. None on
    the host, which ships `PageIds`."""
    kv_lens_B: Any
    """Positions of each row that exist once this step's tokens are written; 0 for padding."""
    cu_q_lens_B1: Any
    """Row b has the tokens cu_q_lens[b] .. cu_q_lens[b+1]-1."""
    decode: bool = field(metadata={"static": True})
    windows: tuple[WindowLayout, ...] = ()
    """For each pool of layers that see only a window."""

    @property
    def is_token_T(self) -> Any:
        """Whether a packed token is one, and no padding; in a decode step, whether its row takes part in the round."""
        if self.decode:
            return self.kv_lens_B > 0
        return jnp.arange(self.positions_T.shape[0], dtype=jnp.int32) < self.cu_q_lens_B1[-1]

    def of(self, pool: int) -> "BatchLayout":
        """The layout in one pool: 0 is that of the layers which see every position."""
        if pool == 0:
            return replace(self, windows=())
        window = self.windows[pool - 1]
        places = {name: getattr(window, name) for name in ("destinations_T", "page_table_BP", "kv_lens_B")}
        return replace(self, **places, windows=())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """What to draw, and how. On the host, what no sample of a step asks for is None, and is not shipped."""

    packed_index_S: Any
    """The token whose logits are drawn from; INVALID for padding."""
    position_S: Any
    """The position of the token drawn."""
    want_logprobs_S: Any = None
    """Whether its log-probability will be read."""
    want_top_S: Any = None
    """Whether alternatives will be read; then its log-probability is, too."""
    temperature_S: Any = None
    """0 for the most likely token."""
    top_k_S: Any = None
    """0 for all."""
    top_p_S: Any = None
    min_p_S: Any = None
    top_n_sigma_S: Any = None
    """0 for all."""
    seed_S2: Any = None
    """The request's seed, as two words."""
    index_S: Any = None
    """Which sequence of its request."""
    target_S: Any = None
    """The token to score instead of drawing one, or INVALID."""
    row_S: Any = None
    """The row that the sample's token is in: the history that penalties look at."""
    prompt_len_S: Any = None
    """Where the output begins; penalties tell it from the prompt."""
    repetition_penalty_S: Any = None
    """Penalties; 1, 0 and 0 for none."""
    presence_penalty_S: Any = None
    frequency_penalty_S: Any = None
    bias_ids_SE: Any = None
    """Token ids whose logit is changed, or INVALID."""
    bias_SE: Any = None
    """What is added to it."""
    has_mask_S: Any = None
    """Whether it may not draw every token."""
    mask_SW: Any = None
    """With `has_mask_S`, the tokens that may be drawn: bit t % 32 of word t // 32."""


SAMPLE_FIELDS = tuple(field.name for field in fields(SampleInputs))
SCORE_FIELDS = (
    "packed_index_S", "want_logprobs_S", "want_top_S", "target_S",
    "temperature_S", "top_k_S", "top_p_S", "min_p_S", "top_n_sigma_S",
)  # fmt: skip
"""What a token that is scored has of `SampleInputs`: all that is of the logits, nothing that is of a row's history."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundInputs:
    """How far each row of a decode step may go on by itself. More than one round only if sample b draws for row b."""

    max_rounds_B: Any
    """Tokens the row may produce: by its budget, and by its pages; 0 for padding."""
    stops_at_eos_B: Any
    """Whether the row need not go on after one of `eos_ids`. The host judges again."""
    eos_ids_E: Any
    """The model's end tokens, or INVALID."""
    stop_ids_BE: Any = None
    """Token ids of its own after which a row need not go on, or INVALID; None on the host where no row has any."""


def default_samples(num_samples: int, vocab_size: int) -> SampleInputs:
    """Every array of `SampleInputs`, with the values that stand for what nobody asked for."""

    def full(value: Any, dtype: Any, *dims: int) -> np.ndarray:
        return np.full((num_samples, *dims), value, dtype)

    return SampleInputs(
        packed_index_S=full(INVALID, np.int32),
        position_S=full(0, np.int32),
        want_logprobs_S=full(False, np.bool_),
        want_top_S=full(False, np.bool_),
        temperature_S=full(0, np.float32),
        top_k_S=full(0, np.int32),
        top_p_S=full(1, np.float32),
        min_p_S=full(0, np.float32),
        top_n_sigma_S=full(0, np.float32),
        seed_S2=full(0, np.uint32, 2),
        index_S=full(0, np.int32),
        target_S=full(INVALID, np.int32),
        row_S=full(0, np.int32),
        prompt_len_S=full(0, np.int32),
        repetition_penalty_S=full(1, np.float32),
        presence_penalty_S=full(0, np.float32),
        frequency_penalty_S=full(0, np.float32),
        bias_ids_SE=full(INVALID, np.int32, MAX_BIASES),
        bias_SE=full(0, np.float32, MAX_BIASES),
        has_mask_S=full(False, np.bool_),
        mask_SW=full(0, np.uint32, mask_words(vocab_size)),
    )


def default_scores(num_scores: int) -> SampleInputs:
    """The arrays of `SampleInputs` that a score has, for a step that scores nothing; None in place of the others."""
    neutral = default_samples(num_scores, vocab_size=0)
    return replace(neutral, **{name: None for name in SAMPLE_FIELDS if name not in SCORE_FIELDS})


def default_rounds(num_rows: int) -> RoundInputs:
    """Every array of `RoundInputs`, for rows that go nowhere and have no stop ids."""
    return RoundInputs(
        max_rounds_B=np.zeros(num_rows, np.int32),
        stops_at_eos_B=np.zeros(num_rows, np.bool_),
        eos_ids_E=np.full(MAX_EOS_IDS, INVALID, np.int32),
        stop_ids_BE=np.full((num_rows, MAX_STOP_IDS), INVALID, np.int32),
    )


def default_embed(num_rows: int) -> np.ndarray:
    """`StepInputs.embed_first_B` of rows whose hidden states nobody asks for."""
    return np.full(num_rows, INVALID, np.int32)


def with_defaults[T](given: T, defaults: T) -> T:
    """A step's inputs with what is None replaced: the defaults are on the device already, and nothing is shipped."""
    return jax.tree.map(lambda a, b: b if a is None else a, given, defaults, is_leaf=lambda x: x is None)


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
class PageIds:
    """The page tables of all rows, one after another: as many ids as the rows have pages, whatever the longest has."""

    ids_X: np.ndarray
    cu_lens_B1: np.ndarray
    """Row b has the ids cu_lens[b] .. cu_lens[b+1]-1."""

    def of(self, row: int) -> np.ndarray:
        """The page table of one row."""
        return self.ids_X[self.cu_lens_B1[row] : self.cu_lens_B1[row + 1]]


@dataclass(frozen=True)
class WindowInputs:
    """The page tables of all rows in a pool of layers that see only a window, and what is to be done to its pages."""

    page_ids: PageIds
    pages: PageCommands


@dataclass(frozen=True)
class StepInputs:
    """One step, as arrays. A second process that runs the same inputs comes to the same state."""

    tokens_T: np.ndarray
    layout: BatchLayout
    page_ids: PageIds
    samples: SampleInputs
    rounds: RoundInputs
    pages: PageCommands
    scores: SampleInputs | None = None
    """Tokens that are there, and whose log-probabilities are asked for: as many as a step has tokens, INVALID behind
    the last. With the `SCORE_FIELDS` only. None where no token is scored, as in every decode step."""
    embed_first_B: np.ndarray | None = None
    """The packed token from which on a row's hidden states are added up, to its last; INVALID for a row that is not
    embedded, None where no row is. Not in a decode step."""
    windows: tuple[WindowInputs, ...] = ()
    """For each pool of layers that see only a window."""
    draft: "DraftInputs | None" = None
    """What the draft model does beside it; None where there is none, or nothing to do for it."""

    @property
    def pools(self) -> list[tuple[PageIds, PageCommands]]:
        """The page tables of every pool, and what is to be done to its pages."""
        return [(self.page_ids, self.pages), *((window.page_ids, window.pages) for window in self.windows)]

    @property
    def shape(self) -> StepShape:
        """The program this step needs."""
        return StepShape(
            len(self.tokens_T), len(self.layout.kv_lens_B), len(self.samples.packed_index_S), self.layout.decode
        )

    @property
    def num_bytes(self) -> int:
        """What is shipped to the device."""
        steps = (self.tokens_T, self.layout, self.samples, self.rounds, self.scores, self.embed_first_B)
        arrays = jax.tree.leaves(steps)
        for ids, pages in self.pools:
            arrays += [ids.ids_X, ids.cu_lens_B1, pages.swap_out, pages.copy, pages.swap_in, pages.poison]
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class DraftInputs:
    """Steps of the draft model, whose pool has the same page ids. One or both; the first has the page commands."""

    catch_up: StepInputs | None
    """Tokens that are there, computed so that it has their KV."""
    guess: StepInputs | None
    """Rounds of decoding, of the rows that have more than one token in the step, in order. What one draws comes in the
    place of its tokens behind the first."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step says of the tokens it drew, or scored; one column a round.

    Scores of a row that did not ask, beside one that did, may be anything.
    """

    tokens_SR: Any
    """INVALID in rounds that the row did not take part in."""
    logprobs_SR: Any
    """Raw log-probability of the token, before everything else. What nobody asked for is not fetched: None on the
    host, as in all that follows."""
    top_ids_SRX: Any
    top_logprobs_SRX: Any
    processed_logprobs_SR: Any
    """Log-probability of the token under what it is drawn from; -inf if it could not be drawn."""
    kept_mass_SR: Any
    """The probability that all which could be drawn have together, before the rest was cut off."""
    processed_top_ids_SRX: Any
    processed_top_logprobs_SRX: Any
    """-inf for a token that could not be drawn."""
    scores: "StepOutput | None" = None
    """Of the tokens that were scored, the same; None from a decode step."""
    pooled_BD: Any = None
    """The sum of the hidden states of each row that is pooled, in float32; None from a decode step."""
    drafted_BR: Any = None
    """What a draft model guessed for each row with drafts, in order; no column where it failed, and has no KV of any
    page. None where it was not asked to."""

    def only(self, inputs: StepInputs) -> "StepOutput":
        """The tokens, and of the rest what the step was asked for; None in the place of what it was not."""
        scores = None if inputs.scores is None or self.scores is None else self.scores._asked_by(inputs.scores)
        pooled_BD = None if inputs.embed_first_B is None else self.pooled_BD
        return replace(self._asked_by(inputs.samples), scores=scores, pooled_BD=pooled_BD)

    def _asked_by(self, samples: SampleInputs) -> "StepOutput":
        absent = []
        if samples.want_logprobs_S is None:
            absent += ["logprobs_SR", "processed_logprobs_SR", "kept_mass_SR"]
        if samples.want_top_S is None:
            absent += ["top_ids_SRX", "top_logprobs_SRX", "processed_top_ids_SRX", "processed_top_logprobs_SRX"]
        return replace(self, **dict.fromkeys(absent))

    @classmethod
    def empty(cls, num_samples: int, num_rounds: int, max_logprobs: int = DEFAULT_MAX_LOGPROBS) -> "StepOutput":
        """Return the output in which no round has been run, with room for `max_logprobs` alternatives of a token."""
        shape = (num_samples, num_rounds)
        zeros_SR, zeros_SRX = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, max_logprobs), jnp.float32)
        ids_SRX = jnp.zeros(zeros_SRX.shape, jnp.int32)
        tokens_SR = jnp.full(shape, INVALID, jnp.int32)
        return cls(tokens_SR, zeros_SR, ids_SRX, zeros_SRX, zeros_SR, zeros_SR, ids_SRX, zeros_SRX)
