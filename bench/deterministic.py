"""What `deterministic=True` costs: three engines over the same prompts, in turn.

    python bench/deterministic.py MODEL [--rows 8] [--repeats 3]

The engine as it comes, plain XLA, and plain XLA that adds up in one order; the latter two in the same type, with the
same budget of tokens a step, as small as the rows. Prints the median seconds of each for a short prompt and as many new
tokens, and the ratio to plain XLA within each turn. Run it alone.
"""

import argparse
import statistics
from contextlib import ExitStack

from quire import LLM, SamplingParams
from quire.bench.measure import our_side, take_turns
from quire.config import EngineKnobs

LENGTH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    small: EngineKnobs = {"num_pages": 256, "max_num_seqs": args.rows, "max_model_len": 2 * LENGTH}
    budget: EngineKnobs = {"max_num_batched_tokens": max(args.rows, 16)}
    kinds: dict[str, EngineKnobs] = {
        "as it comes": small,
        "plain XLA": {**small, **budget, "attention": "xla", "matmul": "xla"},
        "deterministic": {**small, **budget, "deterministic": True},
    }
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    with ExitStack() as stack:
        llms = {name: stack.enter_context(LLM(args.model, **knobs)) for name, knobs in kinds.items()}
        sides = {name: our_side(llm, params) for name, llm in llms.items()}
        times = take_turns(sides, llms["as it comes"], args.rows, LENGTH, args.repeats)
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["plain XLA"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:14} {statistics.median(seconds):.3f} s, {statistics.median(ratios):.2f} of plain XLA ({spread})")


if __name__ == "__main__":
    main()
