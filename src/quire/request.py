"""What a client asks for, and the streams of tokens that answer it.

`Request` is frozen. `Sequence` is the only mutable state the host keeps about a stream: its tokens, its page table
and how far its KV has been computed. Nothing here knows jax, a scheduler or text.

    tokens       | prompt ................ | output ....... last |
    positions    0                   prompt_len              len(tokens)
    KV computed  0 ....................................... num_computed

The newest token has no KV yet: that is written by the step that computes the token after it.
"""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from quire.config import check_whole
from quire.core.errors import StateError
from quire.structured import Structured

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_LOGIT_BIASES = 300
MAX_SAMPLES_PER_REQUEST = 1024
MAX_STOPS = 64
MAX_STOP_LEN = 4096
"""Characters and ids of all stops of a request together."""
MAX_TOKEN_ID = (1 << 31) - 1
MAX_PRIORITY = 1 << 31
MAX_SALT_LEN = 1024


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends."""

    temperature: float = 1.0
    """0 takes the most likely token; higher is more varied."""
    top_k: int = 0
    """Draw from the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Leave out tokens less likely than this times the most likely one."""
    seed: int | None = None
    """Tokens depend only on this, the sequence's index and the position; None draws a fresh seed."""
    n: int = 1
    """Sequences to generate from the prompt."""
    max_tokens: int | None = None
    """New tokens at most; None for as many as fit. 0 computes the prompt only (with `prompt_logprobs`)."""
    min_tokens: int = 0
    """No stop of any kind before this many new tokens."""
    stop: str | SequenceOf[str | SequenceOf[int]] = ()
    """Stop strings, and sequences of token ids, that end a sequence; neither is part of the text."""
    stop_token_ids: SequenceOf[int] = ()
    """Token ids that end a sequence, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on after the model's end tokens."""
    skip_special: bool = True
    """Leave special tokens out of the text."""
    include_stop: bool = False
    """A stop string that ends a sequence is part of its text."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens in the prompt or the output by this where positive, multiply where negative."""
    presence_penalty: float = 0.0
    """Take this off the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Take this off the logits of tokens in the output, once for each time they are there."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit, after the penalties."""
    logprobs: int | None = None
    """Report each token's log-probability, and this many most likely alternatives: under the model itself
    (temperature 1, nothing cut off) and, apart, under what it was drawn from (see `TokenLogprob`)."""
    prompt_logprobs: bool = False
    """Report the log-probability of each prompt token given those before it."""
    structured: Structured | None = None
    """A form that the text must have; it ends once nothing can follow. Log-probabilities stay as they are: raw ones of
    the model itself, processed ones of what was left to draw from."""

    def __post_init__(self) -> None:
        for name in (
            "temperature", "top_k", "top_p", "min_p", "seed", "n", "max_tokens", "min_tokens", "logprobs",
            "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            if hasattr(value, "item"):  # a number of numpy's or jax's
                object.__setattr__(self, name, value.item())
        if hasattr(self.stop_token_ids, "tolist"):
            object.__setattr__(self, "stop_token_ids", self.stop_token_ids.tolist())  # pyright: ignore
        _real("temperature", self.temperature, 0.0, 1e4)
        check_whole("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _real("top_p", self.top_p, 0.0, 1.0, low_excluded=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 1e4, low_excluded=True)
        _real("presence_penalty", self.presence_penalty, -1e4, 1e4)
        _real("frequency_penalty", self.frequency_penalty, -1e4, 1e4)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.seed is not None:
            check_whole("seed", self.seed, 0, (1 << 64) - 1)
        check_whole("n", self.n, 1, MAX_SAMPLES_PER_REQUEST)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 0, 1 << 31)
        check_whole("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.max_tokens == 0 and not self.prompt_logprobs:
            raise ValueError("max_tokens=0 asks for nothing; ask for 1 or more, or for prompt_logprobs=True")
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special", "include_stop", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise ValueError(f"structured={self.structured!r} must be Structured(...)")
        object.__setattr__(self, "stop", _stops(self.stop))
        if not isinstance(self.stop_token_ids, SequenceOf) or isinstance(self.stop_token_ids, str | bytes):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r} must be a list of token ids")
        ids = tuple(self.stop_token_ids)
        if len(ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_IDS} are allowed")
        for token_id in ids:
            check_whole("stop_token_ids", token_id, 0, MAX_TOKEN_ID)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def has_penalty(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stops that are text."""
        return tuple(stop for stop in self.stop if isinstance(stop, str))

    @property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The stops that are sequences of token ids."""
        return tuple(tuple(stop) for stop in self.stop if not isinstance(stop, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asked for: `params.n` sequences that continue one prompt."""

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Higher runs first; the same priority runs in order of arrival."""
    cache_salt: str = ""
    """Requests find each other's prefixes in the cache only under the same salt: give each tenant its own."""
    stream: bool = False
    """Somebody watches: hand out tokens in small groups."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str):
            raise ValueError(f"id={self.id!r} must be a string")
        check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_LEN:
            raise ValueError(f"cache_salt={self.cache_salt!r} must be a string of at most {MAX_SALT_LEN} characters")
        if not isinstance(self.stream, bool):
            raise ValueError(f"stream={self.stream!r} must be True or False")


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
    penalties, bias, temperature and cuts (0 for a greedy token, whose choice was certain). Scored prompt tokens were
    not drawn and have raw ones only.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    processed_logprob: float | None = None
    processed_top: tuple[tuple[int, float], ...] = ()
    """Only tokens that could have been drawn."""


class TokenEvent(NamedTuple):
    """What one committed step did to one sequence."""

    sequence: "Sequence"
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class StopWatch(Protocol):
    """What a sequence asks of whoever turns its tokens into text."""

    def advance(self, token_ids: SequenceOf[int], start: int, /) -> bool:
        """Read on in the output, which begins at `start`, and say whether a stop string is complete."""
        ...

    def sibling(self) -> "StopWatch":
        """A fresh one for another sequence of the same request."""
        ...


class Grammar(Protocol):
    """What a sequence asks of whoever constrains its tokens. End tokens are the sequence's own business."""

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""
        ...

    def mask(self) -> np.ndarray:
        """The tokens that may come next, end tokens left out: bit t % 32 of word t // 32. The caller's own."""
        ...

    def advance(self, token_ids: SequenceOf[int], start: int, /) -> bool:
        """Read on in the output, which begins at `start`. False if a token may not be there, or if all has failed."""
        ...

    def copy(self) -> "Grammar":
        """Another one that has read the same."""
        ...


class Sequence:
    """One stream of tokens. The scheduler moves it; commit appends to it; nobody else writes to it."""

    __slots__ = (
        "arrival", "eos_ids", "family", "finish_reason", "grammar", "has_stop_strings", "hash_root", "host_pages",
        "index", "kv_weights", "logprobs", "mask", "max_tokens", "num_born", "num_cached_tokens", "num_computed",
        "num_failures", "num_inherited", "num_published", "num_stop_tokens", "page_hashes", "pages", "params", "parent",
        "preemptions", "priority", "prompt_len", "prompt_logprobs", "request", "seed", "state", "stop_ids", "text",
        "tokens", "weight_versions",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        *,
        index: int,
        arrival: int,
        seed: int,
        max_tokens: int,
        eos_ids: frozenset[int] = frozenset(),
        text: StopWatch | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.request = request
        self.index = index
        """Which of the request's sequences this is; draws differ by it."""
        self.family: list[Sequence] = [self]
        """Every sequence of a living request, but for forks that have ended; the same list for all of them."""
        self.num_born = 1
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
        self.text = text
        """Turns the output into text; None without a tokenizer."""
        self.params = request.params
        self.has_stop_strings = bool(request.params.stop_strings)
        self.priority = request.priority
        self.prompt_len = len(request.prompt_token_ids)
        self.tokens = list(request.prompt_token_ids)
        self.pages = array("i")
        """The page table: position p lives in page `pages[p // page_size]`."""
        self.host_pages = array("i")
        """While swapped: where the same pages are in host memory."""
        self.num_computed = 0
        """Positions whose KV is in the pages."""
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
        """For each output token, the weights it was drawn under."""
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_stop_tokens = 0
        """Output tokens at the end that are the stop itself and carry no text."""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        """One entry for each prompt token scored so far (the first has nothing before it); shared by the family."""
        self.preemptions = 0
        self.num_failures = 0
        """Steps that failed on the device with this sequence in them."""
        self.grammar = grammar
        """Constrains the output; it has read all of it."""
        self.mask: np.ndarray | None = None
        """With a grammar: the tokens that may be drawn next, end tokens too. Replaced, never written to."""
        if grammar is not None:
            self.mask = self._allowed(grammar, grammar.mask())

    def fork(self) -> "Sequence":
        """Another sequence of the family with the tokens that this one has; it waits, and draws on its own."""
        first = self.family[0]
        child = Sequence(
            self.request,
            index=first.num_born,
            arrival=self.arrival,
            seed=self.seed,
            max_tokens=self.max_tokens,
            eos_ids=self.eos_ids,
            text=self.text and self.text.sibling(),
        )
        first.num_born += 1
        child.family = self.family
        child.family.append(child)
        child.parent, child.num_inherited = self, len(self.tokens)
        child.tokens = self.tokens.copy()
        child.logprobs = self.logprobs.copy()
        child.weight_versions = self.weight_versions.copy()
        child.prompt_logprobs = self.prompt_logprobs
        child.grammar, child.mask = self.grammar and self.grammar.copy(), self.mask
        return child

    @property
    def name(self) -> str:
        """What messages and maps call it: request id/index."""
        return f"{self.request.id}/{self.index}"

    def __repr__(self) -> str:
        return f"<Sequence {self.name} {self.state}, {self.num_output} of {self.max_tokens} tokens>"

    @property
    def output_token_ids(self) -> list[int]:
        """What has been generated so far."""
        return self.tokens[self.prompt_len :]

    @property
    def num_output(self) -> int:
        """How many tokens have been generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller runs first: higher priority, then earlier arrival, then lower index."""
        return (-self.priority, self.arrival, self.index)

    @property
    def forbidden_ids(self) -> SequenceOf[int]:
        """Token ids that may not be drawn next, because `min_tokens` has not been reached."""
        if self.num_output >= self.params.min_tokens:
            return ()
        return self.stop_ids

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
        self.grammar = self.mask = None
        if self.index >= self.params.n:
            self.family.remove(self)

    def stop_reason(self) -> FinishReason | None:
        """Judge the newest output token: does the sequence end with it, and why."""
        num_output, params = len(self.tokens) - self.prompt_len, self.params
        if num_output >= params.min_tokens:
            token_id = self.tokens[-1]
            if token_id in self.eos_ids:
                self.num_stop_tokens = 1
                return FinishReason.EOS
            if token_id in params.stop_token_ids:
                self.num_stop_tokens = 1
                return FinishReason.STOP
            if params.stop and self._at_stop(num_output):
                return FinishReason.STOP
        if self.grammar is not None and (reason := self._read_on(self.grammar)):
            return reason
        return FinishReason.LENGTH if num_output >= self.max_tokens else None

    def _at_stop(self, num_output: int) -> bool:
        last = self.tokens[-1]
        for stop in self.params.stop:
            if stop[-1] == last and num_output >= len(stop) and tuple(self.tokens[-len(stop) :]) == stop:
                self.num_stop_tokens = len(stop)
                return True
        return bool(self.has_stop_strings and self.text and self.text.advance(self.tokens, self.prompt_len))

    def _read_on(self, grammar: Grammar) -> FinishReason | None:
        """Take the newest tokens through the grammar and find what may follow; if nothing may, the sequence ends."""
        if not grammar.advance(self.tokens, self.prompt_len):
            return FinishReason.ABORT
        text = grammar.mask()
        has_text = text.any()
        self.mask = self._allowed(grammar, text)
        if has_text and self.mask.any():
            return None
        return FinishReason.STOP if grammar.accepts else FinishReason.ABORT

    def _allowed(self, grammar: Grammar, mask: np.ndarray) -> np.ndarray:
        """What may be drawn: text that goes on, the end where it may end, and no stop before `min_tokens`."""
        if grammar.accepts:
            for token_id in self.eos_ids:
                mask[token_id >> 5] |= 1 << (token_id & 31)
        for token_id in self.forbidden_ids:
            mask[token_id >> 5] &= 0xFFFFFFFF ^ (1 << (token_id & 31))
        return mask


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise ValueError(f"logit_bias={biases!r} must map token ids to numbers")
    if len(biases) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias has {len(biases)} entries, at most {MAX_LOGIT_BIASES} are allowed")
    for token_id, bias in biases.items():
        check_whole("a token id of logit_bias", token_id, 0, MAX_TOKEN_ID)
        _real(f"logit_bias[{token_id}]", bias, -1e4, 1e4)
    return dict(biases)


def _real(name: str, value: Any, low: float, high: float, *, low_excluded: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (low_excluded and value == low):  # NaN is in no range
        above = "above" if low_excluded else "from"
        raise ValueError(f"{name}={value!r} must be a number {above} {low:g} to {high:g}")


def _stops(stop: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, SequenceOf):
        raise ValueError(f"stop={stop!r} must be a string or a list of strings and of lists of token ids")
    if len(stop) > MAX_STOPS:
        raise ValueError(f"stop has {len(stop)} entries, at most {MAX_STOPS} are allowed")
    stops: list[str | tuple[int, ...]] = []
    for entry in stop:
        if isinstance(entry, str):
            stops.append(entry)
        elif isinstance(entry, SequenceOf) and not isinstance(entry, bytes):
            for token_id in entry:
                check_whole("stop", token_id, 0, MAX_TOKEN_ID)
            stops.append(tuple(entry))
        else:
            raise ValueError(f"stop holds {entry!r}; put strings or lists of token ids there (ids: stop_token_ids)")
        if len(entry) == 0:
            raise ValueError("stop holds an empty entry, which would end every sequence before it starts")
    total = sum(map(len, stops))
    if total > MAX_STOP_LEN:
        raise ValueError(f"stop has {total} characters and ids in all, at most {MAX_STOP_LEN} are allowed")
    return tuple(stops)
