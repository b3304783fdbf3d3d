"""An LLM for asyncio programs: `AsyncLLM`.

    any event loop, any thread                 engine thread (engine_thread.py)
    submit(requests) -> Streams  -- inbox -->  engine.add
    async for updates in stream  <- mailbox -  engine.step(meanwhile=...): tokens become text while the device computes
    stream.cancel(), abort(id)   -- inbox -->  engine.abort, before the next step is planned

Every request ends: with a finish reason for each of its sequences, or with an error. What a slow reader has not taken
is merged, so that a stream never holds more than its own request's tokens.
"""

import asyncio
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
from jax.sharding import Mesh

from quire.async_llm.admission import Admission, Work
from quire.async_llm.engine_thread import EngineThread
from quire.async_llm.engines import Engines
from quire.async_llm.errors import DeadlineError, UnavailableError
from quire.async_llm.heartbeat import STALLED_AFTER_S
from quire.async_llm.observer import Observer
from quire.async_llm.open_streams import CHECK_EVERY_S, OpenStreams
from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream
from quire.async_llm.text_stream import TextStream
from quire.config import EngineConfig, EngineKnobs, ModelConfig, check_seconds, check_whole
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Version
from quire.core.stopping import Grammar
from quire.core.tenants import checked_weights
from quire.device.mesh import EngineMesh
from quire.embedding import Pooling, check_dimensions
from quire.engine.engine import Engine
from quire.field_error import FieldError, refuse_unknown_arguments
from quire.llm import LLM, Message, Prompt, plain
from quire.outputs import RequestOutput, embedding_of, request_output
from quire.text.tokenizer import Tokenizer

SHORT_TEXT_LEN = 4096
"""Characters of a prompt that are encoded at once; more of them would hold up the event loop, and go to a thread."""

MAX_WAITING = 1 << 31

STOPPING = "the engine is stopping"
NO_ORIGIN = Origin()


class AsyncLLM:
    """A model that generates for many tasks at once, on a thread of its own: `async with AsyncLLM(model) as llm`.

    Tasks of any event loop, in any thread, may use one `AsyncLLM` at the same time; their requests are batched. Every
    request ends with outputs or an error. A task that is cancelled takes its request with it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        mesh: Mesh | str | None = None,
        chat_template: str | Path | None = None,
        quiet: bool = False,
        max_waiting: int | None = None,
        **knobs: Unpack[EngineKnobs],
    ) -> None:
        """Have `model` loaded by `async with` or `start`; the arguments are those of `LLM`.

        `mesh="data=2,model=4"` is two engines, each with the model on four devices of its own, that share the requests.
        With `max_waiting`, a request that finds so many others waiting for their turn is refused with OverloadError;
        without, any number may wait.
        """
        open_llm = partial(LLM, model, revision=revision, chat_template=chat_template, quiet=quiet, **knobs)
        self._set_up([partial(open_llm, mesh=each) for each in engine_meshes(mesh)], _bounded(max_waiting), ())

    @classmethod
    def from_params(
        cls,
        model_config: ModelConfig,
        params: Any,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: Mesh | str | None = None,
        quiet: bool = False,
        max_waiting: int | None = None,
        **knobs: Unpack[EngineKnobs],
    ) -> "AsyncLLM":
        """Use weights that are already in this program, as `LLM.from_params` does."""
        open_llm = partial(LLM.from_params, model_config, params, tokenizer, quiet=quiet, **knobs)
        open_llms = [partial(open_llm, mesh=each) for each in engine_meshes(mesh)]
        return cls.from_factory(*open_llms, admission=_bounded(max_waiting))

    @classmethod
    def from_factory(
        cls, *open_llms: Callable[[], LLM], admission: Admission | None = None, observers: Sequence[Observer] = ()
    ) -> "AsyncLLM":
        """Use the LLM that a function returns. It is called on the engine's thread, which an engine belongs to.

        Several functions make as many engines of one model, which share the requests. `admission` bounds what waits, by
        requests and by tokens; `observers` are told of tokens, ends and steps.
        """
        if not open_llms:
            raise ValueError("from_factory needs a function that returns an LLM, or several of them")
        llm = cls.__new__(cls)
        llm._set_up(open_llms, admission or Admission(), observers)
        return llm

    def _set_up(
        self, open_llms: Sequence[Callable[[], LLM]], admission: Admission, observers: Sequence[Observer]
    ) -> None:
        self.admission = admission
        """Counts and bounds the requests that wait."""
        on_step = [observer.on_step for observer in observers]
        self.engines = Engines([EngineThread(open_llm, on_step) for open_llm in open_llms])
        """Who of them takes requests."""
        self._streams = OpenStreams(self.engines, admission, observers)
        for thread in self.engines.threads:
            weakref.finalize(self, thread.ask_to_stop).atexit = False  # somebody may forget to close it

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and be ready; raises what loading raises. `async with` does this."""
        self._streams.check_open()
        first, *others = self.engines.threads
        first.start()
        await asyncio.wrap_future(first.ready)  # what is wrong is said once, and what was compiled is kept for others
        for thread in others:
            thread.start()
        for thread in others:
            await asyncio.wrap_future(thread.ready)
        self.admission.num_rows = len(self.engines) * self.llm.engine.config.max_num_seqs
        self.engines.watch_pages()

    async def drain(self) -> None:
        """Take no more requests, and wait until those under way have ended."""
        self._streams.refuse("draining: no more requests are taken")
        await self._streams.wait_until_empty()

    async def drain_engine(self, engine: int) -> None:
        """Give one of several engines no more requests, and wait until those that it has have ended.

        `engines.resume(engine)` lets it go on. Weights that are set meanwhile are set there, too.
        """
        self.engines.drain(engine)
        await self._streams.wait_until_empty(engine)

    def end_all(self) -> None:
        """Take no more requests, and end those under way with UnavailableError. Any thread may call this."""
        self._streams.refuse(STOPPING)
        self._streams.end_all(lambda: UnavailableError(STOPPING))

    async def close(self) -> None:
        """End what runs, give weights and pages back, and end the thread. `async with` does this."""
        self.end_all()
        await asyncio.gather(*(asyncio.to_thread(thread.stop, STALLED_AFTER_S) for thread in self.engines.threads))

    async def __aenter__(self) -> "AsyncLLM":
        try:
            await self.start()
        except BaseException:
            for thread in self.engines.threads:
                thread.ask_to_stop()  # it may still load
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def llm(self) -> LLM:
        """The LLM underneath, once loaded, to read from; its methods belong to the engine's thread (see `call`).

        Of several, the one with the smallest pool: what it can run they all can.
        """
        if not self._is_loaded:
            raise UnavailableError("the model is not loaded: use `async with AsyncLLM(...)`, or `await llm.start()`")
        if len(self.engines) == 1:
            return self.engines.threads[0].llm
        return min((thread.llm for thread in self.engines.threads), key=lambda llm: llm.engine.max_request_len)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; an error if it has none."""
        return self.llm.tokenizer

    @property
    def _is_loaded(self) -> bool:
        readies = [thread.ready for thread in self.engines.threads]
        return all(ready.done() and ready.exception() is None for ready in readies)

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken."""
        return self._is_loaded and self._streams.is_open and self.engines.is_any_open

    @property
    def is_draining(self) -> bool:
        """Whether it was told to take no more requests, by `drain` or `close`."""
        return not self._streams.is_open

    @property
    def is_healthy(self) -> bool:
        """Whether every engine steps, or waits for something to do."""
        return not self.engines.silent

    @property
    def failure(self) -> Exception | None:
        """Why the engine will never step again: a process of its group is lost. None otherwise."""
        return next((thread.failure for thread in self.engines.threads if thread.failure), None)

    @property
    def beat_age_s(self) -> float:
        """Seconds since the engine's thread, or the most silent one, showed itself; 0 while the model is loaded."""
        return max(thread.heartbeat.age_s for thread in self.engines.threads) if self._is_loaded else 0.0

    @property
    def num_failed_steps(self) -> int:
        """Steps that raised an error."""
        return sum(thread.num_failed_steps for thread in self.engines.threads)

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def streams(self) -> list[Stream]:
        """Streams of the requests that have not ended."""
        return self._streams.all()

    # -- generating ---------------------------------------------------------------------------------------------------

    @refuse_unknown_arguments
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        group: str = "",
        tenant: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> RequestOutput:
        """Continue one prompt, text or token ids, to its end; `asyncio.gather` many of these to batch them.

        Without `params` the model's own defaults are used. Prefixes are found in the cache only under the same
        `cache_salt`. Tenants that wait are served in proportion to their weights (`set_tenant_weights`); without
        `tenant` it is the salt. Among requests of one tenant a higher `priority` runs first. Of several engines,
        requests of a `group` go to the same one.

        RequestError if the request is wrong, DeadlineError (a TimeoutError) if it has not ended after `timeout_s`
        seconds, OverloadError if too many wait, UnavailableError if the engine is closed or gone, GenerationError if it
        failed on this one. A request that `abort` ends returns what it has, with finish reason "abort".
        """
        request = await self._request(prompt, params, cache_salt, priority, group, tenant, request_id, stream=False)
        stream = await self._submit_one(request, timeout_s)
        try:
            texts = [update.text for update in await stream.read_all()]
        finally:
            stream.cancel()
        return request_output(stream.sequences, prompt=prompt if isinstance(prompt, str) else None, texts=texts)

    @refuse_unknown_arguments
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        group: str = "",
        tenant: str | None = None,
        timeout_s: float | None = None,
        request_id: str | None = None,
    ) -> TextStream:
        """Continue one prompt, handing out text as it becomes certain: `async for chunk in llm.stream(prompt)`.

        Leaving the loop, or cancelling its task, aborts the request. A slow reader gets larger chunks. The arguments
        and errors are those of `generate`; with `params.n` above 1, `chunk.index` says which sequence a chunk is of.
        """
        request_id = request_id or _new_id()

        async def submit() -> Stream:
            request = await self._request(prompt, params, cache_salt, priority, group, tenant, request_id, stream=True)
            return await self._submit_one(request, timeout_s)

        return TextStream(request_id, submit)

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RequestOutput:
        """Answer a conversation, rendered by the model's own chat template.

        `tools` and `chat_template_kwargs` are those of `LLM.chat`, `options` those of `generate`.
        """
        prompt = await self.chat_prompt(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return await self.generate(prompt, params, **options)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **options: Any,
    ) -> np.ndarray:
        """The embedding of one prompt, text or token ids, as `LLM.embed` makes it; `options` are those of `generate`.

        RuntimeError if `abort` ends it.
        """
        how = self.llm.embedding_config.changed(pooling, normalize)
        check_dimensions(dimensions, self.llm.model_config.hidden_size)
        output = await self.generate(prompt, SamplingParams(max_tokens=0, pooling=how.pooling), **options)
        return embedding_of(output, normalize=how.normalize, dimensions=dimensions)

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the answer begins: a prompt for `generate` and `stream`.

        `tools` and `chat_template_kwargs` are those of `LLM.chat`.
        """
        how = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        return await asyncio.to_thread(self.llm.chat_prompt, messages, **how)

    def abort(self, request_id: str) -> bool:
        """End a request before the next step; False if there is none. Any thread may call this.

        Its waiting `generate` or `stream` gets what was generated, with finish reason "abort".
        """
        stream = self._streams.get(request_id)
        if stream:
            self._streams.abort(stream)
        return stream is not None

    def abort_all(self) -> int:
        """Abort every request under way, and go on; returns how many there were. Any thread may call this."""
        streams = self.streams
        for stream in streams:
            self._streams.abort(stream)
        return len(streams)

    # -- between two steps --------------------------------------------------------------------------------------------

    async def call[T](
        self, function: Callable[[Engine], T], timeout_s: float | None = None, *, engine: int | None = None
    ) -> T:
        """Run `function(engine)` on the engine's thread between two steps, and return what it returns.

        All of the engine's methods may be used there but `add` and `step`. Requests stand still meanwhile. Of several
        engines one must be named, from 0 on; `call_all` runs it on each. TimeoutError if it has not ended after
        `timeout_s` seconds, UnavailableError if the engine is closed or gone.
        """
        if engine is None and len(self.engines) > 1:
            raise FieldError(f"there are {len(self.engines)} engines: name one, or use call_all", field="engine")
        self.engines.check_index(engine or 0)
        thread = self.engines.threads[engine or 0]
        future = asyncio.wrap_future(thread.call(function))
        try:
            async with asyncio.timeout(timeout_s):
                while not future.done():
                    await asyncio.wait([future], timeout=CHECK_EVERY_S)
                    if not future.done() and not thread.is_moving:
                        raise UnavailableError("the engine does not respond")
            return future.result()
        finally:
            future.cancel()

    async def call_all[T](self, function: Callable[[Engine], T], timeout_s: float | None = None) -> list[T]:
        """Run `function(engine)` on the thread of every engine, and return what each returns; see `call`.

        When it fails on some, the first error is raised once all have ended.
        """
        return await self._call_all([function] * len(self.engines), timeout_s)

    async def _call_all[T](
        self, functions: Sequence[Callable[[Engine], T]], timeout_s: float | None = None, *, changes: str | None = None
    ) -> list[T]:
        """`call_all`. Functions that change what the engines have in common leave out those on which they fail."""
        calls = (self.call(function, timeout_s, engine=i) for i, function in enumerate(functions))
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = [i for i, result in enumerate(results) if isinstance(result, BaseException)]
        if changes and len(failed) < len(results):
            for i in failed:
                self.engines.refuse(i, changes)
        for i in failed:
            raise results[i]  # pyright: ignore[reportGeneralTypeIssues]
        return results  # pyright: ignore[reportReturnType]

    async def sleep(self) -> None:
        """Give the memory of weights and pages back, of every engine, until `wake`. Requests stay, and wait."""
        await self._call_all([lambda engine: engine.sleep()] * len(self.engines), changes="it did not go to sleep")

    async def wake(self, params: Any = None, version: Version | None = None, *, copy: bool = True) -> None:
        """Go on after `sleep` with these weights; None for those of the model's file, as `LLM.wake` takes them."""
        llms = [thread.llm for thread in self.engines.threads]
        functions = [lambda engine, llm=llm: llm.wake(params, version, copy=copy) for llm in llms]
        await self._call_all(functions, changes="it did not wake")

    async def set_weights(
        self,
        params: Any,
        version: Version | None = None,
        running: Literal["keep", "recompute", "abort"] = "keep",
        *,
        copy: bool = True,
    ) -> int:
        """Compute with other weights of the same shape from the next step on, as `Engine.set_weights` does.

        Requests under way keep the KV they have, have it computed again, or are aborted; returns how many sequences
        were. Each token's version is in `CompletionOutput.weight_versions`. Several engines change each before its own
        next step; one on which it fails, though not on all, gets no more requests.
        """

        def change(engine: Engine) -> int:
            return len(engine.set_weights(params, version, running, copy=copy))

        return sum(await self._call_all([change] * len(self.engines), changes="its weights are older than the others'"))

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Share each engine among waiting tenants in proportion to these, from its next step on.

        Each is from 0.001 to 1,000. This replaces all weights: a tenant that is not named has the weight 1. It does
        not wait.
        """
        checked = checked_weights(weights)
        for thread in self.engines.threads:
            thread.call(lambda engine: engine.set_tenant_weights(checked))

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], *, timeout_s: float | None = None, grammar: Grammar | None = None
    ) -> list[Stream]:
        """Take requests, all or none, for the event loop that runs here; for those who make `Request`s themselves.

        `grammar` is what `Engine.compile_grammar` made of their `params.structured`; without it, it is compiled here.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        return self._streams.open(requests, self._works(requests, grammar), timeout_s, grammar)

    async def run_in_turns[T](
        self,
        requests: Sequence[Request],
        each: Callable[[Stream], T],
        *,
        timeout_s: float | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> list[T]:
        """Run many requests of one client, all or none, and return what `each` makes of every stream that has ended.

        Only as many are under way at once as keep all rows busy and leave the queue room for others; the rest takes no
        room there, and is not refused later. All of them have `timeout_s` seconds together.
        """
        works, loop, admission = self._works(requests), asyncio.get_running_loop(), self.admission
        deadline = None if timeout_s is None else loop.time() + timeout_s
        under_way: deque[Stream] = deque()
        done: list[T] = []
        with self._streams.turns():
            try:
                while len(done) < len(requests):
                    begin = len(done) + len(under_way)
                    # Twice the rows: what a step has ended is known here only while the next one runs. Others want
                    # to wait, too: they are left half of the room.
                    end = begin + int(
                        min(2 * admission.num_rows - len(under_way), max(admission.room_for(works[0].tenant) // 2, 1))
                    )
                    left = None if deadline is None else deadline - loop.time()
                    if left is not None and left <= 0:
                        raise DeadlineError
                    new = self._streams.open(
                        requests[begin:end], works[begin:end], left, None, is_admitted=begin > 0, in_turns=True
                    )
                    for stream in new:
                        stream.origin = origin
                    under_way += new
                    await under_way[0].read_all()
                    done.append(each(under_way.popleft()))
            finally:
                for stream in under_way:
                    stream.cancel()
        return done

    def _works(self, requests: Sequence[Request], grammar: Grammar | None = None) -> list[Work]:
        """What requests may come to; RequestError if one of them can never run."""
        engine, works = self._engine, []
        for request in requests:
            max_tokens, n = engine.check(request, grammar), request.params.n
            works.append(Work(request.id, n, len(request.prompt_token_ids) + n * max_tokens, request.tenant or ""))
        return works

    @property
    def _engine(self) -> Engine:
        """The engine, if it takes requests; else UnavailableError."""
        self._streams.check_open()
        engine = self.llm.engine
        if len(self.engines.silent) == len(self.engines):
            raise UnavailableError(self.engines.describe_hang() or "the engine does not respond")
        return engine

    async def _submit_one(self, request: Request, timeout_s: float | None) -> Stream:
        grammar, structured = None, request.params.structured
        if structured:
            compile_grammar = partial(self._engine.compile_grammar, structured, request.cache_salt, trusted=True)
            try:
                grammar = await asyncio.to_thread(compile_grammar)  # it may take seconds
            except ValueError as error:
                raise RequestError(str(error), field="structured", request_id=request.id) from None
        return self.submit([request], timeout_s=timeout_s, grammar=grammar)[0]

    async def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str,
        priority: int,
        group: str,
        tenant: str | None,
        request_id: str | None,
        *,
        stream: bool,
    ) -> Request:
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params={params!r} must be SamplingParams(...)", field="params")
        return Request(
            id=request_id or _new_id(),
            prompt_token_ids=tuple(await self._encode(prompt)),
            params=params or self.llm.default_params,
            priority=priority,
            cache_salt=cache_salt,
            group=group,
            tenant=tenant,
            stream=stream,
        )

    async def _encode(self, prompt: Any) -> Sequence[int]:
        """The token ids of one prompt; an array of them is as good as a list."""
        if isinstance(prompt, str):
            self._streams.check_open()
            encode = self.tokenizer.encode
            return encode(prompt) if len(prompt) <= SHORT_TEXT_LEN else await asyncio.to_thread(encode, prompt)
        token_ids = plain(prompt)
        is_list = isinstance(token_ids, Sequence) and not isinstance(token_ids, bytes)
        if not is_list or any(isinstance(entry, str | Sequence) for entry in token_ids):
            message = f"prompt={prompt!r} must be one text or one list of token ids; asyncio.gather several calls"
            raise RequestError(message, field="prompt")
        return [plain(token_id) for token_id in token_ids]


def engine_meshes(mesh: Mesh | str | None) -> Sequence[Mesh | EngineMesh | str | None]:
    """The mesh of each engine: several if a text has the axis `data`, else one."""
    num_engines = EngineConfig(mesh=mesh).num_engines if isinstance(mesh, str) else 1
    return [mesh] if num_engines == 1 else [EngineMesh(str(mesh), i) for i in range(num_engines)]


def _bounded(max_waiting: int | None) -> Admission:
    if max_waiting is None:
        return Admission()
    check_whole("max_waiting", max_waiting, 1, MAX_WAITING)
    return Admission(max_requests=max_waiting)


def _new_id() -> str:
    return uuid.uuid4().hex
