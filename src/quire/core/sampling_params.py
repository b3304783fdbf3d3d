"""How tokens are drawn and when a sequence ends, checked when it is made.

The fields of `SamplingParams` are the one declaration of what a request can ask for. From each number and each switch
there follow: its check, its field over HTTP (`server/openai/schema.py`, `parse.py`), its command-line flag
(`cli/__init__.py`), its column in a step (`engine/packer.py`), what random tests draw for it (`tests/histories.py`) and
its line of docs/sampling.md. Lists, maps and forms are written out there by hand. How to add one:
docs/add-a-sampling-parameter.md.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from quire.config import MAX_LOGPROBS, MAX_ROUNDS, check_whole
from quire.embedding import Pooling, check_pooling
from quire.field_error import FieldError, refuse_unknown_fields
from quire.short_repr import short_repr
from quire.structured.form import Structured

MAX_STOP_IDS = 64
MAX_LOGIT_BIASES = 300
MAX_SAMPLES_PER_REQUEST = 1024
MAX_STOPS = 64
MAX_STOP_LEN = 4096
"""Characters and ids of all stops of a request together."""
MAX_TOKEN_ID = (1 << 31) - 1
MAX_WIRE_TOKENS = 1 << 24
"""Tokens that a request over HTTP or gRPC may speak of."""


class Range(NamedTuple):
    """The numbers from `low` to `high`."""

    low: float
    high: float
    above: bool = False
    """Whether `low` itself is left out."""


def number(
    default: float | None,
    limits: Range,
    text: str,
    *,
    wire: Range | None = None,
    from_wire: Callable[[Any], Any] | None = None,
    on_wire: bool = True,
    flag: str | None = None,
    stage: Literal["penalty", "draw"] | None = None,
) -> Any:
    """A field that is a number; one whose default is None may also be None.

    `limits` is its range and `text` says in one line what it does. Over HTTP and gRPC the range is `wire` where that is
    another, and `from_wire` turns what came into a value of this field; `on_wire=False` for a field that protocols ask
    for in ways of their own. `flag` names the value in the help of its command-line flag; without it there is no flag.
    `stage` is the part of the sampler that gets the number: a "penalty" always counts, what is for the "draw" counts
    above temperature 0. The default of a number with a stage, temperature apart, must change nothing.
    """
    how = {"wire": wire or limits, "from_wire": from_wire, "on_wire": on_wire, "flag": flag, "stage": stage}
    return field(default=default, metadata={"text": text, "limits": limits, **how})


def switch(default: bool, text: str, *, wire_name: str | None = None) -> Any:
    """A field that is True or False, and its name over HTTP and gRPC where that is another."""
    return field(default=default, metadata={"text": text, "wire_name": wire_name})


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when a sequence ends."""

    temperature: float = number(
        1.0,
        Range(0, 1e4),
        "0 takes the most likely token; higher is more varied",
        wire=Range(0, 2),
        flag="T",
        stage="draw",
    )
    top_k: int = number(
        0,
        Range(0, MAX_TOKEN_ID),
        "draw from the k most likely tokens; 0 for all",
        wire=Range(-1, MAX_TOKEN_ID),
        from_wire=lambda k: max(k, 0),  # -1 is for all, too
        flag="K",
        stage="draw",
    )
    top_p: float = number(
        1.0,
        Range(0, 1, above=True),
        "draw from the smallest set of most likely tokens whose probability reaches this",
        wire=Range(0, 1),
        from_wire=lambda p: p or 1e-6,  # 0 is for the likeliest token
        flag="P",
        stage="draw",
    )
    min_p: float = number(
        0.0, Range(0, 1), "leave out tokens less likely than this times the most likely one", flag="P", stage="draw"
    )
    top_n_sigma: float = number(
        0.0,
        Range(0, 1e4),
        "leave out tokens whose logit is more than this many standard deviations below the highest; 0 leaves out none",
        flag="N",
        stage="draw",
    )
    seed: int | None = number(
        None,
        Range(0, (1 << 64) - 1),
        "draws depend on this, the sequence's index and the position; by default a fresh seed for each request",
        wire=Range(-(1 << 63), (1 << 63) - 1),
        from_wire=lambda seed: seed % (1 << 64),
        flag="N",
    )
    n: int = number(
        1, Range(1, MAX_SAMPLES_PER_REQUEST), "sequences to generate from the prompt, computed once", wire=Range(1, 128)
    )
    max_tokens: int | None = number(
        None,
        Range(0, 1 << 31),
        "new tokens at most; by default as many as fit",
        wire=Range(0, MAX_WIRE_TOKENS),
        flag="N",
    )
    min_tokens: int = number(
        0, Range(0, 1 << 31), "no stop of any kind before this many new tokens", wire=Range(0, MAX_WIRE_TOKENS)
    )
    stop: str | SequenceOf[str | SequenceOf[int]] = ()
    """Stop strings, and sequences of token ids, that end a sequence; neither is part of the text."""
    stop_token_ids: SequenceOf[int] = ()
    """Token ids that end a sequence, beside the model's own end tokens."""
    ignore_eos: bool = switch(False, "go on after the model's end tokens")
    skip_special: bool = switch(True, "leave special tokens out of the text", wire_name="skip_special_tokens")
    include_stop: bool = switch(
        False, "a stop string that ends a sequence is part of its text", wire_name="include_stop_str_in_output"
    )
    repetition_penalty: float = number(
        1.0,
        Range(0, 1e4, above=True),
        "divide the logits of tokens in the prompt or the output by this where positive, multiply where negative",
        wire=Range(0, 10, above=True),
        stage="penalty",
    )
    presence_penalty: float = number(
        0.0,
        Range(-1e4, 1e4),
        "take this off the logits of tokens that are in the output",
        wire=Range(-2, 2),
        stage="penalty",
    )
    frequency_penalty: float = number(
        0.0,
        Range(-1e4, 1e4),
        "take this off the logits of tokens in the output, once for each time they are there",
        wire=Range(-2, 2),
        stage="penalty",
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit, after the penalties."""
    logprobs: int | None = number(
        None,
        Range(0, MAX_LOGPROBS),
        "report each token's log-probability, and this many most likely alternatives, up to the engine's max_logprobs",
        on_wire=False,
    )
    prompt_logprobs: bool = switch(False, "report the log-probability of each prompt token given those before it")
    prompt_logprobs_start: int = number(
        1,
        Range(1, 1 << 31),
        "with prompt_logprobs: the first prompt token to report; what lies before it may come from the prefix cache",
        wire=Range(1, MAX_WIRE_TOKENS),
    )
    structured: Structured | None = None
    """A form that the text must have; it ends once nothing can follow. Log-probabilities stay as they are: raw ones of
    the model itself, processed ones of what was left to draw from."""
    max_rounds: int | None = number(
        None,
        Range(1, MAX_ROUNDS),
        "tokens of a sequence before the host looks, at most: fewer come sooner and cost time; by default the "
        "engine's, and behind them what a form forces",
        wire=Range(4, MAX_ROUNDS),  # as few as a row with a grammar gets: it holds up the rows of other clients
    )
    pooling: Pooling | None = None
    """Embed the prompt instead of continuing it: by the hidden state of its "last" token, or by the "mean" of all. It
    goes with `max_tokens=0`; `LLM.embed` asks for it."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name, declared in DECLARED.items():
            value = getattr(self, name)
            is_number = hasattr(value, "item") and getattr(value, "size", 1) == 1  # of numpy or jax
            if declared.limits is not None and is_number:
                value = value.item()
                object.__setattr__(self, name, value)
            declared.check(value)
        if hasattr(self.stop_token_ids, "tolist"):
            object.__setattr__(self, "stop_token_ids", self.stop_token_ids.tolist())  # pyright: ignore
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = (
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower the first or raise the "
                "second"
            )
            raise FieldError(message, field="min_tokens")
        self._check_pooling()
        if self.max_tokens == 0 and not self.prompt_logprobs and not self.pooling:
            message = "max_tokens=0 asks for nothing; ask for 1 or more, for prompt_logprobs=True or for pooling"
            raise FieldError(message, field="max_tokens")
        if self.structured is not None and not isinstance(self.structured, Structured):
            raise FieldError(f"structured={self.structured!r} must be Structured(...)", field="structured")
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    def _check_pooling(self) -> None:
        if self.pooling is None:
            return
        check_pooling(self.pooling)
        for name, value in (("max_tokens", 0), ("n", 1)):
            if getattr(self, name) != value:
                message = f"pooling={self.pooling!r} embeds a prompt and generates nothing: it needs {name}={value}"
                raise FieldError(message, field=name)

    @property
    def has_penalty(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond what the model makes of them."""
        return any(getattr(self, name) != DECLARED[name].default for name in PENALTIES)

    def check_scores_draws(self) -> None:
        """Raise FieldError unless a token's logits alone say how likely it is to be drawn with these parameters.

        Penalties, biases, forms and stops held back belong to an output.
        """
        if self.temperature == 0:
            raise FieldError("temperature=0 draws nothing: score under a temperature above 0", field="temperature")
        neutral = {name: DECLARED[name].default for name in PENALTIES}
        for name, value in (neutral | {"logit_bias": {}, "structured": None, "min_tokens": 0}).items():
            if getattr(self, name) != value:
                message = (
                    f"{name}={getattr(self, name)!r} is of an output, and no output is drawn: leave it at {value!r}"
                )
                raise FieldError(message, field=name)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stops that are text."""
        return tuple(stop for stop in self.stop if isinstance(stop, str))

    @property
    def stop_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The stops that are sequences of token ids."""
        return tuple(tuple(stop) for stop in self.stop if not isinstance(stop, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """What the declaration says of one number or switch: see `number` and `switch`."""

    name: str
    kind: type
    """int, float or bool."""
    default: Any
    text: str
    wire_name: str
    limits: Range | None = None
    """None for a switch."""
    wire: Range | None = None
    from_wire: Callable[[Any], Any] | None = None
    on_wire: bool = True
    flag: str | None = None
    stage: str | None = None

    def check(self, value: Any) -> None:
        """Raise unless the field may have this value."""
        if self.limits is None:
            if not isinstance(value, bool):
                raise FieldError(f"{self.name}={value!r} must be True or False", field=self.name)
        elif value is None and self.default is None:
            return
        elif self.kind is int:
            check_whole(self.name, value, int(self.limits.low), int(self.limits.high))
        else:
            _check_real(self.name, value, self.limits)


def _declared() -> dict[str, Declared]:
    declared = {}
    for one in fields(SamplingParams):
        if one.metadata:
            kind: Any = (get_args(one.type) or (one.type,))[0]  # int of `int | None`
            how = {**one.metadata, "wire_name": one.metadata.get("wire_name") or one.name}
            declared[one.name] = Declared(name=one.name, kind=kind, default=one.default, **how)
    return declared


DECLARED = _declared()
"""Every number and switch of `SamplingParams`, by name."""
DRAWS = tuple(name for name, declared in DECLARED.items() if declared.stage == "draw")
PENALTIES = tuple(name for name, declared in DECLARED.items() if declared.stage == "penalty")


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
        _check_real(f"logit_bias[{token_id}]", bias, Range(-1e4, 1e4), field="logit_bias")
    return dict(biases)


def _check_real(name: str, value: Any, limits: Range, *, field: str | None = None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high, above = limits
    if not is_number or not low <= value <= high or (above and value == low):  # NaN is in no range
        words = "above" if above else "from"
        raise FieldError(f"{name}={value!r} must be a number {words} {low:g} to {high:g}", field=field or name)


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
