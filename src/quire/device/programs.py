"""The device programs of an engine, traced from a model's config, a mesh and a few numbers: no weights, no pool.

A mesh of devices that are only described (`jax.experimental.topologies`) does as well, so that the programs of a TPU
slice can be compiled and read where there is none. `ModelRunner` compiles and runs the same ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.config import DEFAULT_MAX_LOGPROBS, ModelConfig, WindowPoolSize
from quire.device import kv_cache, native
from quire.device.attention import choose_backend, get_backend
from quire.device.inputs import (
    INVALID,
    BatchLayout,
    SampleInputs,
    StepOutput,
    StepShape,
    WindowLayout,
    default_embed,
    default_rounds,
    default_samples,
    default_scores,
)
from quire.device.linear import MatmulKind, choose_kind
from quire.device.mesh import num_devices_of, sharding
from quire.device.models import get_architecture
from quire.device.models.layers import LayerFunction, ModelStatics, Params, decoder, unembed
from quire.device.models.padding import padded_config
from quire.device.models.weights import abstract_params
from quire.device.pooling import pool_rows
from quire.device.rounds import run_rounds
from quire.device.sampler import rows_at_once, sample, sample_and_score
from quire.field_error import FieldError

PAGE_COMMAND_WIDTH = 64
"""Pages that one call of a page program handles; more take several calls of the same program."""

PAGE_TABLE_WIDTHS = (1 << 10, 1 << 15)
"""Page ids that one call of the page table's program writes."""


COMPILER_OPTIONS = {"TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}}
"""By a device's kind. Arrays of bfloat16 come to every TPU in tiles of 8 x 128; of itself the compiler for a v7x copies
each weight, at each dispatch, to tiles of 16 x 128."""

PageProgram = tuple[int, str | int]
"""Which pool it is of, and which program: "copy", "poison", "read", "write", or so many ids to its page table."""


@dataclass(frozen=True)
class Programs:
    """Everything that decides an engine's programs, and the programs. The knobs are those of `EngineConfig`."""

    model: ModelConfig
    mesh: Mesh
    dtype: str
    num_pages: int
    page_size: int
    pages_per_row: int
    max_num_rows: int
    """Rows of the page table: the most that a step has."""
    max_rounds: int = 1
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    """Alternatives that the sampler returns beside each token."""
    windows: tuple[WindowPoolSize, ...] = ()
    """Windows whose layers have pools of their own; other layers keep every position."""
    attention: str = "auto"
    matmul: str = "auto"
    quantize: str | None = None
    weights: Params | None = None
    """What `params` is, where a file decides it: with quantize="gguf"."""

    @cached_property
    def matmul_kind(self) -> MatmulKind:
        """How the weights are kept and multiplied."""
        if self.quantize == "mxfp4" and self.model.experts is None:
            raise FieldError(
                f"quantize='mxfp4' is for mixtures of experts, and {self.model.architecture} has none: take "
                "quantize='int8', or on accelerators 'int8-weights'",
                field="quantize",
            )
        return choose_kind(self.matmul, self.quantize, self.dtype, self.mesh)

    @cached_property
    def statics(self) -> ModelStatics:
        """What the model's functions are compiled for."""
        is_native = self.matmul != "xla" and native.unavailable_reason_on(self.mesh) is None
        name, _ = self._backend
        backend = get_backend(name, self.mesh.devices.flat[0].device_kind)
        windows = tuple(size.window for size in self.windows)
        return ModelStatics(config=self._padded, backend=backend, mesh=self.mesh, windows=windows, native=is_native)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know at start, each in one sentence."""
        _, reason = self._backend
        notes = [f"attention runs in plain XLA, which is slower: {reason}"] if reason else []
        if self.matmul_kind.weight_bits and self.mesh.devices.flat[0].platform == "cpu":
            notes.append(f"quantize={self.quantize!r} is for accelerators: on a CPU quantize='int8' has native code")
        return tuple(notes)

    @cached_property
    def _padded(self) -> ModelConfig:
        return padded_config(self.model, self.mesh)

    @property
    def _backend(self) -> tuple[str, str | None]:
        device = self.mesh.devices.flat[0]
        return choose_backend(self.attention, self._padded, device.platform, device.device_kind)

    @property
    def layer(self) -> LayerFunction:
        """What the architecture stacks."""
        return get_architecture(self.model.architecture).layer

    @cached_property
    def params(self) -> Params:
        """The shape, type and placement of every weight, in the place of the weight."""
        if self.weights is not None:
            return self.weights
        return abstract_params(self.model, mesh=self.mesh, dtype=self.dtype, kind=self.matmul_kind)

    @cached_property
    def caches(self) -> kv_cache.Caches:
        """The same of every pool."""
        sizes = [self.num_pages, *(size.num_pages for size in self.windows)]
        return tuple(self.cache_of(num_pages, pool) for pool, num_pages in enumerate(sizes))

    def cache_of(self, num_pages: int, pool: int = 0) -> kv_cache.KVCache:
        """The same of one pool, of another size."""
        layers = zip(self.statics.config.attention, self.statics.pools, strict=True)
        return kv_cache.abstract(
            self.statics.backend,
            [attention for attention, its_pool in layers if its_pool == pool],
            num_pages=num_pages,
            page_size=self.page_size,
            dtype=jnp.dtype(self.dtype),
            mesh=self.mesh,
            has_tokens=pool == 0,
        )

    @property
    def page_tables(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The same of the page table of every pool."""
        widths = [self.pages_per_row, *(size.pages_per_row for size in self.windows)]
        return tuple(self._whole((self.max_num_rows, width), np.int32) for width in widths)

    def trace(self, shape: StepShape) -> jax.stages.Traced:
        """The program of one step shape, not yet for any platform: params, pools and inputs to pools and output.

        The pools are donated.
        """
        statics, layer, max_logprobs = self.statics, self.layer, self.max_logprobs
        device, whole = self.mesh.devices.flat[0], sharding(self.mesh)
        at_once, num_parts = rows_at_once(device.platform), num_devices_of(self.mesh, "vocab")
        draw = partial(
            sample, native=statics.native, rows_at_once=at_once, num_parts=num_parts, max_logprobs=max_logprobs
        )

        def step(params, caches, tokens_T, layout, samples, rounds, scores, embed_first_B):
            def cut(layout):
                return replace(layout, page_table_BP=layout.page_table_BP[: shape.num_rows])

            layout = replace(cut(layout), windows=tuple(map(cut, layout.windows)))

            def one_round(caches, tokens_T, layout, samples):
                hidden_TD, caches = decoder(layer, params, caches, tokens_T, layout, statics)

                def draw_from(samples: SampleInputs) -> StepOutput:
                    index_S = samples.packed_index_S
                    hidden_SD = jnp.where(
                        (index_S != INVALID)[:, None], hidden_TD[index_S], jnp.zeros((), hidden_TD.dtype)
                    )
                    logits_SV = unembed(params, hidden_SD, statics.config)
                    output = draw(logits_SV, samples, caches[0].tokens_MZ, layout.page_table_BP)
                    # Else each device keeps a part of the alternatives, and those of all rounds are put together.
                    output = jax.lax.with_sharding_constraint(output, whole)
                    # Where nothing is possible the last token is drawn, which must not be one of the padding.
                    return replace(output, tokens_SR=jnp.minimum(output.tokens_SR, statics.config.vocab_size - 1))

                if shape.decode:
                    return caches, draw_from(samples)
                output = sample_and_score(draw_from, samples, scores, max_logprobs)
                return caches, replace(output, pooled_BD=pool_rows(hidden_TD, embed_first_B, layout.cu_q_lens_B1))

            if shape.decode:
                most = self.max_rounds
                return run_rounds(one_round, caches, tokens_T, layout, samples, rounds, most, max_logprobs)
            return one_round(caches, tokens_T, layout, samples)

        out_shardings = (kv_cache.placement(self.caches), whole)
        options = COMPILER_OPTIONS.get(device.device_kind)
        program = jax.jit(step, donate_argnums=1, out_shardings=out_shardings, compiler_options=options)
        return program.trace(self.params, self.caches, *self.inputs(shape))

    def inputs(self, shape: StepShape) -> Any:
        """The schema of a step's arrays at one shape: tokens, layout, samples, rounds, scores, what to embed."""
        tokens, rows = shape.num_tokens, shape.num_rows
        per_token, per_row = np.zeros(tokens, np.int32), np.zeros(rows, np.int32)
        table, *tables = self.page_tables
        layout = BatchLayout(
            positions_T=per_token,
            destinations_T=per_token,
            page_table_BP=table,
            kv_lens_B=per_row,
            cu_q_lens_B1=np.zeros(rows + 1, np.int32),
            decode=shape.decode,
            windows=tuple(WindowLayout(per_token, table, per_row) for table in tables),
        )
        samples = default_samples(shape.num_samples, self.model.vocab_size)
        scores = None if shape.decode else default_scores(tokens)
        arrays = (per_token, layout, samples, default_rounds(rows), scores, default_embed(rows))
        return jax.tree.map(lambda array: self._whole(array.shape, array.dtype), arrays)

    def output(self, shape: StepShape) -> StepOutput:
        """The fields of a step's output; what stands in them is of no meaning."""
        drawn = jax.eval_shape(partial(StepOutput.empty, shape.num_samples, 1, self.max_logprobs))
        return drawn if shape.decode else replace(drawn, scores=drawn, pooled_BD=0)

    def page_table_widths(self, pool: int) -> tuple[int, ...]:
        """How many page ids a call may write, smallest first: a table that is small has no use for the largest."""
        small, large = PAGE_TABLE_WIDTHS
        return (small, large) if math.prod(self.page_tables[pool].shape) > small else (small,)

    def trace_page_programs(self) -> Mapping[PageProgram, jax.stages.Traced]:
        """The small programs that copy, poison, read and write the pages of each pool, and write its page table.

        All but "read" donate their first argument, the pool or the table.
        """
        whole, pages = sharding(self.mesh), self._whole((PAGE_COMMAND_WIDTH,), np.int32)
        write_ids = jax.jit(_write_page_ids, donate_argnums=0, out_shardings=whole)
        ends, start = self._whole((self.max_num_rows + 1,), np.int32), self._whole((), np.int32)
        programs: dict[PageProgram, jax.stages.Traced] = {}
        for pool, cache in enumerate(self.caches):
            content = self.cache_of(PAGE_COMMAND_WIDTH, pool)
            change = partial(jax.jit, donate_argnums=0, out_shardings=kv_cache.placement(cache))
            read = jax.jit(kv_cache.read_pages, out_shardings=kv_cache.placement(content))
            programs |= {
                (pool, "copy"): change(kv_cache.copy_pages).trace(cache, pages, pages),
                (pool, "poison"): change(kv_cache.poison_pages).trace(cache, pages),
                (pool, "read"): read.trace(cache, pages),
                (pool, "write"): change(kv_cache.write_pages).trace(cache, pages, content),
            }
            for width in self.page_table_widths(pool):
                ids = self._whole((width,), np.int32)
                programs[pool, width] = write_ids.trace(self.page_tables[pool], ends, ids, start)
        return programs

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(self.mesh))


def _write_page_ids(table_BP: jax.Array, cu_lens_B1: jax.Array, ids_X: jax.Array, start: jax.Array) -> jax.Array:
    """Write a piece of all rows' pages, of which it is the ids from `start` on, to their rows."""
    place_X = start + jnp.arange(ids_X.shape[0], dtype=jnp.int32)
    row_X = jnp.searchsorted(cu_lens_B1, place_X, side="right").astype(jnp.int32) - 1
    column_X = place_X - cu_lens_B1[row_X]
    row_X = jnp.where(place_X < cu_lens_B1[-1], row_X, table_BP.shape[0])  # behind the last: dropped
    return table_BP.at[row_X, column_X].set(ids_X, mode="drop")
