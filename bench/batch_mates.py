"""What one row that asks for more costs everybody in its batch: all rows plain, against all but one.

    python bench/batch_mates.py MODEL [--rows 32] [--max-model-len 2048] [--new-tokens 64] [--repeats 5]

Turns of all kinds are interleaved; a ratio is the plain turn's time over the mixed turn's, median and range.
"""

import argparse
import time

import numpy as np

from quire import LLM, SamplingParams, Structured
from quire.bench.measure import random_prompts

PROMPT_LEN = 64
ONE_ROW = {
    "a penalty": {"presence_penalty": 0.5},
    "a bias": {"logit_bias": {5: 1.0}},
    "alternatives": {"logprobs": 5},
    "a grammar": {"structured": Structured(regex=r"[a-z ]{4000}"), "ignore_eos": False},
}


def seconds(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """The time that a batch takes, with an empty prefix cache."""
    llm.engine.clear_prefix_cache()
    start = time.perf_counter()
    llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    plain = {"temperature": 0, "max_tokens": args.new_tokens, "ignore_eos": True}
    kinds: dict[str, dict] = {"nothing": {}} | ONE_ROW
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with LLM(args.model, max_num_seqs=args.rows, max_model_len=args.max_model_len, quiet=True) as llm:
        rng = np.random.default_rng(0)
        for repeat in range(args.repeats + 1):
            for kind, asked in kinds.items():
                prompts = random_prompts(rng, llm, args.rows, PROMPT_LEN)
                params = [SamplingParams(**plain)] * (args.rows - 1) + [SamplingParams(**plain | asked)]
                spent = seconds(llm, prompts, params)
                if repeat:  # the first turn warms up
                    times[kind].append(spent)
    for kind in ONE_ROW:
        ratios = sorted(a / b for a, b in zip(times["nothing"], times[kind], strict=True))
        print(
            f"{args.rows} rows, max_model_len {args.max_model_len}, one of them with {kind}: "
            f"{np.median(ratios):.2f}x of the speed of plain rows ({ratios[0]:.2f}..{ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
