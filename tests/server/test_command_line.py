"""What a person types: help that fits, completion, and errors before anything is loaded."""

import dataclasses
import inspect
import subprocess
import sys
import typing

import pytest

from quire import LLM, EngineConfig
from quire.cli import build_parser, main
from quire.config import EngineKnobs

SCREEN = 50


def quire(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "quire", *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_help_fits_on_a_screen_and_hides_nothing_for_good(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        shown.append(capsys.readouterr().out)
    assert len(shown[0].splitlines()) <= SCREEN
    assert "--attention" not in shown[0]
    assert "--attention" in shown[1]


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


def test_a_model_that_is_not_there_is_one_line():
    done = quire("serve", "./no-such-model", "--port", "0")
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert "Traceback" not in done.stderr


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


def test_the_engines_knobs_are_stated_once():
    """`LLM` takes every field of the config by its type, and has no default of its own for any."""
    fields = {field.name: field.type for field in dataclasses.fields(EngineConfig)}
    assert typing.get_type_hints(EngineKnobs) == fields
    taken = inspect.signature(LLM.__init__).parameters
    assert not set(taken) & set(fields)
    with pytest.raises(ValueError, match=r"max_seqs is not a knob of the engine; did you mean max_num_seqs\?"):
        LLM("nowhere", max_seqs=4)  # pyright: ignore[reportCallIssue]
