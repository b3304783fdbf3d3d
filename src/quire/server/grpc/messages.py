"""Converts protobuf's messages: requests to the types of `openai.schema`, updates of the engine to messages.

A request's fields have the names of the schema's and go through its types: limits are stated in one place.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update
from quire.core.sequence import TokenLogprob
from quire.core.stopping import FinishReason
from quire.server.errors import ApiError
from quire.server.grpc.proto import quire_pb2 as pb
from quire.server.openai import schema
from quire.server.openai.embeddings import Embedded

PROMPTS = ("text", "token_ids", "chat")
FINISH_REASONS = {
    str(reason): pb.FinishReason.Value(f"FINISH_REASON_{reason.name}")
    for reason in FinishReason
    if reason is not FinishReason.NOT_FINITE
}


def parse[T: Message](kind: type[T], data: bytes) -> T:
    """Parse a message; a field that its type does not have is refused, not ignored."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise ApiError(400, f"the message is no {kind.DESCRIPTOR.full_name}", code="invalid_message") from None
    if unknown := [field.field_number for field in UnknownFieldSet(message)]:
        text = f"{kind.DESCRIPTOR.full_name} has no field number {unknown[0]}"
        raise ApiError(400, text, param=str(unknown[0]), code="unknown_field")
    return message


def read_request(
    request: pb.GenerateRequest, *, model: str, max_model_len: int, stream: bool
) -> schema.CompletionRequest | schema.ChatRequest:
    """Convert a request to the body that HTTP would have had; raises the errors that HTTP would have had."""
    fields: dict[str, Any] = {"model": model, "stream": stream}
    for descriptor, value in request.ListFields():  # those that are set
        name = descriptor.name
        if name == "structured_outputs":
            fields[name] = _form(value)
        elif name == "logit_bias":
            fields[name] = dict(_few(name, value))
        elif name in ("stop", "stop_token_ids"):
            fields[name] = list(_few(name, value))
        elif name not in PROMPTS:
            fields[name] = value
    if request.WhichOneof("prompt") == "chat":
        messages = _few("messages", request.chat.messages)
        fields["messages"] = [{"role": message.role, "content": message.content} for message in messages]
        if "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        return msgspec.convert(fields, schema.ChatRequest)
    if request.HasField("text"):
        fields["prompt"] = request.text
    if request.HasField("token_ids"):
        fields["prompt"] = list(_few("prompt", request.token_ids.ids, max_model_len))
    return msgspec.convert(fields, schema.CompletionRequest)


def read_embed_request(request: pb.EmbedRequest, *, model: str, max_model_len: int) -> schema.EmbeddingsRequest:
    """Convert a request to the body that HTTP would have had; raises the errors that HTTP would have had."""
    fields: dict[str, Any] = {"model": request.model or model, "encoding_format": "base64"}  # for the limit of bytes
    for name in ("dimensions", "priority"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    if request.cache_salt:
        fields["cache_salt"] = request.cache_salt
    if request.HasField("texts"):
        fields["input"] = list(_few("input", request.texts.texts, schema.MAX_INPUTS))
    if request.HasField("token_ids"):
        lists = _few("input", request.token_ids.lists, schema.MAX_INPUTS)
        fields["input"] = [list(_few("input", one.ids, max_model_len)) for one in lists]
    return msgspec.convert(fields, schema.EmbeddingsRequest)


def _few[T](name: str, values: T, limit: int = schema.MAX_MESSAGES) -> T:
    """The values themselves, unless there are more than any type allows: millions fit into a message."""
    if (count := len(values)) > limit:  # pyright: ignore[reportArgumentType]
        code = "context_length_exceeded" if name == "prompt" else "invalid_value"
        raise ApiError(400, f"{name}: {count:,} entries, at most {limit:,} are allowed", param=name, code=code)
    return values


def _form(form: pb.StructuredOutputs) -> dict[str, Any]:
    compact = {"compact": form.compact} if form.HasField("compact") else {}
    return _value(form) | compact


def _value(form: pb.StructuredOutputs) -> dict[str, Any]:
    kind = form.WhichOneof("form")
    if kind is None:
        return {}
    if kind == "choice":
        return {"choice": list(_few("structured_outputs.choice", form.choice.options))}
    if kind != "json_schema":
        return {kind: getattr(form, kind)}
    try:
        return {"json": msgspec.json.decode(form.json_schema, type=dict)}
    except (msgspec.MsgspecError, RecursionError):
        where = "structured_outputs.json_schema"
        raise ApiError(400, f"{where} is no JSON object", param=where, code="invalid_value") from None


# -- responses --------------------------------------------------------------------------------------------------------


def update_message(request_id: str, update: Update, ended: Stream | None = None) -> pb.GenerateUpdate:
    """The message for what is new of a sequence; the last one of a stream that has `ended` also has its totals."""
    totals = _totals(ended) if ended else {}
    return pb.GenerateUpdate(request_id=request_id, **_update_fields(update), **totals)


def response_message(request_id: str, stream: Stream, wholes: Sequence[Update]) -> pb.GenerateResponse:
    """The message for all sequences of a stream that has ended."""
    outputs = [pb.Output(**_update_fields(whole)) for whole in wholes]
    return pb.GenerateResponse(request_id=request_id, outputs=outputs, **_totals(stream))


def _totals(stream: Stream) -> dict[str, Any]:
    return {"usage": _usage(stream), "prompt_logprobs": _prompt_logprobs(stream)}


def _prompt_logprobs(stream: Stream) -> list[pb.TokenLogprob]:
    """The log-probability of each token of the prompt, if the request wants them; the first has none."""
    ids = stream.request.prompt_token_ids
    return [
        _logprob(entry) if entry else pb.TokenLogprob(token_id=ids[i])
        for i, entry in enumerate(stream.prompt_logprobs or ())
    ]


def _usage(stream: Stream) -> pb.Usage:
    """The message for the tokens of the prompt and of the generated text."""
    return pb.Usage(
        prompt_tokens=len(stream.request.prompt_token_ids),
        completion_tokens=stream.num_output_tokens,
        cached_tokens=stream.num_cached_tokens,
    )


def embedding_message(embedding_D: np.ndarray) -> pb.Embedding:
    """The message for the embedding of one prompt."""
    return pb.Embedding(values=embedding_D.tolist())


def embed_response(embedded: Embedded[pb.Embedding]) -> pb.EmbedResponse:
    """The message for the embeddings of all prompts."""
    usage = pb.Usage(prompt_tokens=embedded.num_prompt_tokens, cached_tokens=embedded.num_cached_tokens)
    return pb.EmbedResponse(embeddings=embedded.vectors, usage=usage)


def _update_fields(update: Update) -> dict[str, Any]:
    return {
        "index": update.index,
        "text": update.text,
        "token_ids": update.token_ids,
        "logprobs": [_logprob(entry) for entry in update.logprobs],
        "finish_reason": FINISH_REASONS[update.finish_reason] if update.finish_reason else None,
    }


def _logprob(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        top=_top(entry.top),
        processed_logprob=entry.processed_logprob,
        processed_top=_top(entry.processed_top),
    )


def _top(entries: Sequence[tuple[int, float]]) -> list[pb.TopLogprob]:
    return [pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in entries]
