"""Reads the bodies of requests. A field that is not known is left out and named, unless `strict_fields` refuses it.

Whoever sends such a field finds its name in a header of the response. One that is known to change what an answer means
(`REFUSED`) is an error instead.

A body without unknown fields is decoded once. Of another one, unknown values are skipped and never built.
"""

import json
import logging
import re
from dataclasses import dataclass
from functools import cache
from typing import get_args

import msgspec
from msgspec.inspect import ListType, StructType, Type, UnionType, type_info

from quire.server.errors import ApiError, as_api_error
from quire.server.openai import schema

HEADER = "x-quire-ignored-fields"
MAX_NAMED = 16
"""Names in a response's header."""
MAX_NAME_LEN = 64
"""Characters of each part of a name."""
MAX_LOGGED = 256
"""Names that are remembered, so that each is logged once; others are not logged."""
MAX_SEARCHED = 100_000
"""Commas of a body that is searched for unknown fields; in a longer one they are refused. So it has about as few fields
and entries. They are not counted themselves, because that would build them first, while all streams stand still."""

_TEXT_ONLY = "this server reads and writes text only"
_OWN_TEMPLATE = "the chat template is the model's own, and ends where the answer begins"
REFUSED = {
    "add_generation_prompt": _OWN_TEMPLATE,
    "allowed_token_ids": "raise them with logit_bias, or send structured_outputs",
    "audio": _TEXT_ONLY,
    "bad_words": "lower their tokens with logit_bias",
    "chat_template": _OWN_TEMPLATE,
    "continue_final_message": _OWN_TEMPLATE,
    "documents": "put their text into a message",
    "ebnf": "send structured_outputs with grammar",
    "extra_body": "send its fields in the body itself",
    "function_call": "send tool_choice",
    "functions": "send tools",
    "grammar": "send structured_outputs with grammar",
    "guided_choice": "send structured_outputs with choice",
    "guided_grammar": "send structured_outputs with grammar",
    "guided_json": "send structured_outputs with json",
    "guided_regex": "send structured_outputs with regex",
    "image": _TEXT_ONLY,
    "images": _TEXT_ONLY,
    "input_embeds": "send text or token ids",
    "inputs_embeds": "send text or token ids",
    "logits_processors": "a request brings no code; logit_bias may serve",
    "json_schema": "send structured_outputs with json",
    "lora_path": "this server has one model",
    "lora_request": "this server has one model",
    "multi_modal_data": _TEXT_ONLY,
    "prompt_embeds": "send text or token ids",
    "regex": "send structured_outputs with regex",
    "template": _OWN_TEMPLATE,
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "tokens are sampled; n and logprobs may serve",
    "web_search_options": "nothing is fetched",
}
"""Fields of other servers that would change what an answer means, and what to do instead."""
ELSEWHERE = {"response_format": "send structured_outputs; to /v1/responses, text.format"}
"""The same for fields that another route has."""
ABSENT = {"add_generation_prompt": (b"null", b"true")}
"""Values with which such a field changes nothing; of those not listed here, null and false."""
_EFFORTS = ", ".join(map(repr, get_args(schema.ReasoningEffort)))
_NOT_KEPT = "nothing is stored: send the whole conversation in input"
FIXES = {
    "background": "nothing is stored: leave it out, and send stream to see the answer as it is made",
    "best_of": "all n sequences are returned: send n and choose among them",
    "completion_window": "'24h' is the only one",
    "conversation": _NOT_KEPT,
    "encoding_format": "'float' and 'base64' are formats",
    "endpoint": "'/v1/chat/completions', '/v1/completions' and '/v1/embeddings' are endpoints",
    "input[].content[].type": _TEXT_ONLY,
    "input[].output[].type": _TEXT_ONLY,
    "input[].type": f"'message', 'function_call', 'function_call_output' and 'reasoning' are types; {_NOT_KEPT}",
    "messages[].audio": "messages are text only",
    "messages[].content[].type": "messages are text only: 'text' is the only type of a part",
    "messages[].function_call": "send tool_calls",
    "method": "'POST' is the only method",
    "messages[].role": "'system', 'developer', 'user', 'assistant' and 'tool' are roles",
    "modalities[]": "answers are text only: leave modalities out",
    "previous_response_id": _NOT_KEPT,
    "prompt": "send text: this server stores no templates",
    "reasoning.effort": f"{_EFFORTS} are efforts",
    "reasoning_effort": f"{_EFFORTS} are efforts",
    "response_format.type": "'text', 'json_object' and 'json_schema' are types",
    "service_tier": "'auto' and 'default' are tiers: leave it out",
    "store": "nothing is stored: send false or leave it out",
    "stream_options.include_obfuscation": "streams are not padded: leave it out",
    "suffix": "text is continued, not filled in: leave it out",
    "text.format.type": "'text', 'json_object' and 'json_schema' are types",
    "tool_choice": "'none', 'auto', 'required' and {'type': 'function', 'function': {'name': ...}} are choices",
    "tool_choice.type": "'function' is the only type",
    "tools[].type": "'function' is the only type of a tool: this server runs none itself",
    "url": "'/v1/chat/completions', '/v1/completions' and '/v1/embeddings' are urls",
    "truncation": "what does not fit is refused: send 'disabled' and a shorter input",
}
"""What to do about a value that a field does not take, where its type does not say enough."""

_log = logging.getLogger("quire.server")


class BodyReader:
    """Reads the bodies of one server's requests."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def read[T](self, body: bytes, kind: type[T]) -> tuple[T, list[str]]:
        """A body as a struct, and the names of the fields that it does not have, fit for a header."""
        if not body.strip():
            raise ApiError(400, "the body is empty: send a JSON object", code="invalid_json")
        try:
            return msgspec.json.decode(body, type=kind), []
        except msgspec.ValidationError as error:
            is_long = body.count(b",") > MAX_SEARCHED
            if self._strict or is_long:
                shown = with_fix(error)
                if is_long and shown.code == "unknown_field":
                    shown.message += f"; leave it out of a body with more than {MAX_SEARCHED:,} commas"
                raise shown from None
        search = _Search()
        known = search.known_part(msgspec.Raw(body.lstrip()), _shape_of(kind))
        try:
            value = msgspec.json.decode(known, type=kind)
        except msgspec.ValidationError as error:
            shown = with_fix(error)
            if shown.code == "missing_field" and search.names:
                shown.message += f"; the body has {', '.join(search.names)}, which this route does not know"
            raise shown from None
        self._log(search.names)
        return value, search.names

    def _log(self, names: list[str]) -> None:
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                _log.info("unknown field ignored", extra={"field": name})


def with_fix(error: msgspec.ValidationError) -> ApiError:
    """The response for a value that its field does not take, with what to do about it."""
    shown = as_api_error(error)
    if shown.code == "missing_field":
        return shown  # the fixes are for values that are there
    if shown.param == "prompt" and "Expected `null`" not in shown.message:
        return shown  # a prompt itself, and no template
    if fix := FIXES.get(re.sub(r"\[[^\]]*\]", "[]", shown.param or "")):
        shown.message += f"; {fix}"
    return shown


class _Search:
    """One search through a body for fields that its type does not have."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of those found, each once, as paths such as `messages[].mood`; at most `MAX_NAMED`."""

    def known_part(self, raw: msgspec.Raw, shape: "_Shape", path: str = "") -> msgspec.Raw:
        """The JSON of a value without the fields that its type does not have. What is no such value stays as it is."""
        first = bytes(memoryview(raw)[:1])
        if first == b"{" and shape.structs:
            return self._known_fields(raw, shape, path)
        if first == b"[" and shape.items:
            entries = msgspec.json.decode(raw, type=list[msgspec.Raw])
            kept = [self.known_part(entry, shape.items, f"{path}[]") for entry in entries]
            return msgspec.Raw(msgspec.json.encode(kept))
        return raw

    def _known_fields(self, raw: msgspec.Raw, shape: "_Shape", path: str) -> msgspec.Raw:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        tag = bytes(fields.get(shape.tag_field or "", b"")) if len(shape.structs) > 1 else next(iter(shape.structs))
        known = shape.structs.get(tag)
        if known is None:  # a tag that there is not: decoding tells
            return raw
        kept: dict[str, msgspec.Raw] = {}
        for name, value in fields.items():
            if name in known:
                inner = known[name]
                kept[name] = self.known_part(value, inner, f"{path}.{name}" if path else name) if inner else value
            elif name == shape.tag_field:
                kept[name] = value
            else:
                self._leave_out(name, value, path)
        return msgspec.Raw(msgspec.json.encode(kept))

    def _leave_out(self, name: str, value: msgspec.Raw, path: str) -> None:
        fix = None if path else REFUSED.get(name) or ELSEWHERE.get(name)
        if fix and bytes(memoryview(value)[:8]) not in ABSENT.get(name, (b"null", b"false")):
            message = f"{name} is not supported: {fix}; or leave it out"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if len(self.names) == MAX_NAMED:
            return
        shown = re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_NAME_LEN]) or "?"
        shown = f"{path}.{shown}" if path else shown
        if shown not in self.names:
            self.names.append(shown)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where a value of some type can hold structs."""

    structs: dict[bytes, "dict[str, _Shape | None]"]
    """Those that it can be itself, by the JSON of their tag: their fields, and where these hold structs."""
    tag_field: str | None
    items: "_Shape | None"
    """That of its entries, if it is an array."""


@cache
def _shape_of(kind: type) -> _Shape:
    shape = _shape(type_info(kind))
    assert shape is not None
    return shape


def _shape(kind: Type) -> _Shape | None:
    """None of a type that holds no structs."""
    kinds = kind.types if isinstance(kind, UnionType) else (kind,)
    structs = [one for one in kinds if isinstance(one, StructType)]
    lists = (_shape(one.item_type) for one in kinds if isinstance(one, ListType))
    items = next(filter(None, lists), None)
    if not structs and items is None:
        return None
    fields = {json.dumps(one.tag).encode(): {f.encode_name: _shape(f.type) for f in one.fields} for one in structs}
    tag_field = structs[0].tag_field if structs else None
    return _Shape(fields, tag_field, items)
