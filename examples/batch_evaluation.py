"""How good is a model at capitals? All questions in one batch, greedy, with the answers it got wrong.

    python examples/batch_evaluation.py [MODEL]

The questions begin with the same examples, so the KV of those is computed once and found in the prefix cache after.
"""

import sys

from quire import LLM, SamplingParams

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = "Q: What is the capital of Norway?\nA: Oslo\n\nQ: What is the capital of Peru?\nA: Lima\n\n"
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Australia": "Canberra",
    "Kazakhstan": "Astana",
}

with LLM(MODEL, dtype="float32", max_model_len=256, max_num_seqs=8, page_size=8) as llm:
    prompts = [f"{EXAMPLES}Q: What is the capital of {country}?\nA:" for country in CAPITALS]
    llm.generate(prompts[:1], SamplingParams(max_tokens=1))  # from here on the examples are in the prefix cache
    outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, stop=["\n"]))

right = 0
for out, (country, capital) in zip(outs, CAPITALS.items(), strict=True):
    answer = out.outputs[0].text.strip()
    right += answer == capital
    print(f"{'right' if answer == capital else 'WRONG'}  {country}: {answer}")
print(
    f"{right} of {len(outs)} right; {sum(out.num_cached_tokens for out in outs)} prompt tokens were not computed again"
)
