"""What HTTP and gRPC have in common: one model, its tokenizer, its bridge, and how a request gets in."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.core.stopping import Grammar
from quire.server.admission import OverloadError
from quire.server.async_engine import Bridge
from quire.server.errors import ApiError
from quire.server.stream import Stream
from quire.structured.form import Structured
from quire.text.tokenizer import Tokenizer

NUM_THREADS = 2
ASIDE_TIMEOUT_S = 10.0
"""For a prompt to be encoded, a template rendered or a grammar compiled."""
MAX_ASIDE = 256
"""Such jobs, running and waiting."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a tenant by the hash of a key, or anybody."""

    tenant: str = ""

    def salt(self, asked: str) -> str:
        """What keeps this tenant's prefixes from others', and apart by what the caller asked for."""
        return hashlib.sha256(f"{self.tenant}\0{asked}".encode()).hexdigest() if self.tenant or asked else ""


class Service:
    """One model behind every protocol."""

    def __init__(self, bridge: Bridge, model_name: str, started_at: int, max_priority: int = 0) -> None:
        self.bridge = bridge
        self.model_name = model_name
        self.started_at = started_at
        self.max_priority = max_priority
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="aside")
        self._num_aside = 0
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; an error for a client if it has none."""
        if self.bridge.llm.engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: send token ids instead of text", code="no_tokenizer")
        return self.bridge.llm.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        return self.bridge.llm.engine.max_model_len

    def check_model(self, name: str | None) -> None:
        """Only one model is here."""
        if name is not None and name != self.model_name:
            message = f"the model {name!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_arrival(self, model_name: str | None) -> None:
        """Before a prompt is read: whether anybody could be answered."""
        self.check_model(model_name)
        self.bridge.admission.check_room()

    async def aside[T](self, function: Callable[..., T], *args: Any) -> T:
        """Run something slow off the event loop, for a bounded time and with a bounded queue."""
        if self._num_aside >= MAX_ASIDE:
            raise OverloadError("too many prompts are being read", retry_after_s=1)
        with self._lock:
            self._num_aside += 1
        job = self._threads.submit(function, *args)
        job.add_done_callback(self._end_aside)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), ASIDE_TIMEOUT_S)
        except TimeoutError:
            if job.cancelled():  # it never began
                raise OverloadError("too many prompts are being read", retry_after_s=5) from None
            raise ApiError(400, f"reading the request took more than {ASIDE_TIMEOUT_S:g} s", code="too_slow") from None

    def _end_aside(self, _: object) -> None:
        with self._lock:
            self._num_aside -= 1

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text that may be long."""
        return await self.aside(self.encode_here, text, add_special)

    def encode_here(self, text: str, add_special: bool = True, param: str = "prompt") -> list[int]:
        """The same on this thread."""
        tokenizer = self.tokenizer
        if len(text) > self.max_model_len * tokenizer.longest_piece:
            message = f"{param}: {len(text):,} characters cannot fit into max_model_len={self.max_model_len} tokens"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return tokenizer.encode(text, add_special)

    async def compile(self, structured: Structured | None, salt: str) -> Grammar | None:
        """A grammar for what an answer must look like; compiled ones are kept for callers of the same salt."""
        if structured is None:
            return None
        return await self.aside(self.bridge.llm.engine.compile_grammar, structured, salt)

    def cancel(self, streams: Sequence[Stream]) -> None:
        """End what has not ended."""
        for stream in streams:
            stream.cancel()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
