"""What a model thinks comes apart from its answer: in whole responses, in streams, and over a real server."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import openai
import pytest
from openai.types.responses import Response

from quire import LLM, SamplingParams
from quire.async_llm.updates import Update
from quire.checkpoint.tokenizer_files import tokenizer_from_folder
from quire.core.sequence import TokenLogprob
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.answer_parser import AnswerParser
from quire.server.openai.format import ChatFormatter
from quire.server.openai.parse import parse_chat
from quire.server.openai.responses import parse_response
from quire.server.openai.responses_format import ResponsesFormatter
from quire.server.openai.tools import ToolParser
from quire.server.service import Service
from quire.text.reasoning import ReasoningParser, has_special_marks, is_opened, reasoning_style
from tests.server.process import SMALL, serving
from tests.server.tiny_folder import TEMPLATE, write_tiny_folder

MESSAGES = [{"role": "user", "content": "What is a quire?"}]
THINK = "<think>\nA word.\n</think>\n\nPages."
HARMONY = "<|channel|>analysis<|message|>A word.<|end|><|start|>assistant<|channel|>final<|message|>Pages."
CALL = (
    "<|channel|>analysis<|message|>A word.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
)
NEXT = "<|end|><|start|>assistant"
TURNS = (
    f"<|channel|>analysis<|message|>A{NEXT}<|channel|>commentary<|message|>Bé{NEXT}"
    f'<|channel|>commentary to=functions.weather<|message|>{{"city": "Paris"}}<|call|><|start|>assistant'
    f"<|channel|>analysis<|message|>C{NEXT}<|channel|>final<|message|>D"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    """Whose tokens are bytes."""
    return tokenizer_from_folder(tiny_folder)


@pytest.fixture(scope="module")
def service(tokenizer):
    llm = SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer))
    return SimpleNamespace(engine=SimpleNamespace(llm=llm), tokenizer=tokenizer, model_name="m")


stream = cast(
    Any,
    SimpleNamespace(
        request=SimpleNamespace(params=SamplingParams(), prompt_token_ids=(1,)),
        num_output_tokens=3,
        num_cached_tokens=0,
        grammar=None,
    ),
)


def connected(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def updates(text: str, size: int) -> list[Update]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return [Update(0, piece, finish_reason="eos" if i == len(pieces) - 1 else None) for i, piece in enumerate(pieces)]


def with_tokens(tokenizer, text: str, size: int, lag: int = 0, reason: str = "length") -> list[Update]:
    """The updates for a text: `size` tokens in each, its text `lag` tokens behind them."""
    ids = tokenizer.encode(text)
    ends = [*range(size, len(ids), size), len(ids)]
    shown, told = [], 0
    for begin, end in itertools.pairwise([0, *ends]):
        is_last = end == len(ids)
        certain = text if is_last else tokenizer.decode(ids[: max(0, end - lag)]).removesuffix("\ufffd")
        new, told = certain[told:], len(certain)
        logprobs = [TokenLogprob(i, -0.5) for i in ids[begin:end]]
        shown.append(Update(0, new, ids[begin:end], logprobs, reason if is_last else None))
    return shown


def parser_of(style: str, functions: tuple[str, ...] = ()) -> AnswerParser:
    return AnswerParser(ReasoningParser(style, functions=functions))


def chat_formatter(service, style: str, functions: tuple[str, ...] = ()) -> ChatFormatter:
    body = msgspec.convert({"model": "m", "messages": MESSAGES}, schema.ChatRequest)
    return ChatFormatter(service, body, lambda: parser_of(style, functions))


def responses_formatter(service, new_parser) -> ResponsesFormatter:
    body = msgspec.convert({"model": "m", "input": "What is a quire?"}, schema.ResponsesRequest)
    chat = msgspec.convert({"model": "m", "messages": MESSAGES, "logprobs": True}, schema.ChatRequest)
    return ResponsesFormatter(service, body, chat, new_parser)


@pytest.mark.parametrize(("style", "text"), [("think", THINK), ("harmony", HARMONY)])
def test_a_chat_has_both_apart(service, style, text):
    message = chat_formatter(service, style).choice(0, stream, Update(0, text, finish_reason="eos"))["message"]
    assert (message["reasoning_content"], message["content"]) == ("A word.", "Pages.")
    for size in (1, 5, 1000):
        formatter = chat_formatter(service, style)
        deltas = [formatter.delta(0, stream, update) for update in updates(text, size)]
        shown = [delta["delta"] for delta in deltas if delta]
        assert "".join(delta.get("reasoning_content", "") for delta in shown) == "A word."
        assert "".join(delta.get("content", "") for delta in shown) == "Pages."
        assert deltas[-1]["finish_reason"] == "stop"


def test_a_message_without_thoughts_has_no_such_field(service):
    choice = chat_formatter(service, "think").choice(0, stream, Update(0, "Pages.", finish_reason="eos"))
    assert choice["message"] == {"role": "assistant", "content": "Pages.", "refusal": None}


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_of_harmony_is_a_tool_call(service, size):
    formatter = chat_formatter(service, "harmony", functions=("weather",))
    deltas = [delta for update in updates(CALL, size) if (delta := formatter.delta(0, stream, update))]
    (call,) = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert "".join(delta["delta"].get("reasoning_content", "") for delta in deltas) == "A word."


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_response_has_an_item_for_each(service, size):
    formatter = responses_formatter(service, lambda: parser_of("harmony"))
    events = formatter.first_events([stream])
    for update in updates(HARMONY, size):
        events += formatter.events(0, stream, update)
    response = Response.model_validate(events[-1]["response"])
    thought, message = response.output
    assert (thought.type, message.type, response.output_text) == ("reasoning", "message", "Pages.")
    assert [part.text for part in thought.content] == ["A word."]
    kinds = ("response.reasoning_text.delta", "response.output_text.delta")
    told = ["".join(event["delta"] for event in events if event["type"] == kind) for kind in kinds]
    assert told == ["A word.", "Pages."]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def items(response: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """The type, the text and the tokens with log-probabilities of each item."""
    shown = []
    for item in response["output"]:
        if item["type"] == "function_call":
            shown.append((item["type"], item["arguments"], []))
        else:
            (part,) = item["content"]
            shown.append((item["type"], part["text"], [entry["token"] for entry in part.get("logprobs", [])]))
    return shown


@pytest.mark.parametrize("lag", [0, 3, 1000])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_response_keeps_the_order_of_the_text_in_a_stream_and_whole(service, tokenizer, size, lag):
    """Each message has the log-probabilities of its own tokens, and no other's."""
    formatter = responses_formatter(service, lambda: parser_of("harmony", ("weather",)))
    events = [
        event for update in with_tokens(tokenizer, TURNS, size, lag) for event in formatter.events(0, stream, update)
    ]
    half = "\ufffd"  # half of a character
    expected = [
        ("reasoning", "A", []),
        ("message", "Bé", ["B", half, half]),
        ("function_call", '{"city": "Paris"}', []),
        ("reasoning", "C", []),
        ("message", "D", ["D"]),
    ]
    assert items(events[-1]["response"]) == expected
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == ["B", half, half, "D"]
    (whole,) = with_tokens(tokenizer, TURNS, 1000)
    response = responses_formatter(service, lambda: parser_of("harmony", ("weather",))).response([stream], [[whole]])
    assert items(response) == expected
    # Tokens are bytes: both messages of thoughts, `<|message|>`'s last byte and their end's.
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2 * (1 + 1 + len("<|end|>"))
    assert events[-1]["response"]["usage"] == response["usage"]


@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_that_is_cut_in_its_thoughts_has_no_message(service, tokenizer, size):
    formatter = responses_formatter(service, lambda: parser_of("think"))
    events = []
    for update in with_tokens(tokenizer, "<think>Hm, a", size):
        events += formatter.events(0, stream, update)
    response = events[-1]["response"]
    assert items(response) == [("reasoning", "Hm, a", [])]
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(">Hm, a")


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_in_the_text_takes_its_log_probabilities_with_it(service, tokenizer, size):
    text = '<think>A</think>B<tool_call>{"name": "f", "arguments": {}}</tool_call>C'
    formatter = responses_formatter(
        service, lambda: AnswerParser(ReasoningParser("think"), ToolParser("hermes", ("f",)))
    )
    events = []
    for update in with_tokens(tokenizer, text, size):
        events += formatter.events(0, stream, update)
    expected = [("reasoning", "A", []), ("message", "B", ["B"]), ("function_call", "{}", []), ("message", "C", ["C"])]
    assert items(events[-1]["response"]) == expected


@pytest.mark.slow
def test_a_server_hands_out_what_follows_an_open_mark_as_reasoning(tmp_path):
    """A template that opens the thoughts itself; this model never closes them. With a form there are none."""
    opening = "<|im_start|>assistant\n<think>\n"
    assert TEMPLATE.count("<|im_start|>assistant\n") == 1
    template = TEMPLATE.replace("<|im_start|>assistant\n", opening) + "{# </think> #}"
    folder = write_tiny_folder(tmp_path / "tiny", template)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    with serving(folder, *SMALL) as server, connected(server) as client:
        message = client.chat.completions.create(**asked).choices[0].message
        chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        formed = client.chat.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
        back = [*MESSAGES, message.model_dump(exclude_none=True), *MESSAGES]
        raw = client.chat.completions.with_raw_response.create(**asked | {"messages": back})
    with LLM(folder, dtype="float32", max_num_seqs=8, max_num_batched_tokens=64, num_pages=512, quiet=True) as llm:
        text = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=30)).outputs[0].text
    assert text.strip()
    assert (message.reasoning_content, message.content) == (text.strip(), "")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == text.strip()
    assert "".join(delta.content or "" for delta in chunks) == ""
    assert formed.choices[0].message.content in ("yes", "no")
    assert "x-quire-ignored-fields" not in raw.headers


def test_the_style_is_read_from_the_template_and_the_marks_from_the_vocabulary(tmp_path):
    plain = tokenizer_from_folder(write_tiny_folder(tmp_path / "plain"))
    assert reasoning_style(plain) is None
    harmony = tokenizer_from_folder(write_tiny_folder(tmp_path / "harmony", "<|channel|>analysis<|message|>"))
    assert reasoning_style(harmony) == "harmony"
    think = tokenizer_from_folder(write_tiny_folder(tmp_path / "think", "<think></think>"))
    assert (reasoning_style(think), has_special_marks(think, "think")) == ("think", False)
    assert is_opened(think, think.encode("a <think>\n"))
    assert not is_opened(think, think.encode("<think>\n\n</think>\n\n"))


HARMONY_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}t{% endif %}<|channel|><|message|>"


@contextlib.contextmanager
def service_of(folder) -> Iterator[Service]:
    """A service with a tokenizer, and without an engine."""
    tokenizer = tokenizer_from_folder(folder)
    engine = SimpleNamespace(llm=SimpleNamespace(engine=SimpleNamespace(tokenizer=tokenizer, max_request_len=4096)))
    engine.llm.default_params, engine.admission = SamplingParams(), SimpleNamespace(check_room=lambda tenant: None)
    with contextlib.closing(Service(cast(Any, engine), "m", 0)) as service:
        yield service


@pytest.mark.parametrize(
    ("fields", "is_call"),
    [
        ({"tools": ["weather", "f"]}, True),
        ({"tools": ["weather"], "tool_choice": "auto"}, True),
        ({"tools": ["weather"], "tool_choice": "none"}, False),
        ({"tools": ["f"]}, False),
        ({}, False),
    ],
    ids=str,
)
def test_only_functions_that_the_request_offers_are_called(tmp_path, fields, is_call):
    tools = [{"type": "function", "function": {"name": name}} for name in fields.get("tools", ())]
    body = {"model": "m", "messages": MESSAGES} | fields | ({"tools": tools} if tools else {})
    asked = msgspec.convert(body, schema.ChatRequest)
    with service_of(write_tiny_folder(tmp_path / "tiny", HARMONY_TEMPLATE)) as service:
        parsed = asyncio.run(parse_chat(service, asked, Caller()))
    choice = cast(ChatFormatter, parsed.formatter).choice(0, stream, Update(0, CALL, finish_reason="eos"))
    if is_call:
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    else:
        assert "tool_calls" not in choice["message"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"city": "Paris"}', "stop")


EFFORTS = get_args(schema.ReasoningEffort)


def test_the_effort_is_the_chat_templates(tmp_path):
    """By either of OpenAI's fields, or as a variable; and both at once are an error that names the field."""
    template = "{{ reasoning_effort or 'own' }}{% for message in messages %}{% endfor %}"
    with service_of(write_tiny_folder(tmp_path / "tiny", template)) as service:

        def prompt(**fields: Any) -> str:
            body = msgspec.convert({"model": "m", "messages": MESSAGES} | fields, schema.ChatRequest)
            return asked(parse_chat(service, body, Caller()))

        def prompt_of_response(**fields: Any) -> str:
            body = msgspec.convert({"model": "m", "input": "x"} | fields, schema.ResponsesRequest)
            return asked(parse_response(service, body, Caller()))

        def asked(parsing: Any) -> str:
            return service.tokenizer.decode(asyncio.run(parsing).requests[0].prompt_token_ids)

        variable = {"chat_template_kwargs": {"reasoning_effort": "high"}}
        assert (prompt(), prompt_of_response(reasoning={"summary": "auto"})) == ("own", "own")
        assert (prompt(**variable), prompt_of_response(**variable)) == ("high", "high")
        for effort in EFFORTS:
            assert prompt(reasoning_effort=effort) == prompt_of_response(reasoning={"effort": effort}) == effort
        for make, name, fields in (
            (prompt, "reasoning_effort", {"reasoning_effort": "high"}),
            (prompt_of_response, "reasoning.effort", {"reasoning": {"effort": "low"}}),
        ):
            with pytest.raises(
                ApiError, match=f"{name} and chat_template_kwargs.reasoning_effort are the same"
            ) as caught:
                make(**fields, **variable)
            assert (caught.value.status, caught.value.param) == (400, name)


def test_the_effort_comes_back_in_a_response_and_others_are_refused(server):
    with connected(server) as client:
        asked: Any = {"model": "tiny", "input": "x", "max_output_tokens": 2}
        raw = client.responses.with_raw_response.create(**asked, reasoning={"effort": "low", "summary": "auto"})
        assert "x-quire-ignored-fields" not in raw.headers
        assert raw.parse().reasoning.effort == "low"
        assert client.responses.create(**asked).reasoning.effort is None
        chat = client.chat.completions.with_raw_response.create(
            model="tiny", messages=cast(Any, MESSAGES), max_tokens=2, reasoning_effort="none"
        )
        assert "x-quire-ignored-fields" not in chat.headers
    for path, fields, name in (
        ("/v1/responses", asked | {"reasoning": {"effort": "very"}}, "reasoning.effort"),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": MESSAGES, "reasoning_effort": "x"},
            "reasoning_effort",
        ),
    ):
        status, answer = server.post(path, fields)
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, name)
        assert "'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max' are efforts" in error["message"]
