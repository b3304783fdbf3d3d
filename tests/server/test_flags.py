"""Flags of the command that change what a server does, from the command line to what a client sees."""

import json

import pytest

from quire.cli import main
from quire.server.logs import read_line
from quire.text.tokenizer import Tokenizer
from tests.server.process import SMALL, serving
from tests.server.tiny_folder import write_tiny_folder

TEMPLATE = "FROM THE FILE{% for one in messages %}[{{ one.role }}: {{ one.content }}]{% endfor %}\n"
RENDERED = "FROM THE FILE[user: hi]"
"""A template ends without the last newline of its file."""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "own.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.mark.own_server
def test_a_server_with_a_template_of_its_own_and_without_an_access_log(tmp_path, template):
    """Two flags of one server, because it takes seconds to start."""
    folder = write_tiny_folder(tmp_path / "tiny", template="FROM THE MODEL")
    with serving(folder, *SMALL, "--chat-template", str(template), "--access-log", "off") as server:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        status, answer = server.post("/v1/chat/completions", body | {"return_token_ids": True})
        assert status == 200
        ids = json.loads(answer)["choices"][0]["prompt_token_ids"]
        assert json.loads(server.post("/detokenize", {"model": "tiny", "tokens": ids})[1])["prompt"] == RENDERED
        assert server.get("/nowhere")[0] == 404
        count = 'quire_http_requests_total{route="/v1/chat/completions",status="200"} 1.0'
        text = server.get("/metrics")[1].decode()
        assert count in text
        assert 'quire_http_requests_total{route="none",status="404"} 1.0' in text
        assert server.terminate() == 0
        lines = [read_line(line) for line in server.lines]
        assert {"ready", "loading"} <= {line.event for line in lines}
        assert not [line for line in lines if line.event == "request"]


def test_a_chat_on_the_terminal_uses_the_template_of_the_flag(tmp_path, template, monkeypatch):
    folder = write_tiny_folder(tmp_path / "tiny", template="FROM THE MODEL")
    prompts, typed = [], iter(["hi"])

    def read_line(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    encode_chat = Tokenizer.encode_chat

    def recorded(tokenizer, *args, **kwargs):
        ids = encode_chat(tokenizer, *args, **kwargs)
        prompts.append(tokenizer.decode(ids))
        return ids

    monkeypatch.setattr("builtins.input", read_line)
    monkeypatch.setattr(Tokenizer, "encode_chat", recorded)
    flags = [*SMALL, "--max-tokens", "2", "--temperature", "0"]
    assert main(["chat", str(folder), "--chat-template", str(template), *flags]) == 0
    assert prompts == [RENDERED]
