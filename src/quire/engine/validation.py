"""Which requests can never run: told at once, with the field that has to change, instead of when their turn comes."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from quire.config import ModelConfig
from quire.core.errors import RequestError
from quire.core.page_tables import PageTables
from quire.core.request import Request

TOO_LONG = "context_length_exceeded"


class RequestValidator:
    """Checks requests against one model and one pool. It only reads, so that any thread may call it."""

    def __init__(
        self, model: ModelConfig, tables: PageTables, *, max_model_len: int, max_logprobs: int, has_tokenizer: bool
    ) -> None:
        self._model = model
        self._tables = tables
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._has_tokenizer = has_tokenizer

    def max_tokens(self, request: Request) -> int:
        """How many tokens each sequence of a request may generate; RequestError if it can never run."""
        if not isinstance(request, Request):
            raise RequestError(f"{request!r} must be a Request(id=..., prompt_token_ids=..., params=...)")
        self._check_token_ids(request)
        params = request.params
        if params.logprobs is not None and params.logprobs > self._max_logprobs:
            message = (
                f"logprobs={params.logprobs} is more than the engine's max_logprobs={self._max_logprobs}; ask for "
                f"fewer alternatives, or start the engine with max_logprobs={params.logprobs}"
            )
            raise RequestError(message, field="logprobs", request_id=request.id)
        if params.stop_strings and not self._has_tokenizer:
            message = "stop holds a string and there is no tokenizer; use token ids"
            raise RequestError(message, field="stop", request_id=request.id)
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = self._max_tokens_that_fit(request)
        self._check_length(request, max_tokens)
        self._tables.check_fits(request.id, len(request.prompt_token_ids), max_tokens)
        return max_tokens

    def forced_tokens(self, token_ids: Any, request_id: str) -> list[int]:
        """Tokens to put behind a sequence's own, as a list; an array is as good."""
        token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
            message = f"token_ids={token_ids!r} must be a list of token ids"
            raise RequestError(message, field="token_ids", request_id=request_id)
        self._check_in_vocabulary("token_ids", token_ids, request_id)
        return list(token_ids)

    def _check_in_vocabulary(self, field: str, token_ids: Iterable[Any], request_id: str) -> None:
        vocab_size = self._model.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                message = f"{field} token {token_id!r} is no token id (0 to {vocab_size - 1})"
                raise RequestError(message, field=field, request_id=request_id)

    def _check_token_ids(self, request: Request) -> None:
        """Every token id that a request names is one of the vocabulary."""
        vocab_size, params = self._model.vocab_size, request.params
        if not request.prompt_token_ids:
            message = "the prompt is empty; give at least one token"
            raise RequestError(message, field="prompt", request_id=request.id)
        self._check_in_vocabulary("prompt", request.prompt_token_ids, request.id)
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "stop": itertools.chain(*params.stop_sequences),
        }
        for field, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    message = f"{field} holds {token_id}, which is not below the vocabulary's {vocab_size}"
                    raise RequestError(message, field=field, request_id=request.id)

    def _max_tokens_that_fit(self, request: Request) -> int:
        """In the model's length, and in the pool: the last token drawn needs no place there."""
        tables, prompt_len = self._tables, len(request.prompt_token_ids)
        in_pool = tables.pool.allocator.num_pages * tables.page_size + 1
        max_tokens = min(self._max_model_len, in_pool) - prompt_len
        if max_tokens < max(request.params.min_tokens, 1):
            raise RequestError(
                f"a prompt of {prompt_len} tokens leaves {max(max_tokens, 0)} for new ones: max_model_len="
                f"{self._max_model_len}, and the pool has {in_pool - 1} tokens; shorten it or raise these",
                field="prompt",
                code=TOO_LONG,
                request_id=request.id,
            )
        return max_tokens

    def _check_length(self, request: Request, max_tokens: int) -> None:
        prompt_len, limit = len(request.prompt_token_ids), self._max_model_len
        if prompt_len + max_tokens > limit:
            fixes = ["shorten the prompt"] + ["lower max_tokens"] * (max_tokens > 0)
            fixes += ["raise max_model_len"] * (limit < self._model.max_len)
            raise RequestError(
                f"a prompt of {prompt_len} tokens + max_tokens={max_tokens} is more than "
                f"max_model_len={limit}; {' or '.join(fixes)}",
                field="prompt",
                code=TOO_LONG,
                request_id=request.id,
            )


def max_model_len(asked: int | None, model: ModelConfig) -> int:
    """The longest sequence that runs: what was asked for, or the model's own length."""
    if asked is None:
        return model.max_len
    if asked > model.max_len:
        raise ValueError(f"max_model_len={asked} is more than the model's own {model.max_len}")
    return asked
