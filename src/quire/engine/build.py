"""Makes the parts of an engine from its config: the pool, the scheduler, the packer, the runner, detokenizers."""

from collections.abc import Collection
from typing import Any, NamedTuple

from jax.sharding import Mesh

from quire.config import MAX_EOS_IDS, EngineConfig, ModelConfig
from quire.core.page_tables import PageTables
from quire.core.pages import PageAllocator
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.device import memory
from quire.device.runner import ModelRunner
from quire.engine.packer import Packer
from quire.engine.pool_size import default_pool_bytes, host_pages, pool_pages
from quire.engine.step_shapes import step_shapes
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


class Pool(NamedTuple):
    """How many pages an engine has, on the device and in host memory, and how large one is."""

    num_pages: int
    num_host_pages: int
    page_bytes: int


def end_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The token ids that end a sequence: the model's own, and those its tokenizer knows."""
    eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
    if len(eos_ids) > MAX_EOS_IDS or max(eos_ids, default=0) >= model.vocab_size:
        raise ValueError(f"end tokens {sorted(eos_ids)}: at most {MAX_EOS_IDS}, each below {model.vocab_size}")
    return eos_ids


def choose_pool(config: EngineConfig, model: ModelConfig, max_model_len: int, mesh: Mesh) -> Pool:
    """The pool that the config asks for, or that fits into the memory there is."""
    page_bytes = memory.page_bytes(
        model, mesh=mesh, dtype=config.dtype, page_size=config.page_size, attention=config.attention
    )
    budget = default_pool_bytes(memory.available_bytes(mesh), is_host_memory=memory.is_host_memory(mesh))
    num_pages = config.num_pages or pool_pages(config, max_model_len, page_bytes=page_bytes, default_budget=budget)
    available = memory.available_host_bytes()
    num_host_pages = host_pages(config, num_pages, page_bytes=page_bytes, available_bytes=available)
    return Pool(num_pages, num_host_pages, page_bytes)


def describe_capacity(config: EngineConfig, pool: Pool, max_model_len: int) -> str:
    """What fits in a pool, in words."""
    num_tokens = pool.num_pages * config.page_size
    longest = min(max_model_len, num_tokens)
    at_once = min(num_tokens // longest, config.max_num_seqs)
    size = pool.num_pages * pool.page_bytes / 2**30
    return (
        f"pool {pool.num_pages:,} pages x {config.page_size} tokens = {num_tokens:,} tokens ({size:.2f} GiB); "
        f"{at_once} request{'s' * (at_once != 1)} of {longest:,} at once"
    )


def build_scheduler(config: EngineConfig, pool: Pool) -> Scheduler:
    """A scheduler over an empty pool."""
    tables = PageTables(
        PageAllocator(pool.num_pages),
        page_size=config.page_size,
        host=PageAllocator(pool.num_host_pages) if pool.num_host_pages else None,
        prefix_cache=config.prefix_cache,
        poison_freed=config.debug,
    )
    return Scheduler(
        tables,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_samples=config.max_num_samples,
        max_rounds=config.max_rounds,
        preemption=config.preemption,
    )


def build_packer(config: EngineConfig, pool: Pool, eos_ids: Collection[int]) -> Packer:
    """The packer that knows the shapes for which programs are compiled."""
    sizes = {"page_size": config.page_size, "num_pages": pool.num_pages}
    return Packer(step_shapes(config), **sizes, eos_ids=eos_ids, debug=config.debug)


def build_runner(
    config: EngineConfig, pool: Pool, model: ModelConfig, params: Any, max_model_len: int, mesh: Mesh
) -> ModelRunner:
    """A runner with weights and an empty KV cache, nothing compiled yet. Takes the arrays out of `params`."""
    return ModelRunner(
        model,
        params,
        mesh=mesh,
        dtype=config.dtype,
        num_pages=pool.num_pages,
        page_size=config.page_size,
        pages_per_row=min(-(-max_model_len // config.page_size), pool.num_pages),
        shapes=step_shapes(config),
        max_rounds=config.max_rounds,
        num_host_pages=pool.num_host_pages,
        attention=config.attention,
        matmul=config.matmul,
        quantize=config.quantize,
        fail_on_compile=config.fail_on_compile,
    )


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
