"""The same tokens whatever happens to the pages: SmolLM2 in float32, greedy and seeded.

Alone is the measure. Batched, chunked, forked, served from the prefix cache, preempted by recompute and by swap (every
sequence, in a pool that holds a few of them): each path must give what a request gives by itself.
"""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.request import Request
from tests.oracle.harness import TieRule
from tests.oracle.prompts import cut, texts

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

NEW = 20
LENGTHS = [5, 17, 40, 64, 90, 150]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=NEW, ignore_eos=True, logprobs=2),
}
KNOBS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "debug": True, "quiet": True}


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, progress=False)]


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path):
    """Prompts, and for each kind of params what each prompt gives by itself, with the gap between the two best."""
    with LLM(smollm2_gguf, **KNOBS, max_num_batched_tokens=256, prefix_cache=False) as llm:
        prompts = cut(llm.tokenizer.encode(texts()), LENGTHS, seed=4)
        results = {}
        for kind, params in PARAMS.items():
            outputs = [llm.generate([prompt], params, progress=False)[0].outputs[0] for prompt in prompts]
            results[kind] = [
                {"tokens": out.token_ids, "gaps": [entry.top[0][1] - entry.top[1][1] for entry in out.logprobs or ()]}
                for out in outputs
            ]
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=NEW, ignore_eos=True, n=4)
        results["family"] = []
        for index in range(4):  # one child at a time: the others are aborted before they start
            family = llm.engine.add(Request(id=f"f{index}", prompt_token_ids=tuple(prompts[4]), params=params))
            for sequence in family:
                if sequence.index != index:
                    llm.engine.abort(sequence)
            while llm.engine.has_work:
                llm.engine.step()
            results["family"].append(family[index].output_token_ids)
        return prompts, results


def compare(ours: list[list[int]], expected: list[dict], label: str) -> None:
    rule = TieRule()
    for i, (tokens, theirs) in enumerate(zip(ours, expected, strict=True)):
        rule.compare(tokens, theirs, f"{label}, prompt {i}")
    assert len(rule.ties) <= 1, rule.ties


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_batched_tokens": 256},
        {"max_num_batched_tokens": 32},
        {"max_num_batched_tokens": 64, "num_pages": 24, "preemption": "recompute", "prefix_cache": False},
        {"max_num_batched_tokens": 64, "num_pages": 24, "preemption": "swap", "prefix_cache": False},
        {"max_num_batched_tokens": 64, "num_pages": 24, "preemption": "auto"},
    ],
    ids=str,
)
def test_batched_chunked_cached_preempted_and_forked_equal_alone(smollm2_gguf, alone, knobs):
    prompts, expected = alone
    small = "num_pages" in knobs
    with LLM(smollm2_gguf, **KNOBS, **knobs) as llm:
        for kind, params in PARAMS.items():
            label = f"{kind} {knobs}"
            if small:
                compare(preempting(llm, prompts, params, knobs["preemption"]), expected[kind], label)
            compare(answers(llm, prompts, params), expected[kind], label)
            compare(answers(llm, prompts, params), expected[kind], f"again, {label}")
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=NEW, ignore_eos=True, n=4)
        family = llm.generate([prompts[4]], params, progress=False)[0]
        assert [out.token_ids for out in family.outputs] == expected["family"]
        stats = llm.engine.stats()
        assert (stats.held_pages, stats.compiles_after_warmup) == (0, 0)
        assert stats.cached_tokens >= 3 * len(prompts[4]) // 16 * 16, "the children did not compute the prompt again"
        if small:
            assert stats.preemptions >= 2 * len(prompts)


def preempting(llm: LLM, prompts: list[list[int]], params: SamplingParams, how: str) -> list[list[int]]:
    """Generate, and take the pages of every sequence at least once on the way, the first one's too."""
    engine = llm.engine
    swap = {"swap": True, "recompute": False, "auto": None}[how]
    sequences = []
    for i, prompt in enumerate(prompts):
        sequences += engine.add(Request(id=f"p{i}", prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        engine.step()
        for sequence in list(engine.scheduler.running):
            if not sequence.preemptions and sequence.num_output >= 3:
                engine.scheduler.preempt(sequence, swap=swap)
    assert all(sequence.preemptions for sequence in sequences)
    return [sequence.output_token_ids for sequence in sequences]
