"""What a device really does, beside what was planned for it: kernels against the reference, memory, one step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.capacity.footprint import work_of
from quire.capacity.roofline import StepTime, decode_step
from quire.capacity.topology import Topology
from quire.config import AttentionConfig, ModelConfig
from quire.device.attention import LayerKV, paged_attention
from quire.device.inputs import BatchLayout, StepShape, default_embed, default_rounds, default_samples
from quire.device.kv_cache import Caches
from quire.device.linear import choose_kind, convert, linear
from quire.device.mesh import sharding
from quire.device.programs import Programs

PAGE_SIZE = 16
PROMPTS = (6, 16, 34, 70)
"""Tokens of each row before it decodes: less than a page, a page, and a few. Even: both halves are one program."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
"""By how much attention of normal random numbers may differ from the reference."""
FORMS = (
    AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=128),
    AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=64, window=20),
)
"""What kernels are checked with: heads as wide as a TPU's lanes, and narrower ones with a window shorter than a row."""


@dataclass(frozen=True)
class StepSize:
    """The model and the batch of which one decode step is measured."""

    model: ModelConfig
    dtype: str
    rows: int
    context: int
    rounds: int


def _model(width: int, ffn: int, attention: AttentionConfig, layers: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=ffn,
        attention=(attention,) * layers,
        max_len=8192,
    )


LARGE = StepSize(
    _model(4096, 14336, AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128), 4, 32_768),
    "bfloat16",
    rows=64,
    context=1024,
    rounds=16,
)
"""Four layers of a model with 8 billion weights: 2.3 GB, and a pool of 1.1 GB."""
SMALL = StepSize(
    _model(64, 128, AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16), 2, 256),
    "float32",
    rows=4,
    context=32,
    rounds=4,
)
"""For a CPU, and for tests."""


# -- kernels against the reference ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelCheck:
    """One attention backend in one type, with one form of attention."""

    backend: str
    dtype: str
    head_dim: int
    window: int | None
    error: float
    """The largest difference from the reference."""

    @property
    def is_right(self) -> bool:
        """Whether it is within what the type's rounding explains."""
        return bool(self.error <= TOLERANCES[self.dtype])

    def __str__(self) -> str:
        window = f" and a window of {self.window}" if self.window else ""
        return f"{self.backend} in {self.dtype} with heads of {self.head_dim}{window}"


def check_kernels(mesh: Mesh, knobs: Sequence[str] = ("auto", "xla")) -> list[KernelCheck]:
    """The backends that these knobs mean, on prompts in two pieces and then a decode step, over poisoned pages."""
    return [
        check for dtype in TOLERANCES for attention in FORMS for check in _check_form(mesh, knobs, dtype, attention)
    ]


def _check_form(mesh: Mesh, knobs: Sequence[str], dtype: str, attention: AttentionConfig) -> list[KernelCheck]:
    checks: dict[str, KernelCheck] = {}
    right = _attend_all(_attention_programs("reference", dtype, attention, mesh))
    for programs in (_attention_programs(knob, dtype, attention, mesh) for knob in knobs):
        name = type(programs.statics.backend).__name__.removesuffix("Backend").lower()
        if name not in checks:
            pairs = zip(_attend_all(programs), right, strict=True)
            error = np.max([np.max(np.abs(ours - theirs)) for ours, theirs in pairs])  # NaN if any is
            checks[name] = KernelCheck(name, dtype, attention.head_dim, attention.window, float(error))
    return list(checks.values())


def _attention_programs(knob: str, dtype: str, attention: AttentionConfig, mesh: Mesh) -> Programs:
    pages_per_row = -(-(max(PROMPTS) + 1) // PAGE_SIZE)
    return Programs(
        model=_model(64, 64, attention, 1, 64),
        mesh=mesh,
        dtype=dtype,
        num_pages=2 * pages_per_row * len(PROMPTS),
        page_size=PAGE_SIZE,
        pages_per_row=pages_per_row,
        max_num_rows=len(PROMPTS),
        attention=knob,
    )


def _attend_all(programs: Programs) -> list[np.ndarray]:
    """What each of three steps attends to, in float32."""
    attention, rng = programs.model.attention[0], np.random.default_rng(0)
    call = jax.jit(partial(paged_attention, programs.statics.backend, programs.mesh), static_argnames="attention")
    kv = _poisoned(programs.caches[0].layers[0])
    pages = rng.permutation(programs.num_pages)[: programs.pages_per_row * len(PROMPTS)]
    tables = pages.reshape(len(PROMPTS), -1).astype(np.int32)
    none, all_ = np.zeros(len(PROMPTS), np.int64), np.array(PROMPTS)
    results = []
    for first, last in ((none, all_ // 2), (all_ // 2, all_), (all_, all_ + 1)):
        layout = _layout(first, last, tables)
        counts = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        shapes = [(len(layout.positions_T), count, attention.head_dim) for count in counts]
        q, k, v = (jnp.asarray(rng.standard_normal(shape), programs.dtype) for shape in shapes)
        out, kv = call(kv, q, k, v, layout, attention=attention)
        results.append(np.asarray(out, np.float32))
    return results


def _poisoned(abstract: LayerKV) -> LayerKV:
    """A layer's arrays, all NaN, or -1 in arrays of integers."""

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        value = np.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else -1
        return jax.device_put(jnp.full(leaf.shape, value, leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, abstract)


def _layout(first: np.ndarray, last: np.ndarray, tables: np.ndarray) -> BatchLayout:
    """Rows whose positions `first .. last-1` are computed."""
    rows = np.repeat(np.arange(len(first)), last - first)
    positions = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)]).astype(np.int32)
    destinations = tables[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return BatchLayout(
        positions_T=positions,
        destinations_T=destinations.astype(np.int32),
        page_table_BP=tables,
        kv_lens_B=last.astype(np.int32),
        cu_q_lens_B1=np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32),
        decode=bool(np.all(last - first == 1)),
    )


# -- memory and one step ---------------------------------------------------------------------------------------------


def memory_bandwidth(device: Any, num_bytes: int, *, passes: int = 10) -> float:
    """Bytes a second that a device reads and writes when it adds to an array of so many bytes."""

    def add(array: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, passes, lambda _, x: x + 1.0, array)

    program = jax.jit(add, donate_argnums=0)
    array = jax.device_put(jnp.zeros(num_bytes // 4, jnp.float32), device)
    array = jax.block_until_ready(program(array))  # compiles
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        array = jax.block_until_ready(program(array))
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes * passes / min(seconds)


def matmul_speed(mesh: Mesh, dtype: str, *, num_tokens: int = 512, width: int = 2048) -> float:
    """Return the multiplications and additions per second of the engine's matmul without quantisation."""
    ones = partial(jnp.ones, dtype=dtype, device=sharding(mesh))
    weight = convert(ones((width, width)), 0, choose_kind("auto", None, dtype, mesh))
    program, x = jax.jit(linear), ones((num_tokens, width))
    jax.block_until_ready(program(x, weight))  # compiles
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(program(x, weight))
        seconds.append(time.perf_counter() - start)
    return 2 * num_tokens * width * width / min(seconds)


def decode_seconds(size: StepSize, mesh: Mesh) -> float:
    """Seconds of one round of a decode step: the best of a few dispatches, each of many rounds."""
    programs = _programs(size, mesh)
    shape = StepShape(size.rows, size.rows, size.rows, decode=True)
    program = programs.trace(shape).lower().compile()
    params, caches = _zeros(programs.params), _zeros(programs.caches)
    inputs = _decode_inputs(programs, shape, size)
    return min(_time_dispatch(program, params, caches, inputs, size.rounds))


def _time_dispatch(program: Callable, params: Any, caches: Caches, inputs: Any, rounds: int) -> list[float]:
    seconds = []
    for _ in range(4):  # the first is not the best
        start = time.perf_counter()
        caches, _ = jax.block_until_ready(program(params, caches, *inputs))
        seconds.append((time.perf_counter() - start) / rounds)
    return seconds


def planned_decode(size: StepSize, mesh: Mesh, topology: Topology) -> StepTime:
    """The same at best."""
    return decode_step(work_of(_programs(size, mesh)), topology, rows=size.rows, context=size.context)


def _programs(size: StepSize, mesh: Mesh) -> Programs:
    pages_per_row = -(-(size.context + size.rounds) // PAGE_SIZE)
    return Programs(
        model=size.model,
        mesh=mesh,
        dtype=size.dtype,
        num_pages=pages_per_row * size.rows,
        page_size=PAGE_SIZE,
        pages_per_row=pages_per_row,
        max_num_rows=size.rows,
        max_rounds=size.rounds,
    )


def _zeros(abstract: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract)


def _decode_inputs(programs: Programs, shape: StepShape, size: StepSize) -> Any:
    """Rows of `context` positions that each take the most rounds."""
    tables = np.arange(programs.num_pages, dtype=np.int32).reshape(size.rows, -1)
    first = np.full(size.rows, size.context)
    layout = _layout(first, first + 1, tables)
    samples = replace(
        default_samples(size.rows, size.model.vocab_size),
        packed_index_S=np.arange(size.rows, dtype=np.int32),
        position_S=layout.positions_T + 1,
    )
    rounds = replace(default_rounds(size.rows), max_rounds_B=np.full(size.rows, size.rounds, np.int32))
    placed = jax.tree.map(lambda leaf: leaf.sharding, programs.inputs(shape))
    arrays = (np.zeros(size.rows, np.int32), layout, samples, rounds, None, default_embed(size.rows))
    return jax.device_put(arrays, placed)
