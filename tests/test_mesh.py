"""A model split over devices is the same model: tokens, log-probabilities, forks, prefixes, pages swapped, weights."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from quire import LLM, EngineConfig, SamplingParams
from quire.config import parse_mesh
from quire.field_error import FieldError
from tests.effort import nightly
from tests.tiny import VOCAB, tiny_config, tiny_llm, tiny_params, tiny_tensors

ODD = tiny_config(num_heads=9, num_kv_heads=3, vocab_size=99, intermediate_size=50)
"""Nothing that a mesh splits divides by 2 or by 4."""
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "debug": True}
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, VOCAB, size=n).tolist() for n in (1, 5, 8, 17, 33)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=20, prompt_logprobs=True)
SEEDED = SamplingParams(seed=5, max_tokens=16, ignore_eos=True, n=3, top_p=0.9, frequency_penalty=0.5)


def tokens(outputs) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def numbers(outputs) -> list[list[float]]:
    """Every log-probability there is: of the prompts, of what was generated, and the likeliest of each place."""
    entries = [[*filter(None, output.prompt_logprobs), *output.outputs[0].logprobs] for output in outputs]
    return [[value for entry in each for value in (entry.logprob, *(top for _, top in entry.top))] for each in entries]


# -- the same model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    with tiny_llm(ODD, **SMALL) as llm:
        return llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, SEEDED), llm.score(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("size", [4])
def test_what_does_not_divide_is_the_same_on_any_number_of_devices(alone, size):
    greedy, seeded, scores = alone
    tensors = tiny_tensors(ODD)
    with LLM.from_params(
        ODD, tensors, mesh=f"model={size}", dtype="float32", page_size=4, num_pages=64, **SMALL
    ) as llm:
        again = llm.generate(PROMPTS, GREEDY)
        assert tokens(again) == tokens(greedy)
        for got, expected in zip(numbers(again), numbers(greedy), strict=True):
            np.testing.assert_allclose(got, expected, atol=5e-4)
        assert tokens(llm.generate(PROMPTS, SEEDED)) == tokens(seeded)
        for got, expected in zip(llm.score(PROMPTS), scores, strict=True):
            np.testing.assert_allclose(got, expected, atol=5e-4)
        check_weights(llm, tensors)


@pytest.mark.slow
def test_a_model_whose_logits_are_no_numbers_draws_no_token():
    """Neither one of the vocabulary, nor one of what follows it on a mesh to make it divide evenly."""
    broken = {name: tensor * np.float32("nan") for name, tensor in tiny_tensors(ODD).items()}
    drawn = []
    for mesh in (None, "model=2"):
        with LLM.from_params(ODD, broken, mesh=mesh, dtype="float32", page_size=4, num_pages=16, **SMALL) as llm:
            (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            drawn += [(completion.token_ids, completion.finish_reason) for completion in output.outputs]
    assert drawn == [([], "not_finite")] * 2


def check_weights(llm: LLM, tensors) -> None:
    """They come out as they went in, and others may be put in by tree and by name."""
    given, changed = tiny_params(ODD), {name: tensor * np.float32(1.25) for name, tensor in tensors.items()}
    jax.tree.map(np.testing.assert_array_equal, llm.params, given)
    before = tokens(llm.generate(PROMPTS, GREEDY))
    llm.set_weights(changed)
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(new, np.asarray(old) * np.float32(1.25)), llm.params, given
    )
    assert tokens(llm.generate(PROMPTS, GREEDY)) != before
    llm.set_weights(given)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == before
    llm.set_weights(llm.params)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == before
    assert llm.engine.stats().compiles_after_warmup == 0


@pytest.mark.slow
def test_repeated_kv_heads_fork_are_found_again_and_are_swapped():
    """2 KV heads on 4 devices, each on two of them."""
    long, many = PROMPTS[-1], SamplingParams(seed=5, max_tokens=16, ignore_eos=True, n=3)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with tiny_llm(**SMALL) as llm:
        expected = [tokens(llm.generate(*what)) for what in (([long], many), ([long], greedy), (PROMPTS, greedy))]
    pages = {"num_pages": 16, "num_host_pages": 32, "preemption": "swap"}
    with tiny_llm(num_devices=4, **(SMALL | pages)) as llm:
        assert tokens(llm.generate([long], many)) == expected[0]
        (again,) = llm.generate([long], greedy)
        assert (tokens([again]), again.num_cached_tokens) == (expected[1], 32)
        assert tokens(llm.generate(PROMPTS, greedy)) == expected[2]
        stats = llm.engine.stats()
        assert stats.swaps > 0
        assert (stats.held_pages, stats.free_host_pages) == (0, stats.num_host_pages)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_real_model_with_3_kv_heads_is_the_same_on_4_devices(smollm2_gguf):
    knobs = {"dtype": "float32", "quiet": True, "num_pages": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    prompts = ["The capital of France is", "A quire is a gathering of pages, and"]
    got = {}
    for size in (1, 4):
        with LLM(smollm2_gguf, mesh=f"model={size}", **knobs) as llm:
            assert llm.engine.runner.mesh.size == size
            got[size] = tokens(llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24), progress=False))
    assert got[1] == got[4]


# -- what a mesh may be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh='' must say how many devices an axis has, such as 'model=4'"),
        ("4", "mesh='4' must say how many"),
        (4, "mesh=4 must say how many"),
        ("model", "mesh='model' must say how many"),
        ("model=-1", "mesh='model=-1' must say how many"),
        ("model=4,", "mesh='model=4,' must say how many"),
        ("model=0", "mesh='model=0': model=0 must be a whole number from 1 to"),
        ("dat=2", "mesh='dat=2' has an axis 'dat'; there are 'model', as in 'model=4', for mixtures"),
        ("model=2,model=2", "has the axis 'model' twice"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused_by_name(text, message):
    with pytest.raises(FieldError, match=message) as error:
        EngineConfig(mesh=text)
    assert error.value.field == "mesh"
    with pytest.raises(FieldError, match=message):
        LLM("nowhere", mesh=text)


def test_more_devices_than_there_are():
    assert parse_mesh("model=64") == {"model": 64}
    with pytest.raises(
        FieldError, match=r"'model=64' needs 64 devices, and there are 4 \(cpu\).*'model=4'.*device_count=64"
    ):
        LLM("nowhere", mesh="model=64")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["model=2,expert=2", nightly("expert=4")])
def test_the_axis_of_experts(mesh):
    assert parse_mesh("model=2,expert=2") == {"model": 2, "expert": 2}
    with pytest.raises(FieldError, match=r"the axis 'expert' is for mixtures of experts.*give mesh='model=2'"):
        LLM.from_params(tiny_config(), tiny_params(tiny_config()), mesh="expert=2", dtype="float32", quiet=True)
    config, knobs = tiny_config("qwen3_moe"), {"dtype": "float32", "page_size": 4, "num_pages": 64, "quiet": True}
    found = []
    for devices in (None, mesh):
        with LLM.from_params(config, tiny_tensors(config), mesh=devices, **knobs, **SMALL) as llm:
            found.append(tokens(llm.generate(PROMPTS[:3], GREEDY)))
            assert llm.params["layers"][0]["experts_down"].shape == (6, 24, 32)
    assert found[0] == found[1]


def test_a_mesh_of_another_shape_is_refused():
    devices = np.array(jax.devices()[:4])
    with pytest.raises(FieldError, match=r"mesh has the axes {'tp': 4}: it needs one called 'model'"):
        LLM("nowhere", mesh=Mesh(devices, ("tp",)))
    with pytest.raises(FieldError, match=r"mesh has the axes {'data': 2, 'model': 2}"):
        LLM("nowhere", mesh=Mesh(devices.reshape(2, 2), ("data", "model")))
    with pytest.raises(ValueError, match="MODEL 'nowhere' does not exist"):
        LLM("nowhere", mesh=Mesh(devices.reshape(1, 4), ("data", "model")))
