"""Batch jobs in processes of their own: memory that comes back, and the command `quire generate`."""

import contextlib
import json
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import jax
import pytest

from quire import Request, SamplingParams

GREEDY = SamplingParams(temperature=0)


def test_a_closed_engine_says_so_and_holds_nothing():
    from tests.tiny import tiny_llm

    llm = tiny_llm(max_num_seqs=2, max_num_batched_tokens=8)
    engine = llm.engine
    pages = [weakref.ref(array) for array in jax.tree.leaves(engine.runner._caches)]
    llm.close()
    llm.close()
    assert not any(array() for array in pages), "though somebody holds the engine"
    engine.close()
    request = Request(id="a", prompt_token_ids=(1,), params=GREEDY)
    for call in (lambda: engine.add(request), lambda: engine.params, lambda: engine.set_weights({}), engine.zero_cache):
        with pytest.raises(RuntimeError, match="engine is closed"):
            call()
    assert (engine.stats().held_pages, engine.step(), engine.has_work) == (0, [], False)


OPEN_AND_CLOSE = """
    import os, sys, threading
    from quire import LLM, SamplingParams
    from tests.tiny import tiny_llm

    def mib() -> float:
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024

    closed, opened = [], []
    for i in range(int(sys.argv[2])):
        if sys.argv[1] == "tiny":
            llm = tiny_llm(max_num_seqs=2, max_num_batched_tokens=8)
        else:
            llm = LLM(sys.argv[1], quiet=True, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=1024)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        opened.append(mib())
        llm.close()
        closed.append(mib())
    print(*map(round, (opened[0], closed[0], closed[2], closed[-1], threading.active_count())))
"""


def open_and_close(model: object, times: int) -> list[int]:
    """Resident MiB open, closed the first, third and last time, and threads."""
    command = [sys.executable, "-c", textwrap.dedent(OPEN_AND_CLOSE), str(model), str(times)]
    root = Path(__file__).parents[1]
    out = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=True, cwd=root)
    print(out.stdout)
    return [int(word) for word in out.stdout.split()]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
def test_opening_and_closing_does_not_grow():
    _, _, third, last, threads = open_and_close("tiny", 50)
    assert last - third < 30, "50 engines of 40 MiB each have been there"
    assert threads == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
def test_closing_gives_the_memory_of_a_real_model_back(smollm2_gguf):
    opened, closed, *_ = open_and_close(smollm2_gguf, 3)
    assert opened - closed > 400, "the weights alone are 256 MiB in bfloat16, and packed once more"


# -- the command ---------------------------------------------------------------------------------------------------

COMMAND = (sys.executable, "-m", "quire", "generate")
FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "1024", "--max-tokens")


def start(model: Path, *flags: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, str(model), *FLAGS, *flags], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_json_lines_come_as_they_end_and_ctrl_c_says_how_many_there_were(smollm2_gguf):
    with start(smollm2_gguf, "400", "--json", "--stop", "Paris") as process:
        process.stdin.write("The capital of France is\n\n" + "Once upon a time\n" * 100)
        process.stdin.close()
        first = json.loads(process.stdout.readline())  # while the others run
        assert (first["index"], first["prompt"], first["finish_reason"]) == (0, "The capital of France is", "stop")
        process.send_signal(signal.SIGINT)
        reasons = [json.loads(line)["finish_reason"] for line in process.stdout.read().splitlines()]
        assert process.wait(300) == 130
        err = process.stderr.read()
    assert "abort" in reasons, "prompts that had begun are printed as far as they had come"
    assert f"interrupted; {1 + len(reasons) - reasons.count('abort')} prompts had finished" in err
    assert "compiling" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_standard_input_is_read_as_there_is_room_and_a_closed_pipe_ends_quietly(smollm2_gguf):
    def write_forever():
        with contextlib.suppress(BrokenPipeError), process.stdin:
            while True:
                process.stdin.write("Once upon a time\n")

    with start(smollm2_gguf, "2") as process:
        writer = threading.Thread(target=write_forever)
        writer.start()
        assert process.stdout.readline().startswith("Once upon a time")
        process.stdout.close()
        assert process.wait(300) == 128 + signal.SIGPIPE
        writer.join()
        err = process.stderr.read()
    assert "Error" not in err
    assert "Traceback" not in err
