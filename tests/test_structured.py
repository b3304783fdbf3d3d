"""Forms that a client asks for: one at a time, of a bounded size, and errors that name the field."""

import json

import pytest

from quire import SamplingParams
from quire.structured.form import MAX_LEN, Structured


def nested(depth: int) -> dict:
    inner: dict = {}
    for _ in range(depth):
        inner = {"items": inner}
    return inner


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "structured must have exactly one of json_schema, json_object, .*; it has none"),
        ({"regex": "a", "choice": ["a"]}, "it has regex and choice"),
        ({"regex": 3}, "structured.regex must be a string, got int"),
        ({"grammar": b"start: x"}, "structured.grammar must be a string, got bytes"),
        ({"json_object": "yes"}, "structured.json_object='yes' must be True or False"),
        ({"json_schema": ["a"]}, "structured.json_schema must be an object, or one as JSON text, got list"),
        ({"json_schema": "{'a': 1}"}, "structured.json_schema is not JSON"),
        ({"json_schema": '{}}], "max_tokens": 1, "x": [{"a": {}'}, "structured.json_schema is not JSON"),
        ({"json_schema": {"a": float("nan")}}, "structured.json_schema is not JSON"),
        ({"json_schema": '{"minimum": NaN}'}, "structured.json_schema is not JSON"),
        ({"json_schema": {"a": object()}}, "structured.json_schema is not JSON"),
        ({"json_schema": '{"a": ' + "9" * 5000 + "}"}, "structured.json_schema is not JSON"),
        ({"json_schema": "[" * 30_000}, "structured.json_schema is (nested too deeply|not JSON)"),
        ({"json_schema": nested(5000)}, "structured.json_schema is nested too deeply"),
        ({"choice": []}, "structured.choice must be a list of at least one string"),
        ({"choice": "abc"}, "structured.choice must be a list of at least one string"),
        ({"choice": ["a", 1]}, r"structured.choice\[1\] must be a string, got int"),
        ({"choice": ["a\ud800"]}, "structured.choice: character 1 is a lone surrogate"),
        ({"regex": "a" * (MAX_LEN + 1)}, f"structured.regex has {MAX_LEN + 1} characters, at most {MAX_LEN}"),
        ({"choice": [""] * (MAX_LEN + 2)}, "structured.choice has .* characters, at most"),
        ({"json_schema": {"enum": ["a" * MAX_LEN]}}, "structured.json_schema has .* characters, at most"),
        ({"json_schema": " " * MAX_LEN + "{}"}, "structured.json_schema has .* characters, at most"),
        ({"json_schema": "true"}, "structured.json_schema must be an object, it is true"),
        (
            {"json_schema": {"x-guidance": {"whitespace_pattern": "ab"}}},
            "structured.json_schema must have no 'x-guidanc",
        ),
        ({"json_schema": '{"x-guidance": {}}'}, "structured.json_schema must have no 'x-guidance'; `compact` says"),
        ({"json_schema": {}, "compact": 1}, "structured.compact=1 must be True, False or None"),
        ({"regex": "a", "compact": True}, "structured.compact is for json_schema and json_object, not for regex"),
    ],
    ids=map(str, range(27)),
)
def test_what_is_refused_is_named(fields, match):
    with pytest.raises(ValueError, match=match):
        Structured(**fields)
    with pytest.raises(ValueError, match=match.replace("structured", "response_format", 1)):
        Structured(name="response_format", **fields)


def test_a_schema_is_the_same_as_text_or_as_an_object_and_keeps_its_order():
    schema = {"properties": {"b": {}, "a": {"const": "ü"}}}
    one, other = Structured(json_schema=schema), Structured(json_schema=json.dumps(schema, indent=3), name="other")
    assert one == other
    assert hash(one) == hash(other)
    assert json.loads(str(one.json_schema)) == schema
    assert list(json.loads(str(one.json_schema))["properties"]) == ["b", "a"]
    assert one != Structured(json_schema={"properties": {"a": {"const": "ü"}, "b": {}}})
    assert (one.kind, Structured(json_object=True).kind) == ("json_schema", "json_object")
    assert Structured(choice=["a", "b"]) == Structured(choice=("a", "b"))


def test_a_schema_is_compact_unless_told_otherwise_and_any_object_is_not():
    assert Structured(json_schema={}) == Structured(json_schema={}, compact=True)
    assert Structured(json_schema={}) != Structured(json_schema={}, compact=False)
    assert Structured(json_object=True) == Structured(json_object=True, compact=False)
    assert Structured(regex="a").compact is None


def test_sampling_params_take_nothing_else():
    with pytest.raises(ValueError, match=r"structured=\{'regex': 'a'\} must be Structured\(...\)"):
        SamplingParams(structured={"regex": "a"})  # pyright: ignore[reportArgumentType]
    assert SamplingParams(structured=Structured(regex="a")) == SamplingParams(structured=Structured(regex="a"))
