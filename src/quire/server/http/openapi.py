"""The OpenAPI document, generated from the types of `schema`, so that both state the same limits."""

from functools import cache
from typing import Any

import msgspec

from quire import __version__
from quire.server.http.guard import PUBLIC
from quire.server.openai import schema

POSTS = {
    "/v1/completions": schema.CompletionRequest,
    "/v1/chat/completions": schema.ChatRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
}
GETS = ("/v1/models", "/health", "/livez", "/readyz", "/metrics", "/version", "/openapi.json")
ERRORS = (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503)


@cache
def openapi() -> dict[str, Any]:
    """All routes of the public port."""
    _, components = msgspec.json.schema_components(POSTS.values(), ref_template="#/components/schemas/{name}")
    error = {"description": "an error", "content": {"application/json": {"schema": _ERROR}}}
    errors = {str(status): error for status in ERRORS}
    paths: dict[str, Any] = {}
    for path, kind in POSTS.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        response = {"description": "the response, or its events"}
        paths[path] = {
            "post": {"requestBody": {"required": True, "content": body}, "responses": {"200": response} | errors}
        }
    for path in GETS:
        paths[path] = {"get": {"responses": {"200": {"description": "the response"}, **errors}}}
        if path in PUBLIC:
            paths[path]["get"]["security"] = []
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"] = {"get": paths["/v1/models"]["get"] | {"parameters": [name]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


_NULLABLE = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE,
                "code": _NULLABLE,
            },
        }
    },
}
