"""One model in several real processes: the tokens are those of one, and whatever goes wrong is told in 10 seconds."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from quire import LLM
from quire.distributed.group import free_port
from tests.distributed import program
from tests.effort import nightly
from tests.server.process import LONGEST_S, PYTHON, Server
from tests.server.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.alone]

KEY = {"QUIRE_GROUP_KEY": "a key of sixteen characters or more"}
LIMIT_S = 10.0
"""From a fault to the end of every process."""
ONE_PROGRAM = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--num-pages", "512")


class Process:
    """One process of a group, and the lines that it prints."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*PYTHON, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"XLA_FLAGS": ""} | KEY | (env or {}),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += self.process.stdout

    def wait(self, timeout_s: float = LONGEST_S) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def kill(self) -> None:
        self.process.kill()
        self.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start():
    """Starts processes, and ends those that are left."""
    with contextlib.ExitStack() as running:

        def start_process(*command: str, **how) -> Process:
            process = Process(*command, **how)
            running.callback(process.kill)
            return process

        yield start_process


# -- the same model ----------------------------------------------------------------------------------------------------


def run_group(start, model: Path, num_processes: int, **knobs) -> dict:
    group = {"num_processes": num_processes, "coordinator": f"127.0.0.1:{free_port('127.0.0.1')}"}
    everybody = [
        start("-m", "tests.distributed.program", str(model), json.dumps(knobs | group | {"process_id": i}))
        for i in range(num_processes)
    ]
    codes = [process.wait() for process in everybody]
    assert codes == [0] * num_processes, "\n".join(process.text for process in everybody)
    (line,) = [line for line in everybody[0].lines if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.fixture(scope="module")
def alone(tiny) -> dict:
    with LLM(tiny, quiet=True, **program.SMALL) as llm:
        return program.generate(llm) | program.change_weights(llm, str(tiny))


@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 4), nightly(4, 4)])
def test_tokens_are_those_of_one_process(start, tiny, alone, num_processes, num_devices):
    """Greedy and seeded, swapped out and in, with other weights, asleep and awake."""
    found = run_group(start, tiny, num_processes, mesh=f"model={num_devices}", **program.SMALL)
    assert found == alone
    assert found["changed"] != found["greedy"] == found["woken"] == found["zeroed"]


@pytest.mark.nightly
def test_a_real_model_in_two_processes(start, smollm2_gguf):
    knobs = program.SMALL | {"debug": False}
    with LLM(smollm2_gguf, quiet=True, **knobs) as llm:
        expected = program.generate(llm)
    assert run_group(start, smollm2_gguf, 2, mesh="model=2", **knobs) == expected


# -- faults ------------------------------------------------------------------------------------------------------------


def flags(coordinator: str, process_id: int, *more: str) -> tuple[str, ...]:
    group = ("--num-processes", "2", "--process-id", str(process_id), "--coordinator", coordinator)
    return ("--mesh", "model=2", *ONE_PROGRAM, *group, "--join-timeout-s", "60", *more)


class ServedGroup:
    """`quire serve` in two processes."""

    def __init__(self, start, tiny: Path, coordinator: str | None = None) -> None:
        self.coordinator = coordinator or f"127.0.0.1:{free_port('127.0.0.1')}"
        self.follower = start("-m", "quire", "serve", str(tiny), *flags(self.coordinator, 1))
        self.leader = Server(tiny, *flags(self.coordinator, 0), env=KEY)
        self.leader.wait_ready()

    def complete(self, max_tokens: int = 8) -> tuple[int, bytes]:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        return self.leader.post("/v1/completions", body)

    def lines(self) -> str:
        return "".join(self.leader.lines)


@pytest.fixture
def served(start, tiny):
    with contextlib.ExitStack() as running:

        def serve(coordinator: str | None = None) -> ServedGroup:
            group = ServedGroup(start, tiny, coordinator)
            running.callback(group.leader.kill)
            return group

        yield serve


def check_failure(group: ServedGroup, message: str, fault) -> None:
    """A request that runs ends with an error, health is false, and then every process ends: all in time."""
    answers: list[tuple[int, bytes]] = []
    running = threading.Thread(target=lambda: answers.append(group.complete(4000)))
    running.start()
    while not group.leader.metric("quire_sequences_running"):
        time.sleep(0.02)
    begin = time.monotonic()
    fault()
    while group.leader.get("/health")[0] == 200:
        assert time.monotonic() - begin < LIMIT_S
        time.sleep(0.05)
    assert group.leader.get("/health") == (503, b"a process of the engine's group is lost")
    assert group.leader.get("/readyz")[0] == 503
    assert group.leader.process.wait(LIMIT_S) == 1
    assert time.monotonic() - begin < LIMIT_S
    running.join()
    assert answers[0][0] in (500, 503)
    assert message in group.lines()


def test_a_follower_that_dies_and_a_group_that_is_started_again(served, tiny):
    group = served()
    status, answer = group.complete()
    assert status == 200
    check_failure(group, "process 1 has ended, or closed the connection", group.follower.process.kill)
    again = served(group.coordinator)
    text = json.loads(answer)["choices"][0]["text"]
    assert json.loads(again.complete()[1])["choices"][0]["text"] == text
    hang = lambda: again.follower.process.send_signal(signal.SIGSTOP)  # noqa: E731
    check_failure(again, "process 1 has not been heard of for 5 seconds", hang)
    again.follower.process.send_signal(signal.SIGCONT)
    assert again.follower.wait(LIMIT_S) == 1
    assert "process 1 ends: " in again.follower.text


def test_who_comes_late_is_refused_and_a_leader_that_dies_ends_its_follower(served, start, tiny):
    group = served()
    late = start("-m", "quire", "serve", str(tiny), *flags(group.coordinator, 1))
    assert late.wait() == 1
    assert "refuses this process: a process with process_id=1 is in the group already" in late.text
    assert group.complete()[0] == 200
    begin = time.monotonic()
    group.leader.process.kill()
    assert group.follower.wait(LIMIT_S) == 1
    assert time.monotonic() - begin < LIMIT_S
    assert f"process 1 ends: the leader at {group.coordinator} has ended" in group.follower.text


def test_a_leader_that_hangs_ends_its_follower_and_sigterm_ends_both(served):
    group = served()
    group.leader.process.send_signal(signal.SIGTERM)
    assert (group.leader.process.wait(LONGEST_S), group.follower.wait()) == (0, 0)
    other = served(group.coordinator)
    begin = time.monotonic()
    other.leader.process.send_signal(signal.SIGSTOP)
    assert other.follower.wait(LIMIT_S) == 1
    assert time.monotonic() - begin < LIMIT_S
    assert "has not been heard of for 5 seconds" in other.follower.text


OTHER_VERSION = "import quire, sys; quire.__version__ = '0.0.1'; from quire.cli import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("how", "at_leader", "at_follower"),
    [
        ({"env": {"QUIRE_GROUP_KEY": "another key of many characters"}}, "came with another key", "has another key"),
        ({"more": ("--page-size", "8")}, "has another config or model", "it has another config or model"),
        ({"code": OTHER_VERSION}, "another version of quire, '0.0.1'", "it has another version of quire, '0.0.1'"),
    ],
    ids=["key", "config", "version"],
)
def test_who_does_not_belong_to_the_group_is_told_at_both_ends(start, tiny, how, at_leader, at_follower):
    coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
    leader = start("-m", "quire", "serve", str(tiny), "--port", "0", *flags(coordinator, 0))
    command = ("-c", how["code"]) if "code" in how else ("-m", "quire")
    follower = start(*command, "serve", str(tiny), *flags(coordinator, 1, *how.get("more", ())), env=how.get("env"))
    assert follower.wait() == 1
    end = time.monotonic()
    assert leader.wait(LIMIT_S) == 1
    assert time.monotonic() - end < LIMIT_S
    assert at_leader in leader.text
    assert at_follower in follower.text
