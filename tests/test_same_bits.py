"""In bfloat16 on the native path a token's log-probability is one number: bit for bit, however it was computed."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from quire import LLM, EngineConfig, RolloutBatch, SamplingParams
from quire.device.models import ARCHITECTURES
from quire.train import logprobs
from tests.effort import nightly, slow
from tests.tiny import tiny_config, tiny_llm

PROMPTS = [[(5 * i + j) % 90 + 1 for i in range(size)] for j, size in enumerate((3, 19, 30, 41))]
DRAWN = SamplingParams(temperature=1, max_tokens=12, ignore_eos=True, logprobs=0, n=2, seed=5)
NAMES = [slow("llama"), slow("gemma3"), slow("qwen3"), slow("gpt_oss")]
NAMES += [nightly(name) for name in sorted(ARCHITECTURES.keys() - {"llama", "gemma3", "qwen3", "gpt_oss"})]


def reported(outputs) -> list[np.ndarray]:
    return [
        np.array([entry.logprob for entry in one.logprobs], np.float32) for output in outputs for one in output.outputs
    ]


def check_equal(got, expected, how: str) -> None:
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"sample {i}, {how}")


def whole_sequences(outputs) -> tuple[list[list[int]], list[int]]:
    """The tokens of every sample with its prompt's, and where the prompt ends."""
    sequences = [(output.prompt_token_ids, one.token_ids) for output in outputs for one in output.outputs]
    return [[*prompt, *tokens] for prompt, tokens in sequences], [len(prompt) for prompt, _ in sequences]


def check_score_drawn(llm, outputs, params) -> None:
    whole, starts = whole_sequences(outputs)
    scores = llm.score_drawn(whole, params, start=starts)
    for score, one in zip(scores, [one for output in outputs for one in output.outputs], strict=True):
        np.testing.assert_array_equal(score.processed_logprobs, [np.float32(e.processed_logprob) for e in one.logprobs])
        np.testing.assert_array_equal(score.kept_mass, [np.float32(entry.kept_mass) for entry in one.logprobs])
        assert (score.kept_mass < 1).any()


def check_score(llm, outputs) -> None:
    expected = reported(outputs)
    whole, starts = whole_sequences(outputs)
    check_equal(llm.score(whole, start=starts), expected, "scored")
    llm.engine.reset()
    alone = [llm.score(tokens, start=start) for tokens, start in zip(whole, starts, strict=True)]
    check_equal(alone, expected, "scored alone")


def check_train(llm, outputs, temperature: float = 1.0, params=None) -> None:
    batch = RolloutBatch.of(outputs)
    tokens, mask = (
        np.concatenate(both, axis=1) for both in ((batch.prompts, batch.tokens), (batch.prompt_mask, batch.mask))
    )
    start, config = batch.prompts.shape[1], llm.model_config
    score = jax.jit(lambda params: logprobs(params, tokens, config, start=start, mask=mask, temperature=temperature))
    expected = batch.logprobs if temperature == 1 else batch.processed_logprobs
    np.testing.assert_array_equal(np.asarray(score(llm.params if params is None else params)), expected)


def check_masters(llm) -> None:
    """Weights in float32 that bfloat16 does not hold are rounded by the trainer as the engine has them rounded."""
    rng = np.random.default_rng(3)
    masters = jax.tree.map(lambda x: x.astype("float32") * rng.uniform(0.9, 1.1, x.shape).astype("f"), llm.params)
    llm.set_weights(jax.tree.map(lambda x: x.astype("bfloat16"), masters), version="rounded")
    check_train(llm, llm.generate(PROMPTS[:2], DRAWN), params=masters)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_one_log_probability(name):
    """Prompts are longer than a step takes, so who is alone has other chunks than who shares the step."""
    knobs = {"num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 11, "debug": True, "max_rounds": 4}
    with tiny_llm(tiny_config(name), dtype="bfloat16", **knobs) as llm:
        outputs = llm.generate(PROMPTS, DRAWN)
        expected = reported(outputs)
        assert len({float(x) for line in expected for x in line}) > 50
        llm.engine.reset()
        check_equal([x for p in PROMPTS for x in reported(llm.generate([p], DRAWN))], expected, "alone")
        check_equal([x for p in PROMPTS for x in reported(llm.generate([p], DRAWN))], expected, "from the prefix cache")
        check_score(llm, outputs)
        check_train(llm, outputs)
        check_masters(llm)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_forks_preemption_and_other_company_change_no_bit(temperature):
    """A pool so small that sequences are swapped or computed again, and forks of other sampling parameters."""
    config, params = tiny_config(), replace(DRAWN, temperature=temperature)
    knobs = {"max_num_seqs": 8, "dtype": "bfloat16", "max_rounds": 4, "debug": True}
    with tiny_llm(config, num_pages=200, **knobs) as llm:
        outputs = llm.generate(PROMPTS, params)
        expected = reported(outputs)
        check_train(llm, outputs, temperature)
        truncated = replace(params, top_p=0.9)
        check_score_drawn(llm, llm.generate(PROMPTS, truncated), truncated)
    for preemption in ("swap", "recompute"):
        with tiny_llm(config, num_pages=24, preemption=preemption, max_model_len=60, **knobs) as llm:
            check_equal(reported(llm.generate(PROMPTS, params)), expected, preemption)
            stats = llm.engine.stats()
            assert (stats.swaps if preemption == "swap" else stats.recomputes) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")])
def test_one_program_makes_plain_xla_equal_to_itself(name, dtype):
    """Alone, in company, in other chunks, from the prefix cache, preempted, scored: `deterministic`, float32 too."""
    params = replace(DRAWN, temperature=0.7, top_p=0.9)
    knobs = {"max_num_seqs": 8, "dtype": dtype, "deterministic": True, "max_num_batched_tokens": 24, "debug": True}
    with tiny_llm(tiny_config(name), num_pages=200, **knobs) as llm:
        assert llm.engine.runner.programs.matmul_kind.native is False
        outputs = llm.generate(PROMPTS, params)
        expected = reported(outputs)
        check_equal(reported(llm.generate(PROMPTS, params)), expected, "from the prefix cache")
        llm.engine.reset()
        llm.engine.clear_prefix_cache()
        check_equal([x for p in PROMPTS for x in reported(llm.generate([p], params))], expected, "alone")
        check_score(llm, outputs)
        check_score_drawn(llm, outputs, params)
    for preemption in ("swap", "recompute"):
        with tiny_llm(tiny_config(name), num_pages=24, preemption=preemption, max_model_len=60, **knobs) as llm:
            check_equal(reported(llm.generate(PROMPTS, params)), expected, preemption)
            assert llm.engine.stats().preemptions > 0


@pytest.mark.parametrize(("field", "value"), [("attention", "xla"), ("matmul", "native")])
def test_deterministic_says_what_it_needs(field, value):
    with pytest.raises(ValueError, match=f"deterministic=True needs {field}="):
        EngineConfig(deterministic=True, **{field: value})


@pytest.mark.slow
@pytest.mark.parametrize(("num_prompts", "n", "num_tokens", "few_pages"), [(3, 2, 12, 13), nightly(8, 8, 64, 40)])
def test_a_real_model_reports_what_the_trainer_computes(smollm2_gguf, num_prompts, n, num_tokens, few_pages):
    rng = np.random.default_rng(0)
    lengths = [5, 150, *rng.integers(10, 100, num_prompts - 2)]
    prompts = [rng.integers(1000, 20_000, size).tolist() for size in lengths]
    params = replace(DRAWN, n=n, max_tokens=num_tokens)
    knobs = {"max_model_len": 152 + num_tokens, "quiet": True}
    with LLM(smollm2_gguf, max_num_seqs=32, max_num_batched_tokens=512, **knobs) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        expected = reported(outputs)
        check_equal(reported(llm.generate(prompts, params, progress=False)), expected, "from the prefix cache")
        check_equal(reported(llm.generate(prompts[1:2], params, progress=False)), expected[n : 2 * n], "alone")
        check_score(llm, outputs)
        check_train(llm, outputs)
    small = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "max_rounds": 1, "num_pages": few_pages}
    with LLM(smollm2_gguf, **small, **knobs) as llm:
        check_equal(reported(llm.generate(prompts, params, progress=False)), expected, "preempted, 64 tokens a step")
        assert llm.engine.stats().preemptions > 0 or n == 2, "eight times eight do not fit"
