"""Quire computes what Tunix computes, on the weights of Tunix's own models, in an environment that has both."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.effort import nightly

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".cache/tunix/bin/python"


def run(module: str, *args: str) -> Any:
    """What a program prints last, in the environment that has Tunix."""
    assert PYTHON.exists(), "run .ci/tunix-env first"
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [PYTHON, "-m", module, *args]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    print(seen)
    return seen


def test_log_probabilities_are_those_of_tunix():
    seen = run("tests.tunix.logprobs")
    assert len(seen) == 3
    for name, (difference, scale) in seen.items():
        assert difference <= 1e-5 * scale, name


@pytest.mark.parametrize("name", ["whole", nightly("lora")])
def test_the_grpo_learner_of_tunix_runs_on_quire(name):
    """Ten steps: every log-probability is that of the model that is trained, and a group's prompt is computed once."""
    seen = run("tests.tunix.rollout", name)[name]
    assert seen["steps"] == seen["weights set"] == seen["different outputs"] == 10
    assert seen["difference"] < 1e-3
    # Two prompts of 13 tokens a step; of each of their 16 samples the last token is not put through the model.
    assert seen["computed tokens"] == 10 * (2 * 13 - 16) + seen["generated tokens"]
    assert seen["held pages"] == 0


def test_its_agentic_learner_runs_on_quire_from_16_threads():
    seen = run("tests.tunix.rollout", "agentic")["agentic"]
    assert seen["steps"] == seen["weights set"] == 10
    assert seen["different outputs"] > 100, "each of its 160 calls has a seed of its own"
    assert seen["difference"] < 1e-3
    assert seen["held pages"] == 0


@pytest.mark.nightly
def test_rollouts_of_tunix_come_from_many_threads_while_weights_change():
    seen = run("tests.tunix.rollout", "threads")["threads"]
    assert seen["outputs"] == 64
    assert seen["weights set"] > 0


def test_the_flax_model_of_the_docs_is_sampled_trained_and_compared():
    """Flax comes with Tunix; the page's other model is run by tests/test_docs_of_sampling.py."""
    verdict = run("tests.tunix.your_model", "Flax")
    assert verdict.endswith("model.layers.1.self_attn.o_proj.weight.")
