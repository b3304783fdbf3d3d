"""Sixteen answers to one prompt, the likeliest first: the prompt is computed once, its pages are shared.

python examples/best_of_n.py [MODEL]
"""

import math
import sys

from quire import LLM, SamplingParams

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct.Q4_1.gguf"

with LLM(MODEL, dtype="float32", max_model_len=256, max_num_seqs=16) as llm:
    params = SamplingParams(n=16, seed=1, temperature=0.8, top_p=0.95, max_tokens=24, stop=["\n"], logprobs=0)
    (out,) = llm.generate(["My favourite thing about the sea is"], params)


def mean_logprob(answer) -> float:
    """Under the model itself, before temperature and top-p: answers of different lengths can be compared."""
    return sum(token.logprob for token in answer.logprobs) / len(answer.logprobs)


answers = sorted(out.outputs, key=mean_logprob, reverse=True)
for place, answer in enumerate(answers, start=1):
    if place <= 3 or place == len(answers):
        perplexity = math.exp(-mean_logprob(answer))
        print(f"{place:2}. perplexity {perplexity:6.2f} {answer.text!r} ({answer.finish_reason})")
