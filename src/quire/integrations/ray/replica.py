"""One engine as a replica of Ray Serve: the server's own application, called by an ingress instead of a socket."""

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from starlette.types import Message

from quire.async_llm import AsyncLLM
from quire.async_llm.admission import Admission
from quire.config import EngineKnobs
from quire.core.prefix_cache import PrefixCache
from quire.engine.engine import Engine
from quire.integrations.ray.forwarded import NAME_BYTES, ForwardedRequest, ResponseStart
from quire.llm import LLM
from quire.server.access import AccessLog
from quire.server.config import ServerConfig
from quire.server.http.routes import Api
from quire.server.keys import Keys
from quire.server.observe.metrics import Metrics
from quire.server.serve import SWITCH_S
from quire.server.service import Service

MAX_REPORTED_PAGES = 4096
"""Of an engine, to routers: those in use, then the most recently used ones. 32 KB."""
REPORT_TIMEOUT_S = 2.0


class EngineReplica:
    """An engine with OpenAI's routes. Serve makes one for each replica, and asks it how it is."""

    async def __init__(
        self,
        model: str,
        revision: str | None,
        model_name: str,
        config: ServerConfig,
        keys: Keys,
        knobs: EngineKnobs,
    ) -> None:
        """Load the model; Serve sends requests once this is done."""
        sys.setswitchinterval(SWITCH_S)
        metrics = Metrics()
        self._engine = AsyncLLM.from_factory(
            partial(LLM, model, revision=revision, quiet=True, **knobs),
            admission=Admission(
                max_requests=config.max_queued_requests,
                max_tokens=config.max_queued_tokens,
                find_client=keys.find_tenant,
            ),
            observers=[metrics],
        )
        await self._engine.start()
        metrics.watch(self._engine, model_name)
        service = Service(self._engine, model_name, int(time.time()), config.max_priority)
        access = AccessLog("off", metrics.count_request)  # the ingress logs each request
        self._app = Api(service, config, metrics, access=access).app(keys)

    async def handle(self, request: ForwardedRequest) -> AsyncIterator[ResponseStart | bytes]:
        """The response of the server's application: its head, then its body in pieces, as they come."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()  # of one response: bounded by its request's tokens
        running = asyncio.create_task(self._app(_scope(request), _receive(request.body), messages.put))
        running.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while message := await messages.get():
                if message["type"] == "http.response.start":
                    yield ResponseStart(message["status"], list(message["headers"]))
                    continue
                body = message.get("body", b"")
                while not messages.empty() and (message := messages.get_nowait()):
                    body += message.get("body", b"")  # to send one piece to another process costs as much as many
                if body:
                    yield body
                if message is None:
                    break
            await running  # raises what it raised
        finally:
            running.cancel()  # nobody waits for it any more: its sequences end

    # -- what Serve asks ----------------------------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise an error if the engine does not step: Serve replaces the replica."""
        if not self._engine.is_healthy:
            raise RuntimeError("the engine does not respond")

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers know of this engine: the names of its cached pages, and its load."""
        pages = await self._engine.call(_page_names, REPORT_TIMEOUT_S)
        return {
            "pages": pages,
            "num_requests": self._engine.num_streams,
            "queued_tokens": self._queued_tokens,
            "has_room": self._engine.admission.room > 0,
            "is_ready": self._engine.is_ready,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas depends on."""
        return {"queued_tokens": float(self._queued_tokens)}

    @property
    def _queued_tokens(self) -> int:
        """Tokens of the requests that are here, waiting or running, which are still to be computed, at most."""
        engine, total = self._engine.llm.engine, 0
        for stream in self._engine.streams:
            prompt, params = len(stream.request.prompt_token_ids), stream.request.params
            most = engine.max_request_len - prompt if params.max_tokens is None else params.max_tokens
            total += max(params.n * most - stream.num_output_tokens, 0)
            total += 0 if stream.num_output_tokens else prompt
        return total


def _page_names(engine: Engine) -> bytes:
    """The names of cached pages, one after another."""
    cache = engine.scheduler.tables.pool.prefix_cache
    if cache is None:
        return b""
    names = itertools.chain(_names_in_use(engine, cache), map(cache.hash_of, reversed(cache.idle_pages)))
    return b"".join(name[:NAME_BYTES] for name in itertools.islice(names, MAX_REPORTED_PAGES) if name)


def _names_in_use(engine: Engine, cache: PrefixCache) -> Iterator[bytes]:
    for sequence in engine.scheduler.running:
        for name in sequence.page_hashes:
            if cache.page_of(name) is None:
                break  # nothing behind it is published either
            yield name


def _scope(request: ForwardedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": request.query,
        "headers": request.headers,
    }


def _receive(body: bytes) -> Any:
    """The body at once; then the client stays, until `handle` is cancelled."""
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await asyncio.Future()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
