"""Compiles the device programs and runs them: the only way in which device state changes.

One program for each step shape, all compiled at warm-up. The pools of pages are donated to every program and come back
updated in place. What compiles afterwards inside a run is counted, and is an error when the config says so.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from quire.config import DEFAULT_MAX_LOGPROBS, ModelConfig, WindowPoolSize
from quire.device import kv_cache
from quire.device.inputs import (
    PageCommands,
    PageIds,
    StepInputs,
    StepOutput,
    StepShape,
    default_embed,
    default_rounds,
    default_samples,
    default_scores,
    with_defaults,
)
from quire.device.memory import is_host_memory, return_freed_memory
from quire.device.mesh import place
from quire.device.models.layers import Params
from quire.device.models.tensors import has_tensor_names
from quire.device.models.weights import (
    abstract_like,
    arrays_from_tensors,
    cast_later,
    check_params,
    is_stored,
    prepare,
    replace_params,
    restore_params,
)
from quire.device.programs import PAGE_COMMAND_WIDTH, PageProgram, Programs
from quire.device.saved_programs import SavedPrograms
from quire.field_error import FieldError
from quire.machine import num_processors

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles = threading.local()
"""Its `names`: what has been compiled inside a run, in the thread that runs."""


class CompileError(RuntimeError):
    """Something compiled after warm-up, and the config forbids it."""


class StepHandle:
    """A step under way."""

    def __init__(self, output: StepOutput, inputs: StepInputs) -> None:
        self._output = output.only(inputs)

    def result(self) -> StepOutput:
        """Wait, and fetch to the host what somebody asked for."""
        return jax.device_get(self._output)


class ModelRunner:
    """One model on one mesh, with its KV cache."""

    failure = None

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
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        windows: tuple[WindowPoolSize, ...] = (),
        num_host_pages: Sequence[int] = (),
        attention: str = "auto",
        matmul: str = "auto",
        quantize: str | None = None,
        fail_on_compile: bool = False,
    ) -> None:
        """Takes the arrays out of `params` as it prepares them. `num_host_pages` are each pool's; () for none."""
        self.model = model
        self.mesh = mesh
        self.num_pages = num_pages
        self.page_size = page_size
        self.shapes = tuple(shapes)
        self.num_compiles = 0
        """Programs compiled inside `run` since warm-up."""
        self.pages_per_move = PAGE_COMMAND_WIDTH
        self.seconds_per_move = 0.0
        """To move up to so many pages to host memory or back, as measured at warm-up."""
        self._fail_on_compile = fail_on_compile
        self.programs = Programs(
            model,
            mesh,
            dtype,
            num_pages=num_pages,
            page_size=page_size,
            pages_per_row=pages_per_row,
            max_num_rows=max(shape.num_rows for shape in shapes),
            max_rounds=max_rounds,
            max_logprobs=max_logprobs,
            windows=windows,
            attention=attention,
            matmul=matmul,
            quantize=quantize,
        )
        self.notes = self.programs.notes
        """What a person should know at start, each in one sentence."""
        kind = self.programs.matmul_kind
        if kind.stored and not is_stored(params):
            raise FieldError(
                "quantize='gguf' keeps the blocks in which a GGUF file has its weights, and these came from none: take "
                "quantize='int4', or None",
                field="quantize",
            )
        self._params = prepare(model, params, mesh=mesh, kind=kind)
        if kind.stored:
            self.programs = replace(self.programs, weights=abstract_like(self._params))
        self._is_complete = True
        """Whether all weights are of one version; not while they are being replaced."""
        self._caches = self._create_caches()
        self._num_host_pages = tuple(num_host_pages)
        self._host = self._create_host_pages()
        """The pages in host memory, for each pool; none if nothing is ever swapped."""
        self._compiled: dict[StepShape | PageProgram, jax.stages.Compiled] = {}
        """The program of each step shape, and those that handle pages, as `Programs` names them."""
        self._defaults = {
            shape: jax.tree.map(
                partial(place, mesh),
                (
                    default_samples(shape.num_samples, model.vocab_size),
                    default_rounds(shape.num_rows),
                    None if shape.decode else default_scores(shape.num_tokens),
                    default_embed(shape.num_rows),
                ),
            )
            for shape in self.shapes
        }
        """On the device: what stands for the inputs that nobody asked for."""
        self._page_tables = self._create_page_tables()
        """Of each pool. Written with the pages of a step's rows before the step; what earlier steps left behind is
        never read."""

    @property
    def params(self) -> Params:
        """The weights as programs take them."""
        if not self._is_complete:
            raise RuntimeError("a set_weights ended in the middle, so there are no weights: call it again")
        return self._params

    @property
    def num_programs(self) -> int:
        """Compiled programs: one for each step shape, and small ones for page tables, copies, poison and moves."""
        return len(self._compiled)

    @property
    def growth_bytes(self) -> int:
        """Bytes of host memory that steps can take beyond what is occupied after warm-up.

        The largest program's temporaries, and pages that the system has not backed with memory yet.
        """
        pages = sum(host.num_bytes for host in self._host)
        if not is_host_memory(self.mesh):
            return pages
        if kv_cache.is_committed_late(self.mesh):
            pages += sum(array.nbytes for array in jax.tree.leaves(self._caches))
        stats = [stats for program in self._compiled.values() if (stats := program.memory_analysis())]
        return pages + max(
            (one.temp_size_in_bytes + one.output_size_in_bytes - one.alias_size_in_bytes for one in stats), default=0
        )

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile everything that will ever run.

        `progress(done, total, what)` is called from this thread before each program and after it: how many are ready,
        and what is loaded or compiled now.
        """
        num_workers = num_processors()
        report = progress or (lambda done, total, what: None)
        saved = SavedPrograms(self.programs)
        pool = ThreadPoolExecutor(num_workers)
        try:
            # Outside the interpreter's lock, while the small ones are traced.
            loading = pool.map(saved.load, self.shapes)
            moves = () if self._host else ("read", "write")
            traced = self.programs.trace_page_programs()
            small = {name: program for name, program in traced.items() if name[1] not in moves}
            total = len(self.shapes) + len(small)
            report(0, total, "page tables; copy, poison and move pages")
            for name, program in small.items():
                self._compiled[name] = program.lower().compile()
            for shape in self.shapes:
                report(len(self._compiled), total, str(shape))
                if (program := next(loading)) is not None:
                    self._compiled[shape] = program
            missing = [shape for shape in self.shapes if shape not in self._compiled]
            self._compile_steps(
                missing, saved, pool, num_workers, lambda what: report(len(self._compiled), total, what)
            )
        finally:
            pool.shutdown(cancel_futures=True)  # Ctrl-C waits for what is compiling, not for the rest
        if self._host:
            self._measure_moves(self._host[0])
        return_freed_memory()  # what reading and packing weights, and compiling, took on the way
        report(total, total, "")

    def _compile_steps(
        self,
        shapes: Sequence[StepShape],
        saved: SavedPrograms,
        pool: ThreadPoolExecutor,
        num_workers: int,
        report: Callable[[str], None],
    ) -> None:
        """Compile the programs of step shapes, as many at once as there are processors."""
        compiling: dict[Future, StepShape] = {}

        def collect() -> None:
            for future in wait(compiling, return_when=FIRST_COMPLETED).done:
                self._compiled[compiling.pop(future)] = future.result()

        def report_with(*more: StepShape) -> None:
            report("; ".join(map(str, [*compiling.values(), *more])))

        # XLA compiles outside the interpreter's lock, too: while one program compiles the next is traced.
        for shape in shapes:
            report_with(shape)
            lowered = self.programs.trace(shape).lower()
            if len(compiling) == num_workers:
                collect()
            compiling[pool.submit(saved.compile, shape, lowered)] = shape
        while compiling:
            report_with()
            collect()

    def _measure_moves(self, host: kv_cache.HostPages) -> None:
        nothing = np.full(PAGE_COMMAND_WIDTH, self.num_pages, np.int32)
        for _ in range(2):  # the first time it takes the memory
            start = time.perf_counter()
            self._swap_out(0, nothing, np.arange(PAGE_COMMAND_WIDTH) % host.num_pages)
            self._change_pages(0, "write", nothing, host.load(nothing * 0))
            jax.block_until_ready(self._caches)
            self.seconds_per_move = (time.perf_counter() - start) / 2

    def run(self, inputs: StepInputs) -> StepHandle:
        """Dispatch one step: its page commands, then the forward and the sampler. Returns without waiting."""
        with self._count_compiles():
            for pool, (page_ids, commands) in enumerate(inputs.pools):
                self._run_page_commands(pool, commands)
                self._write_page_table(pool, page_ids)
            given = (inputs.samples, inputs.rounds, inputs.scores, inputs.embed_first_B)
            asked = with_defaults(given, self._defaults[inputs.shape])
            table, *tables = self._page_tables
            windows = [
                replace(window, page_table_BP=its_table)
                for window, its_table in zip(inputs.layout.windows, tables, strict=True)
            ]
            layout = replace(inputs.layout, page_table_BP=table, windows=tuple(windows))
            program = self._compiled[inputs.shape]
            try:
                self._caches, output = program(self.params, self._caches, inputs.tokens_T, layout, *asked)
            except RuntimeError as error:
                if any(array.is_deleted() for array in jax.tree.leaves(self._params)):
                    raise RuntimeError(
                        "arrays that the engine computes with were donated or deleted after they were given to "
                        "from_params, or to set_weights with copy=False: call set_weights"
                    ) from error
                raise
        return StepHandle(output, inputs)

    def _create_page_tables(self) -> list[jax.Array]:
        return [place(self.mesh, np.zeros(table.shape, np.int32)) for table in self.programs.page_tables]

    def _write_page_table(self, pool: int, page_ids: PageIds) -> None:
        """Put the pages of every row in their places, in pieces of a few sizes."""
        cu_lens = np.full(self._page_tables[pool].shape[0] + 1, len(page_ids.ids_X), np.int32)
        cu_lens[: len(page_ids.cu_lens_B1)] = page_ids.cu_lens_B1
        start, widths = 0, self.programs.page_table_widths(pool)
        while start < len(page_ids.ids_X):
            left = len(page_ids.ids_X) - start
            width = next((width for width in widths if left <= width), widths[-1])
            piece = np.zeros(width, np.int32)
            piece[: min(left, width)] = page_ids.ids_X[start : start + width]
            write = self._compiled[pool, width]
            self._page_tables[pool] = write(self._page_tables[pool], cu_lens, piece, np.int32(start))
            start += width

    def _run_page_commands(self, pool: int, commands: PageCommands) -> None:
        outside = self._caches[pool].num_pages
        for count, pages, host_pages in _batches(commands.swap_out, padding=(0, 0)):
            self._swap_out(pool, pages, host_pages[:count])
        for _, source, target in _batches(commands.copy, padding=(0, outside)):
            self._change_pages(pool, "copy", source, target)
        for _, host_pages, pages in _batches(commands.swap_in, padding=(0, outside)):
            self._change_pages(pool, "write", pages, self._host_pages(pool).load(host_pages))
        for _, pages in _batches(commands.poison[:, None], padding=(outside,)):
            self._change_pages(pool, "poison", pages)

    def _change_pages(self, pool: int, program: str, *args: Any) -> None:
        changed = self._compiled[pool, program](self._caches[pool], *args)
        self._caches = (*self._caches[:pool], changed, *self._caches[pool + 1 :])

    def _swap_out(self, pool: int, pages: np.ndarray, host_pages: np.ndarray) -> None:
        self._host_pages(pool).store(host_pages, self._compiled[pool, "read"](self._caches[pool], pages))

    def _host_pages(self, pool: int) -> kv_cache.HostPages:
        if not self._host:
            raise ValueError("a step moves pages to or from host memory and num_host_pages=0")
        return self._host[pool]

    # -- the named commands --------------------------------------------------------------------------------------

    def set_weights(self, params: Params, *, copy: bool = True) -> None:
        """Compute with these from the next step on. With `copy` the caller's arrays stay the caller's.

        A tree as in docs/weights.md in the engine's type or a wider float, or tensors of any float type under Hugging
        Face names. Weights of another shape, type or name are refused before anything changes. Arrays are replaced one
        at a time, so that the device holds one or two beyond those of the model. When it runs out of memory in the
        middle, no weights are left: steps raise until a later call succeeds.
        """
        self.replace_weights(self.checked_weights(params), copy=copy)

    def checked_weights(self, params: Params) -> Params:
        """Weights that `set_weights` takes, as `replace_weights` does: arrays, or functions that make them."""
        stored = self.programs.matmul_kind.stored
        if stored and not (isinstance(params, Mapping) and is_stored(params)):
            raise FieldError(
                "quantize='gguf' computes with the blocks of the model's file, and other weights have none: open the "
                "model with quantize=None or 'int4' to replace its weights",
                field="quantize",
            )
        if has_tensor_names(params):
            return arrays_from_tensors(self.model, params, dtype=self.programs.dtype)
        check_params(self.model, params, dtype=self.programs.dtype, stored=stored)
        return cast_later(params, self.programs.dtype)

    def replace_weights(self, arrays: Params, *, copy: bool = True) -> None:
        """Compute with what `checked_weights` returned."""
        self._is_complete = False
        replace_params(self.model, self._params, arrays, mesh=self.mesh, kind=self.programs.matmul_kind, copy=copy)
        self._is_complete = True

    def get_weights(self) -> Params:
        """The weights in the layout of docs/weights.md, as copies: what `set_weights` takes."""
        return restore_params(self.model, self.params, mesh=self.mesh)

    def sleep(self) -> None:
        """Let go of weights and pages, and keep the programs."""
        self._is_complete = False
        self._params = {"layers": [{} for _ in range(self.model.num_layers)]}
        self._delete_caches()
        self._host = []
        return_freed_memory()

    def wake(self) -> None:
        """Have pages again; weights come by `set_weights`."""
        jax.block_until_ready(self._params)  # until they are packed, what they are packed from is in memory
        self._caches = self._create_caches()
        self._host = self._create_host_pages()

    def zero(self) -> None:
        """Clear every page on the device."""
        self._delete_caches()
        self._caches = tuple(map(kv_cache.create_zeros, self.programs.caches))

    def _delete_caches(self) -> None:
        """Before there are others; whoever still refers to one, such as an error's traceback."""
        for array in jax.tree.leaves(self._caches):
            array.delete()

    def close(self) -> None:
        """Let go of weights, pages and programs, whoever still holds this object. It cannot run afterwards."""
        self._is_complete = False
        self._params = {}
        self._compiled.clear()
        self._defaults.clear()
        del self._caches, self._page_tables
        self._host = []

    def recover(self) -> bool:
        """After a failed step: True if the cache survived it, else a new one has been made and every page is lost."""
        self._page_tables = self._create_page_tables()  # they may be donated, or of a program that failed
        survived = self._has_caches()
        if not survived:
            self._delete_caches()
            self._caches = self._create_caches()
        return survived

    def _has_caches(self) -> bool:
        try:
            jax.block_until_ready(self._caches)  # raises if one was donated, or if the program that made it failed
        except RuntimeError:
            return False
        return True

    def create_cache(self, num_pages: int) -> kv_cache.KVCache:
        """One pool of so many pages for all layers, whatever they see."""
        return kv_cache.create(replace(self.programs, windows=()).cache_of(num_pages))

    def _create_host_pages(self) -> list[kv_cache.HostPages]:
        pools = zip(self._caches, self._num_host_pages, strict=True) if self._num_host_pages else ()
        return [kv_cache.HostPages(cache, count) for cache, count in pools]

    def _create_caches(self) -> kv_cache.Caches:
        return tuple(map(kv_cache.create, self.programs.caches))

    @contextmanager
    def _count_compiles(self) -> Iterator[None]:
        new = _compiles.names = []
        try:
            yield
        finally:
            del _compiles.names
            self.num_compiles += len(new)
        if new and self._fail_on_compile:
            raise CompileError(f"compiled after warm-up: {', '.join(new)}; fail_on_compile=False lets it")


def _batches(commands: np.ndarray, padding: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Cut `[n, columns]` into pieces of the page programs' width: how many commands, and each padded column."""
    for start in range(0, len(commands), PAGE_COMMAND_WIDTH):
        rows = commands[start : start + PAGE_COMMAND_WIDTH]
        piece = np.full((PAGE_COMMAND_WIDTH, len(padding)), padding, np.int32)
        piece[: len(rows)] = rows
        yield len(rows), *(np.ascontiguousarray(column) for column in piece.T)


def _on_event(event: str, duration_secs: float, **metadata: object) -> None:
    del duration_secs
    if event == _COMPILE_EVENT and hasattr(_compiles, "names"):
        _compiles.names.append(str(metadata.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_on_event)
