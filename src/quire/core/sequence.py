"""One stream of tokens that answers a request: the only mutable state that the host keeps about it.

Its tokens, its page table and how far its KV has been computed. Nothing here knows jax, a scheduler or text.

    tokens       | prompt ................ | output ....... last |
    positions    0                   prompt_len              len(tokens)
    KV computed  0 ....................................... num_computed

The newest token has no KV yet, nor have those that a grammar forced behind it: the step that computes the token after
them writes it.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from quire.core.drafts import Drafter, Guesses
from quire.core.errors import StateError
from quire.core.request import Request
from quire.core.stopping import FinishReason, Grammar, StopDetector
from quire.core.tenants import Tenant
from quire.short_repr import short_repr


class SequenceState(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


# The seeds' table; besides, an abort may end a sequence anywhere, and a swapped one may lose its host pages.
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


Version = int | str
"""What the owner of a set of weights calls it."""


class Weights(NamedTuple):
    """Which weights compute. Every change makes others, even under a name that was there before."""

    version: Version
    change: int
    """How often weights had been set before."""


class TokenLogprob(NamedTuple):
    """A token and its log-probability, raw and processed; alternatives likeliest first.

    Raw is under the model itself, what a trainer computes. Processed is under what the token was drawn from: after
    penalties, bias, temperature and cuts (0 for a greedy token, whose choice was certain). Prompt tokens were not drawn
    and have raw ones only, but where `LLM.score_drawn` asks for both.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    processed_logprob: float | None = None
    processed_top: tuple[tuple[int, float], ...] = ()
    """Only tokens that could have been drawn."""
    kept_mass: float | None = None
    """The probability, at that temperature, that all tokens which could be drawn had together before top-k, top-p,
    min-p and top-n-sigma cut the others off: 1 if nothing was cut. Given with `processed_logprob`."""

    def __repr__(self) -> str:
        return short_repr(self)


class TokenEvent(NamedTuple):
    """What one committed step did to one sequence."""

    sequence: "Sequence"
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class WindowTable:
    """The pages of a sequence in a pool of layers that see only a window."""

    __slots__ = ("first", "host_pages", "pages")

    def __init__(self, first: int = 0, pages: Iterable[int] = ()) -> None:
        self.first = first
        """How many pages have left the window: position p lives in page `pages[p // page_size - first]`."""
        self.pages = array("i", pages)
        self.host_pages = array("i")
        """While swapped: where the same pages are in host memory."""


class Sequence:
    """One stream of tokens. The scheduler moves it; commit appends to it; nobody else writes to it."""

    __slots__ = (
        "arrival", "detokenizer", "drafter", "eos_ids", "family", "finish_reason", "grammar", "has_stop_strings",
        "hash_root", "host_pages", "index", "kv_weights", "logprobs", "mask", "max_tokens", "next_index",
        "num_cached_tokens", "num_charged", "num_computed", "num_failures", "num_inherited", "num_published",
        "num_stop_tokens", "num_tokens", "order", "output_token_ids", "page_hashes", "pages", "params", "parent",
        "pooled_D", "preemptions", "priority", "prompt_len", "prompt_logprobs", "request", "sampling_record", "seed",
        "state", "stop_ids", "tenant", "weight_versions", "windows",
    )  # fmt: skip

    tenant: Tenant
    """The tenant of its request; set once the sequence waits for a row."""

    def __init__(
        self,
        request: Request,
        *,
        index: int,
        arrival: int,
        seed: int,
        max_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
        detokenizer: StopDetector | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.request = request
        self.index = index
        """Which of the request's sequences this is; draws differ by it."""
        self.family: list[Sequence] = [self]
        """Every sequence of a living request, but for forks that have ended; the same list for all of them."""
        self.next_index = 1
        """Of the first of a family: how many there have been."""
        self.parent: Sequence | None = None
        """Until it starts: whom it was forked from."""
        self.num_inherited = 0
        """Tokens it has in common with its parent."""
        self.arrival = arrival
        self.seed = seed
        self.max_tokens = max_tokens
        self.eos_ids = frozenset() if request.params.ignore_eos else eos_ids
        self.stop_ids = [*self.eos_ids, *request.params.stop_token_ids]
        """Token ids that end it once it has `min_tokens`."""
        self.detokenizer = detokenizer
        """Turns the output into text; None without a tokenizer."""
        self.params = request.params
        self.sampling_record: bytes | None = None
        """`params` as the packer lays them out, made once."""
        self.has_stop_strings = bool(request.params.stop_strings)
        self.priority = request.priority
        self.order = (-request.priority, arrival, index)
        """Smaller runs first: higher priority, then earlier arrival, then lower index."""
        self.prompt_len = len(request.prompt_token_ids)
        self.output_token_ids: list[int] = []
        """What has been generated so far. The prompt stays with the request: all sequences of it share one."""
        self.num_tokens = self.prompt_len
        """How many tokens there are, of the prompt and generated: kept, because every step asks several times."""
        self.pages = array("i")
        """The page table: position p lives in page `pages[p // page_size]`."""
        self.host_pages = array("i")
        """While swapped: where the same pages are in host memory."""
        self.windows: list[WindowTable] = []
        """From its start on, one for each pool of layers that see only a window."""
        self.num_computed = 0
        """Positions whose KV is in the pages."""
        self.num_charged = 0
        """Positions from the front that its tenant was charged for, or found computed."""
        self.num_published = 0
        """Pages at the front of the table that the prefix cache knows as these."""
        self.num_cached_tokens = 0
        """Positions found in the prefix cache when it first started, instead of computed."""
        self.hash_root: bytes = b""
        self.page_hashes: list[bytes] = []
        """Of its full pages, as far as anybody has asked; valid under `hash_root`."""
        self.kv_weights: Weights | None = None
        """What computed its KV; None if there is none, or if two did."""
        self.weight_versions: list[Version] = []
        """For each output token, the weights it was drawn under, or that there were when it was forced."""
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_stop_tokens = 0
        """Output tokens at the end that are the stop itself and carry no text."""
        self.logprobs: list[TokenLogprob] = []
        """When asked for, one for each output token; of a fork that has yet to run, those of its parent."""
        start = request.params.prompt_logprobs_start if request.params.prompt_logprobs else 1
        self.prompt_logprobs: list[TokenLogprob | None] = [None] * min(start, self.prompt_len)
        """One entry for each prompt token scored so far (the first has nothing before it, and those before
        `prompt_logprobs_start` were not asked for). Shared by the family, but for a fork that asks for others than its
        parent."""
        self.pooled_D: np.ndarray | None = None
        """With `pooling`: the hidden state of the newest computed token, or the sum of those of all computed ones."""
        self.preemptions = 0
        self.num_failures = 0
        """Steps that failed on the device with this sequence in them."""
        self.grammar = grammar
        """Constrains the output; it has read all of it."""
        self.drafter: Drafter | Guesses | None = None
        """Where drafts are made: what finds them, or how good a draft model's are. A fork has one of its own."""
        self.mask: np.ndarray | None = None
        """With a grammar: the tokens that may be drawn next, end tokens too. Replaced, never written to."""

    def fork(self) -> "Sequence":
        """Another sequence of the family with the tokens that this one has; it waits, and draws on its own."""
        child = self.begin_fork()
        child.join_family()
        return child

    def begin_fork(self) -> "Sequence":
        """A fork that is not of the family yet.

        Its text begins where its output does: what somebody has read of this one's text is still to be read of it.
        """
        child = Sequence(
            self.request,
            index=self.family[0].next_index,
            arrival=self.arrival,
            seed=self.seed,
            max_tokens=self.max_tokens,
            eos_ids=self.eos_ids,
            detokenizer=self.detokenizer and self.detokenizer.fork(),
            grammar=self.grammar and self.grammar.copy(),
        )
        child.mask = self.mask
        child.output_token_ids = self.output_token_ids.copy()
        child.num_tokens = self.num_tokens
        child.inherit(self)
        return child

    def inherit(self, parent: "Sequence") -> None:
        """Take over what belongs to the parent's tokens: their KV, their versions and their log-probabilities."""
        self.family = parent.family
        self.parent, self.num_inherited = parent, parent.num_tokens
        self.weight_versions = parent.weight_versions.copy()
        if self.params.logprobs is not None:
            self.logprobs = parent.logprobs.copy()
        if not parent.num_output or len(parent.prompt_logprobs) == parent.prompt_len:
            self._inherit_prompt_logprobs(parent)

    def _inherit_prompt_logprobs(self, parent: "Sequence") -> None:
        """Share the parent's, or take what is asked for of them; what they lack is scored anew."""
        mine, start = self.params, len(self.prompt_logprobs)
        is_alike = parent.params.prompt_logprobs and parent.params.prompt_logprobs_start == mine.prompt_logprobs_start
        if is_alike or not mine.prompt_logprobs:
            self.prompt_logprobs = parent.prompt_logprobs
        elif all(parent.prompt_logprobs[start:]):
            self.prompt_logprobs = [*self.prompt_logprobs, *parent.prompt_logprobs[start:]]

    def forget_prompt_scores(self) -> None:
        """Have the prompt scored anew, as all of it is to be under one version of the weights, unless it is done.

        It is once somebody of the family has drawn from it: they share the scores.
        """
        if not any(member.num_output for member in self.family):
            self.prompt_logprobs[:] = [None] * self.prompt_logprobs.count(None)

    def join_family(self) -> None:
        """Be one of the sequences of its parent's request from here on."""
        self.family[0].next_index += 1
        self.family.append(self)

    @property
    def tables(self) -> list[array]:
        """Its pages in every pool: `pages`, then those of each window."""
        return [self.pages, *(table.pages for table in self.windows)]

    @property
    def host_tables(self) -> list[array]:
        """The same in host memory, while it is swapped."""
        return [self.host_pages, *(table.host_pages for table in self.windows)]

    @property
    def name(self) -> str:
        """What messages and maps call it: request id/index."""
        return f"{self.request.id}/{self.index}"

    def __repr__(self) -> str:
        return f"<Sequence {self.name} {self.state}, {self.num_output} of {self.max_tokens} tokens>"

    @property
    def num_output(self) -> int:
        """How many tokens have been generated so far."""
        return len(self.output_token_ids)

    @property
    def tokens(self) -> list[int]:
        """The prompt and what has been generated. Builds a list: see `tokens_between` for a part."""
        return [*self.request.prompt_token_ids, *self.output_token_ids]

    def tokens_between(self, start: int, end: int) -> SequenceOf[int]:
        """The tokens at the positions `start .. end-1`."""
        prompt_len = self.prompt_len
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : end - prompt_len]
        prompt = self.request.prompt_token_ids[start:end]
        return prompt if end <= prompt_len else [*prompt, *self.output_token_ids[: end - prompt_len]]

    def unscored_between(self, start: int, end: int) -> list[range]:
        """Positions of `start .. end-1` whose tokens are there, and their log-probabilities, though asked for, not."""
        parts = [range(max(start, part.start), min(end, part.stop)) for part in self._unscored()]
        return [part for part in parts if part]

    @property
    def first_unscored(self) -> int | None:
        """The first such position. The one before it is yet to be computed: its logits are needed."""
        return next((part.start for part in self._unscored() if part), None)

    def _unscored(self) -> tuple[range, range]:
        prompt = range(len(self.prompt_logprobs), self.prompt_len if self.params.prompt_logprobs else 0)
        scored_end = self.prompt_len + len(self.logprobs)
        return prompt, range(scored_end, self.num_tokens if self.params.logprobs is not None else 0)

    @property
    def embedding_D(self) -> np.ndarray | None:
        """Of a prompt that was embedded: the hidden state of its last token, or the mean of all. None before that."""
        if self.pooled_D is None or self.finish_reason is not FinishReason.LENGTH:  # it was aborted
            return None
        return self.pooled_D / np.float32(self.prompt_len) if self.params.pooling == "mean" else self.pooled_D

    @property
    def forbidden_ids(self) -> SequenceOf[int]:
        """Token ids that may not be drawn next, because `min_tokens` has not been reached."""
        if self.num_output >= self.params.min_tokens:
            return ()
        return self.stop_ids

    def charge(self, first: int, end: int) -> int:
        """Charge the tenant for the positions `first .. end-1` that it was not charged for; return how many."""
        num_tokens = end - max(first, self.num_charged)
        if num_tokens <= 0:
            return 0
        self.tenant.charge(num_tokens)
        self.num_charged = end
        return num_tokens

    def move_to(self, state: SequenceState) -> None:
        """Change state along the transition table."""
        if state not in TRANSITIONS[self.state]:
            raise StateError(f"sequence {self.name}: no way from {self.state} to {state}")
        self.state = state

    def finish(self, reason: FinishReason) -> None:
        """End the stream. The n sequences that were asked for stay in their family, a fork leaves it."""
        self.move_to(SequenceState.FINISHED)
        self.finish_reason = reason
        self.parent = None
        self.grammar = self.mask = self.drafter = None
        if self.index >= self.params.n:
            self.family.remove(self)
