"""Sessions: turn after turn computes what is new, and says what one long prompt would have said."""

import random

import jax
import numpy as np
import pytest

from quire import Rollouts, SamplingParams
from tests.fake_llm import fake_llm
from tests.tiny import tiny_config, tiny_llm

DRAWN = SamplingParams(temperature=1, seed=7, max_tokens=32, ignore_eos=True, logprobs=0)


def computed(rollouts) -> int:
    """Tokens that went through the model so far."""
    return rollouts.call(lambda engine: engine.stats()).computed_tokens


def turn_tokens(turn: int, size: int) -> list[int]:
    return [(turn * 13 + i * 5) % 90 + 1 for i in range(size)]


def test_a_session_computes_what_is_new():
    """8 turns of 32 tokens and 32 answered: every token goes through the model once, but for the very last."""
    with Rollouts.from_factory(lambda: tiny_llm(tiny_config(max_len=600), num_pages=200)) as rollouts:
        session, before = rollouts.session(), computed(rollouts)
        for turn in range(8):
            answer = session.send(turn_tokens(turn, 32), DRAWN).result()
            assert session.token_ids == [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
            assert answer.num_cached_tokens == max(64 * turn - 1, 0)
        assert len(session.token_ids) == 8 * 64
        assert computed(rollouts) - before == 8 * 64 - 1
        assert rollouts.call(lambda engine: engine.stats()).held_pages == 0, "between turns nobody holds a page"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_session_says_what_one_prompt_would_say(dtype):
    """Log-probabilities of all turns are those of a sequence that was never cut into turns."""
    with Rollouts.from_factory(lambda: tiny_llm(tiny_config(), dtype=dtype, num_pages=200)) as rollouts:
        session, drawn = rollouts.session(), []
        for turn in range(4):
            answer = session.send(turn_tokens(turn, 3 + turn), DRAWN).result()
            whole = answer.prompt_token_ids
            drawn += [(len(whole) + i, entry.logprob) for i, entry in enumerate(answer.outputs[0].logprobs)]
        token_ids = session.token_ids
        rollouts.call(lambda engine: engine.clear_prefix_cache())
        asked = SamplingParams(max_tokens=0, prompt_logprobs=True)
        entries = rollouts.submit(token_ids, asked).result().prompt_logprobs
        expected = [entries[position].logprob for position, _ in drawn]
        if dtype == "bfloat16":
            assert [value for _, value in drawn] == expected
        else:
            np.testing.assert_allclose([value for _, value in drawn], expected, atol=1e-4)


def test_forks_share_the_past_and_differ_from_there():
    with Rollouts.from_factory(lambda: tiny_llm(num_pages=200)) as rollouts:
        trunk = rollouts.session(turn_tokens(0, 21))
        trunk.send([5, 6], DRAWN).result()
        before = computed(rollouts)
        branches = [trunk.fork() for _ in range(3)]
        answers = [branch.send([i + 1], DRAWN) for i, branch in enumerate(branches)]
        assert all(future.result().num_cached_tokens == 21 + 2 + 31 for future in answers)
        assert computed(rollouts) - before == 3 * (2 + 31)
        assert len({tuple(branch.token_ids) for branch in branches}) == 3
        assert all(branch.token_ids[: len(trunk.token_ids)] == trunk.token_ids for branch in branches)


def test_new_weights_compute_the_past_again():
    with Rollouts.from_factory(lambda: tiny_llm(num_pages=200)) as rollouts:
        session = rollouts.session()
        session.send(turn_tokens(0, 20), DRAWN).result()
        weights = rollouts.call(lambda engine: engine.params)
        halved = jax.tree.map(lambda x: x * np.asarray(0.5, x.dtype), weights)
        rollouts.set_weights(halved, version=1)
        answer = session.send([3], DRAWN).result()
        assert answer.num_cached_tokens == 0
        assert answer.outputs[0].weight_versions == [1] * 32
        with tiny_llm(num_pages=200) as llm:
            llm.set_weights(halved)
            assert llm.generate([answer.prompt_token_ids], DRAWN)[0].outputs[0].token_ids == answer.outputs[0].token_ids


def test_what_was_aborted_is_not_part_of_it():
    with Rollouts.from_factory(lambda: tiny_llm(num_pages=200)) as rollouts:
        session = rollouts.session([1, 2, 3])
        session.send([4], DRAWN).result()
        before = session.token_ids
        rollouts.pause()
        future = session.send([9], DRAWN, group="turn")
        for use in (lambda: session.token_ids, lambda: session.send([1]), session.fork):
            with pytest.raises(RuntimeError, match="an answer is under way"):
                use()
        assert "waits" in repr(session)
        rollouts.abort("turn")
        rollouts.resume()
        assert future.result().outputs[0].finish_reason == "abort"
        assert session.token_ids == before
        assert "36 tokens" in repr(session)


def test_observations_may_be_appended_without_an_answer():
    with Rollouts.from_factory(lambda: tiny_llm(num_pages=200)) as rollouts:
        session = rollouts.session()
        scored = SamplingParams(max_tokens=0, prompt_logprobs=True, prompt_logprobs_start=9)
        seen = session.send(turn_tokens(1, 11), scored).result()
        assert [entry is None for entry in seen.prompt_logprobs] == [True] * 9 + [False] * 2
        answer = session.send([7], DRAWN).result()
        assert answer.num_cached_tokens == 11
        assert answer.prompt_token_ids == [*turn_tokens(1, 11), 7]


def test_what_cannot_be_a_turn_is_refused():
    with Rollouts.from_factory(lambda: fake_llm(num_pages=20)) as rollouts:
        session = rollouts.session([1, 2])
        with pytest.raises(ValueError, match="n=2 answers to go on from"):
            session.send([3], SamplingParams(n=2))
        with pytest.raises(ValueError, match=r"params=\{\} must be SamplingParams"):
            session.send([3], {})  # type: ignore
        for wrong in ("more", [[1, 2]], ["a"], 3):
            with pytest.raises(ValueError, match="must be a list of token ids"):
                session.send(wrong)  # type: ignore
            with pytest.raises(ValueError, match="must be a list of token ids"):
                rollouts.session(wrong)  # type: ignore
        assert session.token_ids == [1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_many_sessions_in_a_small_pool(seed):
    """Turns, forks, preemption, evictions and new weights in any order: each answer is that of its prompt alone."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=3, temperature=0)
    with Rollouts.from_factory(lambda: fake_llm(num_pages=14, page_size=4, max_num_seqs=4, debug=True)) as rollouts:
        sessions, answers, weights = [rollouts.session() for _ in range(4)], [], 0
        for _ in range(40):
            chosen = rng.sample(range(4), rng.randint(1, 3))
            for i in chosen:
                if len(sessions[i].token_ids) > 30:
                    sessions[i] = rng.choice([rollouts.session(), rng.choice(sessions).fork()])
            futures = [sessions[i].send([rng.randint(1, 9)] * rng.randint(1, 4), params) for i in chosen]
            answers += [(weights, future.result()) for future in futures]
            if rng.random() < 0.1:
                weights += 1
                rollouts.call(lambda engine, weights=weights: engine.set_weights(weights, version=weights))
        cached = sum(answer.num_cached_tokens % 4 != 0 for _, answer in answers)
        assert cached > 10, "partial pages are found"
        assert rollouts.call(lambda engine: engine.stats()).held_pages == 0
    with fake_llm(num_pages=14, page_size=4, prefix_cache=False) as llm:
        for version, answer in answers:
            llm.set_weights(version)
            alone = llm.generate([answer.prompt_token_ids], params)[0].outputs[0]
            assert alone.token_ids == answer.outputs[0].token_ids
