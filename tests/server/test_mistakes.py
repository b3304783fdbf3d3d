"""Mistakes in requests: the response says what is wrong and what to do instead."""

import asyncio
import json

import pytest

from quire.server.batches.answer import Answer, Answerer
from quire.server.batches.lines import line_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


USER = {"role": "user", "content": "a"}
JSON_FORM = {"type": "json_schema"}


@pytest.mark.parametrize(
    ("path", "changes", "says"),
    [
        ("chat/completions", {"messages": "hi"}, "messages: Expected `array`, got `str`"),
        ("chat/completions", {"messages": []}, "messages: Expected `array` of length >= 1"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "field 'messages[0].role' is missing"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "a message of role user needs content"),
        ("chat/completions", {"messages": [USER | {"role": "bot"}]}, "'bot' is not allowed; 'system', 'developer'"),
        ("chat/completions", {"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages are text only"),
        ("chat/completions", {"model": "gpt-4"}, "the model 'gpt-4' does not exist; this server has 'tiny'"),
        ("chat/completions", {"max_tokens": "10"}, "max_tokens: Expected `int | null`, got `str`"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens=0 asks for nothing; ask for 1 or more"),
        ("chat/completions", {"temperature": 3}, "temperature: Expected `float` <= 2.0"),
        ("chat/completions", {"n": 0}, "n: Expected `int` >= 1"),
        ("chat/completions", {"stop": ["a"] * 100}, "stop: Expected `array` of length <= 16"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs: Expected `int` <= 20"),
        ("chat/completions", {"top_logprobs": 5}, "top_logprobs needs logprobs=true"),
        ("chat/completions", {"logit_bias": {"a": 1}}, "a key of logit_bias: Expected `int`, got `str`"),
        ("chat/completions", {"logit_bias": {"99999": 1}}, "logit_bias holds 99999, which is not below"),
        ("chat/completions", {"stream_options": {}}, "stream_options needs stream=true"),
        ("chat/completions", {"priority": 5}, "priority=5: this server allows at most 0 (--max-priority)"),
        ("chat/completions", {"tools": [{}]}, "field 'tools[0].function' is missing"),
        ("chat/completions", {"tools": [{"type": "retrieval"}]}, "'function' is the only type of a tool"),
        ("chat/completions", {"tool_choice": "auto"}, "tool_choice needs tools"),
        ("chat/completions", {"functions": [{}]}, "functions is not supported: send tools"),
        ("chat/completions", {"response_format": "json"}, "response_format: Expected `object | null`, got `str`"),
        ("chat/completions", {"response_format": {"type": "json"}}, "'text', 'json_object' and 'json_schema' are"),
        ("chat/completions", {"response_format": JSON_FORM}, "field 'response_format.json_schema' is missing"),
        ("chat/completions", {"guided_json": {}}, "send structured_outputs with json"),
        ("chat/completions", {"json_schema": {}}, "send structured_outputs with json"),
        ("chat/completions", {"grammar": "a"}, "send structured_outputs with grammar"),
        ("chat/completions", {"ebnf": "a"}, "send structured_outputs with grammar"),
        ("chat/completions", {"regex": "a"}, "send structured_outputs with regex"),
        ("chat/completions", {"extra_body": {"n": 1}}, "send its fields in the body itself"),
        ("chat/completions", {"modalities": ["audio"]}, "answers are text only: leave modalities out"),
        ("completions", {"prompt": 5}, "prompt: Expected `str | array`, got `int`"),
        ("completions", {"prompt": []}, "prompt: Expected `array` of length >= 1"),
        ("completions", {"prompt": ["a", 5]}, "strings, token ids and lists of token ids cannot be mixed"),
        ("completions", {"prompt": [99999]}, "prompt token 99999 is no token id"),
        ("completions", {"best_of": 2}, "all n sequences are returned: send n and choose among them"),
        ("completions", {"suffix": "x"}, "text is continued, not filled in: leave it out"),
        ("completions", {"response_format": JSON_FORM}, "response_format is not supported: send structured_outputs"),
        ("embeddings", {"input": []}, "input: Expected `array` of length >= 1"),
        ("embeddings", {"encoding_format": "hex"}, "'hex' is not allowed; 'float' and 'base64' are formats"),
        ("embeddings", {"dimensions": 0}, "dimensions: Expected `int` >= 1"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens=0 asks for nothing; ask for 1 or more"),
        ("responses", {"max_tokens": 5}, "max_tokens is called max_output_tokens here"),
        ("responses", {"prompt": {"id": "a"}}, "send text: this server stores no templates"),
        ("responses", {"previous_response_id": "a"}, "nothing is stored: send the whole conversation in input"),
        ("responses", {"response_format": JSON_FORM}, "to /v1/responses, text.format"),
        ("responses", {"text": {"format": {"type": "xml"}}}, "'xml' is not allowed; 'text', 'json_object' and"),
    ],
)
def test_a_field_that_is_wrong_says_what_to_do(server, path, changes, says):
    bodies = {
        "chat/completions": CHAT,
        "completions": {"model": "tiny", "prompt": "a"},
        "embeddings": {"model": "tiny", "input": "a"},
        "responses": {"model": "tiny", "input": "a"},
    }
    status, response = server.post(f"/v1/{path}", bodies[path] | changes)
    assert status in (400, 404)
    error = json.loads(response)["error"]
    assert says in error["message"]
    assert error["param"].partition("[")[0].partition(".")[0] in ({*changes} | {"input"})


@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({"content_type": "text/plain"}, 415, "content-type must be application/json"),
        ({"content_encoding": "gzip"}, 415, "compressed bodies are not taken: send it without content-encoding"),
        ({"x_request_id": "a" * 1000}, 400, "x-request-id must be 1 to 128 printable ASCII characters"),
        ({"host": "elsewhere"}, 403, "--allow-host NAME lets it be used under another name"),
        ({"origin": "https://elsewhere"}, 403, "--allow-origin ORIGIN lets a web page use it"),
    ],
)
def test_a_header_that_is_wrong_says_what_to_do(server, headers, status, says):
    answered, response = server.post("/v1/chat/completions", CHAT, **headers)
    assert answered == status
    assert says in json.loads(response)["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"url": "/chat"}, "url: '/chat' is not allowed; '/v1/chat/completions', '/v1/completions' and"),
        ({"method": "GET"}, "method: 'GET' is not allowed; 'POST' is the only method"),
        ({"custom_id": 5}, "line 2: custom_id: Expected `str`, got `int`"),
        ({"foo": 1}, "unknown field 'foo'"),
        (None, "line 2: the body is not JSON"),
    ],
)
def test_a_line_of_a_batch_that_is_wrong_says_what_to_do(changes, says):
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    text = b"{bad" if changes is None else json.dumps(whole | changes).encode()
    answerer = Answerer.__new__(Answerer)
    answerer._endpoint = None
    answer = asyncio.run(answerer.parse(line_of(text, 2, "")))
    assert isinstance(answer, Answer)
    assert says in json.loads(answer.content)["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/chat/completions", CHAT, 404, "/v1/chat/completions? The base URL of a client ends in /v1"),
        ("GET", "/models", None, 404, "did you mean /v1/models?"),
        ("POST", "/v1/v1/completions", CHAT, 404, "did you mean /v1/completions?"),
        ("POST", "/v1/chat/completion", CHAT, 404, "did you mean /v1/chat/completions?"),
        ("GET", "/nothing-like-it", None, 404, "there is no such route; there are /, "),
        ("POST", "/tokenize", {"text": "a"}, 400, "field 'prompt' is missing; the body has text"),
        ("POST", "/v1/completions", {"model": "tiny", "input": "a"}, 400, "'prompt' is missing; the body has input"),
        ("POST", "/v1/completions", b'{"model": "tiny", "prompt": "\xff"}', 400, "the body is not UTF-8"),
        ("GET", "/v1/chat/completions", None, 405, "this route does not take GET; it takes POST"),
        ("DELETE", "/v1/models/tiny", None, 405, "this route does not take DELETE; it takes GET"),
        ("POST", "/v1/completions", b"", 400, "the body is empty: send a JSON object"),
        ("POST", "/v1/completions", b"model=tiny", 400, "the body is not JSON"),
        ("POST", "/v1/completions", [], 400, "Expected `object`, got `array`"),
        ("GET", "/v1/models/nope", None, 404, "the model 'nope' does not exist; this server has 'tiny'"),
        ("POST", "/v1/embedding", CHAT, 404, "did you mean /v1/embeddings?"),
        ("GET", "/healthz", None, 404, "did you mean /health?"),
        ("POST", "/tokenize", {"prompt": 5}, 400, "prompt: Expected `str`, got `int`"),
        ("POST", "/detokenize", {"tokens": [99999]}, 400, "tokens: 99999 is no token id (0 to "),
        ("POST", "/detokenize", {"tokens": "a"}, 400, "tokens: Expected `array`, got `str`"),
    ],
)  # fmt: skip
def test_a_request_that_is_wrong_says_what_to_do(server, method, path, body, status, says):
    sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    answered, response = server.ask(method, path, sent)
    assert answered == status
    assert says in json.loads(response)["error"]["message"]
