"""Mixtures of experts through the whole engine are Hugging Face's, token for token, whatever happens to a request."""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from tests.effort import nightly
from tests.oracle import harness

pytestmark = pytest.mark.oracle

MAX_TOKENS, MAX_TIES = 24, 2
LENGTHS = [1, 14, 16, 20, 47, 47]
KNOBS = {"dtype": "float32", "page_size": 4, "max_num_seqs": 8, "max_model_len": 96, "debug": True, "quiet": True}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The last two begin alike."""
    rng = np.random.default_rng(3)
    drawn = [rng.integers(3, 500, size=n).tolist() for n in LENGTHS]
    return [*drawn[:-1], drawn[-2][:40] + drawn[-1][40:]]


@pytest.fixture(params=["gpt_oss", "mixtral", *map(nightly, ["qwen3_moe", "olmoe"])])
def model(request, prompts, tmp_path):
    """A checkpoint, and what Hugging Face says to each prompt alone."""
    folder = harness.checkpoints() / request.param
    asked = [{"prompt": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]
    return folder, harness.hf("greedy", folder, asked, tmp_path)


def check(llm: LLM, prompts: list[list[int]], answers: list[dict], n: int = 1) -> None:
    def generate(inputs: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True, n=n) for m in max_tokens]
        outputs = llm.generate(inputs, params, progress=False)
        assert all(child.token_ids == out.outputs[0].token_ids for out in outputs for child in out.outputs)
        return [out.outputs[0].token_ids for out in outputs]

    harness.assert_greedy_equal(generate, prompts, answers, MAX_TIES)
    llm.engine.audit()


def test_alone_batched_forked_and_from_the_prefix_cache(model, prompts):
    folder, answers = model
    with LLM(folder, num_pages=256, max_num_batched_tokens=64, **KNOBS) as llm:
        for prompt, answer in zip(prompts, answers, strict=True):
            check(llm, [prompt], [answer])
        check(llm, prompts, answers)
        assert llm.engine.stats().cached_tokens > 0
        check(llm, prompts[2:3], answers[2:3], n=3)


def test_chunked_and_preempted(model, prompts):
    folder, answers = model
    with LLM(folder, num_pages=25, max_num_batched_tokens=16, prefix_cache=False, **KNOBS) as llm:
        check(llm, prompts, answers)
        assert llm.engine.stats().preemptions > 0
