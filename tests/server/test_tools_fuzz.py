"""T24: the text of a model is a stranger's. Reading calls of tools out of it never fails, does not depend on how the
text was cut, gives nothing that cannot be sent, and takes time in proportion to its length.
"""

import itertools
import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.openai.tools import ToolParser
from quire.text.reasoning import MAX_CALLS, Part, merged, text_of

STYLES = ("hermes", "mistral", "llama", "json")
CALL = '{"name": "f", "arguments": {"x": 1}}'
PARTS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", CALL, f"[{CALL}, {CALL}]", '{"name": "f"}',
    '{"name": "f", "parameters": {}}', '{"name": 1, "arguments": 2}', '{"name": "\\ud800", "arguments": {}}',
    '{"name": "f", "arguments": "\\udfff"}', '{"name": "f", "arguments": {"\\ud800": NaN}}', "[[", "{", '"', " ", "\n",
    "<", "[", "<tool", "<tool_call><tool_call>", "null", "1e999", "-Infinity", "[]", "\ufffd", "é", "\\",
    '{"name": "f", "arguments": ' + "9" * 5000 + "}", '{"name": "f", "arguments": ' + "[" * 500 + "]" * 500 + "}",
)  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=8)), max_size=12).map("".join)
styles = st.sampled_from(STYLES)


def read(style: str, pieces: list[str], functions: tuple[str, ...] = ("f",)) -> list[Part]:
    parser = ToolParser(style, functions)
    parts = [*itertools.chain(*map(parser.feed, pieces)), *parser.finish()]
    assert parser.num_calls == len([part for part in parts if part.kind == "call"])
    return merged(parts)


@settings(deadline=None, max_examples=400, derandomize=True)
@given(styles, texts, st.lists(st.integers(0, 400), max_size=12))
def test_how_the_text_is_cut_makes_no_difference(style, text, cuts):
    whole = read(style, [text])
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert read(style, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert read(style, list(text)) == whole


@pytest.mark.slow
@settings(deadline=None, max_examples=400, derandomize=True)
@given(styles, texts)
def test_what_comes_out_can_be_sent_and_is_nothing_but_text(style, text):
    parts = read(style, list(text))
    msgspec.json.encode(parts)
    for part in parts:
        if part.kind == "call":
            assert part.function == "f"
            if not text.count('"arguments": "'):  # a string stays as the model wrote it
                json.loads(part.text, parse_constant=pytest.fail)
    if not any(part.kind == "call" for part in parts):
        assert text_of("content", parts) == text


@pytest.mark.slow
@settings(deadline=None, max_examples=200, derandomize=True)
@given(styles, texts)
def test_a_call_of_a_function_that_is_not_offered_stays_text(style, text):
    assert text_of("content", read(style, list(text), ("g",))) == text


def test_content_and_calls_are_in_the_order_of_the_text():
    call = f"<tool_call>{CALL}</tool_call>"
    parts = [Part("content", "a "), *[Part("call", '{"x": 1}', "f")] * 2, Part("content", " b")]
    assert read("hermes", [f"a {call}{call} b"]) == parts


@pytest.mark.parametrize("depth", [10, 900, 1100, 5000, 100_000])
def test_deep_nesting_stays_text_or_becomes_a_call(depth):
    text = '{"name": "f", "arguments": ' + '{"a":[' * depth + "]}" * depth + "}"
    (part,) = read("json", [text])
    assert part.kind == "call" or part.text == text
    msgspec.json.encode(part)


def test_calls_are_bounded():
    text = f"<tool_call>{CALL}</tool_call>" * (MAX_CALLS + 5)
    *calls, content = read("hermes", [text])
    assert [part.kind for part in calls] == ["call"] * MAX_CALLS
    assert content == Part("content", f"<tool_call>{CALL}</tool_call>" * 5)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("style", "mark", "more"),
    [
        ("hermes", "<tool_call>", "x"),
        ("hermes", "", "<tool_call"),
        ("hermes", "", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>", "</tool_call"),
        ("mistral", "[TOOL_CALLS]", "["),
        ("mistral", "", "[TOOL_CALL"),
        ("llama", "", " "),
        ("llama", "", "{"),
        ("llama", "<|python_tag|>", "x"),
        ("json", "", "["),
    ],
)
def test_time_is_in_proportion_to_length(style, mark, more):
    """A character at a time, as tokens come. Four times the text: sixteen times the time if it were quadratic."""

    def seconds(length: int) -> float:
        pieces = list((mark + more * length)[:length])
        parser = ToolParser(style, ("f",))
        begin = time.thread_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        return time.thread_time() - begin

    short, long = 20_000, 80_000
    assert min(seconds(long) for _ in range(3)) < 9 * min(seconds(short) for _ in range(3)) + 0.01
