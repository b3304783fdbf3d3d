"""What `quire generate` and `quire chat` print, and what Ctrl-C leaves, over an engine without a model."""

import io
import itertools
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire import LLM, GenerationInterrupted, SamplingParams
from quire.cli import chat, generate, main
from quire.outputs import RequestOutput, TextChunk
from tests.fake_llm import LONG_S, fake_llm
from tests.tiny import tiny_llm
from tests.words import toy_tokenizer

TEMPLATE = """{% for message in messages %}{{ message.content }}{% endfor %}
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ suffix }}"""
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class Pieces(io.StringIO):
    """Standard output that keeps what was written between two flushes."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def flush(self):
        if len(self.getvalue()) > sum(map(len, self.pieces)):
            self.pieces.append(self.getvalue()[sum(map(len, self.pieces)) :])


def open_llm(template=TEMPLATE):
    llm = fake_llm(max_num_seqs=4, max_num_batched_tokens=32, num_pages=256, max_rounds=2)
    llm.engine.tokenizer = llm.tokenizer.with_chat_template(template)
    return llm


@pytest.fixture
def llm():
    with open_llm() as made:
        yield made


@pytest.fixture
def command(monkeypatch):
    """`quire generate` and `quire chat` with such an LLM instead of a model."""

    def open_instead(*_, chat_template=None, **__):
        return open_llm(Path(chat_template).read_text()) if chat_template else open_llm()

    for module in (chat, generate):
        monkeypatch.setattr(module, "LLM", open_instead)
        monkeypatch.setattr(module, "find_model_for", lambda args: None)
    return main


def long_prompt(llm):
    """A prompt that has a long continuation, and this."""
    params = SamplingParams(temperature=0, max_tokens=30)
    outputs = llm.generate(["".join(one) for one in itertools.product("ab", repeat=6)], params, progress=False)
    longest = max(outputs, key=lambda output: len(output.outputs[0].text))
    return longest.prompt, longest.outputs[0].text


def user(text):
    return [{"role": "user", "content": text}]


# -- quire generate ------------------------------------------------------------------------------------------------


def test_a_single_prompt_is_streamed(command, llm, monkeypatch):
    prompt, whole = long_prompt(llm)
    out = Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    assert command(["generate", "m", prompt, "--max-tokens", "30"]) == 0
    assert out.getvalue() == f"{prompt}{whole}\n"
    assert len(out.pieces) > 3


def test_a_chat_template_makes_each_prompt_a_user_message(command, llm, tmp_path, capsys):
    template = tmp_path / "own.jinja"
    template.write_text("b{{ messages[0].content }}")
    for prompts in (["a"], ["a", "ab"]):
        assert command(["generate", "m", *prompts, "--max-tokens", "8", "--chat-template", str(template)]) == 0
        shown = capsys.readouterr().out
        for prompt in prompts:
            (output,) = llm.generate(f"b{prompt}", SamplingParams(temperature=0, max_tokens=8), progress=False)
            assert f"{prompt}\n{output.outputs[0].text}\n" in shown


def interrupt_at(llm, step):
    """Ctrl-C comes with this step of the LLM."""
    run, calls = llm.engine.runner.run, itertools.count(1)

    def run_and_interrupt(inputs):
        if next(calls) == step:
            signal.raise_signal(signal.SIGINT)
        return run(inputs)

    llm.engine.runner.run = run_and_interrupt
    return llm


def test_ctrl_c_prints_what_had_finished_and_what_had_begun(command, llm, monkeypatch, capsys):
    prompt, _ = long_prompt(llm)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{prompt}\n{prompt}\n"))
    monkeypatch.setattr(generate, "LLM", lambda *_, **__: interrupt_at(open_llm(), 3))
    assert command(["generate", "m", "--max-tokens", "40", "--json"]) == 130
    out = capsys.readouterr()
    lines = [json.loads(line) for line in out.out.splitlines()]
    assert [(line["prompt"], line["finish_reason"]) for line in lines] == [(prompt, "abort")] * 2
    assert "quire: interrupted; 0 prompts had finished" in out.err


# -- GenerationInterrupted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_iter", [False, True], ids=["generate", "generate_iter"])
def test_an_interrupted_call_has_what_was_generated_of_unfinished_prompts(is_iter):
    with open_llm() as llm:
        params = [SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for tokens in (2, 40, 40, 40, 40)]
        prompts = [[1], [2], [3], [4], [5]]
        whole = llm.generate(prompts, params, progress=False)
        interrupt_at(llm, 5)
        taken = []

        def generate_all():
            if is_iter:
                taken.extend(llm.generate_iter(prompts, params, progress=False))
            else:
                llm.generate(prompts, params, progress=False)

        with pytest.raises(GenerationInterrupted) as caught:
            generate_all()
        stopped = caught.value
        assert [output.index for output in [*taken, *stopped.outputs]] in ([0], [])
        assert stopped.partial, "some prompts were running"
        for output in stopped.partial:
            completion, full = output.outputs[0], whole[output.index].outputs[0]
            assert completion.finish_reason == "abort"
            assert 0 < len(completion.token_ids) < 40
            assert full.token_ids[: len(completion.token_ids)] == completion.token_ids
            assert full.text.startswith(completion.text.rstrip("\ufffd"))
        assert f"{len(stopped.partial)} had begun: they are in its `partial`" in str(stopped)
        stats = llm.engine.stats()
        assert stats.held_pages == 0


# -- LLM.chat ------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "ab", "parameters": {}}}]


def test_chat_streams_with_tools_and_variables_of_the_template(llm):
    how = {"tools": TOOLS, "chat_template_kwargs": {"suffix": "ba"}}
    whole = llm.chat(user("a"), GREEDY, **how)
    assert whole.prompt_token_ids == llm.tokenizer.encode("aabba") == llm.chat_prompt(user("a"), **how)
    chunks = list(llm.chat(user("a"), GREEDY, stream=True, **how))
    assert len(chunks) > 1
    assert all(isinstance(chunk, TextChunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"stream": True, "messages": [user("a"), user("b")]}, "stream=True takes one conversation"),
        ({"tools": TOOLS[0]}, "must be a list of function descriptions"),
        ({"tools": ["ab"]}, "must be a list of function descriptions"),
        ({"chat_template_kwargs": ["suffix"]}, "must be a dict of variables"),
        ({"chat_template_kwargs": {"tools": TOOLS}}, "'tools' may not be set; messages and tools are arguments"),
    ],
    ids=str,
)
def test_what_chat_cannot_take_is_named(llm, how, says):
    with pytest.raises(ValueError, match=says):
        llm.chat(**{"messages": user("a"), "params": GREEDY} | how)


# -- --chat-template -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }\n{% endfor %}", "own.jinja does not compile: line 2: TemplateSyntax"),
        ("line one\n{{ x | nothing }}", "own.jinja does not compile: line 2: "),
    ],
    ids=["syntax", "unknown filter"],
)
@pytest.mark.parametrize("command", ["chat", "generate", "serve"])
def test_a_broken_template_is_named_with_its_line_before_anything_is_loaded(command, source, says, tmp_path, capsys):
    path = tmp_path / "own.jinja"
    path.write_text(source)
    assert main([command, "no-such-model", *["a"] * (command == "generate"), "--chat-template", str(path)]) == 2
    assert says in capsys.readouterr().err
    missing = str(tmp_path / "none.jinja")
    assert main([command, "no-such-model", *["a"] * (command == "generate"), "--chat-template", missing]) == 2
    assert "none.jinja cannot be read: No such file" in capsys.readouterr().err


def test_a_template_that_fails_is_named_with_its_line():
    tokenizer = toy_tokenizer().with_chat_template("a\nb\n{{ 1 // 0 }}", "chat template own.jinja")
    with pytest.raises(ValueError, match=r"chat template own.jinja failed: line 3: ZeroDivisionError"):
        tokenizer.encode_chat(user("a"))


# -- quire chat ----------------------------------------------------------------------------------------------------


def talk(command, monkeypatch, *lines, flags=()):
    """Give lines to `quire chat`, one after the other."""
    left = iter(lines)

    def read_line(prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read_line)
    assert command(["chat", "m", "--temperature", "0", "--max-tokens", "8", *flags]) == 0


def test_the_commands_of_a_chat(command, llm, monkeypatch, capsys, tmp_path):
    saved = tmp_path / "saved.json"
    talk(
        command, monkeypatch, "/help", "/system ab", "a", f"/save {saved}", f"/save {saved}", "/clear",
        "/params top_k=3", "/params temprature=1", "/params max_tokens=-1", "/params max_tokens=x", "/hlep", "/exit",
    )  # fmt: skip
    out = capsys.readouterr()
    messages = json.loads(saved.read_text())
    assert [(one["role"], one["content"]) for one in messages[:2]] == [("system", "ab"), ("user", "a")]
    answer = llm.chat(messages[:2], SamplingParams(temperature=0, max_tokens=8)).outputs[0].text
    assert messages[2:] == [{"role": "assistant", "content": answer}]
    assert f"3 messages are in {saved}." in out.out
    for name in ("/help", "/clear", "/system", "/params", "/save", "/exit"):
        assert name in out.out
    assert "A new conversation." in out.out
    assert "top_k=3" in out.out
    assert "saved.json exists: give another name" in out.err
    assert "NAME=VALUE, such as temperature=0.2, got 'temprature=1'; there are temperature, top_k" in out.err
    assert "max_tokens=-1 must be a whole number" in out.err
    assert "max_tokens=x is no whole number" in out.err
    assert "there is no command /hlep; did you mean /help?" in out.err


def test_an_answer_that_a_limit_cut_is_marked(command, llm, monkeypatch, capsys):
    talk(command, monkeypatch, "a", flags=["--max-tokens", "1"])
    assert "[truncated at max_tokens=1; /params max_tokens=N changes it]" in capsys.readouterr().out


def test_a_message_of_several_lines_is_one_message(command, monkeypatch, tmp_path):
    saved = tmp_path / "saved.json"
    talk(command, monkeypatch, '"""a', "b", "", 'ab"""', "a\nb", "   ", f"/save {saved}")
    asked = [one["content"] for one in json.loads(saved.read_text()) if one["role"] == "user"]
    assert asked == ["a\nb\n\nab", "a\nb"]


def test_a_paste_of_several_lines_is_one_message_on_a_terminal():
    """Of a Python with GNU readline; with libedit the quotes are the way."""
    readline = pytest.importorskip("readline")
    if getattr(readline, "backend", "readline") != "readline" or "libedit" in (readline.__doc__ or ""):
        pytest.skip("this Python has no GNU readline")
    script = (
        "from quire.cli.chat import _edit_lines, read_message; _edit_lines()\n"
        "while (text := read_message(input)) is not None: print('got', repr(text))"
    )
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}
    )
    os.close(slave)
    seen, end = "", time.monotonic() + LONG_S
    try:
        paste = b"\x1b[200~one\ntwo\x1b[201~\r"
        for wanted, typed in (("> ", paste), ("got 'one\\ntwo'", b""), ("> ", b"\x04")):
            while wanted not in seen:
                assert select.select([master], [], [], end - time.monotonic())[0], seen
                seen += os.read(master, 4096).decode()
            seen = seen.split(wanted, 1)[1]
            os.write(master, typed)
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_ctrl_c_while_an_output_is_printed_loses_no_partial_output(monkeypatch):
    printed = []

    class Interrupted(generate._JsonPrinter):
        def add(self, output: RequestOutput) -> None:
            printed.append(output)
            if len(printed) == 1:
                raise KeyboardInterrupt

    with tiny_llm(max_num_seqs=2, max_num_batched_tokens=16, max_rounds=1) as llm:
        each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 40)]
        monkeypatch.setattr(llm, "generate_iter", lambda given, _: LLM.generate_iter(llm, given, each, progress=False))
        status = generate._generate(llm, ["a", "b"], lambda text: [5], SamplingParams(), Interrupted())
    assert status == 130
    assert [(one.index, one.outputs[0].finish_reason) for one in printed] == [(0, "length"), (1, "abort")]
