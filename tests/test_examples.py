"""Every program of examples/ runs as it stands there, with the real model, and says what it is meant to show."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.process import serving

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
CLIENTS = ROOT / ".cache" / "clients" / "python" / "bin" / "python"
pytestmark = [pytest.mark.slow, pytest.mark.alone]


def run(name: str, *args: object, python: Path | str = sys.executable) -> str:
    """What an example prints."""
    command = [str(python), str(EXAMPLES / name), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_batch_evaluation(smollm2_gguf):
    said = run("batch_evaluation.py", smollm2_gguf)
    assert "right  France: Paris" in said
    summary = re.search(r"(\d) of 8 right; (\d+) prompt tokens", said)
    assert summary
    assert int(summary[1]) >= 5
    assert int(summary[2]) >= 8 * 24, "the examples were found in the prefix cache"


def test_streaming_chat(smollm2_gguf):
    said = run("streaming_chat.py", smollm2_gguf)
    first, second = said.split("> ")[1:]
    assert "Paris" in first
    assert second.startswith("And of Italy?\n")
    assert len(second.splitlines()) > 1


def test_grpo(tmp_path):
    """It learns, the first ratio of every batch is exactly 1, and a seed decides the whole curve, bit by bit."""
    files = [tmp_path / name for name in ("one.json", "other.json")]
    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(run, "grpo.py", "--json", file, "--plot", file.with_suffix(".svg")) for file in files]
    said = [done.result().splitlines()[-1] for done in runs]
    assert said[0] == said[1]
    reached = re.fullmatch(r"mean reward ([\d.]+) after (\d+) updates, from 0\.[45]\d+", said[0])
    assert reached
    assert float(reached[1]) >= 0.95
    assert int(reached[2]) <= 200
    depends_on_speed = {"tokens_per_s", "seconds"}
    curves = [json.loads(file.read_text()) for file in files]
    one, other = ([{k: point[k] for k in point.keys() - depends_on_speed} for point in curve] for curve in curves)
    assert one == other
    assert {point["first_ratio_off"] for point in one} == {0.0}
    assert max(point["last_ratio_off"] for point in one) > 0
    assert (tmp_path / "one.svg").stat().st_size > 10_000


@pytest.mark.nightly
def test_tree_search(smollm2_gguf):
    said = run("tree_search.py", smollm2_gguf)
    assert len(re.findall(r"^ +\d+ tokens, \d+ pages held$", said, re.MULTILINE)) == 6
    best, second = (float(score) for score in re.findall(r"^ {4}(-[\d.]+) ['\"]", said, re.MULTILINE)[-2:])
    assert second <= best < 0


@pytest.mark.nightly
def test_structured_extraction(smollm2_gguf):
    people = re.findall(r"^(.+), born (\d{4}) in (.+)$", run("structured_extraction.py", smollm2_gguf), re.MULTILINE)
    assert [name for name, _, _ in people] == ["Ada Lovelace", "Alan Turing", "Grace Hopper"]
    assert [year for _, year, _ in people][:2] == ["1815", "1912"], "a small model; it errs about the third"


@pytest.mark.nightly
def test_best_of_n(smollm2_gguf):
    found = re.findall(r"^ ?(\d+)\. perplexity +([\d.]+) ", run("best_of_n.py", smollm2_gguf), re.MULTILINE)
    assert [int(place) for place, _ in found] == [1, 2, 3, 16]
    perplexities = [float(perplexity) for _, perplexity in found]
    assert perplexities == sorted(perplexities)


def test_server_and_client(smollm2_gguf):
    said = run("server_and_client.py", smollm2_gguf)
    assert re.search(r"^France: .*Paris", said, re.MULTILINE)
    (tokens,) = re.findall(r"^vllm:generation_tokens_total\S* ([\d.e+]+)$", said, re.MULTILINE)
    assert 8 <= float(tokens) <= 8 * 16


def test_langchain_chain(smollm2_gguf):
    subprocess.run(["bash", str(ROOT / ".ci" / "clients-env")], check=True, cwd=ROOT)
    flags = ("--served-model-name", "smollm2", "--max-num-seqs", "4", "--max-model-len", "512")
    with serving(smollm2_gguf, *flags) as server:
        said = run("langchain_chain.py", f"{server.url}/v1", python=CLIENTS)
    lines = dict(line.split(":", 1) for line in said.splitlines())
    assert "Paris" in lines["one"]
    assert lines["batch"].strip().startswith("[")
    assert lines["stream"].strip()
    assert re.fullmatch(r"Capital\(city='.+', country='.+'\)", lines["typed"].strip())


def test_every_example_is_listed_and_tested():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text()))
    assert names == set(re.findall(r'run(?:\(|, )"(\w+\.py)"', Path(__file__).read_text()))
