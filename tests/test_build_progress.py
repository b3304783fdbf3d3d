"""The build of the native library names each file on the terminal, since pip and uv hide the output of a build."""

import subprocess
import sys
from pathlib import Path

import pytest

CMAKE = Path(__file__).parents[1] / "native" / "CMakeLists.txt"


@pytest.fixture
def launcher(tmp_path):
    script = tmp_path / "progress.sh"
    script.write_text(CMAKE.read_text().split("[=[\n")[1].split("]=]")[0])
    return ["sh", str(script), str(tmp_path / "count"), "18"]


def test_a_terminal_shows_which_file_is_compiled(launcher):
    # Output is captured, as pip and uv capture it: only what is written to the terminal itself arrives here.
    both = 'for file in a.cc b.cc; do "$@" true -c "/src dir/$file" >/dev/null 2>&1; done; exit 3'
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [sys.executable, "-c", spawn, "sh", "-c", both, "sh", *launcher]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 3
    lines = [line.replace(b"\x1b[K", b"").strip() for line in done.stdout.splitlines() if b"quire" in line]
    assert lines == [b"quire: compiling 1 of 18: a.cc", b"quire: compiling 2 of 18: b.cc"]


def test_without_a_terminal_only_the_compiler_writes_and_its_exit_code_stays(launcher):
    compiler = ["sh", "-c", "echo out; echo err >&2; exit 5", "-c", "a.cc"]
    result = subprocess.run([*launcher, *compiler], capture_output=True, start_new_session=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (5, b"out\n", b"err\n")
