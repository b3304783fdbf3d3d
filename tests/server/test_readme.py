"""The server's examples in the README, as they stand there, against the real model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.process import serving

README = Path(__file__).parents[2] / "README.md"


def examples(language: str) -> list[str]:
    section = README.read_text().partition("## As a server")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.mark.slow
def test_the_examples_run(smollm2_gguf):
    flags = ("--served-model-name", "smollm2", "--max-num-seqs", "4", "--max-model-len", "512")
    with serving(smollm2_gguf, *flags) as server:
        _, curl = examples("sh")
        (program,) = examples("python")
        for command, says in ((["bash", "-c", curl], "Paris"), ([sys.executable, "-c", program], '"city"')):
            command = [part.replace("http://127.0.0.1:8000", server.url) for part in command]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
            assert says in done.stdout
