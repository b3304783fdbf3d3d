"""What a person types: help that fits, completion, and errors before anything is loaded."""

import dataclasses
import inspect
import subprocess
import sys
import typing

import pytest

from quire import LLM, EngineConfig, SamplingParams
from quire.cli import bench, build_parser, engine_knobs, main, sampling_params
from quire.config import EngineKnobs
from quire.testing import fake_engine
from tests.server.tiny_folder import write_tiny_folder
from tests.tiny import tiny_llm

COLUMNS = 100
DESCRIPTION_COLUMN = 32


def quire(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *args], capture_output=True, text=True, timeout=600)


def flags_in(text: str) -> dict[str, tuple[str, list[str]]]:
    """The group and the lines of the description of each flag in a help text."""
    flags: dict[str, tuple[str, list[str]]] = {}
    heading, flag = "", ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif line.startswith("  -"):
            flag, _, description = line.strip().partition("  ")
            assert flag not in flags
            flags[flag] = heading, [description.strip()] if description else []
        elif flag and line.startswith(" " * DESCRIPTION_COLUMN):
            flags[flag][1].append(line.strip())
        else:
            flag = ""
    return flags


@pytest.mark.parametrize("command", ["generate", "chat", "batch", "serve", "bench"])
def test_help_is_readable_and_hides_nothing_for_good(command, capsys, monkeypatch):
    """Lines fit the terminal, descriptions are short and flags are grouped; their number has no limit."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        texts.append(capsys.readouterr().out)
    shown, everything = map(flags_in, texts)
    assert shown.items() <= everything.items()
    assert [flag for flag, (heading, _) in shown.items() if heading.endswith("for experts")] == []
    assert [flag for flag in everything if flag not in shown and not everything[flag][0].endswith("for experts")] == []
    assert "--attention NAME" in everything.keys() - shown.keys()
    for text in texts:
        assert [line for line in text.splitlines() if len(line) > COLUMNS] == []
    for flags, most_lines in ((shown, 2), (everything, 4)):
        assert {flag: lines for flag, (_, lines) in flags.items() if not 1 <= len(lines) <= most_lines} == {}
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)]
    grouped = {"--" + field.name.replace("_", "-") for field in fields}
    ungrouped = {flag.split()[0] for flag, (heading, _) in everything.items() if heading == "options"}
    assert grouped & ungrouped == set()


def test_a_shell_can_complete(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--print-completion", "bash"])
    assert "--max-num-seqs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from elsewhere and there is no API key"),
        (["--api-key", "short"], "at least 8 printable ASCII characters"),
        (["--port", "99999"], "port=99999 must be a whole number from 0 to 65,535"),
        (["--admin-port", "0"], "--admin-port needs --admin-key"),
        (["--kv-events"], "--kv-events needs --admin-key"),
        (["--port", "9000", "--grpc-port", "9000"], "port=9000, grpc_port=9000, admin_port=None must differ"),
        (["--max-queued-requests", "0"], "max_queued_requests=0 must be a whole number from 1"),
        (["--api-key-file", "nowhere"], "--api-key-file nowhere cannot be read"),
    ],
    ids=str,
)
def test_a_bad_flag_is_refused_before_the_model_is_loaded(flags, says, capsys):
    assert main(["serve", "no-such-model", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_flag_is_written_out(capsys):
    """What is short for one flag today may be short for two tomorrow."""
    with pytest.raises(SystemExit):
        main(["serve", "no-such-model", "--max-num-s", "4"])
    assert "--max-num-s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["m", "a", "b", "--max-tokens", "3"],
        ["m", "--max-tokens", "3", "a", "b"],
        ["--max-tokens", "3", "m", "a", "b"],
        ["m", "a", "--max-tokens", "3", "b"],
        ["m", "--max-tokens", "3", "--", "a", "b"],
    ],
    ids=" ".join,
)
def test_flags_may_stand_before_between_and_behind_prompts(args):
    parsed = build_parser().parse_args(["generate", *args])
    assert (parsed.model, parsed.prompt, parsed.max_tokens) == ("m", ["a", "b"], 3)


def test_a_benchmarks_flags_may_stand_before_its_model():
    parsed = build_parser().parse_args(["bench", "throughput", "--rows", "2", "m"])
    assert (parsed.kind, parsed.model) == ("throughput", "m")


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["serve"], ["bench", "throughput"], ["bench", "steps"]])
def test_a_follower_comes_to_the_leaders_engine_from_the_same_flags(command, monkeypatch):
    """It sees no prompt: what the leader would go by how many there are is the default in a group."""
    flags = [*command, "m", "--num-processes", "2", "--coordinator", "127.0.0.1:7411", "--mesh", "model=2"]
    followed = []
    monkeypatch.setattr("quire.following.follow", lambda model, **knobs: followed.append(knobs))
    assert main([*flags, "--process-id", "1"]) == 0
    leader = build_parser().parse_args(flags)
    knobs = bench.knobs(leader) if command[0] == "bench" else engine_knobs(leader)
    (follower,) = followed
    assert follower.pop("revision") is None
    assert follower == knobs | {"process_id": 1}
    assert follower["max_num_seqs"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["generate", "m", "hi", "--max-num-s", "4"], "did you mean --max-num-seqs?"),
        (["serve", "m", "--prot=9"], "did you mean --port?"),
        (["chat", "m", "--temprature", "1"], "did you mean --temperature?"),
        (["generate", "m", "hi", "--xyzzy"], "unrecognized arguments: --xyzzy"),
    ],
    ids=str,
)
def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(args, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "MODEL", "hi"], ["chat", "MODEL"]], ids=str)
def test_more_tokens_than_ever_fit_are_refused_before_the_weights_are_read(command, tmp_path, capsys):
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    command = [str(folder) if word == "MODEL" else word for word in command]
    assert main([*command, "--max-tokens", "4096"]) == 2
    assert "--max-tokens 4096 and a prompt are more than the model's length, 4096" in capsys.readouterr().err
    assert main([*command, "--max-model-len", "20", "--max-tokens", "20"]) == 2
    assert "--max-tokens 20 and a prompt are more than --max-model-len, 20" in capsys.readouterr().err
    assert main([*command, "--max-tokens", "4095"]) == 2
    assert "no .safetensors file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "pull"])
def test_every_command_that_takes_a_model_takes_a_revision(command):
    kind = ["throughput"] if command == "bench" else []
    assert build_parser().parse_args([command, *kind, "org/name", "--revision", "v1"]).revision == "v1"


def test_flags_that_are_not_given_are_the_models():
    parsed = build_parser().parse_args(["chat", "org/name", "--top-k", "3"])
    stated = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.1)
    assert sampling_params(parsed, stated) == SamplingParams(temperature=0.6, top_k=3, repetition_penalty=1.1)
    assert sampling_params(parsed, SamplingParams()) == SamplingParams(temperature=0.7, top_k=3)
    parsed = build_parser().parse_args(["chat", "org/name", "--temperature", "1"])
    assert sampling_params(parsed, stated).temperature == 1.0


def test_a_model_that_is_not_there_is_one_line():
    done = quire("serve", "./no-such-model", "--port", "0")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_bench_against_a_server(server):
    done = quire(
        "bench",
        "serve",
        "--url",
        f"{server.url}/v1",
        "--rows",
        "4",
        "--requests",
        "8",
        "--new-tokens",
        "16",
        "--json",
        "-",
    )
    assert done.returncode == 0, done.stderr
    assert '"answered": 8' in done.stdout
    assert '"client_cpu_s"' in done.stdout


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1", "http://nowhere.invalid/v1"])
def test_bench_against_a_server_that_is_gone_is_one_line(url, capsys):
    assert main(["bench", "serve", "--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"quire: {url} cannot be reached: ")
    assert line.endswith("; is the server running?")


def test_a_length_that_the_pool_cannot_hold_is_refused_with_both_knobs(capsys):
    assert main(["serve", "no-such-model", "--num-pages", "4", "--max-model-len", "1000", "--port", "0"]) == 2
    assert "max_model_len=1000 is more than the 64 tokens that num_pages=4 of page_size=16" in capsys.readouterr().err
    EngineConfig(num_pages=4, max_model_len=65)  # the last token drawn needs no place


def test_more_pages_than_memory_are_refused_with_the_knob():
    with pytest.raises(
        ValueError, match=r"num_pages: 1,000,000,000 pages of .* GiB of memory are free .*; lower num_pages"
    ):
        tiny_llm(num_pages=10**9)


def test_what_is_told_is_what_the_pool_holds():
    assert fake_engine(num_pages=4, page_size=4).max_request_len == 16
    assert fake_engine(num_pages=400, page_size=4).max_request_len == 64


def test_the_engines_knobs_are_stated_once():
    """`LLM` takes every field of the config by its type, and has no default of its own for any. A mesh and a dtype may
    also be jax's own, of which the config knows nothing.
    """
    fields = {field.name: field.type for field in dataclasses.fields(EngineConfig) if field.name != "mesh"}
    fields["dtype"] = typing.Any
    assert typing.get_type_hints(EngineKnobs) == fields
    taken = inspect.signature(LLM.__init__).parameters
    assert not set(taken) & set(fields)
    with pytest.raises(ValueError, match=r"EngineConfig has no max_seqs; did you mean max_num_seqs\?"):
        LLM("nowhere", max_seqs=4)  # pyright: ignore[reportCallIssue]
