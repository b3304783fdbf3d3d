"""The engine: requests in, token events out, one step at a time.

`Engine.step` is the whole loop: schedule, pack, run, commit. An engine belongs to the thread that made it.
"""

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

from jax.sharding import Mesh

from quire.config import EngineConfig, ModelConfig
from quire.core.audit import audit, pool_stats
from quire.core.commit import allowed_tokens
from quire.core.errors import RequestError
from quire.core.page_map import PageMap, page_map
from quire.core.plan import StepPlan, StepResult
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence, SequenceState, TokenEvent, Version
from quire.core.stopping import Grammar
from quire.device.mesh import mesh_of
from quire.distributed.leader import Leader
from quire.distributed.leader_runner import LeaderRunner
from quire.engine.build import (
    PoolSizes,
    build_detokenizer,
    build_draft_runner,
    build_packer,
    build_runner,
    build_scheduler,
    choose_pool,
    describe_capacity,
    end_tokens,
)
from quire.engine.draft_model import DraftModel, check_draft
from quire.engine.drafting_runner import DraftingRunner
from quire.engine.ownership import between_steps, owner_only
from quire.engine.pace import Pace
from quire.engine.runner import Runner
from quire.engine.stats import EngineStats, Progress, StepCounters, StepTimer, TimingLog
from quire.engine.validation import RequestValidator, max_model_len
from quire.field_error import FieldError
from quire.structured.compiler import GrammarCompiler
from quire.structured.form import Structured
from quire.text.tokenizer import Tokenizer


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
        pool: PoolSizes | None = None,
        group: Leader | None = None,
        draft: DraftModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Compile every program and be ready. With `group`, in all of its processes. `draft` guesses ahead.

        For tests, `runner` replaces the device, `pool` the sizes that are chosen for it, and `clock` the time.
        """
        self.config = config = config or EngineConfig()
        if config.num_processes > 1 and group is None:
            message = f"num_processes={config.num_processes}: a group is made by LLM(...), and here is none"
            raise FieldError(message, field="num_processes")
        if config.draft is not None and draft is None:
            message = f"draft={config.draft!r}: a draft model is loaded by LLM(...), and here is none"
            raise FieldError(message, field="draft")
        if draft is not None:
            check_draft(draft, model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len(config.max_model_len, model)
        self.eos_ids = end_tokens(model, tokenizer)
        self._owner, self.pid = threading.get_ident(), os.getpid()
        self.is_busy = False
        """Whether a call is under way: whoever gets in between, such as a destructor, must not change anything."""
        self.is_closed = False
        self.is_asleep = False
        """Between `sleep` and `wake`: requests are taken, and none advances."""
        mesh = mesh or mesh_of(config.mesh)
        draft_config = draft.config if draft else None
        self._pool = pool or choose_pool(config, model, self.max_model_len, mesh, draft_config)
        self.scheduler = build_scheduler(config, self._pool, draft_config)
        self._packer = build_packer(config, self._pool, self.eos_ids, has_draft=draft is not None)
        if runner is None:
            if group:
                group.send("start", self._pool)  # every process builds a runner
            own = build_runner(config, self._pool, model, params, self.max_model_len, mesh)
            own.warm_up(progress)
            runner = LeaderRunner(group, own) if group else own
            if draft is not None:
                runner = self._with_draft(runner, draft, mesh, progress)
        self.runner = runner
        self.growth_bytes = runner.growth_bytes
        """Bytes that this host's memory can still grow by, beyond what is occupied now that the engine is ready."""
        self.scheduler.costs.seconds_per_move = runner.seconds_per_move
        self.scheduler.costs.pages_per_move = runner.pages_per_move
        self._validator = RequestValidator(
            model,
            self.scheduler.tables,
            max_model_len=self.max_model_len,
            max_logprobs=config.max_logprobs,
            has_tokenizer=tokenizer is not None,
        )
        self._grammars = GrammarCompiler(tokenizer, model.vocab_size, self.eos_ids) if tokenizer else None
        self._requests: dict[str, list[Sequence]] = {}
        """The families of requests that have a sequence alive."""
        self._to_abort: deque[str] = deque()
        self._undelivered: list[TokenEvent] = []
        """Events of a step whose `meanwhile` raised."""
        self.failed_requests: list[str] = []
        """Ids of the requests that the last step held, if it failed."""
        self._num_arrived = self._prompt_tokens = 0
        self._last_number = 0
        """The highest version of weights that was a number."""
        self.pace = Pace(is_cpu=mesh.devices.flat[0].platform == "cpu")
        """Measures dispatches, and says how long the one in flight should take. Any thread may look."""
        self._timer, self._counters, self._timing_log = StepTimer(clock), StepCounters(), TimingLog()

    def _with_draft(self, target: Runner, draft: DraftModel, mesh: Mesh, progress: Any) -> Runner:
        guessing = build_draft_runner(self.config, self._pool, draft, self.max_model_len, mesh)
        guessing.warm_up(progress)
        return DraftingRunner(target, guessing, draft.load, min(self.model.vocab_size, draft.config.vocab_size))

    def __repr__(self) -> str:
        model, scheduler = self.model, self.scheduler
        kind = f"{model.architecture}, {model.num_layers} layers, {self.config.quantize or self.config.dtype}"
        return f"<Engine {kind}: {len(scheduler.running)} running, {scheduler.num_waiting} waiting; {self.capacity}>"

    @property
    def is_owned_here(self) -> bool:
        """Whether this is the thread that may call."""
        return threading.get_ident() == self._owner and os.getpid() == self.pid

    @property
    def failure(self) -> Exception | None:
        """Why no step will ever run again: a process of its group is lost. None otherwise. Any thread may look."""
        return self.runner.failure

    @property
    def max_request_len(self) -> int:
        """Tokens of one sequence at most: `max_model_len`, or what the pool holds."""
        return min(self.max_model_len, self._pool.num_pages * self.config.page_size)

    @property
    def capacity(self) -> str:
        """What fits in the pool, in words."""
        return describe_capacity(self.config, self._pool, self.max_model_len)

    # -- the loop ------------------------------------------------------------------------------------------------

    @owner_only
    def step(self, meanwhile: Callable[[], object] | None = None) -> list[TokenEvent]:
        """Advance everything by one step; returns what happened, and nothing when there is nothing to do.

        `meanwhile` is called while the device computes: there is the time to deliver what the last step returned. What
        it raises is raised once the step is committed; the events of that step then come with those of the next.
        """
        self._check_awake()
        self.failed_requests = []
        timer = self._timer
        timer.start()
        plan = self._schedule()
        if not plan:
            if meanwhile:
                meanwhile()
            return self._take_undelivered()
        with self._surviving(plan):
            inputs = self._packer.pack(plan)
            timer.lap("plan_s")
            self.pace.begin(plan)
            handle = self.runner.run(inputs)
            timer.lap("dispatch_s")
            error = _caught(meanwhile) if meanwhile else None
            result = handle.result()
            seconds = timer.lap("wait_s")
            if plan.has_long_prompts:
                self.scheduler.costs.learn(seconds, plan.num_tokens)
            events = self._commit(plan, result)
            timer.lap("output_s")
        events = [*self._take_undelivered(), *events]
        if error:
            self._undelivered = events
            raise error
        return events

    def _take_undelivered(self) -> list[TokenEvent]:
        events, self._undelivered = self._undelivered, []
        return events

    def _schedule(self) -> StepPlan:
        self._abort_those_asked_for()
        return self.scheduler.schedule()

    def _abort_those_asked_for(self) -> None:
        while self._to_abort:
            self.abort(self._to_abort.popleft())

    @contextmanager
    def _surviving(self, plan: StepPlan) -> Iterator[None]:
        """Leave the engine whole when a step fails, and raise the error all the same.

        A step that never reached the device ends its own requests. One that failed there has taken the donated cache
        with it: what runs is recomputed, once. Ctrl-C in the middle of a step costs a recomputation and no request.
        """
        try:
            yield
        except BaseException as error:
            # A panic of a Rust library is not an Exception, and has failed all the same.
            self.pace.end()
            self.failed_requests = list(dict.fromkeys(row.sequence.request.id for row in plan.rows))
            cache_survived, failed = False, not isinstance(error, KeyboardInterrupt | SystemExit)
            try:
                cache_survived = self.runner.recover()
            finally:  # though there be no memory for another cache
                if failed and cache_survived:
                    self.scheduler.fail(plan)
                else:
                    self.scheduler.recompute(failed=failed)
                self._forget_finished(list(self._requests))
            raise

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or has something left to tell."""
        has_sequences = self.scheduler.running or self.scheduler.waiting
        return not self.is_asleep and bool(has_sequences or self._undelivered)

    # -- requests ------------------------------------------------------------------------------------------------

    @owner_only
    def add(self, request: Request, grammar: Grammar | None = None) -> list[Sequence]:
        """Admit a request; returns its sequences, or raises at once with the reason why it can never run.

        `grammar` is what `compile_grammar` made of `params.structured`; without it this thread does so, and trusts it.
        """
        max_tokens = self._max_tokens(request)
        self._abort_those_asked_for()  # who asked meant what had the id until now
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use; give each request its own", field="request_id")
        params, grammar = request.params, grammar or self._grammar(request)
        self._num_arrived += 1
        seed = secrets.randbits(64) if params.seed is None else params.seed
        first = self._build_sequence(
            request, grammar, index=0, arrival=self._num_arrived, seed=seed, max_tokens=max_tokens
        )
        if grammar is not None:
            first.mask = allowed_tokens(first, grammar, grammar.mask())
            if not first.mask.any():
                raise RequestError(
                    f"what structured allows has no beginning that ignore_eos={params.ignore_eos}, "
                    f"min_tokens={params.min_tokens} and stop_token_ids leave; lower these",
                    field="structured",
                    request_id=request.id,
                )
        for _ in range(params.n - 1):
            first.fork()
        self._requests[request.id] = first.family  # before they are queued: from here on an abort finds them
        self.scheduler.add(first)
        self._prompt_tokens += len(request.prompt_token_ids)
        return list(first.family)

    def _build_sequence(self, request: Request, grammar: Grammar | None, **place: int) -> Sequence:
        detokenizer = self.tokenizer and build_detokenizer(
            self.tokenizer, request.params, keeps_space=grammar is not None
        )
        return Sequence(request, eos_ids=self.eos_ids, detokenizer=detokenizer, grammar=grammar, **place)

    @owner_only
    def fork(
        self, sequence: Sequence, params: SamplingParams | None = None, token_ids: SequenceOf[int] = ()
    ) -> Sequence:
        """Another sequence of the same request that goes on from the last committed token of this one.

        It draws with an index of its own, shares every full page while this one runs, and ends or is aborted alone.

        With `params` it is a sequence that has had these from the beginning: the parent's tokens count in `max_tokens`,
        and are of the form that `structured` asks for. A seed of None is the parent's. `token_ids` are forced: they
        stand behind the parent's tokens in its output, and are scored when `logprobs` is asked for. RequestError if any
        of these tokens would end it, or may not be there.
        """
        if not isinstance(sequence, Sequence):
            raise RequestError(f"{sequence!r} must be a Sequence, as add() returns them")
        if sequence not in self._requests.get(sequence.request.id, ()):
            raise RequestError(f"sequence {sequence.name} is not alive in this engine")
        token_ids = self._validator.forced_tokens(token_ids, sequence.request.id)
        changed = None if params is None else self._with_params(sequence, params)
        return self.scheduler.fork(sequence, changed, token_ids)

    def _with_params(self, sequence: Sequence, params: SamplingParams) -> Sequence:
        """A sequence without tokens in the next place of a family, with other parameters."""
        if not isinstance(params, SamplingParams) or params.n != 1:
            message = f"params={params!r} must be SamplingParams(...) with n=1: a fork is one sequence"
            raise RequestError(message, field="params", request_id=sequence.request.id)
        request = replace(sequence.request, params=params)
        return self._build_sequence(
            request,
            self._grammar(request),
            index=sequence.family[0].next_index,
            arrival=sequence.arrival,
            seed=sequence.seed if params.seed is None else params.seed,
            max_tokens=self._validator.max_tokens(request),
        )

    @owner_only
    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Share rows and tokens among waiting tenants in proportion to these from the next step on.

        Each is from 0.001 to 1,000. This replaces all weights: a tenant that is not named has the weight 1.
        """
        self.scheduler.set_tenant_weights(weights)

    def check(self, request: Request, grammar: Grammar | None = None) -> int:
        """Raise RequestError if a request can never run; returns how many tokens each sequence may generate.

        It only reads: any thread may call it. `grammar` is what `compile_grammar` made of `params.structured`; without
        it, it is compiled here, which may take seconds.
        """
        max_tokens = self._max_tokens(request)
        if grammar is None:
            self._grammar(request)
        return max_tokens

    def _max_tokens(self, request: Request) -> int:
        self._check_open()
        return self._validator.max_tokens(request)

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the engine is closed")

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise RuntimeError("the engine sleeps, and has no weights: wake it with some")

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
            raise RequestError(str(error), field="structured", request_id=request.id) from None

    @owner_only
    def abort(self, target: str | Sequence) -> int:
        """End a sequence, or every sequence of a request, now; returns how many were still alive.

        They end without an event: their `finish_reason` says so.
        """
        if not isinstance(target, str | Sequence):
            raise ValueError(f"{target!r} must be a request id or a sequence")
        events = self._undelivered
        self._undelivered = [e for e in events if target not in (e.sequence, e.sequence.request.id)]
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
        """Abort a request before the next step is planned; any thread may call this."""
        self._to_abort.append(request_id)

    def abort_now_or_soon(self, request_id: str) -> None:
        """Abort a request now if this is the engine's thread and no call is under way, else before the next step.

        For what may happen anywhere at any moment: a destructor runs in whichever thread collects garbage.
        """
        if self.is_owned_here and not self.is_busy:
            self.abort(request_id)
        else:
            self.abort_soon(request_id)

    @between_steps
    def reset(self) -> int:
        """Abort everything, logically: no page is touched, whatever the pool's size. Returns how many ended."""
        ended = self.scheduler.reset()
        self._undelivered = []
        for request_id in list(self._requests):
            self._forget(request_id)
        return ended

    @between_steps
    def close(self) -> None:
        """Abort everything and give back weights, pages and programs; no request is taken afterwards.

        What is closed already stays so.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.reset()
        self.scheduler.close()
        self.runner.close()

    # -- weights and pages ---------------------------------------------------------------------------------------

    @property
    @owner_only
    def params(self) -> Any:
        """The weights in the layout of docs/weights.md. Copies, made each time: keep them, change them, donate them.

        ValueError with quantize, which does not keep what it was made from.
        """
        self._check_open()
        self._check_awake()
        return self.runner.get_weights()

    @between_steps
    def set_weights(
        self,
        params: Any,
        version: Version | None = None,
        running: Literal["keep", "recompute", "abort"] = "keep",
        *,
        copy: bool = True,
    ) -> list[Sequence]:
        """Compute with other weights of the same shape from the next step on; no step is compiled again.

        `params` is a tree as in docs/weights.md, in the engine's type or a wider float, which is rounded, or maps
        Hugging Face names to arrays of any float type.
        A version is what you call these weights, by default the next number: it is on every token. Pages of
        other weights are never found again, whatever they were called. Requests that have begun keep the KV they have,
        have all of it computed again, or are aborted (their sequences are returned). The arrays are copied: a training
        step may go on and donate its own. With `copy=False` those that the engine can compute with as they are stay
        where they are, and must not be donated before the next change. A draft model keeps its own.
        """
        self._check_open()
        self._check_awake()
        if running not in ("keep", "recompute", "abort"):
            raise ValueError(f"running={running!r} must be keep, recompute or abort")
        if version is None:
            version = self._last_number + 1
        version = version.item() if hasattr(version, "item") else version  # pyright: ignore
        if isinstance(version, bool) or not isinstance(version, int | str):
            raise ValueError(f"version={version!r} must be a whole number or a string")
        self.runner.set_weights(params, copy=copy)
        if isinstance(version, int):
            self._last_number = max(self._last_number, version)
        aborted = self.scheduler.set_version(version, running)
        self._forget_finished(sequence.request.id for sequence in aborted)
        return aborted

    @between_steps
    def sleep(self) -> None:
        """Give the memory of weights and pages back and keep the programs, until `wake`.

        Requests stay, and so do the tokens they have; `wake` has their KV computed again. More may be added meanwhile.
        """
        self._check_open()
        if not self.is_asleep:
            self.scheduler.lose_pages()
            self.is_asleep = True  # from here on: Ctrl-C in what follows leaves it asleep, and it may be repeated
            self.runner.sleep()

    @between_steps
    def wake(self, params: Any, version: Version | None = None, *, copy: bool = True) -> None:
        """Go on after `sleep`, with weights as `set_weights` takes them. No step is compiled again.

        When these are refused, or there is no memory for them, the engine stays asleep.
        """
        self._check_open()
        if not self.is_asleep:
            raise RuntimeError("the engine is awake: set_weights changes its weights")
        self.is_asleep = False
        try:
            self.set_weights(params, version, "recompute", copy=copy)
            self.runner.wake()
        except BaseException:
            self.runner.sleep()
            self.is_asleep = True
            raise

    @owner_only
    def clear_prefix_cache(self) -> int:
        """Forget every cached page that no sequence holds; returns how many."""
        return self.scheduler.clear_prefix_cache()

    @between_steps
    def zero_cache(self) -> None:
        """Overwrite every page on the device with zeros. Nothing needs this: pages are masked, never cleared."""
        self._check_open()
        self._check_awake()
        if self.scheduler.running:
            raise RuntimeError(f"{len(self.scheduler.running)} sequences hold pages; abort them, or reset() first")
        self.scheduler.lose_pending_swaps()
        self.clear_prefix_cache()
        self.runner.zero()

    # -- state ---------------------------------------------------------------------------------------------------

    @owner_only
    def stats(self) -> EngineStats:
        """A reading of pages, sequences and programs."""
        scheduler, tables, counters = self.scheduler, self.scheduler.tables, self._counters
        hosts = [pool.host for pool in tables.pools if pool.host]
        swapped = sum(bool(sequence.host_pages) for sequence in scheduler.waiting)
        return EngineStats(
            **asdict(pool_stats(scheduler)),
            num_pages=sum(pool.allocator.num_pages for pool in tables.pools),
            num_host_pages=sum(host.num_pages for host in hosts),
            free_host_pages=sum(host.num_free for host in hosts),
            running=len(scheduler.running),
            waiting=scheduler.num_waiting - swapped,
            swapped=swapped,
            steps=counters.steps,
            rounds=counters.rounds,
            preemptions=scheduler.num_preemptions,
            recomputes=scheduler.num_recomputes,
            swaps=scheduler.num_swaps,
            evictions=sum(pool.prefix_cache.num_evictions for pool in tables.pools if pool.prefix_cache),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            drafted_tokens=scheduler.drafted_tokens,
            accepted_drafts=scheduler.accepted_drafts,
            not_finite=counters.not_finite,
            page_copies=counters.page_copies,
            weight_version=tables.weights.version,
            programs=self.runner.num_programs,
            compiles_after_warmup=self.runner.num_compiles,
            timing=self._timer.read(),
        )

    @property
    def progress(self) -> Progress:
        """The sums of `stats` that every step moves, without looking at any page."""
        done = self._counters
        tokens = (done.computed_tokens, done.generated_tokens)
        return Progress(done.steps, done.rounds, done.rows, *tokens, self._timer.read())

    @owner_only
    def audit(self) -> None:
        """Check every page and every sequence; raises AuditError on the first broken invariant."""
        audit(self.scheduler)

    @owner_only
    def page_map(self) -> PageMap:
        """Owner, refcount, fill, hash and tier of every page; `print` draws it."""
        return page_map(self.scheduler)

    def _commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Let the scheduler judge what a step produced, and keep count."""
        is_whole = all(row.sequence.state is SequenceState.RUNNING for row in plan.rows)  # nothing aborted in flight
        events = self.scheduler.commit(plan, result)
        rounds = self._counters.count(plan, events)
        self.pace.end(rounds if is_whole else 0)  # the rounds of what was aborted are not known
        self._forget_finished(event.sequence.request.id for event in events if event.finish_reason)
        if self.config.debug:
            audit(self.scheduler)
        if self.config.log_timing:
            self._timing_log.maybe_log(self.stats)
        return events

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
