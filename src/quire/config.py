"""Every knob of Quire, and the shape of a model. Frozen, validated once, never mutated.

`EngineConfig` is what a person may turn; command-line flags are generated from its fields. `ModelConfig` is what
a model file says of itself. Neither knows jax.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from quire.field_error import FieldError, refuse_unknown_fields
from quire.memory_budget import budget_bytes
from quire.short_repr import short_repr

DTYPES = ("bfloat16", "float32")
DEFAULT_DTYPE = "bfloat16"
"""Type in which an engine computes, a training step scores and `quire.weights` converts, unless another is given."""
ATTENTION_BACKENDS = ("auto", "native", "pallas", "pallas-int8", "xla", "xla-rows", "reference")
MATMULS = ("auto", "native", "xla")
QUANTIZATIONS = (None, "int8", "int4", "gguf", "int8-weights", "int4-weights", "mxfp4")
PREEMPTIONS = ("auto", "swap", "recompute")
ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")

# Beyond these a number in a model file or a flag is a mistake or an attack, not a model.
MAX_DIMENSION = 1 << 24
MAX_PAGES = 1 << 30
MAX_LAYERS = 4096
MAX_EXPERTS = 4096
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 16
MAX_ROUNDS = 1024
MAX_LOGPROBS = 1024
"""Highest `max_logprobs`: a step has 16 bytes for each alternative of each token, asked for or not."""
DEFAULT_MAX_LOGPROBS = 20
MIN_DRAFTS, MAX_DRAFTS = 4, 1024
DRAFTS_OF_A_MODEL = 8
"""Where there is a draft model and nobody says how many."""
MAX_EOS_IDS = 16
MAX_DEVICES = 1 << 16
MAX_PROCESSES = 1 << 12

MODEL_AXIS = "model"
"""The mesh axis that a model is split over."""
EXPERT_AXIS = "expert"
"""The mesh axis that only experts are split over."""
MESH_AXES = (MODEL_AXIS, EXPERT_AXIS)
DATA_AXIS = "data"
"""Not an axis of an engine's mesh: how many engines there are, each with a mesh of its own."""


def knob(default: Any, text: str, *, expert: bool = False) -> Any:
    """A config field: its default, its one-line description, and whether ordinary users ever need it."""
    return dataclasses.field(default=default, metadata={"help": text, "expert": expert})


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. Ordinary knobs first, expert knobs after."""

    dtype: str = knob(DEFAULT_DTYPE, "type of weights, activations and KV pages: bfloat16 or float32")
    quantize: str | None = knob(None, "int8, int4, gguf (as stored), int8-weights, int4-weights or mxfp4")
    mesh: str | None = knob(None, "devices to use: model=4 or model=2,expert=2; for serve also data=2, two engines")
    page_size: int = knob(16, "token positions in one KV page")
    num_pages: int | None = knob(None, "KV pages in the pool; by default what the memory budget allows")
    max_num_seqs: int = knob(64, "sequences that run at the same time, at most")
    max_num_batched_tokens: int = knob(512, "tokens computed in one step, at most")
    max_model_len: int | None = knob(None, "prompt plus generated tokens of one sequence, at most")
    max_rounds: int = knob(16, "tokens each sequence may generate before the host looks, at most")
    prefix_cache: bool = knob(True, "find and reuse the KV of prompts that begin alike")
    preemption: str = knob("auto", "when pages run out: auto, swap or recompute")
    debug: bool = knob(False, "audit every step and poison freed pages with NaN")

    memory_budget: str | int | None = knob(
        None, "memory for the KV pool when num_pages is not given: 4GiB, bytes, or 50% of what is free", expert=True
    )
    num_host_pages: int | None = knob(
        None, "KV pages in host memory for swapped sequences; by default half of the pool", expert=True
    )
    drafts: int = knob(
        0,
        "tokens of a step that guesses ahead where a text repeats itself, at most: 4 to 1024, 8 is good on a CPU, and "
        "enough for two sequences at once; 0 for never, or with draft for 8",
        expert=True,
    )
    draft: str | None = knob(
        None,
        "draft model: a smaller MODEL with the same tokens guesses ahead, whether a text repeats itself or not",
        expert=True,
    )
    draft_quantize: str | None = knob(
        None, "quantize of the draft model, or none; by default that of the model", expert=True
    )
    max_logprobs: int = knob(
        DEFAULT_MAX_LOGPROBS,
        f"maximum SamplingParams.logprobs of a request, 1 to {MAX_LOGPROBS}; over HTTP and gRPC at most 20",
        expert=True,
    )
    attention: str = knob(
        "auto",
        "attention backend: auto (native on a CPU where it was built, pallas on a TPU, else xla), native, pallas "
        "(on a CPU interpreted: very slow), pallas-int8 (the same, KV in int8), xla, xla-rows (one token at a time, as "
        "deterministic needs it) or reference (slow)",
        expert=True,
    )
    matmul: str = knob(
        "auto",
        "matmuls, what lies between, sampler: auto (native on a CPU where it was built, else xla), native or xla",
        expert=True,
    )
    deterministic: bool = knob(
        False,
        "one program in plain XLA for all steps, so that a log-probability is the same to the last bit in any batch; "
        "costs speed: every step is padded to max_num_batched_tokens",
        expert=True,
    )
    compile_cache: str | None = knob(
        None, "folder of compiled programs; default the user's cache folder, '' for none", expert=True
    )
    log_timing: bool = knob(False, "log one line a second (logger quire): speed, and where the time goes", expert=True)
    fail_on_compile: bool = knob(False, "raise when anything compiles after warm-up", expert=True)
    record: str | None = knob(
        None, "a new file for arrivals and decisions, without text or tokens: quire replay reads it", expert=True
    )
    num_processes: int = knob(1, "processes that run the model together, each with some of its devices", expert=True)
    process_id: int = knob(0, "which of them this is: 0 leads and serves, the others follow", expert=True)
    coordinator: str | None = knob(None, "HOST:PORT at which process 0 waits for the others", expert=True)
    group_key_file: str | None = knob(
        None, "file with the key that the processes share; by default it is in QUIRE_GROUP_KEY", expert=True
    )
    join_timeout_s: int = knob(300, "seconds that the processes wait for each other at start", expert=True)

    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("attention", self.attention, ATTENTION_BACKENDS)
        _one_of("matmul", self.matmul, MATMULS)
        _one_of("quantize", self.quantize, QUANTIZATIONS)
        _one_of("preemption", self.preemption, PREEMPTIONS)
        if self.mesh is not None:
            parse_mesh(self.mesh)
        check_whole("page_size", self.page_size, 1, 4096)
        check_whole("max_num_seqs", self.max_num_seqs, 1, 65_536)
        check_whole("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 20)
        check_whole("max_rounds", self.max_rounds, 1, MAX_ROUNDS)
        check_whole("max_logprobs", self.max_logprobs, 1, MAX_LOGPROBS)
        self._check_draft()
        if self.drafts != 0:
            otherwise = f"0 for {DRAFTS_OF_A_MODEL}" if self.draft else "0 for never"
            check_whole("drafts", self.drafts, MIN_DRAFTS, MAX_DRAFTS, otherwise=f", or {otherwise}")
        if self.memory_budget is not None:
            budget_bytes(self.memory_budget, 0)
        for name, top in (("num_pages", MAX_PAGES), ("max_model_len", MAX_DIMENSION)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1, top)
        if self.num_pages and self.max_model_len and self.max_model_len > self.num_pages * self.page_size + 1:
            raise ValueError(
                f"max_model_len={self.max_model_len} is more than the {self.num_pages * self.page_size} tokens that "
                f"num_pages={self.num_pages} of page_size={self.page_size} hold; raise num_pages or lower max_model_len"
            )
        if self.num_host_pages is not None:
            check_whole("num_host_pages", self.num_host_pages, 0, MAX_PAGES)
            if self.preemption == ("recompute" if self.num_host_pages else "swap"):
                raise ValueError(
                    f"preemption={self.preemption!r} with num_host_pages={self.num_host_pages}: swapping needs host "
                    "pages, recomputing none; change one of the two"
                )
        for name in ("prefix_cache", "debug", "deterministic", "log_timing", "fail_on_compile"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.record is not None and (not isinstance(self.record, str) or not self.record):
            raise FieldError(f"record={self.record!r} must be the path of a new file, as a string", field="record")
        for name in ("compile_cache", "group_key_file"):
            if not isinstance(getattr(self, name), str | PathLike | None):
                raise FieldError(f"{name}={getattr(self, name)!r} must be a path, as a string", field=name)
        if self.record is not None and self.num_engines > 1:
            message = f"record={self.record!r} is the file of one engine and mesh={self.mesh!r} has {self.num_engines}"
            raise FieldError(f"{message}: leave one of the two out", field="record")
        self._check_group()
        if self.deterministic:
            self._use_one_program()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "every running sequence needs one token a step; raise the first or lower the second"
            )
        if self.drafts > self.max_num_batched_tokens:
            of_draft = f" (with draft={self.draft!r})" if self.draft else ""
            raise FieldError(
                f"drafts={self.drafts}{of_draft} is more than max_num_batched_tokens={self.max_num_batched_tokens}, "
                "the tokens of a step: lower the first or raise the second",
                field="drafts",
            )

    def _check_draft(self) -> None:
        """A draft model guesses in steps that have room for drafts, and in one process."""
        _one_of("draft_quantize", self.draft_quantize, (*QUANTIZATIONS, "none"))
        if self.draft is None:
            if self.draft_quantize is not None:
                message = f"draft_quantize={self.draft_quantize!r} is of a draft model, and there is none: give draft"
                raise FieldError(message, field="draft_quantize")
            return
        if not isinstance(self.draft, str) or not self.draft:
            message = f"draft={self.draft!r} must be a MODEL, as a string: a folder, a file or a name"
            raise FieldError(message, field="draft")
        if self.num_processes > 1:
            raise FieldError(
                f"draft={self.draft!r} guesses in one process, and there are num_processes={self.num_processes}: leave "
                "draft out; drafts=8 alone looks them up in the text",
                field="draft",
            )
        if self.drafts == 0:
            object.__setattr__(self, "drafts", DRAFTS_OF_A_MODEL)

    @property
    def quantize_of_draft(self) -> str | None:
        """How the draft model keeps its weights."""
        if self.draft_quantize == "none":
            return None
        return self.draft_quantize or self.quantize

    def _check_group(self) -> None:
        """Several processes need to know where to meet, and devices that can be shared out evenly."""
        check_whole("num_processes", self.num_processes, 1, MAX_PROCESSES)
        check_whole("process_id", self.process_id, 0, self.num_processes - 1)
        check_whole("join_timeout_s", self.join_timeout_s, 1, 1 << 20)
        if (self.coordinator is None) != (self.num_processes == 1):
            raise FieldError(
                f"coordinator={self.coordinator!r} with num_processes={self.num_processes}: several processes need an "
                "address to meet at, one needs none",
                field="coordinator",
            )
        if self.coordinator is not None:
            match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})", self.coordinator)
            if match is None or not 1 <= int(match[2]) <= 65_535:
                raise FieldError(
                    f"coordinator={self.coordinator!r} must be HOST:PORT, such as 127.0.0.1:7411", field="coordinator"
                )
        if self.num_processes > 1 and self.num_engines > 1:
            raise FieldError(
                f"mesh={self.mesh!r} is several engines, and num_processes={self.num_processes} one engine in several "
                "processes: leave one of the two out",
                field="mesh",
            )
        if self.mesh is not None and math.prod(parse_mesh(self.mesh).values()) % self.num_processes:
            raise FieldError(
                f"mesh={self.mesh!r} cannot be shared out evenly among num_processes={self.num_processes}", field="mesh"
            )

    def _use_one_program(self) -> None:
        """What `deterministic` means for other knobs: each may say so itself, or be left as it is."""
        for name, value in (("attention", "xla-rows"), ("matmul", "xla")):
            if getattr(self, name) not in ("auto", value):
                message = f"deterministic=True needs {name}={value!r}, not {getattr(self, name)!r}: leave {name} out"
                raise FieldError(message, field=name)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "max_rounds", 1)  # rounds are of a program that only decodes

    @property
    def num_engines(self) -> int:
        """Engines that share the work and this machine, each with a whole model: the axis `data` of `mesh`."""
        return 1 if self.mesh is None else parse_mesh(self.mesh).get(DATA_AXIS, 1)

    @property
    def max_num_samples(self) -> int:
        """Tokens drawn in one step, at most; logits in memory at once, also of tokens that are scored."""
        return min(self.max_num_batched_tokens, max(self.max_num_seqs, 64, self.drafts))


class EngineKnobs(TypedDict, total=False):
    """The fields of `EngineConfig` by name, for functions that take them as keywords; defaults are stated there.

    But for `mesh`: those functions have a parameter of that name, which may also be a `jax.sharding.Mesh`.
    """

    dtype: Any
    """`"bfloat16"`, `"float32"`, or a dtype of numpy or jax such as `jnp.float32`."""
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
    memory_budget: str | int | None
    num_host_pages: int | None
    drafts: int
    draft: str | None
    draft_quantize: str | None
    max_logprobs: int
    attention: str
    matmul: str
    deterministic: bool
    compile_cache: str | None
    log_timing: bool
    fail_on_compile: bool
    record: str | None
    num_processes: int
    process_id: int
    coordinator: str | None
    group_key_file: str | None
    join_timeout_s: int


def engine_config(*, mesh: str | None = None, **knobs: Unpack[EngineKnobs]) -> EngineConfig:
    """An EngineConfig from knobs by name; an unknown one is refused with the nearest there is."""
    return EngineConfig(mesh=mesh, **knobs)


def parse_mesh(text: Any) -> dict[str, int]:
    """How many devices each axis of a mesh has, from "axis=size,axis=size"; FieldError if that is not what it says."""
    given = f"mesh={text!r}"
    sizes: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        axis, _, size = part.partition("=")
        if not re.fullmatch("[0-9]{1,9}", size):
            raise FieldError(f"{given} must say how many devices an axis has, such as 'model=4'", field="mesh")
        if axis not in (DATA_AXIS, *MESH_AXES):
            known = "'model', as in 'model=4', for mixtures of experts 'expert', and for several engines 'data'"
            raise FieldError(f"{given} has an axis {axis!r}; there are {known}", field="mesh")
        if axis in sizes:
            raise FieldError(f"{given} has the axis {axis!r} twice", field="mesh")
        check_whole(f"{given}: {axis}", int(size), 1, MAX_DEVICES, field="mesh")
        sizes[axis] = int(size)
    return sizes


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was first trained on."""

    kind: Literal["linear", "llama3", "yarn", "proportional", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    beta_fast: float = 32.0
    """For "yarn": pairs that turn more often than this over the original length are left as they are."""
    beta_slow: float = 1.0
    """For "yarn": pairs that turn less often than this are stretched by the whole factor."""
    truncate: bool = True
    """For "yarn": whether the pairs between which is blended are rounded to whole ones."""
    proportion: float = 1.0
    """For "proportional": the share of a head's pairs that turn, the fastest ones; the others stand still."""
    factors: tuple[float, ...] = ()
    """For "factors": what each pair's frequency is divided by, as LongRoPE has it and GGUF files carry it."""
    attention_factor: float = 1.0
    """What cosine and sine are multiplied by."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _positive(name, getattr(self, name), 1e6)
        for factor in self.factors:
            _positive("factors", factor, 1e6)
        _positive("proportion", self.proportion, 1.0)
        _true_or_false("truncate", self.truncate)
        check_whole("original_max_len", self.original_max_len, 1, MAX_DIMENSION)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(f"high_freq_factor={self.high_freq_factor} must be above {self.low_freq_factor=}")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be above {self.beta_slow=}")


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding of one layer."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    dims: int | None = None
    """How many of a head's first dimensions are turned; None for all."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _positive("rope_theta", self.theta, 1e12)
        if self.scaling and self.scaling.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"rope_theta={self.theta!r} must be above 1 where it is scaled by yarn")
        if self.dims is not None:
            check_whole("rotary dims", self.dims, 2, MAX_DIMENSION)
            if self.dims % 2:
                raise ValueError(f"rotary dims={self.dims} must be even: rotary embeddings turn pairs")


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What one layer attends with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """How many positions a token sees, itself included; None for all before it."""
    rotary: RotaryConfig | None = dataclasses.field(default_factory=RotaryConfig)
    """How q and k are turned by their positions; None where they are not."""
    softmax_scale: float | None = None
    """What scores are multiplied by; None for 1 / sqrt(head_dim)."""
    soft_cap: float | None = None
    """Scores s, already multiplied, become soft_cap * tanh(s / soft_cap); None where they stay."""
    v_is_k: bool = False
    """Whether K and V come from one projection."""
    unpadded_heads: tuple[int, int] | None = None
    """Query heads and KV heads of the model itself, where a mesh runs more of them; see `device/models/padding.py`."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_whole(name, getattr(self, name), 1, MAX_DIMENSION)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.rotary is not None:
            self._check_rotary(self.rotary)
        if self.window is not None:
            check_whole("window", self.window, 1, MAX_DIMENSION)
        for name in ("softmax_scale", "soft_cap"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name), 1e6)

    def _check_rotary(self, rotary: Any) -> None:
        if not isinstance(rotary, RotaryConfig):
            raise FieldError(f"rotary={rotary!r} must be a RotaryConfig, or None for none", field="rotary")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings turn pairs")
        dims = self.head_dim if rotary.dims is None else rotary.dims
        if dims > self.head_dim:
            raise ValueError(f"rotary dims={dims} must be at most head_dim={self.head_dim}")
        factors = rotary.scaling.factors if rotary.scaling else ()
        if factors and len(factors) != dims // 2:
            raise ValueError(
                f"{len(factors)} rope factors for {dims} rotary dimensions; there must be one for each pair"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: each token takes a few of many feed-forwards, and adds them up by weight."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Of one expert."""
    normalize_weights: bool = False
    """Whether the weights of a token's experts are divided by their sum."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain feed-forward instead, of the model's `intermediate_size`."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_whole("num_experts", self.num_experts, 1, MAX_EXPERTS)
        check_whole("num_experts_per_token", self.num_experts_per_token, 1, self.num_experts)
        check_whole("intermediate_size", self.intermediate_size, 1, MAX_DIMENSION)
        if not isinstance(self.normalize_weights, bool):
            raise ValueError(f"normalize_weights={self.normalize_weights!r} must be true or false")
        for i in self.dense_layers:
            check_whole("dense_layers", i, 0, MAX_LAYERS - 1)


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder, as its checkpoint describes it."""

    architecture: str
    """Which file of `device/models` runs it, such as llama."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: tuple[AttentionConfig, ...]
    """One for each layer; where all are alike, `(AttentionConfig(...),) * num_layers`."""
    max_len: int
    """The longest context the model was trained for, in tokens."""
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    """Added to the weights of norms: checkpoints of some models (Gemma) keep them less 1."""
    activation: str = "silu"
    """Of the feed-forward's gate: silu, gelu_tanh, or swiglu_oai, which is gpt-oss's and clamped."""
    embedding_multiplier: float = 1.0
    """What a token's embedding is multiplied by where it enters the first layer."""
    residual_multiplier: float = 1.0
    """What a layer adds to the residual stream is multiplied by this."""
    logits_divisor: float = 1.0
    """What logits are divided by."""
    logits_soft_cap: float | None = None
    """Logits x become logits_soft_cap * tanh(x / logits_soft_cap); None where they stay."""
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    """Of a mixture of experts."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "max_len"):
            check_whole(name, getattr(self, name), 1, MAX_DIMENSION)
        if not isinstance(self.attention, tuple) or not all(isinstance(x, AttentionConfig) for x in self.attention):
            raise ValueError("attention must be a tuple with an AttentionConfig for each layer")
        check_whole("num_layers", len(self.attention), 1, MAX_LAYERS)
        _positive("norm_eps", self.norm_eps, 1.0)
        if self.norm_offset not in (0.0, 1.0):
            raise ValueError(f"norm_offset={self.norm_offset!r} must be 0 or 1")
        _one_of("activation", self.activation, ACTIVATIONS)
        for name in ("embedding_multiplier", "residual_multiplier", "logits_divisor"):
            _positive(name, getattr(self, name), 1e6)
        if self.logits_soft_cap is not None:
            _positive("logits_soft_cap", self.logits_soft_cap, 1e6)
        if not isinstance(self.eos_ids, tuple | list):
            raise FieldError(f"eos_ids={self.eos_ids!r} must be a tuple of token ids", field="eos_ids")
        if len(self.eos_ids) > MAX_EOS_IDS:
            raise ValueError(f"eos_ids has {len(self.eos_ids)} ids, at most {MAX_EOS_IDS} are allowed")
        for token_id in self.eos_ids:
            check_whole("eos_ids", token_id, 0, self.vocab_size - 1)
        _true_or_false("tie_embeddings", self.tie_embeddings)
        if self.experts is not None:
            self._check_experts(self.experts)

    def _check_experts(self, experts: Any) -> None:
        if not isinstance(experts, ExpertsConfig):
            raise ValueError(f"experts={experts!r} must be an ExpertsConfig")
        if self.num_layers * experts.num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
            raise FieldError(
                f"num_experts={experts.num_experts} in each of {self.num_layers} layers: it must be at most "
                f"{MAX_EXPERTS_OF_ALL_LAYERS // self.num_layers:,} for so many layers",
                field="num_experts",
            )

    @classmethod
    def from_folder(cls, path: str | PathLike[str]) -> "ModelConfig":
        """What the config.json of a model's folder says; nothing else of it is read."""
        from quire.checkpoint.safetensors_folder import config_of_folder

        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ValueError(f"{str(path)!r} is no folder; of a GGUF file, LLM(path).model_config is the config")
        return config_of_folder(folder)

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(self.attention)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def pools(self, windows: Sequence[int]) -> list[int]:
        """For each layer, which pool of pages keeps its KV.

        Layers with one of these windows have pools of their own, from 1 on; the others keep every position in pool 0.
        """
        pool_of = {window: pool for pool, window in enumerate(windows, 1)}
        return [pool_of.get(layer.window or 0, 0) for layer in self.attention]


@dataclass(frozen=True)
class WindowPoolSize:
    """The pool of pages of the layers that see only a window."""

    window: int
    num_pages: int
    pages_per_row: int
    """Pages that one sequence holds at most."""


def check_whole(name: str, value: Any, low: int, high: int, *, field: str | None = None, otherwise: str = "") -> None:
    """Raise FieldError unless the value is a whole number from `low` to `high`; `field` if it is not called `name`.

    `otherwise` is what the message says one could have instead.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{name}={value!r} must be a whole number from {low:,} to {high:,}{otherwise}"
        raise FieldError(message, field=field or name)


def check_above_zero(name: str, value: Any) -> None:
    """Raise FieldError unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise FieldError(f"{name}={value!r} must be a number above 0", field=name)


def check_seconds(name: str, value: Any) -> None:
    """Raise FieldError unless the value is a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise FieldError(f"{name}={value!r} must be a number of seconds, or None for no limit", field=name)


def _dtype_name(dtype: Any) -> Any:
    """Return the name of a dtype of numpy or jax, such as `jnp.float32`; another value as it is."""
    return dtype.__name__ if isinstance(dtype, type) else getattr(dtype, "name", dtype)


def _positive(name: str, value: Any, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= high:
        raise FieldError(f"{name}={value!r} must be a number above 0, at most {high:g}", field=name)


def _true_or_false(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise FieldError(f"{name}={value!r} must be true or false", field=name)


def _one_of(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if value not in allowed:
        names = ", ".join(name for name in allowed if name is not None)
        left_out = ", or left out" if None in allowed else ""
        raise FieldError(f"{name}={value!r} must be one of {names}{left_out}", field=name)
