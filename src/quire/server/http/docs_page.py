"""The page at `/docs`: the OpenAPI document for people. Made here, once; it runs no script and loads nothing."""

import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from quire.server.http.openapi import openapi

ADDRESS = "[address of this server]"
"""Stands for the server's address in the page: a browser may know it by any of its names."""
_REF = "#/components/schemas/"


@cache
def docs_page() -> str:
    """Return the whole page, with `ADDRESS` where the server's address belongs."""
    document = openapi()
    schemas = document["components"]["schemas"]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    bodies = {_name(operation) for operation in operations if _json_body(operation)}
    routes = [(path, method, route) for path, methods in document["paths"].items() for method, route in methods.items()]
    others = [name for name in schemas if name not in bodies]
    parts = [
        f"<h1>Quire {escape(document['info']['version'])}</h1>",
        f"<p>{_prose(document['info']['description'])}</p>",
        f"<p>This server is at <code>{ADDRESS}</code>; clients of OpenAI's API take <code>{ADDRESS}/v1</code>.</p>",
        "<p>For machines: <a href='/openapi.json'>/openapi.json</a>. To chat: <a href='/'>the page at /</a>.</p>",
        "<nav aria-label='Routes'><ul>",
        *(f"<li><a href='#{_anchor(path, method)}'>{_title(path, method)}</a></li>" for path, method, _ in routes),
        "</ul></nav>",
        *(_route(path, method, route, schemas) for path, method, route in routes),
        *(_object(name, schemas[name]) for name in others),
    ]
    shell = files("quire.server.http").joinpath("docs.html").read_text(encoding="utf-8")
    return shell.replace("<!-- body -->", "\n".join(parts))


def _route(path: str, method: str, route: dict[str, Any], schemas: dict[str, Any]) -> str:
    key = "" if route.get("security") != [] else " <span class='soft'>No key needed.</span>"
    lines = [
        f"<section id='{_anchor(path, method)}'>",
        f"<h2>{_title(path, method)}</h2>",
        f"<p>{_prose(route['summary'])}{key}</p>",
    ]
    if content := _json_body(route):
        if "example" in content:
            lines += ["<h3>Example</h3>", f"<pre>{escape(_curl(path, content['example']))}</pre>"]
        lines += ["<h3>Fields</h3>", _fields(schemas[_name(route)])]
    answer = route["responses"]["200"].get("content", {}).get("application/json")
    if answer:
        shown = escape(json.dumps(_sketch(answer["schema"]), indent=2))
        lines.append(f"<details><summary>Response</summary><pre>{shown}</pre></details>")
    return "\n".join([*lines, "</section>"])


def _title(path: str, method: str) -> str:
    return f"<span class='method'>{method.upper()}</span> {escape(path)}"


def _object(name: str, schema: dict[str, Any]) -> str:
    about = _prose(schema.get("description", ""))
    return f"<section id='{name}'><h2>{escape(name)}</h2><p>{about}</p>{_fields(schema)}</section>"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{escape(name)}</code></td>"
        f"<td>{_type(field)}{', <b>required</b>' if name in required else ''}</td>"
        f"<td>{_prose(field.get('description', ''))}</td></tr>"
        for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in required)
    ]
    head = "<thead><tr><th>field</th><th>type</th><th>what</th></tr></thead>"
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _type(schema: dict[str, Any]) -> str:
    """A type and its limits in words, as HTML."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return f"<a href='#{name}'>{escape(name)}</a>"
    if "anyOf" in schema:
        kinds = [one for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(map(_type, kinds)) or "null"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(one))}</code>" for one in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "anything")
    if kind == "array":
        entry = _type(schema.get("items", {}))
        return f"list of {f'({entry})' if ', ' in entry or ' or ' in entry else entry}{_limits(schema, 'Items')}"
    names = {"integer": "whole number", "object": "object", "null": "null"}
    return names.get(kind, str(kind)) + _limits(schema, {"string": "Length", "object": "Properties"}.get(kind, "imum"))


def _limits(schema: dict[str, Any], what: str) -> str:
    low, high = (schema.get(f"{end}{what}") for end in ("min", "max"))
    units = {"Length": " characters", "Items": " entries", "Properties": " entries", "imum": ""}
    above = schema.get("exclusiveMinimum")
    parts = [] if above is None else [f"above {above:,}"]
    if low is not None and high is not None:
        parts.append(f"{low:,} to {high:,}{units[what]}")
    elif high is not None:
        parts.append(f"at most {high:,}{units[what]}")
    elif low is not None:
        parts.append(f"at least {low:,}{units[what]}")
    if "pattern" in schema:
        parts.append(f"<code>{escape(schema['pattern'])}</code>")
    return "".join(f", {part}" for part in parts)


def _sketch(schema: dict[str, Any]) -> Any:
    """A value of the shape that a response has, with types for values."""
    if "properties" in schema:
        return {name: _sketch(field) for name, field in schema["properties"].items()}
    if schema.get("type") == "array":
        return [_sketch(schema["items"])]
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return " | ".join(schema["enum"])
    kind = schema.get("type", "anything")
    return " | ".join(kind) if isinstance(kind, list) else kind


def _curl(path: str, body: Any) -> str:
    return f"curl -s {ADDRESS}{path} \\\n  -H 'content-type: application/json' \\\n  -d '{json.dumps(body)}'"


def _prose(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text, quote=False))


def _json_body(operation: dict[str, Any]) -> dict[str, Any] | None:
    return operation.get("requestBody", {}).get("content", {}).get("application/json")


def _name(operation: dict[str, Any]) -> str:
    return operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].removeprefix(_REF)


def _anchor(path: str, method: str) -> str:
    """Of a route, by its path; where that has several, those beside the first are told by their method."""
    name = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-") or "page"
    return name if method == next(iter(openapi()["paths"][path])) else f"{name}-{method}"
