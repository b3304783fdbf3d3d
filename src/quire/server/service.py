"""What HTTP and gRPC have in common: one model, its tokenizer, its bridge, and how a request gets in."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.request import Request
from quire.server.bridge import Bridge, Stream
from quire.server.errors import ApiError
from quire.tokenizer import Tokenizer

NUM_HELPERS = 2
HELP_TIMEOUT_S = 10.0
"""For a prompt to be encoded, a template rendered or a grammar compiled."""
MAX_HELP_WAITING = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a tenant by the hash of a key, or anybody."""

    tenant: str = ""

    def salt(self, asked: str) -> str:
        """What keeps this tenant's prefixes from others', and apart by what the caller asked for."""
        return hashlib.sha256(f"{self.tenant}\0{asked}".encode()).hexdigest() if self.tenant or asked else ""


class Service:
    """One model behind every protocol."""

    def __init__(self, bridge: Bridge, model_name: str, started_at: int) -> None:
        self.bridge = bridge
        self.model_name = model_name
        self.started_at = started_at
        self._helpers = ThreadPoolExecutor(NUM_HELPERS, thread_name_prefix="helper")
        self._num_helping = 0

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

    async def help[T](self, function: Callable[..., T], *args: Any) -> T:
        """Run something slow off the event loop, for a bounded time and with a bounded queue."""
        if self._num_helping >= MAX_HELP_WAITING:
            raise ApiError(429, "too many prompts are being read", code="overloaded", headers={"Retry-After": "1"})
        self._num_helping += 1
        future = asyncio.get_running_loop().run_in_executor(self._helpers, function, *args)
        future.add_done_callback(lambda _: self._finish_help())
        try:
            return await asyncio.wait_for(asyncio.shield(future), HELP_TIMEOUT_S)
        except TimeoutError:
            raise ApiError(400, f"reading the request took more than {HELP_TIMEOUT_S:g} s", code="too_slow") from None

    def _finish_help(self) -> None:
        self._num_helping -= 1

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text that may be long."""
        tokenizer = self.tokenizer
        if len(text) > self.max_model_len * tokenizer.longest_piece:
            raise ApiError(
                400,
                f"prompt: {len(text):,} characters cannot fit into max_model_len={self.max_model_len} tokens",
                param="prompt",
                code="context_length_exceeded",
            )
        return await self.help(tokenizer.encode, text, add_special)

    async def compile(self, structured: Any) -> Any:
        """A grammar for what an answer must look like."""
        return await self.help(self.bridge.llm.engine.compile_grammar, structured)

    def submit(self, requests: Sequence[Request], timeout_s: float | None, grammar: Any = None) -> list[Stream]:
        """All of them, or none and an error. Whoever calls this calls `cancel` in the end."""
        streams: list[Stream] = []
        try:
            for request in requests:
                streams.append(self.bridge.submit(request, timeout_s=timeout_s, grammar=grammar))
        except BaseException:
            self.cancel(streams)
            raise
        return streams

    def cancel(self, streams: Sequence[Stream]) -> None:
        """End what has not ended."""
        for stream in streams:
            stream.cancel()

    def close(self) -> None:
        """End the helpers."""
        self._helpers.shutdown(wait=False, cancel_futures=True)
