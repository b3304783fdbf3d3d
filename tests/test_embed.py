"""Embeddings: the hidden states of a prompt, pooled; the same whatever shares its steps and its pages."""

import asyncio
import json
import random

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import AsyncLLM, ModelConfig, Request, SamplingParams
from quire.checkpoint.embedding_files import embedding_config_of_folder
from quire.checkpoint.safetensors_folder import SafetensorsFolder
from quire.embedding import EmbeddingConfig, finish_embedding
from quire.testing import fake_engine, hash_step, hidden_state
from tests.device.test_layers import hidden_states
from tests.tiny import VOCAB, tiny_config, tiny_llm, tiny_params

RNG = np.random.default_rng(3)
CONFIG = tiny_config()
PROMPTS = [RNG.integers(1, VOCAB, size=n).tolist() for n in (1, 2, 4, 5, 17, 40, 90)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
POOLINGS = ["last", "mean"]


def embeds(pooling: str) -> SamplingParams:
    return SamplingParams(max_tokens=0, pooling=pooling)


def expected(prompts: list[list[int]], pooling: str, config: ModelConfig = CONFIG) -> np.ndarray:
    states = [hidden_states(config, prompt) for prompt in prompts]
    pooled = [hidden[-1] if pooling == "last" else hidden.mean(axis=0) for hidden in states]
    return np.stack([finish_embedding(one, normalize=True) for one in pooled])


def check_empty(engine) -> None:
    engine.audit()
    stats = engine.stats()
    assert (stats.held_pages, stats.compiles_after_warmup, engine.has_work) == (0, 0, False)


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(CONFIG, debug=True) as llm:
        yield llm


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_those_of_a_plain_forward(llm, pooling):
    found = llm.embed(PROMPTS, pooling=pooling)
    assert (found.shape, found.dtype) == ((len(PROMPTS), CONFIG.hidden_size), np.float32)
    np.testing.assert_allclose(found, expected(PROMPTS, pooling), atol=1e-5)
    np.testing.assert_allclose(llm.embed(PROMPTS[4], pooling=pooling), found[4], atol=1e-5)
    np.testing.assert_allclose(llm.embed(np.array(PROMPTS[4]), pooling=pooling), found[4], atol=1e-5)
    check_empty(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_embeddings_do_not_depend_on_chunks_and_company(pooling, num_devices):
    """Prompts longer than a step's budget, between sequences that generate; each of these as if alone."""
    with tiny_llm(CONFIG, num_devices, max_num_batched_tokens=16, max_rounds=4, debug=True) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        prompts = [prompt for prompt in PROMPTS for _ in range(2)]
        outputs = llm.generate(prompts, [GREEDY, embeds(pooling)] * len(PROMPTS))
        assert [output.outputs[0].token_ids for output in outputs[::2]] == alone
        found = np.stack([finish_embedding(output.embedding, normalize=True) for output in outputs[1::2]])
        np.testing.assert_allclose(found, expected(PROMPTS, pooling), atol=1e-5)
        assert all(output.embedding is None for output in outputs[::2])
        check_empty(llm.engine)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
def test_layers_with_a_window_embed_as_well(pooling):
    config = tiny_config(windows=(6, None))
    with tiny_llm(config, max_num_batched_tokens=16, debug=True) as llm:
        for _ in range(2):  # the second time with prefixes in the cache
            np.testing.assert_allclose(
                llm.embed(PROMPTS, pooling=pooling), expected(PROMPTS, pooling, config), atol=1e-5
            )
        check_empty(llm.engine)


def test_one_step_embeds_scores_and_generates(llm):
    """In one program: nothing runs for embeddings alone."""
    engine, prompt = llm.engine, PROMPTS[3]
    wanted = {
        "a": GREEDY,
        "b": embeds("mean"),
        "c": embeds("last"),
        "d": SamplingParams(max_tokens=0, prompt_logprobs=True),
    }
    (generating, *others) = [
        engine.add(Request(id=name, prompt_token_ids=tuple(prompt), params=params))[0]
        for name, params in wanted.items()
    ]
    steps = engine.stats().steps
    engine.step()
    assert engine.stats().steps == steps + 1
    assert generating.num_output == 1
    assert [str(sequence.finish_reason) for sequence in others] == ["length"] * 3
    for sequence, pooling in zip(others, ("mean", "last"), strict=False):
        found = finish_embedding(sequence.embedding_D, normalize=True)
        np.testing.assert_allclose(found, expected([prompt], pooling)[0], atol=1e-5)
    engine.abort("a")
    check_empty(engine)


def test_a_prefix_is_found_for_the_last_token_and_computed_for_a_mean():
    with tiny_llm(CONFIG, max_num_batched_tokens=16, debug=True) as llm:
        prompt = PROMPTS[-1]
        llm.generate([prompt], GREEDY)
        for pooling, cached in (("last", 88), ("mean", 0), ("last", 88)):
            (output,) = llm.generate([prompt], embeds(pooling))
            assert output.num_cached_tokens == cached
            found = finish_embedding(output.embedding, normalize=True)
            np.testing.assert_allclose(found, expected([prompt], pooling)[0], atol=1e-5)
        llm.engine.clear_prefix_cache()
        llm.embed(prompt, pooling="mean")
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 88, "what embeds leaves its pages behind"
        check_empty(llm.engine)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("swap", [True, False], ids=["swap", "recompute"])
def test_a_prompt_that_is_preempted_in_the_middle(pooling, swap):
    with tiny_llm(CONFIG, max_num_batched_tokens=16, num_host_pages=64, debug=True) as llm:
        engine, prompt = llm.engine, PROMPTS[-1]
        (sequence,) = engine.add(Request(id="e", prompt_token_ids=tuple(prompt), params=embeds(pooling)))
        for _ in range(3):
            engine.step()
        assert sequence.num_computed == 48
        engine.scheduler.preempt(sequence, swap=swap)
        while engine.has_work:
            engine.step()
        assert sequence.preemptions == 1
        found = finish_embedding(sequence.embedding_D, normalize=True)
        np.testing.assert_allclose(found, expected([prompt], pooling)[0], atol=1e-5)
        check_empty(engine)


def test_any_history_pools_what_the_prompt_says():
    """Whole numbers instead of hidden states: chunks, swaps, recomputation, hits and aborts give exactly the sum."""
    rng = random.Random(5)
    for seed in range(60):
        engine = fake_engine(
            num_pages=14,
            max_num_batched_tokens=rng.choice((4, 7, 16)),
            max_rounds=rng.choice((1, 4)),
            seed=seed,
            debug=True,
        )
        embedded = []
        for i in range(12):
            prompt = tuple([1, 2, 3, 4, 5] * rng.randint(0, 2) + [rng.randrange(11) for _ in range(rng.randint(1, 16))])
            params = rng.choice((GREEDY, embeds("last"), embeds("mean")))
            (sequence,) = engine.add(
                Request(id=str(i), prompt_token_ids=prompt, params=params, priority=rng.randrange(3))
            )
            embedded += [sequence] if params.pooling else []
            for _ in range(rng.randint(0, 3)):
                engine.step()
                if engine.scheduler.running and rng.random() < 0.4:
                    engine.scheduler.preempt(rng.choice(engine.scheduler.running), swap=rng.random() < 0.5)
            if rng.random() < 0.2:
                engine.abort(str(rng.randint(0, i)))
        while engine.has_work:
            engine.step()
        for sequence in embedded:
            check_pooled(sequence)
        check_empty(engine)


def check_pooled(sequence) -> None:
    if str(sequence.finish_reason) == "abort":
        assert sequence.embedding_D is None
        return
    state, states = 0, []
    for token in sequence.request.prompt_token_ids:
        state = hash_step(state, token, 0)
        states.append(hidden_state(state))
    whole = states[-1] if sequence.params.pooling == "last" else sum(states) / np.float32(len(states))
    np.testing.assert_array_equal(sequence.embedding_D, whole)


def test_a_stranger_that_is_not_a_number_is_added_to_nothing():
    import jax.numpy as jnp

    from quire.device.pooling import pool_rows

    hidden = np.ones((8, 4), np.float32)
    hidden[[0, 1, 3, 7]] = np.nan  # tokens of other rows, one before the first that counts, padding
    ends = jnp.array([0, 2, 3, 6, 6], jnp.int32)
    pooled = pool_rows(jnp.array(hidden), jnp.array([-1, 2, 4, -1], jnp.int32), ends)
    np.testing.assert_array_equal(pooled, np.array([0, 1, 2, 0], np.float32)[:, None] * np.ones(4, np.float32))


def test_normalise_and_dimensions(llm):
    raw = llm.embed(PROMPTS[5], normalize=False)
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(llm.embed(PROMPTS[5]), raw / np.linalg.norm(raw), atol=1e-6)
    short = raw[:7] / np.linalg.norm(raw[:7])
    np.testing.assert_allclose(llm.embed(PROMPTS[5], dimensions=7), short, atol=1e-6)
    np.testing.assert_allclose(llm.embed(PROMPTS[5], dimensions=7, normalize=False), raw[:7], atol=1e-6)
    assert llm.embed([]).shape == (0, CONFIG.hidden_size)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"pooling": "cls"}, "pooling='cls' must be 'last' or 'mean'"),
        ({"normalize": 1}, "normalize=1 must be True, False or None"),
        ({"dimensions": 0}, "dimensions=0 must be a whole number from 1 to 32"),
        ({"dimensions": 33}, "dimensions=33 must be"),
        ({"dimensions": True}, "dimensions=True must be"),
    ],
)
def test_what_makes_no_sense_is_refused(llm, how, message):
    with pytest.raises(ValueError, match=message):
        llm.embed(PROMPTS[0], **how)


def test_a_prompt_that_can_never_be_embedded_is_named(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: .* shorten the prompt"):
        llm.embed([PROMPTS[0], [1] * 257])
    with pytest.raises(ValueError, match=r"prompts\[0\]: the prompt is empty"):
        llm.embed([[]])
    check_empty(llm.engine)


def test_pooling_generates_nothing():
    for more in ({}, {"max_tokens": 3}, {"max_tokens": 0, "n": 2}):
        with pytest.raises(ValueError, match="embeds a prompt and generates nothing"):
            SamplingParams(pooling="last", **more)


def test_many_tasks_embed_at_once():
    async def embed_all():
        llm = AsyncLLM.from_params(
            CONFIG,
            tiny_params(CONFIG),
            dtype="float32",
            quiet=True,
            page_size=4,
            num_pages=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
        )
        async with llm:
            generating = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
            found = await asyncio.gather(*(llm.embed(prompt, pooling="mean") for prompt in PROMPTS))
            assert len((await generating).outputs[0].token_ids) == 12
            with pytest.raises(ValueError, match="dimensions=99"):
                await llm.embed(PROMPTS[0], dimensions=99)
            assert (await llm.call(lambda engine: engine.stats())).held_pages == 0
        return found

    np.testing.assert_allclose(asyncio.run(embed_all()), expected(PROMPTS, "mean"), atol=1e-5)


# -- what a model's files say -------------------------------------------------------------------------------------


def write_modules(folder, *kinds: str, **modes: bool) -> None:
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))


@pytest.mark.parametrize(
    ("kinds", "modes", "config"),
    [
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, EmbeddingConfig("last", True)),
        (("Transformer", "Pooling"), {"pooling_mode_lasttoken": True}, EmbeddingConfig("last", False)),
        (
            ("Transformer", "Pooling", "Normalize"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True},
            EmbeddingConfig("mean", True),
        ),
    ],
)
def test_the_files_of_sentence_transformers_say_how_to_pool(tmp_path, kinds, modes, config):
    write_modules(tmp_path, *kinds, **modes)
    assert embedding_config_of_folder(tmp_path) == config


def test_without_these_files_it_is_the_last_token_normalised(tmp_path, llm):
    assert embedding_config_of_folder(tmp_path) == llm.embedding_config == EmbeddingConfig("last", True)


@pytest.mark.parametrize(
    ("kinds", "modes", "message"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "pooling_mode_cls_token is not supported"),
        (("Transformer", "Pooling"), {}, "pooling by none is not supported"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_lasttoken, pooling_mode_mean_tokens is not supported",
        ),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_lasttoken": True}, "type 'Dense' is not supported"),
    ],
)
def test_a_model_that_would_be_embedded_wrongly_is_refused(tmp_path, kinds, modes, message):
    write_modules(tmp_path, *kinds, **modes)
    with pytest.raises(ValueError, match=message):
        embedding_config_of_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("modules.json", "{}"), ("modules.json", "[1]"), ("modules.json", '[{"type": 1}]'),
        ("modules.json", "[" * 5000), ("1_Pooling/config.json", "[]"), ("1_Pooling/config.json", "\xff"),
    ],
)  # fmt: skip
def test_a_broken_file_is_a_clean_error(tmp_path, name, content):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / name).write_text(content, "latin-1")
    with pytest.raises(ValueError, match=r"json"):
        embedding_config_of_folder(tmp_path)


def test_weights_saved_without_a_head_are_found(tmp_path):
    """As embedding models have them: the names do not begin with `model.`."""
    save_file({"norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with SafetensorsFolder(tmp_path) as folder:
        np.testing.assert_array_equal(folder.tensor("model.norm.weight"), np.ones(4, np.float32))
        with pytest.raises(ValueError, match="no tensor"):
            folder.tensor("model.embed_tokens.weight")
