"""The engine: requests in, token events out, one step at a time.

`Engine.step` is the whole loop: schedule, pack, run, commit. An engine belongs to the thread that made it.
"""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from quire.batch import Packer, step_shapes
from quire.config import MAX_EOS_IDS, EngineConfig, ModelConfig
from quire.core.errors import RequestError
from quire.core.pages import PageAllocator
from quire.core.plan import StepPlan
from quire.core.scheduler import Scheduler
from quire.device.memory import default_pool_bytes
from quire.device.mesh import make_mesh
from quire.device.runner import ModelRunner, StepHandle
from quire.request import Request, Sequence, TokenEvent
from quire.text_stream import TextStream
from quire.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A reading of the engine, taken between two steps."""

    num_pages: int
    free_pages: int
    cached_pages: int
    """Pages that only the prefix cache holds."""
    held_pages: int
    """Pages that a sequence holds."""
    shared_pages: int
    """Pages with more than one holder."""
    max_refcount: int
    sum_refcounts: int
    running: int
    waiting: int
    steps: int
    preemptions: int
    prompt_tokens: int
    """Prompt tokens of every request added."""
    computed_tokens: int
    """Tokens put through the model, recomputed ones included."""
    generated_tokens: int
    programs: int
    compiles_after_warmup: int


def _owner_only(method: Callable) -> Callable:
    @wraps(method)
    def checked(self: "Engine", *args: Any, **kwargs: Any) -> Any:
        if not self.is_owned_here:
            raise RuntimeError(
                f"the engine was called from thread {threading.current_thread().name!r} (Engine.{method.__name__}) and "
                "belongs to the thread that made it: send requests there through a queue"
            )
        return method(self, *args, **kwargs)

    return checked


class Engine:
    """One model, one pool of pages, many requests."""

    def __init__(
        self,
        model: ModelConfig,
        params: Any,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model = model
        self.tokenizer = tokenizer
        self._owner = threading.get_ident()
        self.max_model_len = _max_model_len(config, model)
        mesh = mesh or make_mesh()
        num_pages = config.num_pages or _pages_in_budget(config, model, self.max_model_len, mesh)
        pages_per_row = min(-(-self.max_model_len // config.page_size), num_pages)
        shapes = step_shapes(config)
        self.scheduler = Scheduler(
            PageAllocator(num_pages),
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_samples=config.max_num_samples,
            poison_freed=config.debug,
        )
        self._packer = Packer(
            shapes,
            page_size=config.page_size,
            num_pages=num_pages,
            pages_per_row=pages_per_row,
            debug=config.debug,
        )
        self.runner = ModelRunner(
            model,
            params,
            mesh=mesh,
            dtype=config.dtype,
            num_pages=num_pages,
            page_size=config.page_size,
            pages_per_row=pages_per_row,
            shapes=shapes,
            attention=config.attention,
            fail_on_compile=config.fail_on_compile,
        )
        self.eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
        if len(self.eos_ids) > MAX_EOS_IDS or max(self.eos_ids, default=0) >= model.vocab_size:
            raise ValueError(f"end tokens {sorted(self.eos_ids)}: at most {MAX_EOS_IDS}, each below {model.vocab_size}")
        self._requests: dict[str, list[Sequence]] = {}
        """Those with a sequence alive."""
        self._to_abort: deque[str] = deque()
        self._num_arrived = self._steps = self._prompt_tokens = self._computed_tokens = self._generated_tokens = 0
        self.runner.warm_up(progress)

    @property
    def is_owned_here(self) -> bool:
        """Whether this is the thread that may call."""
        return threading.get_ident() == self._owner

    @property
    def capacity(self) -> str:
        """What fits in the pool, in words."""
        num_pages, page_size = self.scheduler.allocator.num_pages, self.config.page_size
        num_tokens = num_pages * page_size
        longest = min(self.max_model_len, num_tokens)
        num_bytes = num_tokens * self.model.kv_bytes_per_token(jnp.dtype(self.config.dtype).itemsize)
        at_once = min(num_tokens // longest, self.config.max_num_seqs)
        return (
            f"pool {num_pages:,} pages x {page_size} tokens = {num_tokens:,} tokens ({num_bytes / 2**30:.2f} GiB); "
            f"{at_once} request{'s' * (at_once != 1)} of {longest:,} at once"
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    @_owner_only
    def step(self) -> list[TokenEvent]:
        """Advance everything by one step; returns what happened, and nothing when there is nothing to do."""
        plan = self._schedule()
        if not plan:
            return []
        with self._surviving(plan):
            inputs = self._packer.pack(plan)
            handle = self.runner.run(inputs)
            return self._commit(plan, handle)

    def _schedule(self) -> StepPlan:
        while self._to_abort:
            self.abort(self._to_abort.popleft())
        return self.scheduler.schedule()

    @contextmanager
    def _surviving(self, plan: StepPlan) -> Iterator[None]:
        """Leave the engine whole when a step fails, and raise the error all the same.

        A step that never reached the device ends its own requests. One that failed there has taken the donated cache
        with it: what runs is recomputed, once. Ctrl-C in the middle of a step costs a recomputation and no request.
        """
        try:
            yield
        except BaseException as error:
            cache_survived, failed = self.runner.recover(), isinstance(error, Exception)
            if failed and cache_survived:
                self.scheduler.fail(plan)
            else:
                self.scheduler.recompute(failed=failed)
            self._forget_finished(row.sequence.request.id for row in plan.rows)
            raise

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # -- requests ------------------------------------------------------------------------------------------------

    @_owner_only
    def add(self, request: Request) -> list[Sequence]:
        """Admit a request; returns its sequences, or raises at once with the reason why it can never run."""
        max_tokens = self.check(request)
        params, tokenizer = request.params, self.tokenizer
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._num_arrived += 1
        text = tokenizer and TextStream(tokenizer, params.stop_strings, params.stop_sequences, params.min_tokens)
        sequences = [
            Sequence(
                request,
                index=index,
                arrival=self._num_arrived,
                seed=seed,
                max_tokens=max_tokens,
                eos_ids=self.eos_ids,
                text=text and text.sibling(),
            )
            for index in range(params.n)
        ]
        self._requests[request.id] = sequences  # before they are queued: from here on an abort finds them
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._prompt_tokens += len(request.prompt_token_ids)
        return sequences

    @_owner_only
    def check(self, request: Request) -> int:
        """Raise RequestError if a request can never run; returns how many tokens each sequence may generate."""
        if not isinstance(request, Request):
            raise RequestError(f"{request!r} must be a Request(id=..., prompt_token_ids=..., params=...)")
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use; give each request its own")
        if request.params.stop_strings and self.tokenizer is None:
            raise RequestError(f"request {request.id}: stop holds a string and there is no tokenizer; use token ids")
        for token_id in itertools.chain(request.params.stop_token_ids, *request.params.stop_sequences):
            if token_id >= self.model.vocab_size:
                raise RequestError(
                    f"request {request.id}: stop or stop_token_ids holds {token_id}, which is not below the "
                    f"vocabulary's {self.model.vocab_size}"
                )
        max_tokens = self._max_new_tokens(request)
        self.scheduler.check_fits(request.id, len(request.prompt_token_ids), max_tokens)
        return max_tokens

    def _max_new_tokens(self, request: Request) -> int:
        prompt_len, limit = len(request.prompt_token_ids), self.max_model_len
        if prompt_len == 0:
            raise RequestError(f"request {request.id}: the prompt is empty; give at least one token")
        for token_id in request.prompt_token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < self.model.vocab_size:
                raise RequestError(
                    f"request {request.id}: prompt token {token_id!r} is no token id (0 to {self.model.vocab_size - 1})"
                )
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            # What fits: in the model's length, and in the pool (the last token drawn needs no place there).
            in_pool = self.runner.num_pages * self.runner.page_size + 1
            max_tokens = min(limit, in_pool) - prompt_len
            if max_tokens < max(request.params.min_tokens, 1):
                raise RequestError(
                    f"request {request.id}: a prompt of {prompt_len} tokens leaves {max(max_tokens, 0)} for new ones: "
                    f"max_model_len={limit}, and the pool has {in_pool - 1} tokens; shorten it or raise these"
                )
        if prompt_len + max_tokens > limit:
            fixes = ["shorten the prompt"] + ["lower max_tokens"] * (max_tokens > 0)
            fixes += ["raise max_model_len"] * (limit < self.model.max_len)
            raise RequestError(
                f"request {request.id}: a prompt of {prompt_len} tokens + max_tokens={max_tokens} is more than "
                f"max_model_len={limit}; {' or '.join(fixes)}"
            )
        return max_tokens

    @_owner_only
    def abort(self, request_id: str) -> int:
        """End every sequence of a request now; returns how many were still alive."""
        return sum(self.scheduler.abort(sequence) for sequence in self._requests.pop(request_id, ()))

    def abort_soon(self, request_id: str) -> None:
        """The same before the next step; the one call that any thread may make."""
        self._to_abort.append(request_id)

    @_owner_only
    def reset(self) -> int:
        """Abort everything, logically: no page is touched, whatever the pool's size. Returns how many ended."""
        self._requests.clear()
        return self.scheduler.reset()

    # -- sight ---------------------------------------------------------------------------------------------------

    @_owner_only
    def stats(self) -> EngineStats:
        """A reading of pages, sequences and programs."""
        allocator = self.scheduler.allocator
        refcounts = allocator.refcounts
        return EngineStats(
            num_pages=allocator.num_pages,
            free_pages=allocator.num_free,
            cached_pages=0,
            held_pages=allocator.num_pages - allocator.num_free,
            shared_pages=int(np.count_nonzero(refcounts > 1)),
            max_refcount=int(refcounts.max()),
            sum_refcounts=int(refcounts.sum()),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            steps=self._steps,
            preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            generated_tokens=self._generated_tokens,
            programs=self.runner.num_programs,
            compiles_after_warmup=self.runner.num_compiles,
        )

    @_owner_only
    def audit(self) -> None:
        """Check every page and every sequence; raises AuditError on the first broken invariant."""
        self.scheduler.audit()

    def _commit(self, plan: StepPlan, handle: StepHandle) -> list[TokenEvent]:
        """Wait for a step, let the scheduler judge it, keep count."""
        events = self.scheduler.commit(plan, handle.result())
        self._steps += 1
        self._computed_tokens += plan.num_tokens
        self._generated_tokens += sum(len(event.token_ids) for event in events)
        self._forget_finished(event.sequence.request.id for event in events if event.finish_reason)
        if self.config.debug:
            self.scheduler.audit()
        return events

    def _forget_finished(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if all(sequence.finish_reason for sequence in self._requests.get(request_id, ())):
                self._requests.pop(request_id, None)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_len
    if config.max_model_len > model.max_len:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's own {model.max_len}")
    return config.max_model_len


def _pages_in_budget(config: EngineConfig, model: ModelConfig, max_model_len: int, mesh: Mesh) -> int:
    """As many pages as the budget holds, and no more than every row at full length could use."""
    page_bytes = config.page_size * model.kv_bytes_per_token(jnp.dtype(config.dtype).itemsize)
    budget = config.memory_budget or default_pool_bytes(mesh)
    useful = config.max_num_seqs * -(-max_model_len // config.page_size)
    pages = min(budget // page_bytes, useful)
    # Compiled programs know the pool's size: on a coarse grid, the next start finds the same ones in the cache.
    pages -= pages % (1 << max(pages.bit_length() - 4, 0))
    if pages < 1:
        raise ValueError(
            f"memory_budget={budget:,} bytes holds no page of {page_bytes:,} bytes; raise it or lower page_size"
        )
    return pages
