"""A command whose output is read no further, as with `| head`, ends without a message."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parent.parent / "bench" / "configs" / "Llama-3.1-8B.json"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_error(unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "quire", "plan", str(CONFIG), "--topology", "v6e:1x1", "--no-compile"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE
