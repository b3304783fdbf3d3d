"""OpenAI's embeddings: from a request to prompts for the engine, and from their hidden states to the response."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from quire.async_llm.async_llm import NO_ORIGIN
from quire.async_llm.origin import Origin
from quire.async_llm.stream import Stream
from quire.core.request import Request
from quire.core.request_id import part_id
from quire.core.sampling_params import SamplingParams
from quire.embedding import check_dimensions, finish_embedding
from quire.field_error import FieldError
from quire.server.errors import ApiError, in_words_of
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.format import usage
from quire.server.openai.parse import checked_priority, token_ids_of
from quire.server.service import Service

MAX_NUMBERS = 2048 * 1024
"""Of one response, inputs times dimensions, as decimal digits: about 26 MB."""
MAX_BINARY_NUMBERS = 2 * MAX_NUMBERS
"""As bytes: 22 MB of base64, or 16 MB over gRPC."""


@dataclass(slots=True)
class Embedded[T]:
    """The embeddings of a request's prompts, in their order, and what they came to."""

    vectors: list[T]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class ParsedEmbeddings:
    """A client's request for embeddings, parsed."""

    requests: list[Request]
    timeout_s: float | None
    model_name: str
    normalize: bool
    dimensions: int | None
    as_base64: bool

    async def run[T](
        self,
        service: Service,
        encode: Callable[[np.ndarray], T],
        timeout_s: float | None,
        origin: Origin = NO_ORIGIN,
    ) -> Embedded[T]:
        """Embed the prompts, a few at a time. Each vector is encoded as soon as it is there; no array is kept."""
        embedded: Embedded[T] = Embedded([], sum(len(one.prompt_token_ids) for one in self.requests), 0)

        def each(stream: Stream) -> None:
            embedded.vectors.append(encode(self._vector(stream)))
            embedded.num_cached_tokens += stream.num_cached_tokens

        try:
            await service.engine.run_in_turns(self.requests, each, timeout_s=timeout_s, origin=origin)
        except FieldError as error:
            raise in_words_of("input", error) from None
        return embedded

    async def response(self, service: Service, timeout_s: float | None, origin: Origin = NO_ORIGIN) -> dict[str, Any]:
        """The whole response of `/v1/embeddings`."""
        embedded = await self.run(service, as_base64 if self.as_base64 else as_digits, timeout_s, origin)
        data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(embedded.vectors)]
        counts = usage(embedded.num_prompt_tokens, 0, embedded.num_cached_tokens)
        del counts["completion_tokens"]
        return {"object": "list", "data": data, "model": self.model_name, "usage": counts}

    def _vector(self, stream: Stream) -> np.ndarray:
        pooled_D = stream.sequences[0].embedding_D
        if pooled_D is None:
            raise ApiError(500, "the request was aborted before it was embedded", code="cancelled")
        return finish_embedding(pooled_D, normalize=self.normalize, dimensions=self.dimensions)


async def parse_embeddings(service: Service, body: schema.EmbeddingsRequest, caller: Caller) -> ParsedEmbeddings:
    """Parse a request for embeddings: one request of the engine for each prompt. The model's files say how to pool."""
    service.check_arrival(body.model, caller)
    llm = service.engine.llm
    check_dimensions(body.dimensions, llm.model_config.hidden_size)
    is_binary = body.encoding_format == "base64"
    _check_size(body.input, body.dimensions or llm.model_config.hidden_size, is_binary)
    priority, salt = checked_priority(service, body.priority), caller.salt(body.cache_salt or "")
    params = SamplingParams(max_tokens=0, pooling=llm.embedding_config.pooling)
    prompts = await token_ids_of(service, body.input, caller, "input", schema.MAX_INPUTS)
    requests = [
        Request(
            id=part_id(caller.request_id or "embd", i),
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=priority,
            cache_salt=salt,
            tenant=caller.tenant,
        )
        for i, prompt in enumerate(prompts)
    ]
    return ParsedEmbeddings(
        requests, body.timeout, service.model_name, llm.embedding_config.normalize, body.dimensions, is_binary
    )


def _check_size(given: Any, dimensions: int, is_binary: bool) -> None:
    """ApiError if the response would be too large; before anything is encoded."""
    num_inputs = 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
    limit = MAX_BINARY_NUMBERS if is_binary else MAX_NUMBERS
    if num_inputs <= schema.MAX_INPUTS and num_inputs * dimensions > limit:
        more = "" if is_binary else f"; encoding_format='base64' allows {MAX_BINARY_NUMBERS:,}"
        message = (
            f"input: {num_inputs:,} inputs with {dimensions:,} dimensions come to {num_inputs * dimensions:,} numbers, "
            f"at most {limit:,} are allowed; send {limit // dimensions:,} inputs at once, or set dimensions{more}"
        )
        raise ApiError(400, message, param="input", code="invalid_value")


# -- numbers ----------------------------------------------------------------------------------------------------------


def as_base64(embedding_D: np.ndarray) -> str:
    """The bytes of float32 numbers, least significant first."""
    return base64.b64encode(embedding_D.astype("<f4").tobytes()).decode()


def as_digits(embedding_D: np.ndarray) -> msgspec.Raw:
    """JSON with as few digits as tell every number from the other numbers of float32."""
    return msgspec.Raw(msgspec.json.encode(_shortest(embedding_D).tolist()))


def _shortest(values_D: np.ndarray) -> np.ndarray:
    """The float64 numbers of fewest digits that are these of float32: nine, or fewer.

    Where powers of ten are not exact, below 1e-13 and above 1e9, numbers stay as they are.
    """
    exact_D = values_D.astype(np.float64)
    shortest_D = exact_D.copy()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        exponent_D = np.floor(np.log10(np.abs(exact_D)))
        for num_digits in (9, 8, 7, 6):  # the fewest is the last that fits
            scale_D = 10.0 ** (num_digits - 1 - exponent_D)
            rounded_D = np.round(exact_D * scale_D) / scale_D
            fits_D = (rounded_D.astype(np.float32) == values_D) & (scale_D >= 1) & (scale_D <= 1e22)
            shortest_D = np.where(fits_D, rounded_D, shortest_D)
    return shortest_D
