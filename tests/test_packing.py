"""A step ships what its rows use and fetches what they asked for, whatever the longest of them or its mates ask."""

import numpy as np
import pytest

from quire import SamplingParams, Structured
from quire.config import EngineConfig
from quire.device.inputs import MAX_BIASES, MAX_STOP_IDS, mask_words
from quire.engine.packer import Packer
from quire.engine.step_shapes import step_shapes
from tests.core.fake import Arrivals, result, scheduler
from tests.tiny import VOCAB, tiny_llm
from tests.words import tiny_tokenizer

PLAIN = {"temperature": 0.0}


def packed(rows: list[dict], *, lengths: list[int] | None = None, max_rounds: int = 4):
    """The inputs of a decode step, with such sampling parameters."""
    arrive = Arrivals()
    s = scheduler(num_pages=1 << 14, page_size=4, rows=64, budget=1 << 14, max_rounds=max_rounds)
    for i, params in enumerate(rows):
        s.add(arrive(lengths[i] if lengths else 5, 40, **params))
    s.commit(plan := s.schedule(), result(plan))
    shapes = step_shapes(EngineConfig(max_num_seqs=64, max_num_batched_tokens=1 << 14))
    return Packer(shapes, page_size=4, num_pages=[1 << 14], eos_ids={3}).pack(s.schedule())


def test_one_long_row_does_not_make_every_row_wide():
    short = packed([PLAIN] * 64, lengths=[5] * 64)
    mixed = packed([PLAIN] * 64, lengths=[8000] + [5] * 63)
    assert mixed.page_ids.ids_X.nbytes == 4 * (8000 // 4 + 1 + 63 * 3), "rows have reserved a page for their rounds"
    assert mixed.num_bytes - short.num_bytes == 4 * (8000 // 4 + 1 - 3)
    assert mixed.num_bytes < 2 * (mixed.page_ids.ids_X.nbytes + 64 * 32)


@pytest.mark.parametrize(
    ("params", "num_bytes"),
    [
        ({"logit_bias": {5: 1.0}}, 64 * MAX_BIASES * 8),
        ({"min_tokens": 9}, 64 * MAX_BIASES * 8),
        ({"stop_token_ids": [5]}, 64 * MAX_STOP_IDS * 4),
        ({"presence_penalty": 1.0}, 64 * 5 * 4),
        ({"temperature": 1.0}, 64 * 8 * 4),
        ({"logprobs": 0}, 64),
        ({"logprobs": 3}, 2 * 64),
    ],
    ids=str,
)
def test_what_nobody_asks_for_is_not_shipped(params, num_bytes):
    plain = packed([PLAIN] * 64)
    one = packed([PLAIN] * 63 + [PLAIN | params])
    if "min_tokens" in params:  # who may not stop yet has forbidden ids only if there are any to forbid
        assert one.num_bytes == plain.num_bytes
        one = packed([PLAIN] * 63 + [PLAIN | params | {"stop_token_ids": [5]}])
        num_bytes += 64 * MAX_STOP_IDS * 4
    assert one.num_bytes - plain.num_bytes == num_bytes


def test_a_bias_is_shipped_until_it_has_no_effect():
    with tiny_llm(max_num_seqs=4, max_rounds=1) as llm:
        shipped = []
        pack = llm.engine._packer.pack
        llm.engine._packer.pack = lambda plan: shipped.append(pack(plan)) or shipped[-1]
        params = SamplingParams(temperature=0, min_tokens=3, max_tokens=6, stop_token_ids=[7], ignore_eos=True)
        llm.generate([[1, 2, 3]], params)
    assert [inputs.samples.bias_SE is not None for inputs in shipped] == [True] * 3 + [False] * 3


def test_what_nobody_asked_for_is_not_fetched():
    fetched = []
    with tiny_llm(max_num_seqs=4) as llm:
        run = llm.engine.runner.run

        class Watched:
            def __init__(self, handle):
                self.handle = handle

            def result(self):
                fetched.append(self.handle.result())
                return fetched[-1]

        llm.engine.runner.run = lambda inputs: Watched(run(inputs))
        for params in ({}, {"logprobs": 0}, {"logprobs": 2}):
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, **params))
    plain, chosen, alternatives = fetched
    assert (plain.logprobs_SR, plain.top_ids_SRX) == (None, None)
    assert isinstance(chosen.logprobs_SR, np.ndarray)
    assert chosen.top_ids_SRX is None
    assert isinstance(alternatives.processed_top_logprobs_SRX, np.ndarray)


def test_a_mask_is_shipped_only_with_a_grammar():
    """Two rows of a batch, one of them constrained: a mask for the step, and none for the step after it has ended."""
    shipped = []
    with tiny_llm(max_num_seqs=4, max_rounds=1, tokenizer=tiny_tokenizer()) as llm:
        pack = llm.engine._packer.pack
        llm.engine._packer.pack = lambda plan: shipped.append(pack(plan)) or shipped[-1]
        free = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        form = SamplingParams(temperature=0, max_tokens=2, structured=Structured(regex="[ab]+"))
        llm.generate([[1, 2, 3], [1, 2, 3]], [free, form])
    masks = [inputs.samples.mask_SW for inputs in shipped]
    assert [mask is not None for mask in masks] == [True, True, False, False, False, False]
    assert masks[0].shape[1] == mask_words(VOCAB)
