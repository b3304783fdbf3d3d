"""The same tokens whatever happens to the pages: SmolLM2 in float32, greedy and seeded.

Alone is the measure. Batched, chunked, forked, served from the prefix cache, preempted by recompute and by swap (every
sequence, in a pool that holds a few of them): each path must give what a request gives by itself.
"""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.request import Request
from quire.core.sequence import TokenLogprob
from tests.oracle.harness import TIE_GAP
from tests.oracle.prompts import cut, texts

pytestmark = [pytest.mark.slow, pytest.mark.oracle]

NEW = 20
LENGTHS = [5, 17, 40, 64, 90, 150]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=NEW, ignore_eos=True, logprobs=2),
}
FAMILY = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=NEW, ignore_eos=True, n=4, logprobs=2)
NEIGHBOURS = 0.02
"""Draws go through tokens in order of likelihood: on the edge between two, float32 may rightly take the next one, which
is about as likely.
"""
Draws = list[TokenLogprob]
KNOBS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "debug": True, "quiet": True}


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Draws]:
    return [out.outputs[0].logprobs or [] for out in llm.generate(prompts, params, progress=False)]


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path) -> tuple[list[list[int]], dict[str, list[Draws]]]:
    """Prompts, and for each kind of params what each prompt gives by itself."""
    with LLM(smollm2_gguf, **KNOBS, max_num_batched_tokens=256, prefix_cache=False) as llm:
        prompts = cut(llm.tokenizer.encode(texts()), LENGTHS, seed=4)
        results = {kind: [answers(llm, [prompt], params)[0] for prompt in prompts] for kind, params in PARAMS.items()}
        results["family"] = []
        for index in range(FAMILY.n):  # one child at a time: the others are aborted before they start
            family = llm.engine.add(Request(id=f"f{index}", prompt_token_ids=tuple(prompts[4]), params=FAMILY))
            for sequence in family:
                if sequence.index != index:
                    llm.engine.abort(sequence)
            while llm.engine.has_work:
                llm.engine.step()
            results["family"].append(family[index].logprobs)
        return prompts, results


def compare(ours: list[Draws], expected: list[Draws], label: str, *, greedy: bool) -> None:
    """Token for token, but for at most two first differences where the choice hangs on the last bits."""
    ties = 0
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert len(a) == len(b) == NEW
        for step, (our, their) in enumerate(zip(a, b, strict=True)):
            if our.token_id == their.token_id:
                assert abs(our.logprob - their.logprob) < TIE_GAP
                continue
            gap = their.top[0][1] - their.top[1][1] if greedy else abs(our.logprob - their.logprob)
            what = f"{label}, sequence {i}, step {step}: {our.token_id} for {their.token_id}, gap {gap:.1e}"
            assert gap < (TIE_GAP if greedy else NEIGHBOURS), what
            print(f"tie: {what}")
            ties += 1
            break
    assert ties <= 2


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"max_num_batched_tokens": 32}, marks=pytest.mark.nightly),
        {"max_num_batched_tokens": 64, "num_pages": 24, "preemption": "auto"},
    ],
    ids=str,
)
def test_batched_chunked_cached_preempted_and_forked_equal_alone(smollm2_gguf, alone, knobs):
    prompts, expected = alone
    small = "num_pages" in knobs
    with LLM(smollm2_gguf, **KNOBS, **knobs) as llm:
        for kind, params in PARAMS.items():
            label, greedy = f"{kind} {knobs}", kind == "greedy"
            if small:
                disturbed = preempting(llm, prompts, params)
                compare(disturbed, expected[kind], f"preempted, {label}", greedy=greedy)
            compare(answers(llm, prompts, params), expected[kind], label, greedy=greedy)
            compare(answers(llm, prompts, params), expected[kind], f"again, {label}", greedy=greedy)
        family = llm.generate([prompts[4]], FAMILY, progress=False)[0]
        compare([out.logprobs or [] for out in family.outputs], expected["family"], f"family {knobs}", greedy=False)
        stats = llm.engine.stats()
        assert (stats.held_pages, stats.compiles_after_warmup) == (0, 0)
        assert stats.cached_tokens >= 3 * len(prompts[4]) // 16 * 16, "the children did not compute the prompt again"
        if small:
            assert stats.preemptions >= 2 * len(prompts)


def preempting(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Draws]:
    """Generate, and take the pages of every sequence once on the way: by swap and by recompute in turns."""
    engine = llm.engine
    sequences = []
    for i, prompt in enumerate(prompts):
        sequences += engine.add(Request(id=f"p{i}", prompt_token_ids=tuple(prompt), params=params))
    while engine.has_work:
        engine.step()
        for sequence in list(engine.scheduler.running):
            if not sequence.preemptions and sequence.num_output >= 3:
                engine.scheduler.preempt(sequence, swap=sequence.arrival % 2 == 0)
    assert all(sequence.preemptions for sequence in sequences)
    return [sequence.logprobs for sequence in sequences]
