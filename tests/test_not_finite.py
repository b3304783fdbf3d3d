"""Logits that are NaN or infinite end their own sequence with a reason, are counted, and change no other sequence."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, AsyncLLM, Request, SamplingParams
from quire.async_llm.errors import GenerationError
from quire.core import plan
from quire.device import inputs as device_inputs
from quire.device.inputs import NOT_FINITE, StepOutput
from quire.recording.replay import replay
from quire.testing import FakeRunner, fake_engine
from tests.tiny import tiny_config, tiny_params

LOST_SEED = 77
"""The sequences of this seed have no finite logits from position 9 on."""


class NotFiniteRunner(FakeRunner):
    """A device on which some sequences have no finite logits."""

    def _draw(self, states, samples) -> StepOutput:
        drawn = super()._draw(states, samples)
        if samples.seed_S2 is not None:
            is_lost = (samples.seed_S2[:, 1] == LOST_SEED) & (samples.position_S >= 9)
            drawn.tokens_SR[is_lost & (samples.packed_index_S >= 0), 0] = NOT_FINITE
        return drawn


def request(name: str, seed: int, **params) -> Request:
    prompt = tuple(1 + i % 3 for i in range(6))
    given = {"max_tokens": 12, "ignore_eos": True, "seed": seed} | params
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**given))


KNOBS = [
    {},
    {"max_rounds": 8},
    {"max_rounds": 8, "eos_ids": (), "max_num_batched_tokens": 4},
    {"drafts": 4},
    {"draft_len": 3},
    {"draft_len": 3, "draft_weights": 1},
]


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_only_the_sequence_itself_ends_and_it_keeps_what_was_drawn_before(knobs, logprobs):
    def run(runner, *seeds):
        engine = fake_engine(runner=runner, debug=True, num_pages=40, **knobs)
        sequences = [
            sequence
            for i, seed in enumerate(seeds)
            for sequence in engine.add(request(str(i), seed, logprobs=logprobs))
        ]
        events = []
        while engine.has_work:
            events += engine.step()
        engine.audit()
        stats = engine.stats()
        assert stats.held_pages == 0
        return sequences, events, stats.not_finite

    expected, _, not_finite = run(FakeRunner, 1, LOST_SEED, 2)
    assert not_finite == 0
    got, events, not_finite = run(NotFiniteRunner, 1, LOST_SEED, 2)
    assert not_finite == 1
    assert [str(sequence.finish_reason) for sequence in got] == ["length", "not_finite", "length"]
    assert got[1].output_token_ids == expected[1].output_token_ids[:3], "positions 6, 7 and 8"
    assert len(got[1].weight_versions) == 3
    assert len(got[1].logprobs) == (0 if logprobs is None else 3)
    assert got[0].output_token_ids == expected[0].output_token_ids
    assert got[2].output_token_ids == expected[2].output_token_ids
    (last,) = [event for event in events if event.finish_reason == "not_finite"]
    assert last.sequence is got[1]


@pytest.mark.parametrize("knobs", [{}, {"max_rounds": 8}, {"drafts": 4}], ids=str)
def test_a_recording_of_it_is_replayed_without_a_difference(knobs, tmp_path):
    engine = fake_engine(runner=NotFiniteRunner, num_pages=40, record=str(tmp_path / "record"), **knobs)
    for i, seed in enumerate((1, LOST_SEED, 2)):
        engine.add(request(str(i), seed))
    while engine.has_work:
        engine.step()
    assert engine.stats().not_finite == 1
    engine.close()
    assert replay(tmp_path / "record").difference is None


def test_both_columns_mean_the_same_number():
    assert plan.NOT_FINITE == device_inputs.NOT_FINITE


def test_an_asynchronous_request_fails_with_a_named_error_and_others_go_on():
    import asyncio

    async def main():
        llm = AsyncLLM.from_factory(lambda: LLM.from_engine(fake_engine(runner=NotFiniteRunner, num_pages=40)))
        async with llm:
            good = asyncio.ensure_future(llm.generate([1, 2, 1, 2, 1, 2], replace(request("g", 1).params)))
            with pytest.raises(GenerationError, match="logits are NaN or infinite after 9 tokens") as error:
                await llm.generate([1, 2, 1, 2, 1, 2], request("b", LOST_SEED).params)
            assert error.value.reason == "not_finite"
            return await good

    output = asyncio.run(main())
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("knobs", [{"max_rounds": 4}, {"max_rounds": 4, "matmul": "xla"}, {"drafts": 4}], ids=str)
def test_a_real_model_whose_weights_overflow_ends_the_rows_that_meet_them(bad, knobs):
    """One row of the embedding is not finite: the sequence that reads this token ends, the other does not."""
    config = replace(tiny_config(), eos_ids=())
    params = tiny_params(config) | {"embed": tiny_params(config)["embed"].at[50].set(bad)}
    shape = {"page_size": 16, "num_pages": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for weights in (tiny_params(config), params):
        with LLM.from_params(config, weights, quiet=True, **shape, **knobs) as llm:
            good, lost = llm.generate([[1, 2, 3, 1, 2, 3], [1, 2, 50]], greedy, progress=False)
            found.append(good.outputs[0].token_ids)
            is_lost = weights is params
            assert lost.outputs[0].finish_reason == ("not_finite" if is_lost else "length")
            assert llm.engine.stats().not_finite == is_lost
            assert lost.outputs[0].token_ids == [] or not is_lost
    assert found[0] == found[1]
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, params))


def test_what_is_only_scored_or_embedded_ends_with_the_same_reason():
    """Scores are returned as they are; an embedding is an error."""
    config = replace(tiny_config(), eos_ids=())
    params = tiny_params(config) | {"embed": tiny_params(config)["embed"].at[50].set(np.nan)}
    shape = {"page_size": 16, "num_pages": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM.from_params(config, params, quiet=True, **shape) as llm:
        assert np.isnan(llm.score([1, 2, 50, 3])[-1])
        with pytest.raises(RuntimeError, match="hidden states are NaN or infinite"):
            llm.embed([[1, 2, 50]])
        scored = SamplingParams(max_tokens=0, prompt_logprobs=True)
        bad, good = llm.generate([[1, 2, 50, 3], [1, 2, 3]], scored, progress=False)
        assert [one.outputs[0].finish_reason for one in (bad, good)] == ["not_finite", "length"]
        assert llm.engine.stats().not_finite == 3
