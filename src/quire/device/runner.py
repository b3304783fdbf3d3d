"""Compiles the device programs and runs them: the one door to device state.

One program for each step shape, all compiled at warm-up. The cache is donated to every program and comes back updated
in place. What compiles afterwards inside a run is counted, and is an error when the config says so.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from quire.config import ModelConfig
from quire.device import kv_cache
from quire.device.attention import get_backend
from quire.device.inputs import MAX_BIASES, BatchLayout, SampleInputs, StepInputs, StepOutput, StepShape
from quire.device.mesh import sharding
from quire.device.models import get_architecture
from quire.device.models.layers import Params, Parts, decoder, unembed
from quire.device.sampler import sample

PAGE_COMMAND_WIDTH = 64
"""Pages that one copy or poison call handles; more take several calls of the same program."""

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles = threading.local()


class CompileError(RuntimeError):
    """Something compiled after warm-up, and the config forbids it."""


class StepHandle:
    """A step under way."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        """Wait, and fetch the arrays to the host."""
        return jax.device_get(self._output)


class ModelRunner:
    """One model on one mesh, with its KV cache."""

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        *,
        mesh: Mesh,
        dtype: str,
        num_pages: int,
        page_size: int,
        pages_per_row: int,
        shapes: Sequence[StepShape],
        attention: str = "xla",
        fail_on_compile: bool = False,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.num_pages = num_pages
        self.page_size = page_size
        self.pages_per_row = pages_per_row
        self.shapes = tuple(shapes)
        self.num_compiles = 0
        """Programs compiled inside `run` since warm-up."""
        self._fail_on_compile = fail_on_compile
        self._params = params
        self._parts = Parts(config=model, backend=get_backend(attention), mesh=mesh)
        self._dtype = jnp.dtype(dtype)
        self._cache = self._create_cache()
        self._programs: dict[StepShape, Callable] = {}

    @property
    def num_programs(self) -> int:
        """Compiled programs: one for each step shape, and those that copy and poison pages."""
        return len(self._programs) + 2

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile everything that will ever run. `progress(done, total, what)` is called after each program."""
        total = len(self.shapes) + 2
        done = 0

        def step(what: str, count: int = 1) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, total, what)

        # XLA compiles outside the interpreter's lock: while one program compiles the next is traced.
        pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        try:
            compiling = {pool.submit(self.trace(shape).lower().compile): shape for shape in self.shapes}
            for future in as_completed(compiling):
                self._programs[compiling[future]] = future.result()
                step(str(compiling[future]))
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C waits for what is compiling, not for the rest
        nothing = np.full(PAGE_COMMAND_WIDTH, self.num_pages, np.int32)
        self._cache = kv_cache.copy_pages(self._cache, nothing, nothing)
        self._cache = kv_cache.poison_pages(self._cache, nothing)
        jax.block_until_ready(self._cache)
        step("copy and poison pages", 2)

    def run(self, inputs: StepInputs) -> StepHandle:
        """Dispatch one step: its page commands, then the forward and the sampler. Returns without waiting."""
        with self._count_compiles():
            for source, target in _batches(self.num_pages, inputs.pages.copy_from, inputs.pages.copy_to):
                self._cache = kv_cache.copy_pages(self._cache, source, target)
            for (pages,) in _batches(self.num_pages, inputs.pages.poison):
                self._cache = kv_cache.poison_pages(self._cache, pages)
            program = self._programs[inputs.shape]
            self._cache, output = program(self._params, self._cache, inputs.tokens_T, inputs.layout, inputs.samples)
        return StepHandle(output)

    def recover(self) -> bool:
        """After a failed step: True if the cache survived it, else a new one has been made and every page is lost."""
        try:
            jax.block_until_ready(self._cache)  # raises if it was donated, or if the program that made it failed
        except RuntimeError:
            self._cache = self._create_cache()
            return False
        return True

    def _create_cache(self) -> kv_cache.KVCache:
        return kv_cache.create(
            self._parts.backend,
            self.model,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=self._dtype,
            mesh=self.mesh,
        )

    def trace(self, shape: StepShape) -> jax.stages.Traced:
        """The program of one shape, not yet for any platform."""
        parts, layer = self._parts, get_architecture(self.model.architecture).layer

        def step(params, cache, tokens_T, layout, samples):
            hidden_TD, cache = decoder(layer, params, cache, tokens_T, layout, parts)
            output = sample(unembed(params, hidden_TD[samples.packed_index_S]), samples)
            return cache, output

        whole = sharding(self.mesh)
        tokens_T, layout, samples = abstract_inputs(shape, self.pages_per_row, whole)
        program = jax.jit(step, donate_argnums=1, out_shardings=(sharding(self.mesh, *parts.backend.axes), whole))
        return program.trace(self._params, self._cache, tokens_T, layout, samples)

    @contextmanager
    def _count_compiles(self) -> Iterator[None]:
        before = getattr(_compiles, "count", 0)
        try:
            yield
        finally:
            new = getattr(_compiles, "count", 0) - before
            self.num_compiles += new
        if new and self._fail_on_compile:
            raise CompileError(f"{new} programs compiled after warm-up; fail_on_compile=False lets them")


def abstract_inputs(shape: StepShape, pages_per_row: int, placed: NamedSharding):
    """The schema of a step's arrays at one shape."""

    def array(dtype, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=placed)

    tokens, rows, samples = shape.num_tokens, shape.num_rows, shape.num_samples
    layout = BatchLayout(
        positions_T=array(np.int32, tokens),
        destinations_T=array(np.int32, tokens),
        page_table_BP=array(np.int32, rows, pages_per_row),
        kv_lens_B=array(np.int32, rows),
        cu_q_lens_B1=array(np.int32, rows + 1),
        decode=shape.decode,
    )
    sample_inputs = SampleInputs(
        packed_index_S=array(np.int32, samples),
        temperature_S=array(np.float32, samples),
        top_k_S=array(np.int32, samples),
        top_p_S=array(np.float32, samples),
        min_p_S=array(np.float32, samples),
        seed_S2=array(np.uint32, samples, 2),
        index_S=array(np.int32, samples),
        position_S=array(np.int32, samples),
        target_S=array(np.int32, samples),
        bias_ids_SE=array(np.int32, samples, MAX_BIASES),
        bias_SE=array(np.float32, samples, MAX_BIASES),
        want_logprobs=array(np.bool_),
        want_top=array(np.bool_),
    )
    return array(np.int32, tokens), layout, sample_inputs


def _batches(num_pages: int, *columns: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Cut columns of page ids into pieces of the programs' width; padding lies outside the pool."""
    for start in range(0, len(columns[0]), PAGE_COMMAND_WIDTH):
        pieces = [column[start : start + PAGE_COMMAND_WIDTH] for column in columns]
        missing = PAGE_COMMAND_WIDTH - len(pieces[0])
        yield tuple(np.pad(piece, (0, missing), constant_values=num_pages) for piece in pieces)


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    del duration_secs
    if event == _COMPILE_EVENT:
        _compiles.count = getattr(_compiles, "count", 0) + 1


jax.monitoring.register_event_duration_secs_listener(_on_event)
