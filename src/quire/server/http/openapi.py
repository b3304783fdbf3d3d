"""The OpenAPI document, generated from the types of `schema`, so that both state the same limits.

What a field does is said once, in the docstring below it in `schema` or in `SamplingParams`.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
from functools import cache
from typing import Any

import msgspec

from quire import __version__
from quire.core.sampling_params import DECLARED, SamplingParams
from quire.server.http.guard import PUBLIC
from quire.server.http.response_schemas import ERROR, RESPONSES
from quire.server.openai import schema
from quire.server.openai.request_body import HEADER

POSTS = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/responses": schema.ResponsesRequest,
    "/v1/embeddings": schema.EmbeddingsRequest,
    "/v1/batches": schema.BatchRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
}
GETS = {
    "/v1/models": "The one model that is served.",
    "/v1/models/{name}": "The model, if it has this name.",
    "/v1/files": "The caller's files, where the server keeps any.",
    "/v1/files/{file_id}": "What is known of a file.",
    "/v1/files/{file_id}/content": "The bytes of a file.",
    "/v1/batches": "The caller's batches, where the server keeps any.",
    "/v1/batches/{batch_id}": "How far a batch is.",
    "/health": "Whether the engine steps.",
    "/livez": "Whether the process responds.",
    "/readyz": "Whether a request would be taken.",
    "/metrics": "Numbers for Prometheus.",
    "/version": "The version of Quire.",
    "/openapi.json": "This document.",
    "/": "A page to chat on, for people.",
    "/docs": "This document, for people.",
}
SUMMARIES = {
    "/v1/completions": "Continue prompts.",
    "/v1/chat/completions": "Answer a conversation, by the model's own chat template.",
    "/v1/responses": "Answer a conversation, in the shape of OpenAI's Responses API. Nothing is stored.",
    "/v1/embeddings": "Embed prompts: one vector for each.",
    "/v1/batches": "Answer the lines of a file, behind everything that somebody waits for.",
    "/tokenize": "Text to token ids.",
    "/detokenize": "Token ids to text.",
}
EXAMPLES = {
    "/v1/completions": {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0},
    "/v1/chat/completions": {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 24,
        "stream": True,
    },
    "/v1/responses": {"model": "smollm2", "input": "What is the capital of France?", "max_output_tokens": 24},
    "/v1/embeddings": {"model": "smollm2", "input": ["The capital of France", "Paris"]},
    "/v1/batches": {"input_file_id": "file-abc", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [19556]},
}
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "One request a line, as JSON."},
        "purpose": {"const": "batch"},
    },
}
ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503)
ABOUT = f"""OpenAI's API for one model, and what Quire adds to it. A key, where the server has keys, goes into the
header `Authorization: Bearer KEY`. A field of a request that is not listed here is ignored and named in the header
`{HEADER}` of the response (with `--strict-fields` it is an error); `null` is the same as leaving a field out."""


@cache
def openapi() -> dict[str, Any]:
    """All routes of the public port."""
    _, components = msgspec.json.schema_components(POSTS.values(), ref_template="#/components/schemas/{name}")
    _describe_fields(components)
    error = {"description": "an error", "content": {"application/json": {"schema": ERROR}}}
    errors = {str(status): error for status in ERRORS}
    paths: dict[str, Any] = {}
    for path, kind in POSTS.items():
        body: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
        if path in EXAMPLES:
            body["example"] = EXAMPLES[path]
        paths[path] = {
            "post": {
                "summary": SUMMARIES.get(path, kind.__doc__),
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": {"200": _response(path, "post")} | errors,
            }
        }
    for path, summary in GETS.items():
        paths.setdefault(path, {})["get"] = {
            "summary": summary,
            "responses": {"200": _response(path, "get")} | errors,
        }
        if path in PUBLIC:
            paths[path]["get"]["security"] = []
    form = {"required": True, "content": {"multipart/form-data": {"schema": UPLOAD}}}
    others = {
        ("/v1/files", "post"): {"summary": "Keep a file for a batch.", "requestBody": form},
        ("/v1/files/{file_id}", "delete"): {"summary": "Forget a file."},
        ("/v1/batches/{batch_id}/cancel", "post"): {"summary": "End a batch; its answers so far stay."},
    }
    for (path, method), about in others.items():
        paths.setdefault(path, {})[method] = about | {"responses": {"200": _response(path, method)} | errors}
    for path, methods in paths.items():
        names = re.findall(r"{(\w+)}", path)
        parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        for operation in methods.values() if parameters else ():
            operation["parameters"] = parameters
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__, "description": " ".join(ABOUT.split())},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


@cache
def openapi_json() -> bytes:
    """The document as it is sent: encoded once, because anybody may ask for it."""
    return msgspec.json.encode(openapi())


def _response(path: str, method: str) -> dict[str, Any]:
    shape = RESPONSES.get(f"{method.upper()} {path}", RESPONSES.get(path))
    if shape is None:
        return {"description": "the response"}
    content: dict[str, Any] = {"application/json": {"schema": shape}}
    if method != "post" or path not in POSTS or "stream" not in POSTS[path].__struct_fields__:
        return {"description": "the response", "content": content}
    content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "the response, or with `stream` its events", "content": content}


def _describe_fields(components: dict[str, Any]) -> None:
    sampling = field_texts(SamplingParams) | {declared.wire_name: declared.text for declared in DECLARED.values()}
    for name, component in components.items():
        texts = dict(sampling) if name.endswith("Request") else {}
        texts |= field_texts(getattr(schema, name))
        for field, one in component.get("properties", {}).items():
            if field in texts:
                one.setdefault("description", texts[field])


def field_texts(kind: type) -> dict[str, str]:
    """What the fields of a class are for: its docstrings below them, and the text of its dataclass fields."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for field, below in itertools.pairwise(_statements(base.__module__).get(base.__name__, ())):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                texts[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    if dataclasses.is_dataclass(kind):
        texts |= {one.name: one.metadata["text"] for one in dataclasses.fields(kind) if "text" in one.metadata}
    return texts


@cache
def _statements(module: str) -> dict[str, list[ast.stmt]]:
    """Statements of each class of a module. Parsed once: for a single class, `inspect` parses the whole module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # built in, made at run time, or installed without its source
        return {}
    return {one.name: one.body for one in tree.body if isinstance(one, ast.ClassDef)}
