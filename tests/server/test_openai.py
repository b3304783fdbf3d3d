"""The real `openai` client against a real server: what it reads is what `LLM` says offline."""

import asyncio
import http.client
import json

import openai
import pytest

from quire import SamplingParams
from tests.server.process import LONGEST_S

PROMPT = "The old harbour was quiet, and "
MESSAGES = [{"role": "user", "content": "What is a quire?"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def expected(offline, prompt, **params):
    (output,) = offline.generate([prompt], SamplingParams(temperature=0, **params), progress=False)
    return output


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


@pytest.mark.parametrize("prompt", [PROMPT, list(range(20, 60))], ids=["text", "ids"])
def test_a_completion_is_what_it_is_offline(client, offline, prompt):
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=40, temperature=0)
    whole = expected(offline, prompt, max_tokens=40)
    assert answer.choices[0].text == whole.outputs[0].text
    assert answer.usage.completion_tokens == len(whole.outputs[0].token_ids)
    assert answer.usage.prompt_tokens == len(whole.prompt_token_ids)


def test_several_prompts_and_n(client, offline):
    prompts = ["one ", "two ", "three "]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=12, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for i, prompt in enumerate(prompts):
        (whole,) = offline.generate([prompt], SamplingParams(seed=5, n=2, max_tokens=12), progress=False)
        assert [choice.text for choice in answer.choices[2 * i : 2 * i + 2]] == [out.text for out in whole.outputs]


def test_a_stream_says_the_same_and_ends_with_usage(client, offline):
    events = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=50,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    whole = expected(offline, PROMPT, max_tokens=50)
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.outputs[0].text
    assert len(events) > 3, "text, the reason, and what was used"
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == len(whole.outputs[0].token_ids)
    assert events[-2].choices[0].finish_reason in ("length", "stop")


def test_echo_and_logprobs(client, offline):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3, echo=True)
    whole = expected(offline, PROMPT, max_tokens=8, logprobs=3, prompt_logprobs=True)
    logprobs = answer.choices[0].logprobs
    scores = [entry and entry.logprob for entry in whole.prompt_logprobs] + [
        entry.logprob for entry in whole.outputs[0].logprobs
    ]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(scores[1:], abs=1e-4)
    assert answer.choices[0].text.startswith(PROMPT)
    assert len(logprobs.tokens) == len(logprobs.text_offset) == len(scores)


def test_echo_in_a_stream_brings_the_prompts_scores(client):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    events = client.completions.create(**fields, logprobs=0, echo=True, stream=True)
    choices = [event.choices[0] for event in events]
    assert "".join(choice.text for choice in choices).startswith(PROMPT)
    assert sum(len(choice.logprobs.tokens) for choice in choices) == len(PROMPT) + 4
    assert choices[0].logprobs.token_logprobs[0] is None


@pytest.mark.parametrize(
    "more",
    [
        {"echo": None, "suffix": None, "best_of": 1, "top_p": 0},
        {"extra_body": {"top_k": -1, "min_p": None}},
        {"n": None},
    ],
    ids=str,
)
def test_what_clients_send_without_meaning_it_changes_nothing(client, more):
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    assert (
        client.completions.create(**fields, **more).choices[0].text
        == client.completions.create(**fields).choices[0].text
    )


def test_a_prompt_can_be_scored_without_drawing_anything(client):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    assert answer.choices[0].text == PROMPT
    assert len(answer.choices[0].logprobs.token_logprobs) == len(PROMPT)


def test_a_chat_is_what_it_is_offline(client, offline):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=30, temperature=0)
    whole = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=30))
    assert answer.choices[0].message.content == whole.outputs[0].text
    assert answer.choices[0].message.role == "assistant"


def test_a_chat_in_a_stream_with_n_and_logprobs(client, offline):
    events = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=20, seed=3, n=3, logprobs=True, top_logprobs=2, stream=True
    )
    texts, counted, reasons = ["", "", ""], [0, 0, 0], {}
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            counted[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    whole = offline.chat(MESSAGES, SamplingParams(seed=3, n=3, max_tokens=20))
    assert texts == [output.text for output in whole.outputs]
    assert counted == [len(output.token_ids) for output in whole.outputs]
    assert set(reasons) == {0, 1, 2}


def test_stop_and_bias_reach_the_sampler(client, offline):
    free = expected(offline, PROMPT, max_tokens=30).outputs[0].text
    stop = free[6:9]
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop])
    assert answer.choices[0].text == free[: free.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    extra = {"include_stop_str_in_output": True}
    kept = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop], extra_body=extra
    )
    assert kept.choices[0].text == answer.choices[0].text + stop
    biased = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logit_bias={"65": 100})
    assert biased.choices[0].text == offline.tokenizer.decode([65] * 5)


def test_cached_tokens_are_told(client):
    prompt = "a prompt that is sent twice, word for word, so that its pages are found again"
    for expected_hit in (False, True):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, n=3, seed=1)
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) is expected_hit


def test_many_async_streams_do_not_mix(server, offline):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:

            async def one(i: int) -> str:
                events = await client.completions.create(
                    model="tiny", prompt=f"stream {i}: ", max_tokens=40, temperature=0, stream=True
                )
                return "".join([event.choices[0].text async for event in events])

            return await asyncio.gather(*(one(i) for i in range(24)))

    texts = asyncio.run(run())
    whole = offline.generate(
        [f"stream {i}: " for i in range(24)], SamplingParams(temperature=0, max_tokens=40), progress=False
    )
    assert texts == [output.outputs[0].text for output in whole]


def test_our_own_fields_go_in_extra_body(client):
    extra = {"top_k": 1, "min_tokens": 3, "return_token_ids": True, "request_id": "mine", "cache_salt": "x"}
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, extra_body=extra)
    assert answer.id == "mine"
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens


def test_tokenize_and_back(server):
    status, body = server.post("/tokenize", {"prompt": PROMPT})
    tokens = json.loads(body)["tokens"]
    assert (status, len(tokens)) == (200, len(PROMPT))
    assert json.loads(server.post("/detokenize", {"tokens": tokens})[1]) == {"prompt": PROMPT}


def test_tokenize_and_back_have_the_limit_of_prompts(server):
    """Else a response could have many times the bytes of its request, and a client could leave thousands unread."""
    most = json.loads(server.post("/tokenize", {"prompt": "x"})[1])["max_model_len"]
    assert server.post("/detokenize", {"tokens": [65] * most})[0] == 200
    for path, field, value in (("/detokenize", "tokens", [65] * (most + 1)), ("/tokenize", "prompt", "x" * (most + 1))):
        status, body = server.post(path, {field: value})
        error = json.loads(body)["error"]
        assert (status, error["param"], error["code"]) == (400, field, "context_length_exceeded")
        assert f"max_model_len={most}" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"prompt": "x", "temperature": 9}, "temperature", "invalid_value"),
        ({"prompt": "x", "n": True}, "n", "invalid_value"),
        ({"prompt": "x", "best_of": 2}, "best_of", "invalid_value"),
        ({"prompt": "x", "guided_regex": "a"}, "guided_regex", "unsupported_field"),
        ({}, "prompt", "missing_field"),
        ({"prompt": [1, "x"]}, "prompt", None),
        ({"prompt": "x", "max_tokens": 10**6}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "logit_bias": {"5": 1e9}}, "logit_bias[...]", "invalid_value"),
        ({"prompt": "x", "min_tokens": 5, "max_tokens": 2}, "min_tokens", "invalid_value"),
        ({"prompt": [99999]}, "prompt", "invalid_value"),
    ],
    ids=str,
)
def test_an_error_names_the_field(server, body, param, code):
    status, answer = server.post("/v1/completions", {"model": "tiny"} | body)
    error = json.loads(answer)["error"]
    assert (status, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"


def test_what_is_not_there_is_told_in_the_same_shape(server):
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ):
        got, body = server.ask(method, path, b"{}" if method == "POST" else None)
        assert got == status
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert server.ask("POST", "/v1/completions", b"{")[0] == 400


def test_the_health_trio(server):
    assert [server.get(path)[0] for path in ("/health", "/livez", "/readyz")] == [200, 200, 200]
    assert json.loads(server.get("/version")[1])["version"]


# -- structured output and tools --------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_shapes_the_answer(client, stream):
    fields = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 900,
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    }
    if stream:
        events = client.chat.completions.create(**fields, stream=True)
        text = "".join(choice.delta.content or "" for event in events for choice in event.choices)
    else:
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "stop"
        text = choice.message.content
    value = json.loads(text)
    assert set(value) == {"city", "size"}
    assert value["size"] in ("small", "large")


@pytest.mark.parametrize(
    ("form", "good"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
        ({"grammar": 'start: "<" /[a-z]+/ ">"'}, lambda text: text[0] == "<" and text[-1] == ">"),
        ({"json": {"type": "boolean"}}, lambda text: json.loads(text) in (True, False)),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_structured_outputs_hold_for_every_sample_and_prompt(client, form, good):
    answer = client.completions.create(
        model="tiny", prompt=["a", "b"], n=3, max_tokens=60, seed=4, extra_body={"structured_outputs": form}
    )
    ended = [choice.text for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(good(text) for text in ended), ended


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "(("}, "regex"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({}, "exactly one"),
        ({"grammar": "start: nothing"}, "grammar"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_is_a_bad_request(client, form, says):
    with pytest.raises(openai.BadRequestError, match=says):
        client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": form})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_has_valid_arguments(client, choice, stream):
    fields = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 900,
        "seed": 2,
    }
    if stream:
        calls, reasons = [], []
        for event in client.chat.completions.create(**fields, stream=True):
            for part in event.choices:
                calls += part.delta.tool_calls or []
                reasons += [part.finish_reason] * bool(part.finish_reason)
        (reason,) = reasons
    else:
        answer = client.chat.completions.create(**fields).choices[0]
        calls, reason = answer.message.tool_calls, answer.finish_reason
    (call,) = calls
    assert (call.function.name, reason) == ("get_weather", "tool_calls")
    assert "city" in json.loads(call.function.arguments)


def test_a_conversation_with_a_tools_answer_goes_on(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], max_tokens=8, temperature=0, tool_choice="none"
    )
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/metrics", None, 200),
        ("GET", "/nowhere", None, 404),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/tokenize", b"x" * (9 << 20), 413),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": true}', 200),
    ],
    ids=["answer", "metrics", "no route", "error", "refused", "stream"],
)
def test_no_answer_is_stored_or_guessed_at(server, method, path, body, status):
    """By a cache on the way, or by a browser that would take it for a page."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)
    connection.putrequest(method, path)
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(len(body or b"")))
    connection.endheaders()
    if body and status != 413:
        connection.send(body)
    answer = connection.getresponse()
    assert answer.status == status
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers.get_all("cache-control") in (["no-store"], ["no-cache"])
    connection.close()
