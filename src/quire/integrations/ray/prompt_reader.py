"""Which pages the prompt of an HTTP request has, told without an engine: what an ingress routes by."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from quire.async_llm.admission import Admission
from quire.async_llm.errors import OverloadError
from quire.checkpoint.load import find_model, load_tokenizer, read_config
from quire.config import EngineConfig, EngineKnobs
from quire.core.sampling_params import SamplingParams
from quire.integrations.ray.forwarded import NAME_BYTES
from quire.routing import prompt_hashes
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.parse import parse_chat, parse_completion
from quire.server.openai.request_body import BodyReader
from quire.server.openai.responses import parse_response
from quire.server.service import Service

MAX_PAGES = 4096
"""Of a prompt's beginning, that are named."""
PARSERS: dict[str, tuple[type, Any]] = {
    "/v1/completions": (schema.CompletionRequest, parse_completion),
    "/v1/chat/completions": (schema.ChatRequest, parse_chat),
    "/v1/responses": (schema.ResponsesRequest, parse_response),
}


class PromptReader:
    """Reads requests as the engines' own server does, with the same tokenizer and template."""

    def __init__(
        self, model: str, revision: str | None, model_name: str, knobs: EngineKnobs, max_priority: int
    ) -> None:
        path = find_model(model, revision, quiet=True)
        max_len = knobs.get("max_model_len") or read_config(path).max_len
        self._service = _service(path, model_name, max_len, max_priority)
        self._page_size = EngineConfig(**knobs).page_size
        self._bodies = BodyReader(strict=False)

    async def read(self, path: str, body: bytes, caller: Caller) -> tuple[tuple[bytes, ...], int]:
        """The names of the prompt's pages, and the tokens that the request may come to; none of what is no request."""
        if path not in PARSERS:
            return (), 0
        kind, parse = PARSERS[path]
        try:
            parsed = await parse(self._service, self._bodies.read(body, kind)[0], caller)
        except (ApiError, OverloadError, msgspec.MsgspecError, RecursionError, ValueError):
            # The engine says what is wrong with it.
            return (), 0
        first, params = parsed.requests[0], parsed.requests[0].params
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in parsed.requests)
        most = self._service.max_model_len - len(first.prompt_token_ids)
        num_tokens = num_prompt_tokens + len(parsed.requests) * params.n * min(params.max_tokens or most, most)
        token_ids = first.prompt_token_ids[: MAX_PAGES * self._page_size]
        names = await asyncio.to_thread(
            prompt_hashes, token_ids, page_size=self._page_size, cache_salt=first.cache_salt
        )
        return tuple(name[:NAME_BYTES] for name in names), num_tokens


def _service(path: Path, model_name: str, max_len: int, max_priority: int) -> Service:
    """A service as far as parsing needs one: it takes everything, since room and defaults are the engine's to judge."""
    core = SimpleNamespace(tokenizer=load_tokenizer(path), max_request_len=max_len)
    llm = SimpleNamespace(engine=core, default_params=SamplingParams())
    engine: Any = SimpleNamespace(llm=llm, admission=Admission())
    return Service(engine, model_name, 0, max_priority)
