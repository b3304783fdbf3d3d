"""Compiles the device programs and runs them: the only way in which device state changes.

One program for each step shape, all compiled at warm-up. The cache is donated to every program and comes back updated
in place. What compiles afterwards inside a run is counted, and is an error when the config says so.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from quire.config import ModelConfig
from quire.device import kv_cache, native
from quire.device.attention import choose_backend, get_backend
from quire.device.inputs import (
    BatchLayout,
    PageCommands,
    PageIds,
    SampleInputs,
    StepInputs,
    StepOutput,
    StepShape,
    default_rounds,
    default_samples,
    with_defaults,
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

PAGE_TABLE_WIDTHS = (1 << 10, 1 << 15)
"""Page ids that one call of the page table's program writes."""

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles = threading.local()


class CompileError(RuntimeError):
    """Something compiled after warm-up, and the config forbids it."""


class StepHandle:
    """A step under way."""

    def __init__(self, output: StepOutput, samples: SampleInputs) -> None:
        self._output = output.only(logprobs=bool(samples.want_logprobs), top=bool(samples.want_top))

    def result(self) -> StepOutput:
        """Wait, and fetch to the host what somebody asked for."""
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
        backend, reason = choose_backend(attention, model, mesh.devices.flat[0].platform)
        self.notes = (f"attention runs in plain XLA, which is slower: {reason}",) if reason else ()
        """What a person should know at start, each in one sentence."""
        is_native = matmul != "xla" and native.unavailable_reason_on(mesh) is None
        self.statics = ModelStatics(config=model, backend=get_backend(backend), mesh=mesh, native=is_native)
        self.layer = get_architecture(model.architecture).layer
        self._dtype = jnp.dtype(dtype)
        self._cache = self.create_cache(num_pages)
        self._host = kv_cache.HostPages(self._cache, num_host_pages) if num_host_pages else None
        self._programs: dict[StepShape, Callable] = {}
        whole, vocab_size = sharding(mesh), model.vocab_size
        self._defaults = {
            shape: jax.device_put(
                (default_samples(shape.num_samples, vocab_size), default_rounds(shape.num_rows)), whole
            )
            for shape in self.shapes
        }
        """On the device: what stands for the inputs that nobody asked for."""
        self._page_table_BP = self._create_page_table()
        """Written with the pages of a step's rows before the step; what earlier steps left behind is never read."""

    @property
    def params(self) -> Params:
        """The weights as programs take them."""
        if not self._is_complete:
            raise RuntimeError("a set_weights ended in the middle, so there are no weights: call it again")
        return self._params

    @property
    def num_programs(self) -> int:
        """Compiled programs: one for each step shape, and small ones for page tables, copies, poison and moves."""
        return len(self._programs) + self._num_page_programs

    @property
    def _num_page_programs(self) -> int:
        return len(self._page_table_widths) + (4 if self._host else 2)

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile everything that will ever run.

        `progress(done, total, what)` is called from this thread before each program and after it: how many are ready,
        and what is being compiled now.
        """
        total = len(self.shapes) + self._num_page_programs
        report = progress or (lambda done, total, what: None)
        self._compile_steps(lambda what: report(len(self._programs), total, what))
        report(len(self._programs), total, "page tables; copy, poison and move pages")
        self._compile_page_programs()
        report(total, total, "")

    def _compile_steps(self, report: Callable[[str], None]) -> None:
        """Compile the program of every step shape, as many at once as there are processors."""
        num_workers = os.cpu_count() or 1
        compiling: dict[Future, StepShape] = {}

        def collect() -> None:
            for future in wait(compiling, return_when=FIRST_COMPLETED).done:
                self._programs[compiling.pop(future)] = future.result()

        def report_with(*more: StepShape) -> None:
            report("; ".join(map(str, [*compiling.values(), *more])))

        # XLA compiles outside the interpreter's lock: while one program compiles the next is traced.
        pool = ThreadPoolExecutor(num_workers)
        try:
            for shape in self.shapes:
                report_with(shape)
                lowered = self.trace(shape).lower()
                if len(compiling) == num_workers:
                    collect()
                compiling[pool.submit(lowered.compile)] = shape
            while compiling:
                report_with()
                collect()
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C waits for what is compiling, not for the rest

    def _compile_page_programs(self) -> None:
        """Run each of the small programs that handle pages, on no page; measure what a move takes."""
        for width in self._page_table_widths:
            self._write_page_table(PageIds(np.zeros(width, np.int32), np.zeros(1, np.int32)))
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

    def run(self, inputs: StepInputs) -> StepHandle:
        """Dispatch one step: its page commands, then the forward and the sampler. Returns without waiting."""
        with self._count_compiles():
            self._run_page_commands(inputs.pages)
            self._write_page_table(inputs.page_ids)
            samples, rounds = with_defaults((inputs.samples, inputs.rounds), self._defaults[inputs.shape])
            layout = replace(inputs.layout, page_table_BP=self._page_table_BP)
            program = self._programs[inputs.shape]
            self._cache, output = program(self.params, self._cache, inputs.tokens_T, layout, samples, rounds)
        return StepHandle(output, inputs.samples)

    @property
    def _page_table_widths(self) -> tuple[int, ...]:
        small, large = PAGE_TABLE_WIDTHS
        return (small, large) if self._page_table_BP.size > small else (small,)

    def _create_page_table(self) -> jax.Array:
        rows = max(shape.num_rows for shape in self.shapes)
        return jax.device_put(np.zeros((rows, self.pages_per_row), np.int32), sharding(self.mesh))

    def _write_page_table(self, page_ids: PageIds) -> None:
        """Put the pages of every row in their places, in pieces of a few sizes."""
        cu_lens = np.full(self._page_table_BP.shape[0] + 1, len(page_ids.ids_X), np.int32)
        cu_lens[: len(page_ids.cu_lens_B1)] = page_ids.cu_lens_B1
        start = 0
        while start < len(page_ids.ids_X):
            left = len(page_ids.ids_X) - start
            width = next((width for width in self._page_table_widths if left <= width), self._page_table_widths[-1])
            piece = np.zeros(width, np.int32)
            piece[: min(left, width)] = page_ids.ids_X[start : start + width]
            self._page_table_BP = _write_pages_of_rows(self._page_table_BP, cu_lens, piece, np.int32(start))
            start += width

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
        so that the device holds one or two beyond those of the model. When it runs out of memory in the
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
        self._page_table_BP = self._create_page_table()  # it may be donated, or of a program that failed
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
            layout = replace(layout, page_table_BP=layout.page_table_BP[: shape.num_rows])

            def one_round(cache, tokens_T, layout, samples):
                hidden_TD, cache = decoder(layer, params, cache, tokens_T, layout, statics)
                logits_SV = unembed(params, hidden_TD[samples.packed_index_S])
                return cache, sample(logits_SV, samples, cache.tokens_MZ, layout.page_table_BP, native=statics.native)

            if shape.decode:
                return run_rounds(one_round, cache, tokens_T, layout, samples, rounds, max_rounds)
            return one_round(cache, tokens_T, layout, samples)

        whole = sharding(self.mesh)
        inputs = abstract_inputs(shape, self._page_table_BP.shape, self.model.vocab_size, whole)
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


def abstract_inputs(shape: StepShape, page_table_shape: tuple[int, ...], vocab_size: int, placed: NamedSharding):
    """The schema of a step's arrays at one shape: tokens, layout, samples, rounds."""
    tokens, rows = shape.num_tokens, shape.num_rows
    layout = BatchLayout(
        positions_T=np.zeros(tokens, np.int32),
        destinations_T=np.zeros(tokens, np.int32),
        page_table_BP=jax.ShapeDtypeStruct(page_table_shape, np.int32),
        kv_lens_B=np.zeros(rows, np.int32),
        cu_q_lens_B1=np.zeros(rows + 1, np.int32),
        decode=shape.decode,
    )
    arrays = (np.zeros(tokens, np.int32), layout, default_samples(shape.num_samples, vocab_size), default_rounds(rows))
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed), arrays)


@partial(jax.jit, donate_argnums=0)
def _write_pages_of_rows(table_BP: jax.Array, cu_lens_B1: jax.Array, ids_X: jax.Array, start: jax.Array) -> jax.Array:
    """Write a piece of all rows' pages, of which it is the ids from `start` on, to their rows. Donates the table."""
    place_X = start + jnp.arange(ids_X.shape[0], dtype=jnp.int32)
    row_X = jnp.searchsorted(cu_lens_B1, place_X, side="right").astype(jnp.int32) - 1
    column_X = place_X - cu_lens_B1[row_X]
    row_X = jnp.where(place_X < cu_lens_B1[-1], row_X, table_BP.shape[0])  # behind the last: dropped
    return table_BP.at[row_X, column_X].set(ids_X, mode="drop")


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
