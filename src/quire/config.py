"""Every knob of Quire, and the shape of a model. Frozen, validated once, never mutated.

`EngineConfig` is what a person may turn; command-line flags are generated from its fields. `ModelConfig` is what
a model file says of itself. Neither knows jax.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

from quire.field_error import FieldError

DTYPES = ("bfloat16", "float32")
ATTENTION_BACKENDS = ("auto", "native", "xla", "reference")
MATMULS = ("auto", "native", "xla")
QUANTIZATIONS = (None, "int8")
PREEMPTIONS = ("auto", "swap", "recompute")

# Beyond these a number in a model file or a flag is a mistake or an attack, not a model.
MAX_DIMENSION = 1 << 24
MAX_PAGES = 1 << 30
MAX_LAYERS = 4096
MAX_EOS_IDS = 16


def knob(default: Any, text: str, *, expert: bool = False) -> Any:
    """A config field: its default, its one-line description, and whether ordinary users ever need it."""
    return dataclasses.field(default=default, metadata={"help": text, "expert": expert})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. Ordinary knobs first, expert knobs after."""

    dtype: str = knob("bfloat16", "type of weights, activations and KV pages: bfloat16 or float32")
    quantize: str | None = knob(None, "int8: weights, and activations as they come; by default neither")
    page_size: int = knob(16, "token positions in one KV page")
    num_pages: int | None = knob(None, "KV pages in the pool; by default what the memory budget allows")
    max_num_seqs: int = knob(64, "sequences that run at the same time, at most")
    max_num_batched_tokens: int = knob(512, "tokens computed in one step, at most")
    max_model_len: int | None = knob(None, "prompt plus generated tokens of one sequence, at most")
    max_rounds: int = knob(16, "tokens each sequence may generate before the host looks, at most")
    prefix_cache: bool = knob(True, "find and reuse the KV of prompts that begin alike")
    preemption: str = knob("auto", "how pages are taken back when they run out: auto, swap or recompute")
    debug: bool = knob(False, "audit every step and poison freed pages with NaN")

    memory_budget: int | None = knob(None, "bytes for the KV pool when num_pages is not given", expert=True)
    num_host_pages: int | None = knob(
        None, "KV pages in host memory for swapped sequences; by default half of the pool", expert=True
    )
    attention: str = knob(
        "auto",
        "attention backend: auto (native on a CPU where it was built, else xla), native, xla or reference (slow)",
        expert=True,
    )
    matmul: str = knob(
        "auto",
        "matmuls, what lies between, sampler: auto (native on a CPU where it was built, else xla), native or xla",
        expert=True,
    )
    compile_cache: str | None = knob(
        None, "folder of compiled programs; default the user's cache folder, '' for none", expert=True
    )
    log_timing: bool = knob(False, "log one line a second (logger quire): speed, and where the time goes", expert=True)
    fail_on_compile: bool = knob(False, "raise when anything compiles after warm-up", expert=True)

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("attention", self.attention, ATTENTION_BACKENDS)
        _one_of("matmul", self.matmul, MATMULS)
        _one_of("quantize", self.quantize, QUANTIZATIONS)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        check_whole("page_size", self.page_size, 1, 4096)
        check_whole("max_num_seqs", self.max_num_seqs, 1, 65_536)
        check_whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        check_whole("max_rounds", self.max_rounds, 1, 1024)
        for name, top in (
            ("num_pages", MAX_PAGES),
            ("max_model_len", MAX_DIMENSION),
            ("memory_budget", 1 << 50),
        ):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, top)
        if self.num_host_pages is not None:
            check_whole("num_host_pages", self.num_host_pages, 0, MAX_PAGES)
            if self.preemption == ("recompute" if self.num_host_pages else "swap"):
                raise ValueError(
                    f"preemption={self.preemption!r} with num_host_pages={self.num_host_pages}: swapping needs host "
                    "pages, recomputing none; change one of the two"
                )
        for name in ("prefix_cache", "debug", "log_timing", "fail_on_compile"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "every running sequence needs one token a step; raise the first or lower the second"
            )

    @property
    def max_num_samples(self) -> int:
        """Logits drawn in one step, at most: one a row, and enough for prompt log-probabilities to move on."""
        return min(self.max_num_batched_tokens, max(self.max_num_seqs, 64))


class EngineKnobs(TypedDict, total=False):
    """The fields of `EngineConfig` by name, for functions that take them as keywords; defaults are stated there."""

    dtype: str
    quantize: str | None
    page_size: int
    num_pages: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    max_rounds: int
    prefix_cache: bool
    preemption: str
    debug: bool
    memory_budget: int | None
    num_host_pages: int | None
    attention: str
    matmul: str
    compile_cache: str | None
    log_timing: bool
    fail_on_compile: bool


def engine_config(**knobs: Unpack[EngineKnobs]) -> EngineConfig:
    """An EngineConfig from knobs by name; an unknown one is refused with those there are."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for knob in knobs:
        if knob not in names:
            near = difflib.get_close_matches(knob, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            raise ValueError(f"{knob} is not a knob of the engine; {hint}")
    return EngineConfig(**knobs)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on."""

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    factors: tuple[float, ...] = ()
    """For "factors": what each pair's frequency is divided by, as a GGUF file carries it."""

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _positive(name, getattr(self, name), 1e6)
        for factor in self.factors:
            _positive("factors", factor, 1e6)
        check_whole("original_max_len", self.original_max_len, 1, MAX_DIMENSION)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor={self.high_freq_factor} must be above {self.low_freq_factor=}")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding of one layer."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _positive("rope_theta", self.theta, 1e12)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What one layer attends with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """How many positions a token sees, itself included; None for all before it."""
    rotary: RotaryConfig = dataclasses.field(default_factory=RotaryConfig)
    softmax_scale: float | None = None
    """What scores are multiplied by; None for 1 / sqrt(head_dim)."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_whole(name, getattr(self, name), 1, MAX_DIMENSION)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs")
        factors = self.rotary.scaling.factors if self.rotary.scaling else ()
        if factors and len(factors) != self.head_dim // 2:
            raise ValueError(f"{len(factors)} rope factors for head_dim={self.head_dim}")
        if self.window is not None:
            check_whole("window", self.window, 1, MAX_DIMENSION)
        if self.softmax_scale is not None:
            _positive("softmax_scale", self.softmax_scale, 1e6)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder, as its checkpoint describes it."""

    architecture: str
    """Which file of `device/models` runs it: llama, mistral, qwen2 or qwen3."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionConfig, ...]
    """One for each layer; where all are alike, `(AttentionConfig(...),) * num_layers`."""
    max_len: int
    """The longest context the model was trained for, in tokens."""
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "max_len"):
            check_whole(name, getattr(self, name), 1, MAX_DIMENSION)
        if not isinstance(self.attention, tuple) or not all(isinstance(x, AttentionConfig) for x in self.attention):
            raise ValueError("attention must be a tuple with an AttentionConfig for each layer")
        check_whole("num_layers", len(self.attention), 1, MAX_LAYERS)
        _positive("norm_eps", self.norm_eps, 1.0)
        if len(self.eos_ids) > MAX_EOS_IDS:
            raise ValueError(f"eos_ids has {len(self.eos_ids)} ids, at most {MAX_EOS_IDS} are allowed")
        for token_id in self.eos_ids:
            check_whole("eos_ids", token_id, 0, self.vocab_size - 1)
        if not isinstance(self.tie_embeddings, bool):
            raise ValueError(f"tie_embeddings={self.tie_embeddings!r} must be true or false")

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self.attention)


def check_whole(name: str, value: Any, low: int, high: int, *, field: str | None = None) -> None:
    """Raise FieldError unless the value is a whole number from `low` to `high`; `field` if it is not called `name`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{name}={value!r} must be a whole number from {low:,} to {high:,}"
        raise FieldError(message, field=field or name)


def _positive(name: str, value: Any, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
        raise FieldError(f"{name}={value!r} must be a number above 0, at most {high:g}", field=name)


def _one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        raise FieldError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}", field=name)
