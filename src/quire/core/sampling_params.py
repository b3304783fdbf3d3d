"""How tokens are drawn and when a sequence ends, checked when it is made."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from quire.config import check_whole
from quire.field_error import FieldError
from quire.structured.form import Structured

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_LOGIT_BIASES = 300
MAX_SAMPLES_PER_REQUEST = 1024
MAX_STOPS = 64
MAX_STOP_LEN = 4096
"""Characters and ids of all stops of a request together."""
MAX_TOKEN_ID = (1 << 31) - 1


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
            message = f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}"
            raise FieldError(message, field="min_tokens")
        if self.max_tokens == 0 and not self.prompt_logprobs:
            message = "max_tokens=0 asks for nothing; ask for 1 or more, or for prompt_logprobs=True"
            raise FieldError(message, field="max_tokens")
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special", "include_stop", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise FieldError(f"{name}={getattr(self, name)!r} must be True or False", field=name)
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise FieldError(f"structured={self.structured!r} must be Structured(...)", field="structured")
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

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


def _stop_token_ids(token_ids: Any) -> tuple[int, ...]:
    if not isinstance(token_ids, SequenceOf) or isinstance(token_ids, str | bytes):
        raise FieldError(f"stop_token_ids={token_ids!r} must be a list of token ids", field="stop_token_ids")
    if len(token_ids) > MAX_STOP_IDS:
        message = f"stop_token_ids has {len(token_ids)} ids, at most {MAX_STOP_IDS} are allowed"
        raise FieldError(message, field="stop_token_ids")
    for token_id in token_ids:
        check_whole("stop_token_ids", token_id, 0, MAX_TOKEN_ID)
    return tuple(token_ids)


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise FieldError(f"logit_bias={biases!r} must map token ids to numbers", field="logit_bias")
    if len(biases) > MAX_LOGIT_BIASES:
        message = f"logit_bias has {len(biases)} entries, at most {MAX_LOGIT_BIASES} are allowed"
        raise FieldError(message, field="logit_bias")
    for token_id, bias in biases.items():
        check_whole("a token id of logit_bias", token_id, 0, MAX_TOKEN_ID, field="logit_bias")
        _real(f"logit_bias[{token_id}]", bias, -1e4, 1e4, field="logit_bias")
    return dict(biases)


def _real(
    name: str, value: Any, low: float, high: float, *, low_excluded: bool = False, field: str | None = None
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (low_excluded and value == low):  # NaN is in no range
        above = "above" if low_excluded else "from"
        raise FieldError(f"{name}={value!r} must be a number {above} {low:g} to {high:g}", field=field or name)


def _stops(stop: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, SequenceOf):
        message = f"stop={stop!r} must be a string or a list of strings and of lists of token ids"
        raise FieldError(message, field="stop")
    if len(stop) > MAX_STOPS:
        raise FieldError(f"stop has {len(stop)} entries, at most {MAX_STOPS} are allowed", field="stop")
    stops: list[str | tuple[int, ...]] = []
    for entry in stop:
        if isinstance(entry, str):
            stops.append(entry)
        elif isinstance(entry, SequenceOf) and not isinstance(entry, bytes):
            for token_id in entry:
                check_whole("stop", token_id, 0, MAX_TOKEN_ID)
            stops.append(tuple(entry))
        else:
            message = f"stop holds {entry!r}; put strings or lists of token ids there (ids: stop_token_ids)"
            raise FieldError(message, field="stop")
        if len(entry) == 0:
            message = "stop holds an empty entry, which would end every sequence before it starts"
            raise FieldError(message, field="stop")
    total = sum(map(len, stops))
    if total > MAX_STOP_LEN:
        message = f"stop has {total} characters and ids in all, at most {MAX_STOP_LEN} are allowed"
        raise FieldError(message, field="stop")
    return tuple(stops)
