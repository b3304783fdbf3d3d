"""What rows that ask for more cost: one of them its batch mates, and a batch of forms against a free one.

    python bench/cliffs.py MODEL [--rows 32] [--max-model-len 2048] [--new-tokens 64] [--repeats 5] [--quantize int8]
        [--only KIND]

First `rows` free rows beside one more that asks for something, against as many rows that are all free: what the free
ones generate in a second, and what that one row does. Then `rows` rows that all have a JSON schema, against free ones.
Only decoding counts. Turns of all kinds are interleaved; a ratio is of two turns beside each other, median and range.
"""

import argparse
import time
from collections.abc import Sequence

import numpy as np

from quire import LLM, SamplingParams, Structured
from quire.bench.measure import random_prompts
from quire.core.request import Request

PROMPT_LEN = 64
_PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 24},
        "last_name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "is_member"],
    "additionalProperties": False,
}
PEOPLE = {
    "type": "object",
    "properties": {"people": {"type": "array", "items": _PERSON, "minItems": 100}},
    "required": ["people"],
}
"""Long enough that no row ends before its budget does."""
PROSE = {"structured": Structured(regex=r"[a-z ]{4000}"), "ignore_eos": False}
ONE_ROW = {
    "a penalty": {"presence_penalty": 0.5},
    "a bias": {"logit_bias": {5: 1.0}},
    "a log-probability": {"logprobs": 0},
    "alternatives": {"logprobs": 5},
    "a regular expression": PROSE,
    "a JSON schema": {"structured": Structured(json_schema=PEOPLE), "ignore_eos": False},
}
EVERY_ROW = {"a JSON schema in every row": ONE_ROW["a JSON schema"], "a regular expression in every row": PROSE}


def speeds(llm: LLM, prompts: list[list[int]], params: Sequence[SamplingParams]) -> tuple[float, float]:
    """Tokens in a second, from when every row has one until the first rows end: of all but the last row, and of it."""
    engine = llm.engine
    engine.clear_prefix_cache()
    requests = (
        Request(id=str(i), prompt_token_ids=tuple(prompt), params=params[i]) for i, prompt in enumerate(prompts)
    )
    rows = [engine.add(request)[0] for request in requests]
    while not all(row.num_output for row in rows):
        engine.step()
    before, start = [row.num_output for row in rows], time.perf_counter()
    while all(row.finish_reason is None for row in rows[:-1]):
        engine.step()
    seconds = time.perf_counter() - start
    engine.reset()
    *others, last = (row.num_output - count for row, count in zip(rows, before, strict=True))
    return sum(others) / seconds, last / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quantize")
    parser.add_argument("--only", choices=[*ONE_ROW, *EVERY_ROW], action="append")
    args = parser.parse_args()
    free = {"temperature": 0, "max_tokens": args.new_tokens, "ignore_eos": True}
    knobs = {"max_num_seqs": args.rows + 1, "max_model_len": args.max_model_len, "quantize": args.quantize}
    with LLM(args.model, quiet=True, **knobs) as llm:
        rng = np.random.default_rng(0)
        for name, asked in (ONE_ROW | EVERY_ROW).items():
            if args.only and name not in args.only:
                continue
            num_rows = args.rows + (name in ONE_ROW)
            plain, other = SamplingParams(**free), SamplingParams(**free | asked)
            sides = {"free": [plain] * num_rows, "mixed": [other] * num_rows}
            if name in ONE_ROW:
                sides["mixed"] = [plain] * args.rows + [other]
            ratios = []
            for repeat in range(args.repeats + 1):
                prompts = random_prompts(rng, llm, num_rows, PROMPT_LEN)
                order = list(sides) if repeat % 2 else list(reversed(sides))
                measured = {side: speeds(llm, prompts, sides[side]) for side in order}
                if repeat:  # the first turn warms up
                    ratios.append(np.divide(measured["mixed"], measured["free"]))
            others, last = np.transpose(ratios)
            print(
                f"{args.rows} rows {'and one with ' * (name in ONE_ROW)}{name}: {_spread(others)} of free ones", end=""
            )
            print(f"; that one row {_spread(last)}" if name in ONE_ROW else "", flush=True)


def _spread(ratios: np.ndarray) -> str:
    return f"{np.median(ratios):.2f}x ({ratios.min():.2f}..{ratios.max():.2f})"


if __name__ == "__main__":
    main()
