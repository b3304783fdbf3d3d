"""Beam search in a few lines: fork the best sequences, let all of them go on, keep the likeliest, abort the rest.

    python examples/tree_search.py [MODEL]

A fork shares the pages of its parent: nothing of the common past is computed or kept twice.
"""

import sys

from quire import LLM, Request, SamplingParams

if "--help" in sys.argv:
    print(__doc__)
    sys.exit()
MODEL = sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct.Q4_1.gguf"
WIDTH, FORKS, LENGTH, STEP = 2, 3, 24, 4  # sequences kept, forks of each, tokens in all, tokens between two choices

with LLM(MODEL, dtype="float32", max_model_len=256, max_num_seqs=WIDTH * (1 + FORKS), max_rounds=STEP) as llm:
    engine = llm.engine
    prompt = tuple(llm.tokenizer.encode("The secret of a good cup of coffee is"))
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
    beam = engine.add(Request(id="search", prompt_token_ids=prompt, params=params))

    def score(sequence) -> float:
        """The mean log-probability of what was generated."""
        return sum(token.logprob for token in sequence.logprobs) / len(sequence.logprobs)

    for length in range(STEP, LENGTH + 1, STEP):
        while any(sequence.num_output < length for sequence in beam):
            engine.step()
        distinct = {tuple(sequence.tokens): sequence for sequence in beam}  # two forks may draw alike
        best = sorted(distinct.values(), key=score, reverse=True)[:WIDTH]
        if length < LENGTH:
            for sequence in beam:
                if sequence not in best:
                    engine.abort(sequence)
        beam = best
        print(f"{length:3} tokens, {engine.stats().held_pages} pages held")
        for sequence in beam:
            print(f"    {score(sequence):.3f} {llm.tokenizer.decode(sequence.tokens[len(prompt) :])!r}")
        if length < LENGTH:
            beam += [engine.fork(sequence) for sequence in beam for _ in range(FORKS)]
    engine.audit()  # every page is accounted for
