"""The engine: requests in, token events out, one step at a time.

`Engine.step` is the whole loop: schedule, pack, run, commit. An engine belongs to the thread that made it.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import wraps
from typing import Any, Literal, Protocol

from jax.sharding import Mesh

from quire.config import MAX_EOS_IDS, EngineConfig, ModelConfig
from quire.core.audit import audit, pool_stats
from quire.core.errors import RequestError
from quire.core.page_map import PageMap, page_map
from quire.core.page_tables import PageTables
from quire.core.pages import PageAllocator
from quire.core.plan import StepPlan, StepResult
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, TokenEvent, Version
from quire.core.stopping import Grammar
from quire.device import memory
from quire.device.inputs import StepInputs
from quire.device.mesh import make_mesh
from quire.device.runner import ModelRunner
from quire.engine.packer import Packer, step_shapes
from quire.engine.pool_size import default_pool_bytes, host_pages, pool_pages
from quire.engine.stats import EngineStats, Progress, StepTimer
from quire.structured.compiler import GrammarCompiler
from quire.structured.form import Structured
from quire.text.detokenizer import TextStream
from quire.text.tokenizer import Tokenizer


class Handle(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for it."""
        ...


class Runner(Protocol):
    """The one door to device state: a `ModelRunner`, or `quire.testing.FakeRunner` where there is no device."""

    seconds_per_move: float
    pages_per_move: int
    num_compiles: int
    notes: tuple[str, ...]
    """What a person should know at start, each in one sentence."""

    @property
    def num_programs(self) -> int:
        """Programs that are ready."""
        ...

    def run(self, inputs: StepInputs) -> Handle:
        """Dispatch one step."""
        ...

    def recover(self) -> bool:
        """After a failed step: whether the cache survived it."""
        ...

    def set_weights(self, params: Any) -> None:
        """Compute with these from the next step on."""
        ...

    def zero(self) -> None:
        """Clear every page."""
        ...


_log = logging.getLogger("quire")

SMOOTHING = 0.1
"""How much the newest step counts in the measured cost of a token."""


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
        runner: Runner | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Compile every program and be ready. `runner` replaces the device, for tests; `clock` the time."""
        self.config = config = config or EngineConfig()
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = _max_model_len(config, model)
        self.eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer else frozenset())
        if len(self.eos_ids) > MAX_EOS_IDS or max(self.eos_ids, default=0) >= model.vocab_size:
            raise ValueError(f"end tokens {sorted(self.eos_ids)}: at most {MAX_EOS_IDS}, each below {model.vocab_size}")
        self._grammars = GrammarCompiler(tokenizer, model.vocab_size, self.eos_ids) if tokenizer else None
        self._owner = threading.get_ident()
        self._timer = StepTimer(clock)
        mesh = mesh or make_mesh()
        kv_layout = {"dtype": config.dtype, "page_size": config.page_size, "attention": config.attention}
        self._page_bytes = page_bytes = memory.page_bytes(model, mesh=mesh, **kv_layout)
        budget = default_pool_bytes(memory.available_bytes(mesh), is_host_memory=memory.is_host_memory(mesh))
        num_pages = config.num_pages or pool_pages(
            config, self.max_model_len, page_bytes=page_bytes, default_budget=budget
        )
        available = memory.available_host_bytes()
        num_host_pages = host_pages(config, num_pages, page_bytes=page_bytes, available_bytes=available)
        pages_per_row = min(-(-self.max_model_len // config.page_size), num_pages)
        shapes = step_shapes(config)
        tables = PageTables(
            PageAllocator(num_pages),
            page_size=config.page_size,
            host=PageAllocator(num_host_pages) if num_host_pages else None,
            prefix_cache=config.prefix_cache,
            poison_freed=config.debug,
        )
        self.scheduler = Scheduler(
            tables,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_samples=config.max_num_samples,
            max_rounds=config.max_rounds,
            preemption=config.preemption,
        )
        self._packer = Packer(
            shapes,
            page_size=config.page_size,
            num_pages=num_pages,
            pages_per_row=pages_per_row,
            debug=config.debug,
        )
        if runner is None:
            runner = ModelRunner(
                model,
                params,
                mesh=mesh,
                dtype=config.dtype,
                num_pages=num_pages,
                page_size=config.page_size,
                pages_per_row=pages_per_row,
                shapes=shapes,
                max_rounds=config.max_rounds,
                num_host_pages=num_host_pages,
                attention=config.attention,
                matmul=config.matmul,
                quantize=config.quantize,
                fail_on_compile=config.fail_on_compile,
            )
            runner.warm_up(progress)
        self.runner = runner
        self.scheduler.costs.seconds_per_move = runner.seconds_per_move
        self.scheduler.costs.pages_per_move = runner.pages_per_move
        self._requests: dict[str, list[Sequence]] = {}
        """Those with a sequence alive."""
        self._to_abort: deque[str] = deque()
        self._num_arrived = self._steps = self._prompt_tokens = self._computed_tokens = self._generated_tokens = 0
        self._page_copies = self._rounds = self._rows = 0
        self._logged: EngineStats | None = None
        self._logged_at = 0.0

    @property
    def is_owned_here(self) -> bool:
        """Whether this is the thread that may call."""
        return threading.get_ident() == self._owner

    @property
    def capacity(self) -> str:
        """What fits in the pool, in words."""
        num_pages, page_size = self.scheduler.tables.allocator.num_pages, self.config.page_size
        num_tokens = num_pages * page_size
        longest = min(self.max_model_len, num_tokens)
        num_bytes = num_pages * self._page_bytes
        at_once = min(num_tokens // longest, self.config.max_num_seqs)
        return (
            f"pool {num_pages:,} pages x {page_size} tokens = {num_tokens:,} tokens ({num_bytes / 2**30:.2f} GiB); "
            f"{at_once} request{'s' * (at_once != 1)} of {longest:,} at once"
        )

    # -- the loop ------------------------------------------------------------------------------------------------

    @_owner_only
    def step(self, meanwhile: Callable[[], object] | None = None) -> list[TokenEvent]:
        """Advance everything by one step; returns what happened, and nothing when there is nothing to do.

        `meanwhile` is called while the device computes: there is the time to deliver what the last step returned. What
        it raises is raised once the step is committed.
        """
        timer = self._timer
        timer.start()
        plan = self._schedule()
        if not plan:
            if meanwhile:
                meanwhile()
            return []
        with self._surviving(plan):
            inputs = self._packer.pack(plan)
            timer.lap("plan_s")
            handle = self.runner.run(inputs)
            timer.lap("dispatch_s")
            error = _caught(meanwhile) if meanwhile else None
            result = handle.result()
            self._learn_cost(plan, timer.lap("wait_s"))
            events = self._commit(plan, result)
            timer.lap("output_s")
        if error:
            raise error
        return events

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
            self._forget_finished(list(self._requests))
            raise

    def _learn_cost(self, plan: StepPlan, seconds: float) -> None:
        """Learn from steps with prompts in them what computing a token costs: that decides how to preempt."""
        if plan.num_tokens > 2 * len(plan.rows):
            costs, now = self.scheduler.costs, seconds / plan.num_tokens
            before = now if costs.seconds_per_token is None else costs.seconds_per_token
            costs.seconds_per_token = before + SMOOTHING * (now - before)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # -- requests ------------------------------------------------------------------------------------------------

    @_owner_only
    def add(self, request: Request, grammar: Grammar | None = None) -> list[Sequence]:
        """Admit a request; returns its sequences, or raises at once with the reason why it can never run.

        `grammar` is what `compile_grammar` made of `params.structured`; without it this thread does so, and trusts it.
        """
        max_tokens = self._check(request)
        params, tokenizer = request.params, self.tokenizer
        grammar = grammar or self._grammar(request)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        self._num_arrived += 1
        text = tokenizer and TextStream(
            tokenizer,
            params.stop_strings,
            params.stop_sequences,
            params.min_tokens,
            keeps_space=grammar is not None,
            skip_special=params.skip_special,
            include_stop=params.include_stop,
        )
        first = Sequence(
            request,
            index=0,
            arrival=self._num_arrived,
            seed=seed,
            max_tokens=max_tokens,
            eos_ids=self.eos_ids,
            text=text,
            grammar=grammar,
        )
        if first.mask is not None and not first.mask.any():
            raise RequestError(
                f"request {request.id}: what structured allows has no beginning that ignore_eos={params.ignore_eos}, "
                f"min_tokens={params.min_tokens} and stop_token_ids leave; lower these"
            )
        for _ in range(params.n - 1):
            first.fork()
        self._requests[request.id] = first.family  # before they are queued: from here on an abort finds them
        self.scheduler.add(first)
        self._prompt_tokens += len(request.prompt_token_ids)
        return list(first.family)

    @_owner_only
    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence of the same request that goes on from the last committed token of this one.

        It draws with an index of its own, shares every full page while this one runs, and ends or is aborted alone.
        """
        if not isinstance(sequence, Sequence):
            raise RequestError(f"{sequence!r} must be a Sequence, as add() returns them")
        if sequence not in self._requests.get(sequence.request.id, ()):
            raise RequestError(f"sequence {sequence.name} is not alive in this engine")
        return self.scheduler.fork(sequence)

    def check(self, request: Request) -> int:
        """Raise RequestError if a request can never run; returns how many tokens each sequence may generate.

        It only looks: any thread may call it.
        """
        max_tokens = self._check(request)
        self._grammar(request)
        return max_tokens

    def compile_grammar(self, structured: Structured, salt: str = "", *, trusted: bool = False) -> Grammar:
        """What constrains a sequence to a form, for `add`. Any thread may call this, and it may take seconds.

        Compiled forms are kept, for requests of the same salt. One that is not trusted is tried in a process of its own
        first. ValueError if it cannot be compiled, or takes too much.
        """
        if self._grammars is None:
            raise ValueError(f"{structured.name} constrains text and there is no tokenizer")
        return self._grammars.compile(structured, salt, trusted=trusted)

    def _grammar(self, request: Request) -> Grammar | None:
        structured = request.params.structured
        try:
            return structured and self.compile_grammar(structured, request.cache_salt, trusted=True)
        except ValueError as error:
            raise RequestError(f"request {request.id}: {error}") from None

    def _check(self, request: Request) -> int:
        if not isinstance(request, Request):
            raise RequestError(f"{request!r} must be a Request(id=..., prompt_token_ids=..., params=...)")
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use; give each request its own")
        if request.params.stop_strings and self.tokenizer is None:
            raise RequestError(f"request {request.id}: stop holds a string and there is no tokenizer; use token ids")
        params = request.params
        for token_id in itertools.chain(params.stop_token_ids, params.logit_bias, *params.stop_sequences):
            if token_id >= self.model.vocab_size:
                raise RequestError(
                    f"request {request.id}: stop, stop_token_ids or logit_bias holds {token_id}, which is not below "
                    f"the vocabulary's {self.model.vocab_size}"
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
            tables = self.scheduler.tables
            in_pool = tables.allocator.num_pages * tables.page_size + 1
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
    def abort(self, target: str | Sequence) -> int:
        """End a sequence, or every sequence of a request, now; returns how many were still alive.

        They end without an event: their `finish_reason` says so.
        """
        if not isinstance(target, str | Sequence):
            raise ValueError(f"{target!r} must be a request id or a sequence")
        if isinstance(target, Sequence):
            if target not in self._requests.get(target.request.id, ()):
                return 0
            ended = int(self.scheduler.abort(target))
            self._forget_finished([target.request.id])
            return ended
        ended = sum(self.scheduler.abort(sequence) for sequence in list(self._requests.get(target, ())))
        self._forget(target)
        return ended

    def abort_soon(self, request_id: str) -> None:
        """The same before the next step; any thread may call it."""
        self._to_abort.append(request_id)

    @_owner_only
    def reset(self) -> int:
        """Abort everything, logically: no page is touched, whatever the pool's size. Returns how many ended."""
        ended = self.scheduler.reset()
        for request_id in list(self._requests):
            self._forget(request_id)
        return ended

    # -- weights and pages ---------------------------------------------------------------------------------------

    @_owner_only
    def set_weights(
        self, params: Any, version: Version, running: Literal["keep", "recompute", "abort"] = "keep"
    ) -> list[Sequence]:
        """Compute with other weights of the same shape from the next step on; nothing is compiled or rebuilt.

        A version is what you call these weights: it is on every token. Pages of other weights are never found again,
        whatever they were called. Requests that have begun keep the KV they have, have all of it computed again, or
        are aborted (their sequences are returned). The arrays are copied: a training step may go on and donate its own.
        """
        if running not in ("keep", "recompute", "abort"):
            raise ValueError(f"running={running!r} must be keep, recompute or abort")
        version = version.item() if hasattr(version, "item") else version  # pyright: ignore
        if isinstance(version, bool) or not isinstance(version, int | str):
            raise ValueError(f"version={version!r} must be a whole number or a string")
        self.runner.set_weights(params)
        aborted = self.scheduler.set_version(version, running)
        self._forget_finished(sequence.request.id for sequence in aborted)
        return aborted

    @_owner_only
    def clear_prefix_cache(self) -> int:
        """Forget every cached page that no sequence holds; returns how many."""
        return self.scheduler.tables.evict(self.scheduler.tables.num_cached)

    @_owner_only
    def zero_cache(self) -> None:
        """Overwrite every page on the device with zeros. Nothing needs this: pages are masked, never cleared."""
        if self.scheduler.running:
            raise RuntimeError(f"{len(self.scheduler.running)} sequences hold pages; abort them, or reset() first")
        self.scheduler.lose_pending_swaps()
        self.clear_prefix_cache()
        self.runner.zero()

    # -- sight ---------------------------------------------------------------------------------------------------

    @_owner_only
    def stats(self) -> EngineStats:
        """A reading of pages, sequences and programs."""
        scheduler, tables = self.scheduler, self.scheduler.tables
        swapped = sum(bool(sequence.host_pages) for sequence in scheduler.waiting)
        return EngineStats(
            **asdict(pool_stats(scheduler)),
            num_pages=tables.allocator.num_pages,
            num_host_pages=tables.host.num_pages if tables.host else 0,
            free_host_pages=tables.host.num_free if tables.host else 0,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting - swapped,
            swapped=swapped,
            steps=self._steps,
            rounds=self._rounds,
            preemptions=scheduler.num_preemptions,
            recomputes=scheduler.num_recomputes,
            swaps=scheduler.num_swaps,
            evictions=tables.prefix_cache.num_evictions if tables.prefix_cache else 0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            computed_tokens=self._computed_tokens,
            generated_tokens=self._generated_tokens,
            page_copies=self._page_copies,
            weight_version=tables.weights.version,
            programs=self.runner.num_programs,
            compiles_after_warmup=self.runner.num_compiles,
            timing=self._timer.read(),
        )

    @property
    def progress(self) -> Progress:
        """The sums of `stats` that every step moves, without looking at any page."""
        generated, timing = self._generated_tokens, self._timer.read()
        return Progress(self._steps, self._rounds, self._rows, self._computed_tokens, generated, timing)

    @_owner_only
    def audit(self) -> None:
        """Check every page and every sequence; raises AuditError on the first broken invariant."""
        audit(self.scheduler)

    @_owner_only
    def page_map(self) -> PageMap:
        """Owner, refcount, fill, hash and tier of every page; `print` draws it."""
        return page_map(self.scheduler)

    def _commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Let the scheduler judge what a step produced, and keep count."""
        events = self.scheduler.commit(plan, result)
        num_rounds = max((len(event.token_ids) for event in events), default=1)
        self._steps += 1
        self._rounds += num_rounds
        self._rows += len(plan.rows)
        self._computed_tokens += plan.num_tokens
        if num_rounds > 1:
            self._computed_tokens += sum(len(event.token_ids) - 1 for event in events)
        self._page_copies += len(plan.operations.copies)
        self._generated_tokens += sum(len(event.token_ids) for event in events)
        self._forget_finished(event.sequence.request.id for event in events if event.finish_reason)
        if self.config.debug:
            audit(self.scheduler)
        if self.config.log_timing:
            self._log_timing()
        return events

    def _log_timing(self) -> None:
        """A line a second: how fast, and where the time goes."""
        seconds = time.perf_counter() - self._logged_at
        if seconds >= 1:
            stats, before = self.stats(), self._logged
            if before:
                tokens, rounds = stats.generated_tokens - before.generated_tokens, stats.rounds - before.rounds
                per_step = rounds / max(stats.steps - before.steps, 1)
                _log.info(
                    f"{tokens / seconds:.0f} tokens/s, {stats.running} running, {stats.waiting} waiting, "
                    f"{per_step:.1f} rounds a step; {stats.timing - before.timing}"
                )
            self._logged, self._logged_at = stats, time.perf_counter()

    def _forget_finished(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if all(sequence.finish_reason for sequence in self._requests.get(request_id, ())):
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """A request is over. Its family is taken apart: members that know each other would wait for the collector."""
        self._requests.pop(request_id, []).clear()


def _caught(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_len
    if config.max_model_len > model.max_len:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's own {model.max_len}")
    return config.max_model_len
