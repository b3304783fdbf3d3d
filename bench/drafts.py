"""What drafts are worth: the same requests with and without them.

    python bench/drafts.py MODEL [--drafts 8] [--rows 1] [--new-tokens 128] [--repeats 5] [--quantize int8]
    python bench/drafts.py MODEL --draft MODEL [--draft-quantize int4]

Without --draft they are looked up in the text, with it a smaller model guesses them.

Prompts of two kinds: some ask to repeat what they bring along (a summary, an edit), others ask for something new. Turns
with and without drafts are interleaved; a ratio is the time without over the time with, median and range. The tokens
of both must be the same.
"""

import argparse
import statistics
import time

from quire import LLM, SamplingParams

TEXT = (
    "The harbour of Lindvik lies at the southern tip of the country. In 1874 the town council decided to build a new "
    "lighthouse, because the old one could not be seen in fog. The work took three years and cost twice as much as the "
    "council had planned. When the lamp was lit for the first time, more than four hundred people came to watch. The "
    "keeper, a man named Olav Berge, lived in the tower with his wife and five children. He kept a diary in which he "
    "wrote down every ship that passed, the weather of each day, and the price of herring at the market. Historians "
    "have used the diary to study how trade along the coast changed between 1877 and 1902."
)
CODE = """def load_orders(path, customer=None):
    orders = []
    with open(path) as file:
        for line in file:
            fields = line.strip().split(",")
            if len(fields) != 4:
                continue
            order = {"id": int(fields[0]), "customer": fields[1], "amount": float(fields[2]), "date": fields[3]}
            if customer is None or order["customer"] == customer:
                orders.append(order)
    return orders
"""
PROMPTS = {
    "repeating": [
        f"Summarize the following text in a few sentences.\n\n{TEXT}",
        f"Rewrite the following text and change the name Olav Berge to Nils Dahl. Change nothing else.\n\n{TEXT}",
        f"Copy the most important sentences of this text word for word.\n\n{TEXT}",
        f"Rename the variable orders to found and print the whole function again.\n\n```python\n{CODE}```",
    ],
    "new": [
        "Write a story about a girl who finds a door at the bottom of the sea.",
        "Explain how vaccines work, to a student of medicine.",
        "Describe the life of a lighthouse keeper in winter.",
        "Give advice to somebody who moves to a big city for the first time.",
    ],
}


def turn(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, list[tuple[int, ...]]]:
    """The seconds that requests take, and their tokens; the prompts are in the prefix cache."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    return time.perf_counter() - start, [tuple(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--draft", help="a smaller model with the same tokens")
    parser.add_argument("--draft-quantize")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize")
    args = parser.parse_args()
    params = SamplingParams(temperature=args.temperature, seed=0, max_tokens=args.new_tokens, ignore_eos=True)
    knobs = {"dtype": args.dtype, "quantize": args.quantize, "max_num_seqs": args.rows, "max_model_len": 1024}
    with (
        LLM(args.model, quiet=True, **knobs) as plain,
        LLM(
            args.model,
            quiet=True,
            drafts=args.drafts,
            draft=args.draft,
            draft_quantize=args.draft_quantize,
            **knobs,
        ) as ahead,
    ):
        for kind, texts in PROMPTS.items():
            ratios, differing = [], 0
            before = ahead.engine.stats()
            tokens_ahead = 0
            for first in range(len(texts)):
                asked = [texts[(first + i) % len(texts)] for i in range(args.rows)]
                prompts = [plain.chat_prompt([{"role": "user", "content": text}]) for text in asked]
                for repeat in range(args.repeats + 1):
                    seconds, expected = turn(plain, prompts, params)
                    seconds_ahead, tokens = turn(ahead, prompts, params)
                    tokens_ahead += sum(map(len, tokens))
                    differing += sum(a != b for a, b in zip(tokens, expected, strict=True))
                    if repeat:  # the first turn computes the prompt
                        ratios.append(seconds / seconds_ahead)
                if args.rows >= len(texts):
                    break  # all of them at once
            now = ahead.engine.stats()
            drafted, accepted = now.drafted_tokens - before.drafted_tokens, now.accepted_drafts - before.accepted_drafts
            steps = now.steps - before.steps
            share = accepted / max(drafted, 1)
            print(
                f"{args.rows} rows, {kind}: {statistics.median(ratios):.2f}x ({min(ratios):.2f}..{max(ratios):.2f}) "
                f"the speed without drafts; {accepted} of {drafted} drafts accepted ({share:.0%}), "
                f"{tokens_ahead / steps:.1f} tokens a step, {differing} sequences differ"
            )


if __name__ == "__main__":
    main()
