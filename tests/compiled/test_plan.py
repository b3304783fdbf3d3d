"""What `quire plan` computes from shapes is what the compilers of those chips say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiled.topology import environment

CONFIG = Path(__file__).parents[2] / "bench" / "configs" / "Llama-3.1-8B.json"


def plan(path, topology, *flags):
    command = [sys.executable, "-m", "quire", "plan", str(path), "--topology", topology, "--json", "-", *flags]
    out = subprocess.run(command, env=environment(topology), capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stdout + out.stderr
    return json.loads(out.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The widths of a real model, and few layers: they repeat."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    changes = {"num_hidden_layers": 4, "vocab_size": 32_768, "eos_token_id": 2}
    path.write_text(json.dumps(json.loads(CONFIG.read_text()) | changes))
    return path


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("topology", ["h100:1"])
def test_memory_from_shapes_is_within_2_percent_of_the_compilers(config, topology):
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    compiled, computed = plan(config, topology, *flags), plan(config, topology, *flags, "--no-compile")
    assert (compiled["source"], computed["source"]) == ("compiler", "formula")
    assert [program["name"].split()[0] for program in compiled["programs"]] == ["decode", "mixed"]
    weights_and_pool = computed["weights_bytes_per_chip"] + computed["pool_bytes_per_chip"]
    for program in compiled["programs"]:
        assert weights_and_pool == pytest.approx(program["argument_bytes"], rel=0.002), program["name"]
        whole = program["argument_bytes"] + program["temp_bytes"]
        assert weights_and_pool + computed["temp_bytes_per_chip"] == pytest.approx(whole, rel=0.02), program["name"]


@pytest.mark.slow
@pytest.mark.nightly
def test_four_chips_sum_two_arrays_a_layer_and_one_for_the_embedding(config):
    report = plan(config, "v5e:2x2", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    assert report["collectives"]["all_reduces_per_step"] == 9
    assert [program["collectives"].get("all-reduce") for program in report["programs"]] == [9, 9]
