"""Mistakes in requests: the response says what is wrong and what to do instead."""

import json

import pytest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


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
        ("GET", "/v1/chat/completions", None, 405, "this route does not take GET"),
    ],
)  # fmt: skip
def test_a_request_that_is_wrong_says_what_to_do(server, method, path, body, status, says):
    sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    answered, response = server.ask(method, path, sent)
    assert answered == status
    assert says in json.loads(response)["error"]["message"]
