"""JSON Schemas of responses, for the OpenAPI document. `openai/format.py` makes the responses themselves."""

from typing import Any


def _object(**fields: Any) -> dict[str, Any]:
    """An object with these fields, and maybe others."""
    return {"type": "object", "required": list(fields), "properties": fields}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT, _WHOLE, _BOOL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_NULLABLE = {"type": ["string", "null"]}

ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_NULLABLE, code=_NULLABLE))
_MODEL = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_WHOLE,
    owned_by=_TEXT,
    max_model_len=_WHOLE | {"description": "Tokens of a prompt and what is generated from it, at most."},
    vocab_size=_WHOLE,
    has_chat_template=_BOOL | {"description": "Whether `/v1/chat/completions` can be used."},
)
_CACHED = _object(cached_tokens=_WHOLE | {"description": "Found in the prefix cache."})
_USAGE = _object(
    prompt_tokens=_WHOLE,
    completion_tokens=_WHOLE,
    total_tokens=_WHOLE,
    prompt_tokens_details=_CACHED,
)
_HEAD = {"id": _TEXT, "created": _WHOLE, "model": _TEXT, "usage": _USAGE}
_LOGPROBS = {"type": ["object", "null"]}
_CALL = _object(id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT))
_MESSAGE = _object(role={"const": "assistant"}, content=_NULLABLE)
_MESSAGE["properties"]["tool_calls"] = _list(_CALL)
_MESSAGE["properties"]["reasoning_content"] = _TEXT | {"description": "What the model thought before its answer."}

_FILE = _object(
    id=_TEXT, object={"const": "file"}, bytes=_WHOLE, created_at=_WHOLE, filename=_TEXT,
    purpose={"enum": ["batch", "batch_output"]}, status={"const": "processed"},
)  # fmt: skip
_BATCH = _object(
    id=_TEXT,
    object={"const": "batch"},
    endpoint=_TEXT,
    input_file_id=_TEXT,
    completion_window=_TEXT,
    status={
        "enum": [
            "validating",
            "failed",
            "in_progress",
            "finalizing",
            "completed",
            "expired",
            "cancelling",
            "cancelled",
        ]
    },
    output_file_id=_NULLABLE,
    error_file_id=_NULLABLE,
    created_at=_WHOLE,
    expires_at=_WHOLE,
    request_counts=_object(total=_WHOLE, completed=_WHOLE, failed=_WHOLE),
)


def _page(items: Any) -> dict[str, Any]:
    return _object(object={"const": "list"}, data=_list(items), first_id=_NULLABLE, last_id=_NULLABLE, has_more=_BOOL)


RESPONSES: dict[str, dict[str, Any]] = {
    "/v1/completions": _object(
        object={"const": "text_completion"},
        choices=_list(
            _object(index=_WHOLE, text=_TEXT, logprobs=_LOGPROBS, finish_reason={"enum": ["stop", "length"]})
        ),
        **_HEAD,
    ),
    "/v1/chat/completions": _object(
        object={"const": "chat.completion"},
        choices=_list(
            _object(
                index=_WHOLE,
                message=_MESSAGE,
                logprobs=_LOGPROBS,
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
            )
        ),
        **_HEAD,
    ),
    "/v1/responses": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_WHOLE,
        model=_TEXT,
        status={"enum": ["completed", "incomplete"]},
        incomplete_details={"type": ["object", "null"]},
        output=_list(_object(id=_TEXT, type={"enum": ["message", "function_call", "reasoning"]}, status=_TEXT)),
        usage=_object(
            input_tokens=_WHOLE,
            input_tokens_details=_CACHED,
            output_tokens=_WHOLE,
            total_tokens=_WHOLE,
        ),
    ),
    "/v1/embeddings": _object(
        object={"const": "list"},
        data=_list(
            _object(
                object={"const": "embedding"},
                index=_WHOLE,
                embedding={"anyOf": [_list({"type": "number"}), _TEXT | {"contentEncoding": "base64"}]},
            )
        ),
        model=_TEXT,
        usage=_object(prompt_tokens=_WHOLE, total_tokens=_WHOLE, prompt_tokens_details=_CACHED),
    ),
    "/v1/files": _FILE,
    "GET /v1/files": _page(_FILE),
    "/v1/files/{file_id}": _FILE,
    "DELETE /v1/files/{file_id}": _object(id=_TEXT, object={"const": "file"}, deleted={"const": True}),
    "/v1/batches": _BATCH,
    "GET /v1/batches": _page(_BATCH),
    "/v1/batches/{batch_id}": _BATCH,
    "/v1/batches/{batch_id}/cancel": _BATCH,
    "/tokenize": _object(tokens=_list(_WHOLE), count=_WHOLE, max_model_len=_WHOLE),
    "/detokenize": _object(prompt=_TEXT),
    "/v1/models": _object(object={"const": "list"}, data=_list(_MODEL)),
    "/v1/models/{name}": _MODEL,
    "/version": _object(version=_TEXT),
}
