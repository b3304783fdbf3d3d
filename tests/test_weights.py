"""Weights change between two steps: no pool rebuilt, nothing compiled, every token knows its version."""

import jax
import numpy as np
import pytest

from quire import SamplingParams
from quire.core.request import Request
from quire.device.mesh import make_mesh
from quire.device.models.weights import params_from_tensors
from tests.fake_llm import fake_llm
from tests.tiny import tiny_config, tiny_llm, tiny_params, tiny_tensors

PROMPT = [(5 * i) % 90 + 1 for i in range(21)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def other_params():
    return params_from_tensors(tiny_config(), tiny_tensors(tiny_config(), seed=9), mesh=make_mesh(), dtype="float32")


def aligned_copy(array: np.ndarray) -> np.ndarray:
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copied = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


def generate(llm, params=GREEDY, **more):
    return llm.generate([PROMPT], params, progress=False, **more)[0]


@pytest.fixture
def llm():
    with tiny_llm(debug=True, fail_on_compile=True, max_rounds=1) as llm:
        yield llm


def test_after_a_change_tokens_are_those_of_the_new_weights_and_no_old_page_is_found(llm):
    old = generate(llm)
    llm.engine.set_weights(other_params(), version="step-1")
    new = generate(llm)
    assert new.num_cached_tokens == 0
    assert (old.outputs[0].weight_versions, new.outputs[0].weight_versions) == ([0] * 12, ["step-1"] * 12)
    with tiny_llm() as fresh:
        fresh.engine.set_weights(other_params(), version=5)
        assert generate(fresh).outputs[0].token_ids == new.outputs[0].token_ids != old.outputs[0].token_ids
    assert generate(llm).num_cached_tokens == 20
    llm.engine.set_weights(tiny_params(tiny_config()), version=0)
    back = generate(llm)
    assert (back.num_cached_tokens, back.outputs[0].token_ids) == (0, old.outputs[0].token_ids)
    assert llm.engine.stats().compiles_after_warmup == 0


@pytest.mark.parametrize("running", ["keep", "recompute", "abort"])
def test_what_runs_is_kept_recomputed_or_aborted(llm, running):
    engine = llm.engine
    request = Request(id="r", prompt_token_ids=tuple(PROMPT), params=GREEDY)
    (sequence,) = engine.add(request)
    for _ in range(5):
        engine.step()
    so_far, computed = list(sequence.tokens), engine.stats().computed_tokens
    aborted = engine.set_weights(other_params(), version=1, running=running)
    engine.audit()
    assert aborted == ([sequence] if running == "abort" else [])
    while engine.has_work:
        engine.step()
    if running == "abort":
        assert (str(sequence.finish_reason), sequence.num_output) == ("abort", 5)
        return
    assert sequence.tokens[: len(so_far)] == so_far
    assert sequence.weight_versions == [0] * 5 + [1] * 7
    again = engine.stats().computed_tokens - computed
    assert again == (7 if running == "keep" else 7 + len(so_far) - 1)
    # What the new weights would have said of the same beginning; with old KV before it, they say something else.
    expected = llm.generate([so_far], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True), progress=False)
    assert (sequence.tokens[len(so_far) :] == expected[0].outputs[0].token_ids) == (running == "recompute")


def test_pages_of_two_versions_are_never_published(llm):
    engine = llm.engine
    engine.add(Request(id="r", prompt_token_ids=tuple(PROMPT), params=SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    known = engine.scheduler.tables.pool.prefix_cache.num_pages
    engine.set_weights(other_params(), version=1)
    while engine.has_work:
        engine.step()
    assert engine.scheduler.tables.pool.prefix_cache.num_pages == known
    assert generate(llm).num_cached_tokens == 0


def test_the_callers_arrays_stay_the_callers(llm):
    """A training step donates its parameters; the engine must not notice."""
    params = other_params()
    llm.engine.set_weights(params, version=1)
    before = generate(llm).outputs[0].token_ids
    jax.block_until_ready(jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(params))
    assert generate(llm).outputs[0].token_ids == before


def test_numpy_arrays_stay_the_callers_too(llm):
    """jax uses an array on a 64-byte boundary in place, and told not to alias it, it still does."""
    params = jax.tree.map(lambda x: aligned_copy(np.asarray(x)), other_params())
    llm.engine.set_weights(params, version=1)
    before = generate(llm).outputs[0].token_ids
    for leaf in jax.tree.leaves(params):
        leaf[...] = 0
    llm.engine.clear_prefix_cache()
    assert generate(llm).outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1.5}, "version=1.5 must be a whole number or a string"),
        ({"version": 1, "running": "stop"}, "running='stop' must be keep, recompute or abort"),
    ],
)
def test_a_bad_change_is_refused_and_changes_nothing(llm, change, message):
    before = generate(llm).outputs[0].token_ids
    with pytest.raises(ValueError, match=message):
        llm.engine.set_weights(other_params(), **change)
    assert generate(llm).outputs[0].token_ids == before


def test_weights_of_another_shape_are_refused_by_name(llm):
    params = other_params()
    params["norm"] = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match=r"params\['norm'\] is float32\[5\]"):
        llm.engine.set_weights(params, version=1)
    assert llm.engine.stats().weight_version == 0


def test_a_request_that_has_begun_is_aborted_whole(llm):
    engine = llm.engine
    params = SamplingParams(n=3, max_tokens=8, seed=1)
    family = engine.add(Request(id="r", prompt_token_ids=tuple(PROMPT * 3), params=params))
    engine.step()  # 32 of 63 tokens: nobody has drawn
    assert set(engine.set_weights(other_params(), version=0, running="abort")) == set(family)
    assert not engine.has_work


def test_a_name_used_again_for_other_weights_finds_none_of_their_pages(llm):
    for version in (0, "policy", "policy", "ref", "policy", np.int64(5)):
        llm.engine.set_weights(other_params(), version=version)
        assert generate(llm).num_cached_tokens == 0
    assert llm.engine.stats().weight_version == 5


def test_a_version_that_nobody_gave_is_the_next_number():
    """No two weights are called the same, however versions were given before."""
    with fake_llm(num_pages=20) as llm:
        seen = []
        for version in (None, 7, None, "a name", None, 3, None):
            llm.set_weights(len(seen) + 1, version=version)
            seen.append(llm.engine.scheduler.tables.weights.version)
        llm.sleep()
        llm.wake(9)
        assert [*seen, llm.engine.scheduler.tables.weights.version] == [1, 7, 8, "a name", 9, 3, 10, 11]
