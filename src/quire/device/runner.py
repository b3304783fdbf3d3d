"""Compiles the device programs and runs them: the one door to device state.

One program for each step shape, all compiled at warm-up. The cache is donated to every program and comes back updated
in place. What compiles afterwards inside a run is counted, and is an error when the config says so.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from quire.config import ModelConfig
from quire.device import kv_cache, native
from quire.device.attention import choose_backend, get_backend
from quire.device.inputs import (
    MAX_BIASES,
    MAX_STOP_IDS,
    BatchLayout,
    PageCommands,
    RoundInputs,
    SampleInputs,
    StepInputs,
    StepOutput,
    StepShape,
    mask_words,
)
from quire.device.linear import choose_kind
from quire.device.mesh import sharding
from quire.device.models import get_architecture
from quire.device.models.layers import ModelStatics, Params, decoder, unembed
from quire.device.models.weights import check_params, prepare, replace_params
from quire.device.rounds import run_rounds
from quire.device.sampler import sample

PAGE_COMMAND_WIDTH = 64
"""Pages that one call of a page program handles; more take several calls of the same program."""

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
        max_rounds: int = 1,
        num_host_pages: int = 0,
        attention: str = "auto",
        matmul: str = "auto",
        quantize: str | None = None,
        fail_on_compile: bool = False,
    ) -> None:
        """Takes the arrays out of `params` as it prepares them."""
        self.model = model
        self.mesh = mesh
        self.num_pages = num_pages
        self.page_size = page_size
        self.pages_per_row = pages_per_row
        self.shapes = tuple(shapes)
        self.max_rounds = max_rounds
        self.num_compiles = 0
        """Programs compiled inside `run` since warm-up."""
        self.pages_per_move = PAGE_COMMAND_WIDTH
        self.seconds_per_move = 0.0
        """To move up to so many pages to host memory or back, as measured at warm-up."""
        self._fail_on_compile = fail_on_compile
        self._matmul_kind = choose_kind(matmul, quantize, dtype, mesh)
        self._params = prepare(model, params, self._matmul_kind)
        self._is_complete = True
        """Whether all weights are of one version; not while they are being replaced."""
        backend, why_slower = choose_backend(attention, model, mesh.devices.flat[0].platform)
        self.notes = (f"attention runs in plain XLA, which is slower: {why_slower}",) if why_slower else ()
        """What a person should know at start, each in one sentence."""
        is_native = matmul != "xla" and native.why_not_on(mesh) is None
        self.statics = ModelStatics(config=model, backend=get_backend(backend), mesh=mesh, native=is_native)
        self.layer = get_architecture(model.architecture).layer
        self._dtype = jnp.dtype(dtype)
        self._cache = self.create_cache(num_pages)
        self._host = kv_cache.HostPages(self._cache, num_host_pages) if num_host_pages else None
        self._programs: dict[StepShape, Callable] = {}
        self._no_mask = {
            n: jax.device_put(np.zeros((n, mask_words(model.vocab_size)), np.uint32), sharding(mesh))
            for n in {shape.num_samples for shape in self.shapes}
        }
        """By number of samples: what stands for the masks of a step that has none. It is not read."""

    @property
    def params(self) -> Params:
        """The weights as programs take them."""
        if not self._is_complete:
            raise RuntimeError("a set_weights ended in the middle, so there are no weights: call it again")
        return self._params

    @property
    def num_programs(self) -> int:
        """Compiled programs: one for each step shape, and those that copy, poison and move pages."""
        return len(self._programs) + self._num_page_programs

    @property
    def _num_page_programs(self) -> int:
        return 4 if self._host else 2

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile everything that will ever run. `progress(done, total, what)` is called after each program."""
        total = len(self.shapes) + self._num_page_programs
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
        if self._host:
            for _ in range(2):  # the first time it compiles
                start = time.perf_counter()
                self._swap_out(nothing, np.arange(PAGE_COMMAND_WIDTH) % self._host.num_pages)
                self._cache = kv_cache.write_pages(self._cache, nothing, self._host.load(nothing * 0))
                jax.block_until_ready(self._cache)
                self.seconds_per_move = (time.perf_counter() - start) / 2
        jax.block_until_ready(self._cache)
        step("copy, poison and move pages", self._num_page_programs)

    def run(self, inputs: StepInputs) -> StepHandle:
        """Dispatch one step: its page commands, then the forward and the sampler. Returns without waiting."""
        with self._count_compiles():
            self._run_page_commands(inputs.pages)
            program = self._programs[inputs.shape]
            samples = inputs.samples
            if samples.mask_SW is None:
                samples = replace(samples, mask_SW=self._no_mask[inputs.shape.num_samples])
            arrays = (inputs.tokens_T, inputs.layout, samples, inputs.rounds)
            self._cache, output = program(self.params, self._cache, *arrays)
        return StepHandle(output)

    def _run_page_commands(self, commands: PageCommands) -> None:
        outside = self.num_pages
        for count, pages, host_pages in _batches(commands.swap_out, padding=(0, 0)):
            self._swap_out(pages, host_pages[:count])
        for _, source, target in _batches(commands.copy, padding=(0, outside)):
            self._cache = kv_cache.copy_pages(self._cache, source, target)
        for _, host_pages, pages in _batches(commands.swap_in, padding=(0, outside)):
            self._cache = kv_cache.write_pages(self._cache, pages, self._host_pages.load(host_pages))
        for _, pages in _batches(commands.poison[:, None], padding=(outside,)):
            self._cache = kv_cache.poison_pages(self._cache, pages)

    def _swap_out(self, pages: np.ndarray, host_pages: np.ndarray) -> None:
        self._host_pages.store(host_pages, kv_cache.read_pages(self._cache, pages))

    @property
    def _host_pages(self) -> kv_cache.HostPages:
        if self._host is None:
            raise ValueError("a step moves pages to or from host memory and num_host_pages=0")
        return self._host

    # -- the named commands --------------------------------------------------------------------------------------

    def set_weights(self, params: Params) -> None:
        """Compute with these from the next step on. They are copied: the caller's arrays stay the caller's.

        Weights of another shape, type or name are refused before anything changes. Arrays are replaced one at a time,
        so that the device never holds more than one beyond those of the model. When it runs out of memory in the
        middle, no weights are left: steps raise until a later call succeeds.
        """
        check_params(self.model, params, dtype=str(self._dtype))
        self._is_complete = False
        replace_params(self.model, self._params, params, mesh=self.mesh, kind=self._matmul_kind)
        self._is_complete = True

    def zero(self) -> None:
        """Clear every page on the device."""
        del self._cache  # before there is another
        self._cache = self.create_cache(self.num_pages)

    def recover(self) -> bool:
        """After a failed step: True if the cache survived it, else a new one has been made and every page is lost."""
        try:
            jax.block_until_ready(self._cache)  # raises if it was donated, or if the program that made it failed
        except RuntimeError:
            self._cache = self.create_cache(self.num_pages)
            return False
        return True

    def create_cache(self, num_pages: int) -> kv_cache.KVCache:
        """A pool of so many pages."""
        return kv_cache.create(
            self.statics.backend,
            self.model,
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=self._dtype,
            mesh=self.mesh,
        )

    def trace(self, shape: StepShape) -> jax.stages.Traced:
        """The program of one shape, not yet for any platform."""
        statics, layer, max_rounds = self.statics, self.layer, self.max_rounds

        def step(params, cache, tokens_T, layout, samples, rounds):
            def one_round(cache, tokens_T, layout, samples):
                hidden_TD, cache = decoder(layer, params, cache, tokens_T, layout, statics)
                logits_SV = unembed(params, hidden_TD[samples.packed_index_S])
                return cache, sample(logits_SV, samples, cache.tokens_MZ, layout.page_table_BP, native=statics.native)

            if shape.decode:
                return run_rounds(one_round, cache, tokens_T, layout, samples, rounds, max_rounds)
            return one_round(cache, tokens_T, layout, samples)

        whole = sharding(self.mesh)
        inputs = abstract_inputs(shape, self.pages_per_row, self.model.vocab_size, whole)
        program = jax.jit(step, donate_argnums=1, out_shardings=(kv_cache.placement(self._cache), whole))
        return program.trace(self.params, self._cache, *inputs)

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


def abstract_inputs(shape: StepShape, pages_per_row: int, vocab_size: int, placed: NamedSharding):
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
        row_S=array(np.int32, samples),
        prompt_len_S=array(np.int32, samples),
        temperature_S=array(np.float32, samples),
        top_k_S=array(np.int32, samples),
        top_p_S=array(np.float32, samples),
        min_p_S=array(np.float32, samples),
        seed_S2=array(np.uint32, samples, 2),
        index_S=array(np.int32, samples),
        position_S=array(np.int32, samples),
        target_S=array(np.int32, samples),
        repetition_S=array(np.float32, samples),
        presence_S=array(np.float32, samples),
        frequency_S=array(np.float32, samples),
        bias_ids_SE=array(np.int32, samples, MAX_BIASES),
        bias_SE=array(np.float32, samples, MAX_BIASES),
        mask_SW=array(np.uint32, samples, mask_words(vocab_size)),
        has_mask=array(np.bool_),
        want_logprobs=array(np.bool_),
        want_top=array(np.bool_),
    )
    rounds = RoundInputs(
        max_rounds_B=array(np.int32, rows),
        stop_ids_BE=array(np.int32, rows, MAX_STOP_IDS),
    )
    return array(np.int32, tokens), layout, sample_inputs, rounds


def _batches(commands: np.ndarray, padding: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Cut `[n, columns]` into pieces of the page programs' width: how many commands, and each padded column."""
    for start in range(0, len(commands), PAGE_COMMAND_WIDTH):
        rows = commands[start : start + PAGE_COMMAND_WIDTH]
        piece = np.full((PAGE_COMMAND_WIDTH, len(padding)), padding, np.int32)
        piece[: len(rows)] = rows
        yield len(rows), *(np.ascontiguousarray(column) for column in piece.T)


def _on_event(event: str, duration_secs: float, **_: object) -> None:
    del duration_secs
    if event == _COMPILE_EVENT:
        _compiles.count = getattr(_compiles, "count", 0) + 1


jax.monitoring.register_event_duration_secs_listener(_on_event)
