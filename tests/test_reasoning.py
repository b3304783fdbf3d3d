"""T24: thoughts are told apart from the answer however the text was cut; the text of a model is a stranger's."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.reasoning import MAX_CALLS, MAX_HEADER_LEN, Part, ReasoningParser, merged, text_of

PARTS = (
    "<think>", "</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>",
    "<|constrain|>", "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
    " to=functions.f ",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", '{"x": 1}', "{", "json", " ", "\n\n",
    "<", "<|", "</", "analysis", "x" * 300, "é",
)  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=8)), max_size=12).map("".join)
styles = st.sampled_from([("think", False), ("think", True), ("harmony", False)])


def read(style: tuple[str, bool], pieces: list[str], functions: tuple[str, ...] = ("weather", "f")) -> list[Part]:
    parser = ReasoningParser(style[0], is_open=style[1], functions=functions)
    return merged([*itertools.chain(*map(parser.feed, pieces)), *parser.finish()])


def thought(text: str) -> Part:
    return Part("reasoning", text)


def said(text: str) -> Part:
    return Part("content", text)


THINK, OPEN, HARMONY = ("think", False), ("think", True), ("harmony", False)
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
WEATHER = Part("call", '{"city": "Paris"}', "weather")
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("style", "text", "parts"),
    [
        (THINK, "<think>\nWhy?\n</think>\n\nBecause.", [thought("Why?"), said("Because.")]),
        (THINK, "\n<think>a b\n c </think>d ", [thought("a b\n c"), said("d ")]),
        (THINK, "<think>\n\n</think>\n\nAt once.", [said("At once.")]),
        (THINK, "No thought.", [said("No thought.")]),
        (THINK, " Say <think> and </think>.", [said(" Say <think> and </think>.")]),
        (THINK, "<think>a</think>b<think>c</think>", [thought("a"), said("b<think>c</think>")]),
        (THINK, "<think>cut in the mid", [thought("cut in the mid")]),
        (THINK, "<think>cut in the mark</thi", [thought("cut in the mark</thi")]),
        (THINK, "  ", [said("  ")]),
        (OPEN, "\nWhy?\n</think>\n\nBecause.", [thought("Why?"), said("Because.")]),
        (OPEN, "<think>", [thought("<think>")]),
        (
            HARMONY,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <b>.<|return|>",
            [thought("Hm."), said("Yes <b>.")],
        ),
        (HARMONY, "<|channel|>final<|message|>Yes.", [said("Yes.")]),
        (HARMONY, "<|channel|>analysis<|message|>cut in the mid", [thought("cut in the mid")]),
        (HARMONY, "<|channel|>ana", []),
        (HARMONY, f"<|channel|>analysis<|message|>Hm.{NEXT}{CALL}<|call|>", [thought("Hm."), WEATHER]),
        (HARMONY, CALL, [WEATHER]),
        (HARMONY, ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}', [WEATHER]),
        (HARMONY, CALL[:-1], [said('{"city": "Paris"')]),
        (HARMONY, f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}", [said("I look."), WEATHER]),
        (
            HARMONY,
            f"<|channel|>analysis<|message|>A{NEXT}<|channel|>commentary<|message|>B{NEXT}{CALL}{NEXT}"
            f"<|channel|>analysis<|message|>C{NEXT}<|channel|>final<|message|>D",
            [thought("A"), said("B"), WEATHER, thought("C"), said("D")],
        ),
        (HARMONY, "plain text", [said("plain text")]),
        (HARMONY, "plain text<|return|>", [said("plain text")]),
        (HARMONY, "Hello<|start|>assistant<|channel|>final<|message|>x", [said("Hellox")]),
        (HARMONY, "<|start|>assistant<|start|>assistant<|channel|>final<|message|>x", [said("x")]),
        (HARMONY, "<|channel|>final<|message|>x<|end|><|start|>assistant", [said("x")]),
        (HARMONY, "user", [said("user")]),
    ],
)  # fmt: skip
def test_thoughts_answers_and_calls_in_their_order(style, text, parts):
    assert read(style, [text]) == parts
    assert read(style, list(text)) == parts


def test_a_call_of_a_function_that_is_not_offered_is_content():
    for functions in ((), ("f",), ("weather2", "weathe")):
        assert read(HARMONY, list(CALL), functions) == [said('{"city": "Paris"}')]


@settings(deadline=None, max_examples=600, derandomize=True)
@given(styles, texts, st.lists(st.integers(0, 700), max_size=12))
def test_how_the_text_is_cut_makes_no_difference(style, text, cuts):
    whole = read(style, [text])
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert read(style, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert read(style, list(text)) == whole


@settings(deadline=None, max_examples=300, derandomize=True)
@given(texts)
def test_what_is_a_call_can_be_read(text):
    for part in read(HARMONY, [text]):
        if part.kind == "call":
            assert isinstance(json.loads(part.text), dict)
            assert part.function in ("weather", "f")


def test_text_comes_as_soon_as_it_is_certain():
    parser = ReasoningParser("think")
    pieces = ("<think>", "a", " b", "</", "think>", "\n", "c <", "d")
    expected = [[], [thought("a")], [thought(" b")], [], [], [], [said("c <")], [said("d")]]
    assert [parser.feed(piece) for piece in pieces] == expected
    parser = ReasoningParser("harmony")
    parser.feed(CALL)
    assert parser.feed("x") == [said("x")], "what is no call is not held back"


def test_headers_and_calls_are_bounded():
    assert text_of("content", read(HARMONY, ["x" * (MAX_HEADER_LEN + 1) + "<|message|>"])).endswith("x<|message|>")
    whole = read(HARMONY, [(CALL + "<|call|>") * (MAX_CALLS + 3)])
    assert whole == [WEATHER] * MAX_CALLS + [said('{"city": "Paris"}' * 3)]
    assert [part.kind for part in read(HARMONY, [CALL[:-17] + '{"a":' * 100_000])] == ["content"]


@pytest.mark.alone
@pytest.mark.parametrize("style", [THINK, OPEN, HARMONY])
@pytest.mark.parametrize("more", [" ", "<", "</think", "<|channel|", "<|channel|>analysis<|message|>", CALL])
def test_time_is_in_proportion_to_length(style, more):
    """A character at a time, as tokens come. Four times the text: sixteen times the time if it were quadratic."""

    def seconds(length: int) -> float:
        parser = ReasoningParser(style[0], is_open=style[1], functions=("weather",))
        begin = time.thread_time()
        for piece in (more * length)[:length]:
            parser.feed(piece)
        parser.finish()
        return time.thread_time() - begin

    assert min(seconds(80_000) for _ in range(3)) < 9 * min(seconds(20_000) for _ in range(3)) + 0.01
