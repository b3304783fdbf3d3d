"""Samples as arrays: every number of every token is where it belongs, and nothing else is anywhere."""

import numpy as np
import pytest

from quire import RolloutBatch, RolloutGroup, SamplingParams
from quire.core.sequence import TokenLogprob
from quire.outputs import CompletionOutput
from tests.fake_llm import fake_llm

PROMPTS = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 1, 2]]
LENGTHS = (3, 7, 1)


@pytest.fixture
def outputs():
    params = [SamplingParams(seed=i, n=2, max_tokens=n, logprobs=0, ignore_eos=True) for i, n in enumerate(LENGTHS)]
    with fake_llm() as llm:
        return llm.generate(PROMPTS, params)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(None, None), (9, 12)])
def test_every_number_is_in_its_place(outputs, prompt_len, max_tokens):
    batch = RolloutBatch.of(outputs, pad_id=77, prompt_len=prompt_len, max_tokens=max_tokens)
    width, length = prompt_len or 5, max_tokens or 7
    rows = [(output.prompt_token_ids, sample) for output in outputs for sample in output.outputs]
    assert len(batch) == len(rows) == 6
    assert batch.prompts.shape == batch.prompt_mask.shape == (6, width)
    for name in ("tokens", "mask", "logprobs", "processed_logprobs", "versions"):
        assert getattr(batch, name).shape == (6, length), name
    for i, (prompt, sample) in enumerate(rows):
        padding, rest = width - len(prompt), length - len(sample.token_ids)
        assert batch.prompts[i].tolist() == [77] * padding + prompt
        assert batch.prompt_mask[i].tolist() == [False] * padding + [True] * len(prompt)
        assert batch.tokens[i].tolist() == sample.token_ids + [77] * rest
        assert batch.mask[i].tolist() == [True] * len(sample.token_ids) + [False] * rest
        raw, processed = ([*values, *[0.0] * rest] for values in zip(*map(both, sample.logprobs), strict=True))
        np.testing.assert_array_equal(batch.logprobs[i], np.float32(raw))
        np.testing.assert_array_equal(batch.processed_logprobs[i], np.float32(processed))
        assert batch.versions[i].tolist() == sample.weight_versions + [-1] * rest
    assert (batch.prompts.dtype, batch.tokens.dtype, batch.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert batch.groups == [None] * 6
    assert batch.was_cut.all()
    assert not np.isnan(batch.logprobs).any()


def both(entry) -> tuple[float, float]:
    return entry.logprob, entry.processed_logprob


def test_rows_of_groups_carry_their_names_and_what_ended_by_itself_was_not_cut(outputs):
    outputs[0].outputs[1].finish_reason = "eos"
    groups = [RolloutGroup("a", [outputs[2]], 0), RolloutGroup(7, [outputs[0], outputs[1]], 2)]
    batch = RolloutBatch.of(groups)
    assert batch.groups == ["a", "a", 7, 7, 7, 7]
    assert batch.was_cut.tolist() == [True, True, True, False, True, True]
    assert batch.tokens[2, :3].tolist() == outputs[0].outputs[0].token_ids
    assert repr(batch) == "<RolloutBatch of 6 samples, prompts of 5 and outputs of 7 tokens at most>"


def test_versions_that_are_called_by_strings_are_strings(outputs):
    outputs[1].outputs[0].weight_versions[2:] = ["step 2"] * 5
    batch = RolloutBatch.of(outputs[1:])
    assert batch.versions[0].tolist() == ["0", "0", *["step 2"] * 5]
    assert batch.versions[2].tolist() == ["0", *[""] * 6]


def test_a_sample_without_a_token_is_a_row_of_padding():
    with fake_llm() as llm:
        (output,) = llm.generate([[1, 2]], SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True))
    sample = output.outputs[0]
    sample.token_ids, sample.logprobs, sample.weight_versions = [], [], []
    batch = RolloutBatch.of([output], max_tokens=3)
    assert not batch.mask.any()
    assert batch.tokens.tolist() == [[0, 0, 0]]


def test_what_cannot_be_a_batch_is_told(outputs):
    with pytest.raises(ValueError, match="samples is empty"):
        RolloutBatch.of([])
    with pytest.raises(ValueError, match="samples is one RequestOutput: give a list"):
        RolloutBatch.of(outputs[0])
    with pytest.raises(ValueError, match="prompt_len=4, and a sample has 5: give at least that, or leave it out"):
        RolloutBatch.of(outputs, prompt_len=4)
    with pytest.raises(ValueError, match="max_tokens=6, and a sample has 7"):
        RolloutBatch.of(outputs, max_tokens=6)
    with pytest.raises(ValueError, match="max_tokens=0 must be a whole number"):
        RolloutBatch.of(outputs, max_tokens=0)
    with fake_llm() as llm:
        unscored = llm.generate([[1, 2]], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match=r"sample 0 has no log-probabilities: draw with SamplingParams\(logprobs=0\)"):
        RolloutBatch.of(unscored)


def test_alternatives_are_arrays_of_one_row_for_each_token():
    entries = [TokenLogprob(5, -0.5, ((5, -0.5), (7, -1.5))), TokenLogprob(7, -0.25, ((7, -0.25),))]
    output = CompletionOutput(0, [5, 7], "", "length", entries)
    ids, logprobs = output.top_logprobs
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(ids, [[5, 7], [7, -1]])
    np.testing.assert_array_equal(logprobs, np.array([[-0.5, -1.5], [-0.25, -np.inf]], np.float32))
    assert [x.shape for x in CompletionOutput(0, [], "", "length", []).top_logprobs] == [(0, 0), (0, 0)]
    with pytest.raises(ValueError, match=r"no log-probabilities: ask with SamplingParams\(logprobs=k\)"):
        _ = CompletionOutput(0, [5], "", "length").top_logprobs
