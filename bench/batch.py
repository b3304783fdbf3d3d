"""What files, JSON and the order of answers cost: `quire batch` beside `LLM.generate`, over the same prompts.

    python bench/batch.py MODEL [--prompts 256] [--rows 32] [--prompt-len 64] [--new-tokens 64] [--repeats 5]

Both have an engine of their own in this process and take turns. The batch reads lines from a file, and writes and syncs
another. A ratio is that of the speeds in one turn: median and range of all turns but the first.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from quire import LLM, AsyncLLM, SamplingParams
from quire.bench.measure import random_prompts
from quire.cli.batch import answer_lines
from quire.server.batches.answer_file import AnswerFile
from quire.server.batches.lines import read_lines


async def measure(args: argparse.Namespace, folder: Path) -> list[tuple[float, float]]:
    """Seconds of every turn: of `generate`, and of a batch."""
    # Random tokens are more of them when their text is encoded again.
    knobs = {"max_num_seqs": args.rows, "max_model_len": 2 * args.prompt_len + args.new_tokens, "quiet": True}
    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)
    turns, rng = [], np.random.default_rng(0)
    with LLM(args.model, **knobs) as llm:
        async with AsyncLLM.from_factory(partial(LLM, args.model, **knobs)) as engine:
            for turn in range(args.repeats + 1):
                prompts = random_prompts(rng, llm, args.prompts, args.prompt_len)
                texts = [llm.tokenizer.decode(prompt, False) for prompt in prompts]
                start = time.perf_counter()
                outputs = llm.generate(texts, params, progress=False)
                generated_s = time.perf_counter() - start
                given, output = folder / f"{turn}.jsonl", folder / f"{turn}-answers.jsonl"
                body = {"model": "model", "max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True}
                with given.open("w") as file:
                    for i, text in enumerate(texts):
                        line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions"}
                        file.write(json.dumps(line | {"body": body | {"prompt": text}}) + "\n")
                start = time.perf_counter()
                with closing(AnswerFile(output)) as answers, given.open("rb") as file:
                    lines = read_lines(file, "")
                    answers.skip_answered(lines)
                    await answer_lines(engine, lines, answers.write, defaults={"model": "model"})
                    answers.sync()
                batch_s = time.perf_counter() - start
                wanted = [one.outputs[0].text for one in outputs]
                found = [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in output.open()]
                same = sum(a == b for a, b in zip(wanted, found, strict=True))
                print(f"turn {turn}: generate {generated_s:.2f} s, batch {batch_s:.2f} s; {same} of {len(found)} equal")
                turns.append((generated_s, batch_s))
    return turns[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        turns = asyncio.run(measure(args, Path(folder)))
    ratios = sorted(generated_s / batch_s for generated_s, batch_s in turns)
    tokens = args.prompts * args.new_tokens
    speeds = [statistics.median(tokens / one[i] for one in turns) for i in (0, 1)]
    print(
        f"{args.prompts} prompts of about {args.prompt_len} tokens and {args.new_tokens} new ones, {args.rows} rows: "
        f"generate {speeds[0]:,.0f}, batch {speeds[1]:,.0f} tokens/s; {statistics.median(ratios):.3f}x of generate "
        f"({ratios[0]:.3f}..{ratios[-1]:.3f})"
    )


if __name__ == "__main__":
    main()
