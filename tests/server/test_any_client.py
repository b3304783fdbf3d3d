"""Clients that send more than Quire knows: what is ignored, what is refused, and how both are told."""

import json
import logging
import tracemalloc
import urllib.request

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.inspect import NoneType, StructType, UnionType, type_info

from quire.server.errors import ApiError
from quire.server.http.openapi import POSTS
from quire.server.openai import request_body, schema
from quire.server.openai.request_body import HEADER, MAX_NAMED, REFUSED, BodyReader

COMPLETION = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
LAX, STRICT = BodyReader(strict=False), BodyReader(strict=True)


def said(content: object, **fields: object) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": content} | fields]}


def read(body: dict, reader: BodyReader = LAX):
    kind = schema.ChatRequest if "messages" in body else schema.CompletionRequest
    return reader.read(json.dumps(body).encode(), kind)


def refusal(body: dict, reader: BodyReader = LAX) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(body, reader)
    assert caught.value.status == 400
    return caught.value


# -- what is ignored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (COMPLETION, []),
        (COMPLETION | {"colour": 1}, ["colour"]),
        (COMPLETION | {"colour": {"deep": [[{"x": 1}]]}, "logit_bias": {"5": 1.5}}, ["colour"]),
        (COMPLETION | {"stream_options": {"include_usage": True, "often": 1}}, ["stream_options.often"]),
        (COMPLETION | {"structured_outputs": {"regex": "a", "x": 1}}, ["structured_outputs.x"]),
        (CHAT | {"messages": [{"role": "user", "content": "x", "mood": 1}] * 3}, ["messages[].mood"]),
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]},
            ["messages[].content[].cache"],
        ),
        (CHAT | {"tools": [TOOL | {"a": 1}]}, ["tools[].a"]),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "f", "a": 1}}]}, ["tools[].function.a"]),
        (CHAT | {"tools": [TOOL], "tool_choice": TOOL | {"a": 1}}, ["tool_choice.a"]),
        (CHAT | {"response_format": {"type": "text", "a": 1}}, ["response_format.a"]),
        (
            CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "b": 2}}},
            ["response_format.json_schema.b"],
        ),
        (CHAT | {"reasoning_effort": "low", "verbosity": "low"}, ["verbosity"]),
        (
            CHAT | {"use_beam_search": False, "documents": None, "add_generation_prompt": True},
            ["use_beam_search", "documents", "add_generation_prompt"],
        ),
    ],
    ids=str,
)
def test_a_field_that_is_not_known_is_left_out_and_named(body, names):
    value, ignored = read(body)
    assert ignored == names
    if names:
        error = refusal(body, STRICT)
        assert error.code == "unknown_field"
        # What is known of it is what it would have been alone.
        again, nothing = read(json.loads(msgspec.json.encode(value)))
        assert (again, nothing) == (value, [])


fields = st.dictionaries(st.text("abc_", min_size=1, max_size=3), st.integers() | st.text() | st.just([{}]), max_size=3)


@given(
    extra=fields,
    inner=fields,
    temperature=st.none() | st.floats(0, 2),
    bias=st.dictionaries(st.integers(0, 9), st.floats(-9, 9)),
)
@settings(max_examples=100, deadline=None)
def test_unknown_fields_change_nothing_of_what_is_known(extra, inner, temperature, bias):
    known = CHAT | {"temperature": temperature, "logit_bias": {str(i): value for i, value in bias.items()}}
    value, _ = read(known, STRICT)
    mixed = extra | known | {"messages": [inner | CHAT["messages"][0]]}
    got, names = read(mixed)
    assert got == value
    assert set(names) == set(extra) | {f"messages[].{name}" for name in inner}


def test_names_come_from_strangers_and_are_bounded():
    hostile = {"a\r\nset-cookie: b": 1, "ü" * 1000: 1, "": 1, '"<script>': 1}
    _, names = read(COMPLETION | hostile)
    assert names == ["a??set-cookie??b", "?" * 64, "?", "??script?"]
    _, names = read(COMPLETION | {f"field_{i}": i for i in range(1000)})
    assert len(names) == MAX_NAMED


COMMAS = 5 * request_body.MAX_SEARCHED


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{%s}" % b",".join(b'"%x":1' % i for i in range(COMMAS)), schema.CompletionRequest),
        (b'{"colour": 1, "messages": [%s1]}' % (b"1," * COMMAS), schema.ChatRequest),
    ],
    ids=["fields", "entries"],
)
def test_what_would_stop_all_streams_is_refused_before_it_is_built(body, kind):
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as caught:
            LAX.read(body, kind)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert "leave it out of a body with more than 100,000 commas" in caught.value.message


def test_a_long_body_has_its_own_error():
    body = COMPLETION | {"prompt": [1] * (request_body.MAX_SEARCHED + 2)}
    assert read(body)[1] == []
    assert refusal(body | {"temperature": "hot"}).param == "temperature"


def test_a_body_may_begin_with_white_space():
    assert LAX.read(b" \n" * 100 + json.dumps(COMPLETION | {"colour": 1}).encode(), schema.CompletionRequest)[1]


def test_each_name_is_logged_once_and_not_for_ever(caplog):
    reader = BodyReader(strict=False)
    with caplog.at_level(logging.INFO, logger="quire.server"):
        for _ in range(3):
            read(COMPLETION | {"colour": "secret words"}, reader)
        for i in range(2 * request_body.MAX_LOGGED):
            read(COMPLETION | {f"f{i}": 1}, reader)
    names = [record.field for record in caplog.records]
    assert names[:2] == ["colour", "f0"]
    assert len(names) == request_body.MAX_LOGGED
    assert "secret" not in caplog.text


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_answer_is_refused_with_what_to_do(name):
    for body in (COMPLETION, CHAT):
        error = refusal(body | {name: "x"})
        assert (error.param, error.code) == (name, "unsupported_field")
        assert error.message == f"{name} is not supported: {REFUSED[name]}; or leave it out"
        assert read(body | {name: None})[1] == [name]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (COMPLETION | {"best_of": 2}, "best_of", "best_of: 2 is not allowed; all n sequences are returned: send n and"),
        (COMPLETION | {"suffix": "end"}, "suffix", "Expected `null`, got `str`; text is continued, not filled in"),
        (COMPLETION | {"store": True}, "store", "store: True is not allowed; nothing is stored: send false or leave"),
        (CHAT | {"modalities": ["text", "audio"]}, "modalities[1]", "'audio' is not allowed; answers are text only"),
        (CHAT | {"response_format": {"type": "xml"}}, "response_format.type", "'xml' is not allowed; 'text', 'json_"),
        (CHAT | {"tool_choice": "maybe"}, "tool_choice", "'maybe' is not allowed; 'none', 'auto', 'required'"),
        (
            said([{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type",
            "'image_url' is not allowed; messages are text only",
        ),
        (said("x", role="bot"), "messages[0].role", "'bot' is not allowed; 'system', 'developer'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("reader", [LAX, STRICT], ids=["lax", "strict"])
def test_a_value_that_is_not_allowed_is_told_with_what_to_do(body, param, says, reader):
    if reader is STRICT and "image_url" in str(body):
        body["messages"][0]["content"][0].pop("image_url", None)
    error = refusal(body, reader)
    assert (error.param, error.code) == (param, "invalid_value")
    assert says in error.message


def test_null_is_the_same_as_nothing():
    """Of every field that may be left out, in every object of a request."""
    seen: set[str] = set()

    def check(kind: StructType) -> None:
        if kind.cls.__name__ in seen:
            return
        seen.add(kind.cls.__name__)
        for field in kind.fields:
            kinds = field.type.types if isinstance(field.type, UnionType) else (field.type,)
            is_nullable = any(isinstance(one, NoneType) for one in kinds)
            assert field.required or is_nullable, f"{kind.cls.__name__}.{field.name} does not take null"
            for one in kinds:
                inner = getattr(one, "item_type", one)
                if isinstance(inner, StructType):
                    check(inner)

    for kind in POSTS.values():
        struct = type_info(kind)
        assert isinstance(struct, StructType)
        check(struct)
    assert {"ChatRequest", "Message", "Tool", "Function", "StructuredOutputs"} <= seen


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_names_what_was_ignored(server, stream):
    body = COMPLETION | {"max_tokens": 2, "stream": stream, "colour": 1, "bad\r\nx: y": 2, "cache_salt": None}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers[HEADER] == "colour, bad??x??y"
        assert response.headers["x"] is None
        response.read()
    server.wait_for_line('"event": "unknown field ignored"', '"field": "colour"')


def test_a_chat_that_is_too_long_is_about_its_messages(server):
    for body in (CHAT | {"max_tokens": 10**6}, CHAT | {"messages": [{"role": "user", "content": "x" * 100_000}]}):
        status, answer = server.post("/v1/chat/completions", body)
        error = json.loads(answer)["error"]
        assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded"), error
