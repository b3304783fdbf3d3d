"""Makes the parts of an engine from its config: the pool, the scheduler, the packer, the runner, detokenizers."""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from jax.sharding import Mesh

from quire.config import MAX_EOS_IDS, EngineConfig, ModelConfig, WindowPoolSize
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.device import memory
from quire.device.runner import ModelRunner
from quire.engine.draft_model import DraftModel, naming_draft
from quire.engine.draft_packer import DraftPacker
from quire.engine.packer import Packer
from quire.engine.pool_size import (
    HOST_RESERVE,
    check_memory,
    host_pages,
    own_windows,
    pages_beside,
    pages_for_length,
    pages_of_row,
    pool_budget,
    pool_pages,
    sequences_that_fit,
)
from quire.engine.step_shapes import draft_shapes, step_shapes
from quire.machine import read_memory
from quire.recording.recorder import RecordingScheduler
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


class PoolSizes(NamedTuple):
    """How many pages an engine has, on the device and in host memory, and how large they are."""

    num_pages: int
    """Of the layers that see every position."""
    page_bytes: int
    windows: tuple[WindowPoolSize, ...] = ()
    """The pools of layers that see a window."""
    window_page_bytes: tuple[int, ...] = ()
    num_host_pages: int = 0
    """For the first pool; the others have theirs in the same proportion."""

    @property
    def all_pages(self) -> tuple[int, ...]:
        """Pages on the device of every pool."""
        return (self.num_pages, *(size.num_pages for size in self.windows))

    @property
    def all_host_pages(self) -> tuple[int, ...]:
        """Pages in host memory of every pool; () for none."""
        if not self.num_host_pages:
            return ()
        share = self.num_host_pages / self.num_pages
        return (self.num_host_pages, *(math.ceil(size.num_pages * share) for size in self.windows))

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages on the device."""
        return self._bytes_of(self.all_pages)

    @property
    def num_host_bytes(self) -> int:
        """Bytes of all pages in host memory."""
        return self._bytes_of(self.all_host_pages)

    def _bytes_of(self, pages: tuple[int, ...]) -> int:
        sizes = (self.page_bytes, *self.window_page_bytes)
        return sum(count * size for count, size in zip(pages, sizes, strict=False))


def end_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The token ids that end a sequence: the model's own, and those its tokenizer knows."""
    eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
    if len(eos_ids) > MAX_EOS_IDS or max(eos_ids, default=0) >= model.vocab_size:
        raise ValueError(f"end tokens {sorted(eos_ids)}: at most {MAX_EOS_IDS}, each below {model.vocab_size}")
    return eos_ids


def size_pool(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    mesh: Mesh,
    free_bytes: int,
    draft: ModelConfig | None = None,
) -> PoolSizes:
    """The pages on the device: as many as the config asks for, or as its budget holds; none yet in host memory.

    A default budget is a share of `free_bytes`, and as much more as an explicit `max_model_len` needs. A page of the
    first pool is one of the draft model's, too.
    """
    windows = own_windows(config, model, max_model_len)
    bytes_of = [
        memory.page_bytes(
            model,
            mesh=mesh,
            dtype=config.dtype,
            page_size=config.page_size,
            attention=config.attention,
            windows=windows,
            pool=pool,
        )
        for pool in range(len(windows) + 1)
    ]
    if draft is not None:
        sizes_of_draft = {"dtype": config.dtype, "page_size": config.page_size, "attention": config.attention}
        with naming_draft(str(config.draft)):
            bytes_of[0] += memory.page_bytes(draft, mesh=mesh, **sizes_of_draft)
    if config.num_pages:
        pages = pages_beside(config, config.num_pages, windows)
    else:
        budget = pool_budget(config, free_bytes, is_host_memory=memory.is_host_memory(mesh))
        sizes_of_pages = {"budget": budget, "page_bytes": bytes_of, "windows": windows}
        pages = pool_pages(config, max_model_len, **sizes_of_pages)
        pages = pages_for_length(config, max_model_len, pages, **sizes_of_pages)
    sizes = tuple(
        WindowPoolSize(window, count, min(pages_of_row(config, window), pages[0]))
        for window, count in zip(windows, pages[1:], strict=True)
    )
    return PoolSizes(pages[0], bytes_of[0], sizes, tuple(bytes_of[1:]))


def choose_pool(
    config: EngineConfig, model: ModelConfig, max_model_len: int, mesh: Mesh, draft: ModelConfig | None = None
) -> PoolSizes:
    """The pool that the config asks for, or that fits into the memory there is: engines share that of the host."""
    on_host, limit = memory.is_host_memory(mesh), read_memory()
    available = max(memory.available_host_bytes() - HOST_RESERVE, 0) // config.num_engines
    free = available if on_host else memory.available_bytes(mesh)
    within = f" beside {HOST_RESERVE >> 20} MiB for other things ({limit.limit / 2**30:.1f} GiB: {limit.source})"
    pool = size_pool(config, model, max_model_len, mesh, free, draft)
    knobs = ("num_pages", "memory_budget", "max_model_len")
    knob = next((name for name in knobs if getattr(config, name) is not None), "memory_budget")
    check_memory(knob, pool.num_pages, num_bytes=pool.num_bytes, available_bytes=free, within=within if on_host else "")
    if on_host:
        available -= pool.num_bytes
    with_windows = -(-pool.num_bytes // pool.num_pages)
    pool = pool._replace(
        num_host_pages=host_pages(config, pool.num_pages, page_bytes=with_windows, available_bytes=available)
    )
    check_memory(
        "num_host_pages",
        pool.num_host_pages,
        num_bytes=pool.num_host_bytes,
        available_bytes=available,
        within=within,
    )
    return pool


def describe_capacity(config: EngineConfig, pool: PoolSizes, max_model_len: int) -> str:
    """What fits in a pool, in words."""
    num_tokens = pool.num_pages * config.page_size
    longest = min(max_model_len, num_tokens)
    held = sequences_that_fit(longest, page_size=config.page_size, num_pages=pool.num_pages, windows=pool.windows)
    at_once = min(held, config.max_num_seqs)
    windows = "".join(f" + {size.num_pages:,} for windows of {size.window:,}" for size in pool.windows)
    return (
        f"pool {pool.num_pages:,} pages{windows} x {config.page_size} tokens = {num_tokens:,} tokens "
        f"({pool.num_bytes / 2**30:.2f} GiB); {at_once} request{'s' * (at_once != 1)} of {longest:,} at once"
    )


def scheduler_config(config: EngineConfig, pool: PoolSizes, draft_len: int = 0) -> SchedulerConfig:
    """What the scheduler of an engine is made from; `draft_len` is how many positions a draft model knows."""
    on_host = pool.all_host_pages or (0,) * (len(pool.windows) + 1)
    return SchedulerConfig(
        page_size=config.page_size,
        num_pages=pool.num_pages,
        num_host_pages=on_host[0],
        windows=pool.windows,
        window_host_pages=on_host[1:],
        prefix_cache=config.prefix_cache,
        poison_freed=config.debug,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_samples=config.max_num_samples,
        max_rounds=config.max_rounds,
        drafts=config.drafts,
        draft_len=draft_len,
        preemption=config.preemption,
    )


def build_scheduler(config: EngineConfig, pool: PoolSizes, draft: ModelConfig | None = None) -> Scheduler:
    """A scheduler over empty pools; it records what it decides if the config says so."""
    sizes = scheduler_config(config, pool, draft.max_len if draft else 0)
    if config.record is None:
        return sizes.build()
    return sizes.build(RecordingScheduler, path=config.record, config=sizes)


def build_packer(
    config: EngineConfig, pool: PoolSizes, eos_ids: Collection[int], *, has_draft: bool = False
) -> Packer | DraftPacker:
    """The packer that knows the shapes for which programs are compiled."""
    knobs = {"page_size": config.page_size, "debug": config.debug}
    packer = Packer(step_shapes(config), num_pages=pool.all_pages, eos_ids=eos_ids, **knobs)
    if not has_draft:
        return packer
    return DraftPacker(packer, Packer(draft_shapes(config), num_pages=pool.all_pages[:1], **knobs))


def build_runner(
    config: EngineConfig, pool: PoolSizes, model: ModelConfig, params: Any, max_model_len: int, mesh: Mesh
) -> ModelRunner:
    """A runner with weights and an empty KV cache, nothing compiled yet. Takes the arrays out of `params`."""
    return ModelRunner(
        model,
        params,
        mesh=mesh,
        shapes=step_shapes(config),
        max_logprobs=config.max_logprobs,
        max_rounds=config.max_rounds,
        windows=pool.windows,
        num_host_pages=pool.all_host_pages,
        quantize=config.quantize,
        **_runner_knobs(config, pool, max_model_len),
    )


def build_draft_runner(
    config: EngineConfig, pool: PoolSizes, draft: DraftModel, max_model_len: int, mesh: Mesh
) -> ModelRunner:
    """The same for a draft model, with a page for each of the target's first pool. Takes the arrays out of it."""
    with naming_draft(draft.name):
        return ModelRunner(
            draft.config,
            draft.params,
            mesh=mesh,
            shapes=draft_shapes(config),
            max_rounds=config.drafts,
            num_host_pages=pool.all_host_pages[:1],
            quantize=config.quantize_of_draft,
            **_runner_knobs(config, pool, max_model_len),
        )


def _runner_knobs(config: EngineConfig, pool: PoolSizes, max_model_len: int) -> dict[str, Any]:
    """What the runners of a model and of its draft model have in common."""
    return {
        "dtype": config.dtype,
        "num_pages": pool.num_pages,
        "page_size": config.page_size,
        "pages_per_row": min(-(-max_model_len // config.page_size), pool.num_pages),
        "attention": config.attention,
        "matmul": config.matmul,
        "fail_on_compile": config.fail_on_compile,
    }


def build_detokenizer(tokenizer: Tokenizer, params: SamplingParams, *, keeps_space: bool) -> Detokenizer:
    """What turns the tokens of one sequence into text, and finds its stop strings."""
    return Detokenizer(
        tokenizer,
        params.stop_strings,
        params.stop_sequences,
        params.min_tokens,
        keeps_space=keeps_space,
        skip_special=params.skip_special,
        include_stop=params.include_stop,
    )
