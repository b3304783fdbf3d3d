"""Throughput of a small mixture of experts against a dense model of the same active size, both with random weights.

    python -m bench.experts [--rows 32] [--quantize int8]

The two take turns; what is printed is the median of each, in tokens per second, and their ratio.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from quire import LLM, AttentionConfig, ModelConfig, SamplingParams
from quire.config import ExpertsConfig
from quire.device.models.weights import weight_specs

NUM_LAYERS, WIDTH, EXPERT_WIDTH, NUM_EXPERTS, PER_TOKEN = 4, 768, 512, 16, 4
PROMPT_LEN, MAX_TOKENS, TURNS = 4, 32, 5


def model(architecture: str, **changes) -> ModelConfig:
    """Two models that differ in nothing but the feed-forward."""
    return ModelConfig(
        architecture=architecture,
        vocab_size=16_384,
        hidden_size=WIDTH,
        intermediate_size=PER_TOKEN * EXPERT_WIDTH,
        attention=(AttentionConfig(num_heads=12, num_kv_heads=4, head_dim=64),) * NUM_LAYERS,
        max_len=1024,
        **changes,
    )


EXPERTS = ExpertsConfig(
    num_experts=NUM_EXPERTS, num_experts_per_token=PER_TOKEN, intermediate_size=EXPERT_WIDTH, normalize_weights=True
)
MODELS = {"dense": model("qwen3"), "experts": model("qwen3_moe", experts=EXPERTS)}


def random_llm(config: ModelConfig, rows: int, quantize: str | None) -> LLM:
    """An engine over weights of the usual size."""
    leaves, tree = jax.tree.flatten(weight_specs(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [
        jax.random.normal(key, spec.shape, jnp.bfloat16) * WIDTH**-0.5
        if len(spec.shape) > 1
        else jnp.ones(spec.shape, jnp.bfloat16)
        for key, spec in zip(keys, leaves, strict=True)
    ]
    knobs = {"max_num_seqs": rows, "max_model_len": 64, "prefix_cache": False, "max_num_batched_tokens": 4 * rows}
    return LLM.from_params(config, tree.unflatten(arrays), quantize=quantize, quiet=True, **knobs)


def tokens_per_second(llm: LLM, rows: int) -> float:
    """Of one batch, prompts included."""
    prompts = [[(7 * i + j) % 16_000 + 1 for i in range(PROMPT_LEN)] for j in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return rows * MAX_TOKENS / (time.perf_counter() - begin)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--quantize", choices=["int8"])
    args = parser.parse_args()
    llms = {name: random_llm(config, args.rows, args.quantize) for name, config in MODELS.items()}
    found: dict[str, list[float]] = {name: [] for name in llms}
    for turn in range(TURNS + 1):
        for name, llm in llms.items():
            speed = tokens_per_second(llm, args.rows)
            if turn:  # the first warms up
                found[name].append(speed)
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    for name, speed in medians.items():
        print(f"{name:8} {speed:8.1f} tokens/s")
    print(f"experts / dense: {medians['experts'] / medians['dense']:.2f}")


if __name__ == "__main__":
    main()
