"""The real `openai` client against `/v1/responses`: the typed client, its helpers for streams and forms, tools."""

import json

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from quire import SamplingParams
from tests.server.attack import connect, post
from tests.server.process import PYTHON, SMALL, serving, write_whole

MESSAGES = [{"role": "user", "content": "What is a quire?"}]
ASKED = {"model": "tiny", "input": MESSAGES, "temperature": 0, "max_output_tokens": 24}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
LOGPROBS = {"include": ["message.output_text.logprobs"]}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as one:
        yield one


def said(offline, messages=MESSAGES, max_tokens=24):
    return offline.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens)).outputs[0]


def checked(response: Response) -> Response:
    """The response, if nothing that its type promises is missing or of another kind."""
    Response.model_validate(response.model_dump(mode="json", by_alias=True))
    return response


# -- text -------------------------------------------------------------------------------------------------------------


def test_a_response_is_what_a_chat_is_offline(client, offline):
    response = checked(client.responses.create(**ASKED, metadata={"run": "7"}, user="me"))
    whole = said(offline)
    assert response.output_text == whole.text
    assert response.id.startswith("resp_")
    assert (response.object, response.model, response.metadata, response.user) == (
        "response",
        "tiny",
        {"run": "7"},
        "me",
    )
    assert (response.temperature, response.top_p, response.store) == (0, 1, False)
    (message,) = response.output
    assert (message.type, message.role) == ("message", "assistant")
    assert response.usage.output_tokens == len(whole.token_ids)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_text_that_is_cut_is_incomplete_and_text_that_ends_is_complete(client, offline):
    cut = client.responses.create(**ASKED | {"max_output_tokens": 3})
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"
    stop = said(offline).text[4:6]
    ended = client.responses.create(**ASKED, extra_body={"stop": [stop]})
    assert (ended.status, ended.incomplete_details) == ("completed", None)
    assert ended.output_text == said(offline).text.split(stop)[0]


def test_without_a_limit_it_goes_on_as_long_as_it_likes(client):
    response = client.responses.create(
        model="tiny", input="x", extra_body={"seed": 1, "stop_token_ids": list(range(60))}
    )
    assert response.status == "completed"
    assert response.max_output_tokens is None


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hello", [{"role": "user", "content": "hello"}]),
        (
            [{"role": "developer", "content": "Be brief."}, {"type": "message", "role": "user", "content": "hello"}],
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        ),
        (
            [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "?"}],
                },
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
                },
                {"role": "user", "content": "d"},
            ],
            [
                {"role": "user", "content": "ab"},
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": "d"},
            ],
        ),
        (
            [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "let me see"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"city": "Bonn"}'},
                {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "rain"}]},
            ],
            [
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": "let me see",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Bonn"}}},
                        {"id": "2", "type": "function", "function": {"name": "f", "arguments": {}}},
                    ],
                },
                {"role": "tool", "content": "sunny", "tool_call_id": "1"},
                {"role": "tool", "content": "rain", "tool_call_id": "2"},
            ],
        ),
    ],
    ids=["text", "roles", "parts", "calls"],
)
@pytest.mark.parametrize("instructions", [None, "Answer in one word."])
def test_items_are_the_messages_of_a_chat(client, offline, items, messages, instructions):
    response = client.responses.create(
        **ASKED | {"input": items}, instructions=instructions, extra_body={"return_token_ids": True}
    )
    if instructions:
        messages = [{"role": "system", "content": instructions}, *messages]
    assert response.prompt_token_ids == offline.tokenizer.encode_chat(messages)
    assert response.token_ids == list(said(offline, messages).token_ids)


def test_a_response_goes_back_as_input(client, offline):
    first = client.responses.create(**ASKED, **LOGPROBS)
    again = client.responses.create(
        **ASKED | {"input": [*MESSAGES, *first.output, {"role": "user", "content": "more"}]}
    )
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
    ]
    assert again.output_text == said(offline, conversation).text


def test_cached_tokens_are_told(client):
    asked = ASKED | {"input": "an input that is sent twice, word for word, so that its pages are found again"}
    hits = [client.responses.create(**asked).usage.input_tokens_details.cached_tokens for _ in range(2)]
    assert hits[0] < hits[1]


def test_logprobs_are_those_of_a_chat(client):
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2
    )
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    response = checked(client.responses.create(**ASKED, **LOGPROBS, top_logprobs=2))
    assert [entry.model_dump() for entry in response.output[0].content[0].logprobs] == expected
    streamed = []
    for event in client.responses.create(**ASKED, **LOGPROBS, top_logprobs=2, stream=True):
        if event.type == "response.output_text.delta":
            streamed += [(entry.token, entry.logprob) for entry in event.logprobs]
    assert streamed == [(entry["token"], entry["logprob"]) for entry in expected]
    assert client.responses.create(**ASKED).output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    "more",
    [
        {"store": True},
        {"store": False, "include": ["reasoning.encrypted_content"]},
        {"truncation": "disabled", "background": False, "previous_response_id": None},
        {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True},
        {"text": {"format": {"type": "text"}}, "service_tier": "auto", "top_logprobs": 0},
        {"prompt_cache_key": "k", "safety_identifier": "s", "stream_options": None},
    ],
    ids=str,
)
def test_what_clients_send_without_meaning_it_changes_nothing(client, offline, more):
    assert checked(client.responses.create(**ASKED, **more)).output_text == said(offline).text


def test_our_own_fields_go_in_extra_body(client, offline):
    extra = {"top_k": 1, "request_id": "mine", "cache_salt": "x", "prompt_logprobs": True, "return_token_ids": True}
    response = client.responses.create(**ASKED | {"temperature": 1}, extra_body=extra)
    assert (response.id, response.output_text) == ("mine", said(offline).text)
    assert len(response.prompt_logprobs) == len(response.prompt_token_ids) == response.usage.input_tokens


# -- streams ----------------------------------------------------------------------------------------------------------

TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


def kinds(events) -> list[str]:
    """The types of events, those that follow each other once."""
    shown = []
    for event in events:
        if not shown or shown[-1] != event.type:
            shown.append(event.type)
    return shown


def test_a_stream_has_every_event_in_its_place(client, offline):
    events = list(client.responses.create(**ASKED, stream=True))
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event.model_dump(mode="json", by_alias=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == said(offline).text
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {events[-1].response.output[0].id}
    assert events[0].response.status == "in_progress"
    assert {event.response.id for event in events if hasattr(event, "response")} == {events[0].response.id}
    whole = client.responses.create(**ASKED)
    without = {"id", "created_at", "output"}
    assert events[-1].response.model_dump(exclude=without | {"usage"}) == whole.model_dump(exclude=without | {"usage"})
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_the_bytes_of_a_stream(server):
    """Each event is named by its type, and nothing follows the last."""
    _, body = server.post("/v1/responses", ASKED | {"stream": True})
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    for block in blocks:
        name, data = block.split("\n")
        assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]


def test_the_clients_own_helper_follows_a_stream(client, offline):
    stop = said(offline).text[8:10]
    with client.responses.stream(**ASKED, extra_body={"stop": [stop]}) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert snapshots[-1] == final.output_text == said(offline).text.split(stop)[0]


def test_an_answer_without_text_is_an_empty_message(client, offline):
    extra = {"stop": said(offline).text[0]}
    response = checked(client.responses.create(**ASKED, extra_body=extra))
    assert (response.output_text, len(response.output), response.status) == ("", 1, "completed")
    events = client.responses.create(**ASKED, extra_body=extra, stream=True)
    assert kinds(events) == [*TEXT_EVENTS, "response.completed"]


def test_a_client_that_goes_in_the_middle_gives_its_pages_back(server, client):
    server.wait_idle()
    fields = ASKED | {"max_output_tokens": 3000}
    stream = client.responses.create(**fields, stream=True, extra_body={"ignore_eos": True})
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    assert server.metric("quire_sequences_running") == 1
    stream.close()
    server.wait_idle()


# -- structured output ------------------------------------------------------------------------------------------------


class Place(pydantic.BaseModel):
    """What the client makes a JSON Schema of."""

    model_config = {"extra": "forbid"}
    large: bool
    rivers: int


def test_parse_gives_a_model_back(client):
    fields = ASKED | {"max_output_tokens": 400}
    response = client.responses.parse(**fields, text_format=Place)
    assert isinstance(response.output_parsed, Place)
    checked(response)
    assert response.text.format.name == "Place"
    with client.responses.stream(**fields, text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_json_object_and_our_own_forms(client):
    fields = ASKED | {"max_output_tokens": 400}
    response = client.responses.create(**fields, text={"format": {"type": "json_object"}}, extra_body={"seed": 3})
    assert response.status == "incomplete" or isinstance(json.loads(response.output_text), dict)
    chosen = client.responses.create(**fields, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.output_text in ("yes", "no")


# -- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=str)
def test_a_forced_call_round_trip(client, choice):
    fields = ASKED | {"max_output_tokens": 900, "tools": [WEATHER]}
    response = checked(client.responses.create(**fields, tool_choice=choice, extra_body={"seed": 2}))
    (call,) = response.output
    assert (call.type, call.name, call.status, response.status) == ("function_call", "get_weather", *["completed"] * 2)
    assert "city" in json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(**fields | {"input": [*MESSAGES, call, result]}, tool_choice="none")
    assert again.output[0].type == "message"


def test_a_call_in_a_stream(client):
    fields = ASKED | {"max_output_tokens": 900, "tools": [WEATHER], "tool_choice": "required"}
    events = list(client.responses.create(**fields, stream=True))
    assert kinds(events) == [*TEXT_EVENTS[:2], *CALL_EVENTS, "response.completed"]
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    for event in events:
        adapter.validate_python(event.model_dump(mode="json", by_alias=True))
    (call,) = events[-1].response.output
    assert "".join(event.delta for event in events if event.type.endswith("arguments.delta")) == call.arguments
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_text_before_calls_is_an_item_of_its_own(client, parallel, stream):
    fields = ASKED | {"max_output_tokens": 400, "tools": [WEATHER], "parallel_tool_calls": parallel}
    extra = {"structured_outputs": {"choice": [f"Wait. {CALL}{CALL} Done."]}}
    if stream:
        events = list(client.responses.create(**fields, stream=True, extra_body=extra))
        response = events[-1].response
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [item.id for item in response.output] == [
            event.item.id for event in events if event.type == "response.output_item.done"
        ]
        assert [event.output_index for event in events if event.type == "response.output_item.added"] == list(
            range(len(response.output))
        )
    else:
        response = client.responses.create(**fields, extra_body=extra)
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == (2 if parallel else 1)
    assert len({call.call_id for call in calls}) == len(calls)
    assert response.output[0].content[0].text.startswith("Wait. ")
    assert "tool_call" not in response.output_text
    assert response.output_text.endswith("Done.")
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=400,
        temperature=0,
        tools=[{"type": "function", "function": {key: WEATHER[key] for key in ("name", "parameters")}}],
        parallel_tool_calls=parallel,
        extra_body=extra,
    )
    assert len(chat.choices[0].message.tool_calls) == len(calls)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation in input"),
        ({"conversation": "conv_1"}, "conversation", "whole conversation in input"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "whole conversation in input"),
        ({"background": True}, "background", "send stream"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no templates"),
        ({"truncation": "auto"}, "truncation", "send 'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function' is the only"),
        ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "'function' is the only"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "'function' is the only"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "nothing is stored"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "text only"),
        ({"input": [{"role": "user"}]}, "input[0].content", "a message needs it"),
        ({"input": [{"content": "x"}]}, "input[0].role", "a message needs it"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", "needs it"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output", "needs it"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "send a message"),
        ({"input": []}, "input", ">= 1"),
        ({"input": "x" * 50_000}, "input", "max_model_len"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1 or more"),
        ({"n": 2}, "n", "2 times"),
        ({"max_tokens": 2}, "max_tokens", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": 3}}}},
         "text.format", "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs", "text.format"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream=true"),
    ],
    ids=lambda part: str(part)[:60],
)  # fmt: skip
def test_a_refusal_names_the_field_and_the_fix(server, fields, param, says):
    status, answer = server.post("/v1/responses", ASKED | fields)
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, param), error
    assert says in error["message"], error
    assert "messages" not in error["message"]
    assert "response_format" not in error["message"]


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(model="gpt-5", input="x")


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(tiny_folder, tmp_path_factory):
    """A server of one row with a short queue, whose device can be made to fail."""
    fault = tmp_path_factory.mktemp("fault") / "fault"
    launcher = [*PYTHON, "-m", "tests.server.faulty", "serve"]
    flags = (*SMALL, "--max-num-seqs", "1", "--max-queued-requests", "1")
    with serving(tiny_folder, *flags, launcher=launcher, env={"FAULT_FILE": str(fault)}) as running:
        yield running, fault


@pytest.mark.own_server
def test_a_failure_in_the_middle_is_told_in_events(faulty):
    server, fault = faulty
    fields = ASKED | {"max_output_tokens": 3000}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        events = []
        for event in client.responses.create(**fields, stream=True, extra_body={"ignore_eos": True}):
            events.append(event)
            if kinds(events) == TEXT_EVENTS[:5] and events[-2].type != event.type:
                write_whole(fault, "raise")
    assert kinds(events) == [*TEXT_EVENTS, "error", "response.failed"]
    *_, error, failed = events
    assert (error.code, failed.response.status, failed.response.error.code) == ("error", "failed", "server_error")
    assert error.message == failed.response.error.message
    assert failed.response.output[0].status == "incomplete"
    assert failed.response.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    server.wait_idle()


@pytest.mark.own_server
def test_a_deadline_in_a_stream_and_outside(faulty):
    server, _ = faulty
    fields = ASKED | {"max_output_tokens": 3000, "ignore_eos": True, "timeout": 0.02}
    status, answer = server.post("/v1/responses", fields)
    assert (status, json.loads(answer)["error"]["code"]) == (408, "deadline")
    _, body = server.post("/v1/responses", fields | {"stream": True})
    assert b"event: response.failed" in body
    server.wait_idle()


@pytest.mark.own_server
def test_a_full_queue_is_a_429(faulty):
    server, _ = faulty
    fields = ASKED | {"max_output_tokens": 3000, "ignore_eos": True, "stream": True}
    with connect(server) as running, connect(server) as waiting:
        running.sendall(post("/v1/responses", json.dumps(fields).encode()))
        assert b"output_text.delta" in read_until(running, b"output_text.delta")
        waiting.sendall(post("/v1/responses", json.dumps(fields).encode()))
        read_until(waiting, b"response.in_progress")
        status, answer = server.post("/v1/responses", ASKED)
        assert (status, json.loads(answer)["error"]["code"]) == (429, "overloaded")
    server.wait_idle()


def read_until(connection, mark: bytes) -> bytes:
    """What comes until this does."""
    got = b""
    while mark not in got:
        more = connection.recv(65536)
        assert more, got
        got += more
    return got
