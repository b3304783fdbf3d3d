"""The surface on the real model: text in, text out, streamed, stopped, interrupted."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from quire import LLM, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 1024}


@pytest.fixture(scope="module")
def llm(smollm2_gguf):
    with LLM(smollm2_gguf, dtype="float32", debug=True, quiet=True, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_left_behind(llm):
    yield
    stats = llm.engine.stats()
    assert (stats.held_pages, stats.running, stats.waiting, stats.compiles_after_warmup) == (0, 0, 0, 0)
    llm.engine.audit()


def text(output):
    return output.outputs[0].text


def test_the_capital_of_france(llm):
    out = llm.generate("The capital of France is", GREEDY)
    assert len(out) == 1
    assert text(out[0]).startswith(" Paris.")
    assert out[0].prompt_token_ids == llm.tokenizer.encode("The capital of France is")


def test_text_and_ids_and_lists_of_either_are_prompts(llm):
    ids = llm.tokenizer.encode("One two three")
    outs = llm.generate(["One two three", ids], [GREEDY, GREEDY])
    assert text(outs[0]) == text(outs[1]) == text(llm.generate(ids, GREEDY)[0])
    assert llm.generate([], GREEDY) == []
    with pytest.raises(ValueError, match="3 params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(ValueError, match=r"prompts\[1\]=3.5"):
        llm.generate(["a", 3.5], GREEDY)


def test_a_stream_is_the_same_text_in_pieces(llm):
    prompt = "List three emoji and say good morning in Japanese, Hindi and Arabic:"
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=60)
    whole = llm.generate(prompt, params)[0].outputs[0]
    chunks = list(llm.stream(prompt, params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert len(chunks) > 10


def test_leaving_a_stream_early_aborts_it(llm):
    for _ in llm.stream("Once upon a time", SamplingParams(max_tokens=500)):
        break
    # The fixture checks that no page is held.


def test_two_streams_and_a_batch_share_the_engine(llm):
    prompts = ["The sun is", "A cat sat on"]
    alone = [text(out) for out in llm.generate(prompts, GREEDY)]
    first, second = (llm.stream(prompt, GREEDY) for prompt in prompts)
    got = ["", ""]
    for _ in range(3):
        got[0] += next(first).text
        got[1] += next(second).text
    middle = llm.generate("The capital of France is", GREEDY)[0]
    got[0] += "".join(chunk.text for chunk in first)
    got[1] += "".join(chunk.text for chunk in second)
    assert got == alone
    assert text(middle).startswith(" Paris.")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_before_itself_wherever_tokens_are_cut(llm, stream):
    free = text(llm.generate("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=40))[0])
    stop = free[11:16]
    params = SamplingParams(temperature=0, max_tokens=40, stop=["no such text", stop])
    if stream:
        chunks = list(llm.stream("Count: one, two, three,", params))
        said, reason = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
    else:
        completion = llm.generate("Count: one, two, three,", params)[0].outputs[0]
        said, reason = completion.text, completion.finish_reason
    assert said == free[: free.index(stop)]
    assert reason == "stop"


def test_min_tokens_holds_a_stop_string_back(llm):
    free = llm.generate("Count: one, two, three,", SamplingParams(temperature=0, max_tokens=40))[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=40, stop=free.text[1:4], min_tokens=20)
    held = llm.generate("Count: one, two, three,", params)[0].outputs[0]
    assert len(held.token_ids) >= 20
    assert held.text.startswith(free.text[:4])


def test_a_stop_sequence_of_ids_leaves_no_text(llm):
    free = llm.generate("The capital of France is", GREEDY)[0].outputs[0].token_ids
    stopped = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=24, stop=[free[3:6]]))
    completion = stopped[0].outputs[0]
    assert completion.token_ids == free[:6]
    assert completion.text == llm.tokenizer.decode(free[:3])


def test_chat_ends_with_the_models_own_end_token(llm):
    out = llm.chat(
        [{"role": "user", "content": "What is the capital of France? Answer in one word."}],
        SamplingParams(temperature=0, max_tokens=100),
    )
    completion = out.outputs[0]
    assert completion.finish_reason == "eos"
    assert completion.token_ids[-1] in llm.engine.eos_ids
    assert "Paris" in completion.text
    assert "<|im_end|>" not in completion.text


def test_every_prompt_is_checked_before_the_first_runs(llm):
    before = llm.engine.stats().steps
    with pytest.raises(ValueError, match="max_model_len=1024"):
        llm.generate(["short", "word " * 2000], GREEDY)
    assert llm.engine.stats().steps == before


def test_a_closed_llm_says_so(smollm2_gguf):
    from tests.tiny import tiny_llm

    llm = tiny_llm()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]])


INTERRUPTED = """
    import signal, sys
    from quire import LLM, SamplingParams
    llm = LLM(sys.argv[1], quiet=True, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1024)
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    run, runs = llm.engine.runner.run, []

    def run_and_interrupt(inputs):
        handle = run(inputs)
        runs.append(None)
        if len(runs) == 10:
            signal.raise_signal(signal.SIGINT)  # while the device computes
        return handle

    llm.engine.runner.run = run_and_interrupt
    try:
        llm.generate(["a", "b", "c", "d", "e", "f"], params)
        print("not interrupted")
    except KeyboardInterrupt:
        stats = llm.engine.stats()
        llm.engine.audit()
        print("interrupted", stats.held_pages, stats.running, stats.waiting)
    print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text)
"""


def test_ctrl_c_in_generate_aborts_cleanly_and_the_engine_goes_on(smollm2_gguf):
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), str(smollm2_gguf)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert out.stdout.splitlines()[0] == "interrupted 0 0 0"
    assert "Paris" in out.stdout


class Terminal:
    """A command on a real pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=os.environ | {"TERM": "dumb"}
        )
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 240) -> str:
        """Read until `text` appears; returns what came before it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.master, 4096).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"ended before {text!r}: {self.seen!r}") from error
        before, self.seen = self.seen.split(text, 1)
        return before

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_chat_streams_and_ctrl_c_ends_the_answer_not_the_chat(smollm2_gguf):
    flags = ["--max-num-batched-tokens", "64", "--max-model-len", "1024", "--temperature", "0", "--max-tokens", "900"]
    terminal = Terminal(sys.executable, "-m", "quire", "chat", str(smollm2_gguf), *flags)
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a dragon.\n")
    terminal.wait_for("dragon.")
    terminal.wait_for("Once")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.wait_for("[interrupted]")
    terminal.wait_for("> ")
    terminal.type("What is the capital of France?\n")
    terminal.wait_for("Paris")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def quire(*args: str, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "quire", *args], input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


def test_quire_generate_prints_real_text(smollm2_gguf):
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "1024", "--max-tokens", "8"]
    out = quire("generate", str(smollm2_gguf), "The capital of France is", *flags)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("The capital of France is Paris.")
    assert "pages x 16 tokens" in out.stderr
    lines = quire(
        "generate", str(smollm2_gguf), "--json", *flags, stdin="The capital of France is\n\nOne, two,\n"
    ).stdout
    assert len(lines.splitlines()) == 2


def test_mistakes_are_one_line_and_no_traceback():
    for args in (["generate", "no-such-model", "x"], ["chat", "./nowhere"]):
        out = quire(*args)
        assert out.returncode == 2
        assert out.stderr.startswith("quire: MODEL")
        assert "Traceback" not in out.stderr


def test_doctor_says_it_runs():
    out = quire("doctor", "--json", "-")
    assert out.returncode == 0, out.stderr
    assert "quire runs here." in out.stdout
    report = json.loads(out.stdout.splitlines()[-1])
    assert report["runs"] is True
    assert all(check["right"] for check in report["attention"])
    assert report["measured"]["bandwidth"] > 0
    assert report["measured"]["decode_step_s"] > 0
    assert "planned" not in report  # a CPU is not in the table of chips
