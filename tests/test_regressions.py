"""Failures that others paid for, one test each, so that nobody has to pay again.

Those of deadlock and thrash in a full pool are in `tests/core/test_preemption.py`.
"""

import jax
import numpy as np
import pytest

from quire import SamplingParams
from quire.core.errors import DoubleFreeError
from quire.core.pages import PageAllocator
from quire.core.request import Request
from tests.tiny import tiny_config, tiny_llm, tiny_params

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SHARED = [(3 * i) % 90 + 1 for i in range(16)]


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(debug=True, fail_on_compile=True, max_rounds=1) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    llm.engine.clear_prefix_cache()
    yield
    stats = llm.engine.stats()
    assert (stats.held_pages, stats.running, stats.waiting, stats.compiles_after_warmup) == (0, 0, 0, 0)
    llm.engine.audit()


def tokens(llm, prompts, params=GREEDY):
    return [[out.token_ids for out in result.outputs] for result in llm.generate(prompts, params, progress=False)]


def test_pages_come_back_when_sequences_end_inside_a_page(llm):
    """sglang-jax #70, #982; sglang #6888, #11970, #16067: pages leaked, or were freed twice, with more than one token
    to a page.
    """
    for length in range(1, 10):
        for new in range(1, 6):
            llm.generate([SHARED[:length]], SamplingParams(max_tokens=new, ignore_eos=True), progress=False)
            assert llm.engine.stats().held_pages == 0


def test_a_double_free_is_an_error_and_not_clamped():
    """Levanter's free_pages: refcounts held at zero hide a double free."""
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(DoubleFreeError):
        allocator.release(pages)
    assert (allocator.num_free, allocator.refcounts.min()) == (4, 0)


def test_requests_that_do_not_fit_into_the_first_batch_are_answered(llm):
    """Levanter's generate: they came back empty."""
    prompts = [[i + 1, i + 2, i + 3] for i in range(40)]
    assert len(prompts) > 4 * llm.engine.config.max_num_seqs
    assert all(len(answer[0]) == 10 for answer in tokens(llm, prompts))


def test_no_mix_of_requests_compiles(llm):
    """tpu-inference #606, #898: recompilation after start. (`fail_on_compile` is on, and the fixture counts.)

    Nor does it matter that JAX forgets what it compiled, as a training loop may ask it to.
    """
    jax.clear_caches()
    mix = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(n=5, seed=1, top_p=0.5, max_tokens=4),
        SamplingParams(top_k=3, seed=1, logprobs=5, max_tokens=2),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2, seed=2, max_tokens=5),
        SamplingParams(logit_bias={4: 3.0}, min_tokens=2, seed=3, max_tokens=5),
        SamplingParams(prompt_logprobs=True, max_tokens=0),
        SamplingParams(min_p=0.1, seed=1, stop_token_ids=[5], max_tokens=6),
    ]
    llm.generate([SHARED[: 3 + i] for i in range(len(mix))], mix, progress=False)
    engine = llm.engine
    (one,) = engine.add(Request(id="swap", prompt_token_ids=tuple(SHARED), params=GREEDY))
    engine.step()
    engine.scheduler.preempt(one, swap=True)
    engine.step()
    engine.fork(one)
    while engine.has_work:
        engine.step()
    assert engine.stats().swaps == 1


def test_the_first_run_is_like_the_later_ones(llm):
    """vLLM #40896: with the prefix cache on, the first run gave other tokens than those after it."""
    prompts = [[*SHARED, i] for i in range(1, 6)]
    runs = [tokens(llm, prompts) for _ in range(3)]
    assert llm.engine.stats().cached_tokens > 0
    assert runs[0] == runs[1] == runs[2]


def test_cancel_and_retry_on_a_shared_prefix_disturb_nobody(llm):
    """SGLang #23392: unrelated requests were corrupted after shared prefix, cancel, retry."""
    engine = llm.engine
    stranger_alone = tokens(llm, [[9, 8, 7, 6, 5]])[0][0]
    shared_alone = tokens(llm, [[*SHARED, 2]])[0][0]
    (stranger,) = engine.add(Request(id="stranger", prompt_token_ids=(9, 8, 7, 6, 5), params=GREEDY))
    for attempt in range(4):
        engine.add(Request(id=f"try{attempt}", prompt_token_ids=(*SHARED, 2), params=GREEDY))
        engine.step()
        engine.step()
        engine.abort(f"try{attempt}")
    (last,) = engine.add(Request(id="last", prompt_token_ids=(*SHARED, 2), params=GREEDY))
    while engine.has_work:
        engine.step()
    assert (stranger.output_token_ids, last.output_token_ids) == (stranger_alone, shared_alone)


def test_two_requests_of_different_length_are_what_they_are_alone(llm):
    """vLLM #39589: two concurrent requests of different length diverged."""
    prompts = [SHARED[:2], [*SHARED, *SHARED, *SHARED]]
    assert tokens(llm, prompts) == [tokens(llm, [prompt])[0] for prompt in prompts]


def test_a_seed_is_honoured_whoever_shares_the_batch(llm):
    """sglang #15481: the seed was ignored."""
    params = SamplingParams(seed=42, max_tokens=10, ignore_eos=True)
    alone = tokens(llm, [SHARED], params)
    crowd = llm.generate([SHARED, *([i, i] for i in range(1, 8))], params, progress=False)
    assert [crowd[0].outputs[0].token_ids] == alone[0]
    assert tokens(llm, [SHARED], SamplingParams(seed=43, max_tokens=10, ignore_eos=True)) != alone


def test_log_probabilities_replay_through_the_models_own_forward(llm):
    """trl #3867, #4159, #6789: log-probabilities were not the trainer's: most often processed ones taken for raw."""
    params = SamplingParams(temperature=0.5, top_k=4, seed=1, max_tokens=12, logprobs=1, n=3, ignore_eos=True)
    for out in llm.generate([SHARED], params, progress=False)[0].outputs:
        replayed = llm.score([*SHARED, *out.token_ids])[len(SHARED) - 1 :]
        np.testing.assert_allclose([entry.logprob for entry in out.logprobs], replayed, atol=1e-4)
        assert all(len(entry.processed_top) == 1 for entry in out.logprobs)
        assert any(abs(entry.processed_logprob - entry.logprob) > 0.1 for entry in out.logprobs)


def test_a_weight_sync_leaves_the_pool_where_it_is(llm):
    """tpu-inference #3180: a weight sync rebuilt the KV cache, in 100 s."""
    engine = llm.engine
    tokens(llm, [SHARED])
    cached = engine.stats().cached_pages
    pool = [array.unsafe_buffer_pointer() for layer in engine.runner._caches[0].layers for array in layer.arrays]
    engine.set_weights(tiny_params(tiny_config()), version=f"{engine.stats().weight_version}+1")
    assert [
        array.unsafe_buffer_pointer() for layer in engine.runner._caches[0].layers for array in layer.arrays
    ] == pool
    assert engine.stats().cached_pages == cached


def test_penalties_of_one_request_do_not_reach_another(llm):
    """A recycled row inherits nothing: mask, seed, penalties, stop ids, log-probability flags."""
    plain = tokens(llm, [SHARED])
    heavy = SamplingParams(
        temperature=0, repetition_penalty=3.0, presence_penalty=5.0, logit_bias={7: 50.0}, min_tokens=4, max_tokens=10
    )
    mixed = llm.generate([SHARED, SHARED, SHARED], [heavy, GREEDY, heavy], progress=False)
    assert [mixed[1].outputs[0].token_ids] == plain[0]
    assert mixed[0].outputs[0].token_ids == mixed[2].outputs[0].token_ids != mixed[1].outputs[0].token_ids
    assert tokens(llm, [SHARED]) == plain
