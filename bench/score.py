"""Scoring against what it should cost: completions that share a prompt, and whole sequences against plain prefill.

    python bench/score.py MODEL [--repeats 5]

Four jobs in turn, over random tokens that no cache has seen: 8 completions of 64 tokens on one prompt of 512, scored by
eight calls of whole sequences and by one call from 512 on; 32 sequences of 256 tokens, scored by one call and only
computed. Prints the median seconds of each, and the ratios within each turn. Run it alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from quire import LLM, SamplingParams

PROMPT_LEN, COMPLETION_LEN, NUM_COMPLETIONS = 512, 64, 8
SEQUENCE_LEN, NUM_SEQUENCES = 256, 32


def jobs(llm: LLM) -> dict[str, Callable[[], object]]:
    """Each computes new tokens whenever it is called."""
    salts = map(str, count())
    rng = np.random.default_rng(0)
    vocab = llm.model_config.vocab_size

    def completions() -> list[list[int]]:
        prompt = rng.integers(0, vocab, PROMPT_LEN).tolist()
        return [prompt + rng.integers(0, vocab, COMPLETION_LEN).tolist() for _ in range(NUM_COMPLETIONS)]

    def sequences() -> list[list[int]]:
        return rng.integers(0, vocab, (NUM_SEQUENCES, SEQUENCE_LEN)).tolist()

    return {
        "eight calls": lambda: [llm.score(each, cache_salt=next(salts)) for each in completions()],
        "one call": lambda: llm.score(completions(), start=PROMPT_LEN),
        "scored": lambda: llm.score(sequences()),
        "computed": lambda: llm.generate(sequences(), SamplingParams(max_tokens=1, temperature=0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    times: dict[str, list[float]] = {}
    with LLM(args.model, num_pages=1024, max_num_seqs=64) as llm:
        todo = jobs(llm)
        for turn in range(args.repeats + 1):
            for name, job in todo.items():
                start = time.perf_counter()
                job()
                if turn:  # the first is for the caches of the machine
                    times.setdefault(name, []).append(time.perf_counter() - start)
    for name, seconds in times.items():
        print(f"{name:12} {statistics.median(seconds):.3f} s")
    for one, other in (("one call", "eight calls"), ("scored", "computed")):
        ratios = [a / b for a, b in zip(times[one], times[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
