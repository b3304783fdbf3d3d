"""Every architecture through the real engine: a token depends on no company, chunk, fork, preemption or reuse."""

import pytest

from quire import SamplingParams
from quire.core.request import Request
from quire.device.models import ARCHITECTURES
from tests.effort import nightly, slow
from tests.tiny import tiny_config, tiny_llm

PROMPTS = [[(5 * i + j) % 90 + 1 for i in range(size)] for j, size in enumerate((3, 19, 30, 41))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DAILY = ("gemma3",)
BY_CI = ("gemma4", "gpt_oss", "llama", "olmo2", "qwen3_moe")
"""One of each kind: windows and shared KV, sinks, plain, norms elsewhere, experts. The others are tried at night."""


def each(name):
    return name if name in DAILY else slow(name) if name in BY_CI else nightly(name)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", [each(name) for name in sorted(ARCHITECTURES)])
def test_tokens_are_the_same_however_they_are_computed(name):
    """Prompts are longer than a step takes, so who is alone has other chunks than who shares the step."""
    knobs = {"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 11, "debug": True, "max_rounds": 4}
    with tiny_llm(tiny_config(name), **knobs) as llm:
        alone = [tokens(llm.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
        assert len({token for line in alone for token in line}) > 8, "it does not say the same over and over"
        llm.engine.reset()
        assert tokens(llm.generate(PROMPTS, GREEDY)) == alone, "batched, in other chunks"
        cached = llm.engine.stats().cached_tokens
        assert tokens(llm.generate(PROMPTS[3:], GREEDY)) == tokens(llm.generate(PROMPTS[3:], GREEDY)) == alone[3:]
        assert llm.engine.stats().cached_tokens > cached, "from the prefix cache"
        check_fork(llm, alone[1])


def check_fork(llm, expected):
    """A fork of a running sequence goes on as its parent does, both preempted: one recomputed, one swapped."""
    engine = llm.engine
    (parent,) = engine.add(Request(id="parent", prompt_token_ids=tuple(PROMPTS[1]), params=GREEDY))
    while parent.num_output < 2:
        engine.step()
    child = engine.fork(parent)
    engine.step()
    engine.scheduler.preempt(parent, swap=False)
    engine.scheduler.preempt(child, swap=True)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.recomputes > 0 < stats.swaps
    assert list(parent.tokens) == list(child.tokens) == PROMPTS[1] + list(expected)
