"""T11: a form that a client sends is a stranger's program: refused, or of bounded cost, while a bystander goes on."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.structured.compiler import MAX_COMPILED
from tests.server.attack import KEY, OTHER_KEY, bystander
from tests.server.process import SMALL, serving

MOST_BYTES = 600 << 20


def nested(depth: int) -> str:
    """As text: Python's own JSON would not go so deep."""
    return '{"properties":{"a":' * depth + '{"type":"string"}' + '},"required":["a"]}' * depth


def branching(depth: int) -> dict:
    kinds = {"type": "string"}
    for i in range(depth):
        kinds = {
            "anyOf": [kinds, {"type": "object", "properties": {f"p{i}": kinds}}, {"type": "array", "items": kinds}]
        }
    return kinds


SCHEMAS = {
    "recursion": {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}, "$ref": "#/$defs/n"},
    "itself": {"$ref": "#"},
    "two in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "deep": nested(150),
    "very deep": nested(1400),
    "branching": branching(10),
    "huge enum": {"enum": [f"value number {i} of very many" for i in range(1800)]},
    "larger enum": {"enum": [f"value number {i} of very many" for i in range(50_000)]},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}},
    "all of": {"allOf": [{"properties": {f"p{i}": {"pattern": "(a|b)*c"}}} for i in range(400)]},
    "one of": {"oneOf": [{"type": "string", "minLength": i} for i in range(400)]},
    "bad pattern": {"type": "string", "pattern": "(a+)+b"},
    "pattern of parentheses": {"type": "string", "pattern": "(" * 30_000 + ")" * 30_000},
    "pattern with look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "endless string": {"type": "string", "minLength": 1 << 31},
    "endless list": {"type": "array", "minItems": 1 << 31, "items": {}},
    "list of lists": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000}},
    "large numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "small steps": {"type": "number", "multipleOf": 1e-300},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 4},
    "no type": {"type": 5},
    "unknown type": {"type": "nothing"},
    "properties as list": {"properties": []},
    "required as number": {"required": 3},
    "reference to nowhere": {"$ref": "#/nowhere"},
    "reference to elsewhere": {"$ref": "http://127.0.0.1:1/schema"},
    "reference to a file": {"$ref": "file:///etc/passwd"},
}
REGEXES = {
    "backtracking": "(a+)+b",
    "nested stars": "((((a*)*)*)*)*b",
    "alternation": "(a|a|a|a)*" * 20 + "b",
    "parentheses": "(" * 30_000 + "a" + ")" * 30_000,
    "unclosed": "(" * 30_000,
    "counted": "a{1000000}",
    "counts of counts": "(((a{1,100}){1,100}){1,100}){1,100}",
    "dots": "(.*a){40}",
    "far ahead": ".*a.{200}",
    "classes": "[\\p{L}]" * 3000,
    "look-behind": "(?<=a)b",
    "back reference": "(a)\\1",
    "broken": "[",
    "end": "\\",
    "nothing": "[^\\x00-\\U0010FFFF]",
}
GRAMMARS = {
    "left recursion": 'start: start "a" | "a"',
    "ambiguity": 'start: start start | "a"',
    "nothing but itself": "start: start",
    "parentheses": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
    "unknown rule": "start: nobody",
    "no start": 'other: "a"',
    "broken": "start: (",
    "empty": " ",
    "many rules": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(1500)) + '\nr1500: "c"',
    "counts": 'start: ("a"{1,1000}){1,1000}',
    "deep terminals": "start: T\nT: " + "(" * 500 + "/a/" + ")*" * 500,
    "import": "%import common.WORD\nstart: WORD",
    "JSON inside": 'start: %json {"$ref": "#"}',
}
CHOICES = {
    "many": [f"choice {i}" for i in range(1024)],
    "too many": [f"choice {i}" for i in range(2000)],
    "long": ["x" * 60_000, "y"],
    "too long": ["x" * 100_000],
    "none": [],
    "empty": [""],
}
FORMS = {"json": SCHEMAS, "regex": REGEXES, "grammar": GRAMMARS, "choice": CHOICES}


def ask(server, path: str, body: dict, schema: Any = None) -> int:
    """A schema that is text goes in where the body says so."""
    text = json.dumps({"model": "tiny", "max_tokens": 20, "timeout": 10} | body)
    if schema is not None:
        text = text.replace('"@"', schema if isinstance(schema, str) else json.dumps(schema))
    status = 429
    while status == 429:  # on a busy machine the process that tries forms may take long to start
        status, answer = server.ask("POST", path, text.encode())
    assert status in (200, 400, 408), (text[:200], answer)
    assert status == 200 or json.loads(answer)["error"]["message"]
    return status


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(FORMS))
def test_a_hostile_form_is_refused_or_bounded(server, offline, kind):
    memory, statuses = server.memory, {}
    with bystander(server, offline):
        for name, form in FORMS[kind].items():
            body, schema = {"prompt": "x", "structured_outputs": {kind: form}}, None
            if kind == "json":
                body, schema = {"prompt": "x", "structured_outputs": {"json": "@"}}, form
            statuses[name] = ask(server, "/v1/completions", body, schema)
    assert 400 in statuses.values(), statuses
    for name in ("no type", "very deep", "reference to a file", "unclosed", "back reference", "broken", "too long"):
        assert statuses.get(name, 400) == 400, name
    assert server.memory - memory < MOST_BYTES
    assert server.get("/health")[0] == 200


def test_exactly_one_form_is_given(server):
    for outputs in ({}, {"regex": "a", "choice": ["b"]}, {"json_object": False}):
        assert ask(server, "/v1/completions", {"prompt": "x", "structured_outputs": outputs}) == 400


def test_a_hostile_schema_of_an_answer_or_a_tool_is_treated_alike(server, offline):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": "@"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": "@"}}
    with bystander(server, offline):
        for name in ("recursion", "very deep", "no type", "bad pattern"):
            for fields in ({"response_format": form}, {"tools": [tool], "tool_choice": "required"}):
                ask(server, "/v1/chat/completions", chat | fields, SCHEMAS[name])


@pytest.mark.slow
def test_one_keys_grammars_hold_up_nobody_else(tiny_folder):
    """By the order of things, not by their time: the bystander is done with all before the attacker's last form is."""
    keys = [f"--api-key={key}" for key in (KEY, OTHER_KEY)]
    answered: list[int] = []

    def attack(number: int) -> None:
        """A second of computing for each form, and then it is refused."""
        patterns = {f"^p{number}x{i}[a-z]*$": {} for i in range(1500)}
        form = {"json": {"patternProperties": patterns}}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1, "structured_outputs": form}
        answered.append(server.post("/v1/completions", body, authorization=f"Bearer {KEY}")[0])

    def stand_by(path: str, body: dict) -> int:
        return server.post(path, {"model": "tiny"} | body, authorization=f"Bearer {OTHER_KEY}")[0]

    with serving(tiny_folder, *SMALL, *keys) as server, ThreadPoolExecutor(4) as connections:
        warm = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"choice": ["a", "b"]}}
        while stand_by("/v1/completions", warm) != 200:  # until the process that tries its forms has started
            pass
        attacks = [connections.submit(attack, number) for number in range(8)]
        while not answered:
            time.sleep(0.01)
        statuses = [stand_by("/tokenize", {"prompt": "some text"}) for _ in range(20)]
        form = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"choice": ["yes", "no"]}}
        statuses += [stand_by("/v1/completions", form)]
        num_answered = len(answered)
        for one in attacks:
            one.result()
    assert statuses == [200] * 21
    assert set(answered) <= {400, 429}
    assert num_answered < 8


@pytest.mark.slow
def test_many_forms_take_bounded_memory(server, offline):
    """What is compiled is kept for those who send it again, but not all of it for ever."""

    def ask_for(form: int) -> int:
        choices = [f"choice {i} of form {form}" for i in range(100)]
        return ask(server, "/v1/completions", {"prompt": "x", "structured_outputs": {"choice": choices}})

    with bystander(server, offline):
        statuses = [ask_for(form) for form in range(2 * MAX_COMPILED)]
        memory = server.memory
        statuses += [ask_for(form) for form in range(2 * MAX_COMPILED, 5 * MAX_COMPILED)]
    assert statuses.count(200) > 0.9 * len(statuses)
    assert server.memory - memory < 64 << 20
