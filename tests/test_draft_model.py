"""A draft model changes nothing but the number of steps, and what it guesses is as good as the model is."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from safetensors.numpy import save_file

import quire.llm
from quire import LLM, AsyncLLM, SamplingParams
from quire.bench.measure import bare_side
from quire.bench.steps import calibrate
from quire.config import EngineConfig, ModelConfig
from quire.core.request import Request
from quire.device.runner import CompileError
from quire.engine.draft_model import DraftModel, check_draft
from quire.engine.engine import Engine
from quire.engine.stats import EngineStats
from quire.field_error import FieldError
from quire.recording.replay import replay
from quire.text.tokenizer import Tokenizer
from tests.effort import nightly, slow
from tests.test_drafts import ASKED, answers, check_same
from tests.test_rounds import PROMPTS
from tests.tiny import tiny_config, tiny_llm, tiny_params, tiny_tensors
from tests.words import tiny_tokenizer

OTHER = tiny_config(windows=(None,), num_heads=2, num_kv_heads=1, hidden_size=16, intermediate_size=24)
"""Fewer layers, fewer heads, less width."""


def write_model(folder: Path, config: ModelConfig, seed: int = 0, tensors: dict | None = None, **changes) -> str:
    """A folder with a llama of random weights."""
    attention = config.attention[0]
    said = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": config.max_len,
        "rms_norm_eps": config.norm_eps,
    }
    folder.mkdir()
    save_file(tiny_tensors(config, seed) if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said | changes))
    return str(folder)


@pytest.fixture(scope="module")
def same(tmp_path_factory) -> str:
    """The model that answers, once more."""
    return write_model(tmp_path_factory.mktemp("models") / "same", tiny_config())


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "other", OTHER, seed=5)


@pytest.fixture(scope="module")
def plain():
    with tiny_llm(tokenizer=tiny_tokenizer(), max_rounds=1) as llm:
        yield llm


def ahead(draft: str, **knobs) -> LLM:
    defaults = {"drafts": 16, "max_rounds": 4, "debug": True, "fail_on_compile": True}
    return tiny_llm(tokenizer=tiny_tokenizer(), draft=draft, **defaults | knobs)


@pytest.fixture(scope="module")
def with_same(same):
    with ahead(same) as llm:
        yield llm


@pytest.fixture(scope="module")
def with_other(other):
    with ahead(other) as llm:
        yield llm


def drafts_between(before: EngineStats, after: EngineStats) -> tuple[int, int]:
    """How many were drafted, and how many of them accepted."""
    return after.drafted_tokens - before.drafted_tokens, after.accepted_drafts - before.accepted_drafts


@pytest.mark.parametrize("name", ASKED)
def test_tokens_do_not_depend_on_a_draft_model(plain, with_same, with_other, name):
    expected = answers(plain, ASKED[name])
    for llm in (with_same, with_other):
        before = llm.engine.stats()
        check_same(answers(llm, ASKED[name]), expected)
        drafted, accepted = drafts_between(before, llm.engine.stats())
        assert (drafted > 0) == (name != "of a form"), "the host has to say what may come next, after every token"
        if drafted and llm is with_same:
            assert accepted > 0.8 * drafted, "all but what stands behind an end"
        assert llm.engine.stats().held_pages == 0
        assert llm.engine.stats().compiles_after_warmup == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_model_itself_guesses_every_token(with_same, temperature):
    """So its KV is there and right at every position, whatever was accepted before: of itself it is never wrong."""
    llm = with_same
    llm.engine.clear_prefix_cache()
    before = llm.engine.stats()
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    llm.generate([[5, 6, 7, 8, 9]], params, progress=False)
    after = llm.engine.stats()
    drafted, accepted = drafts_between(before, after)
    assert accepted == drafted > 40
    assert after.steps - before.steps < 15


def all_accepted(llm: LLM, before: EngineStats) -> bool:
    """Of sequences that end by their length: whether every guess was right, and there were some."""
    drafted, accepted = drafts_between(before, llm.engine.stats())
    return accepted == drafted > 0


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=4), progress=False)
    return [[*output.prompt_token_ids, *one.token_ids] for output in outputs for one in output.outputs]


def test_it_catches_up_on_what_was_computed_without_it(same):
    """Rows too many to be drafted, then few of them; pages of the prefix cache that it has never seen; a grammar's."""
    with ahead(same, drafts=8, max_num_seqs=6, num_pages=200, max_rounds=4) as llm:
        before = llm.engine.stats()
        prompts = [[5, 6, 7], [8, 9], [11, 12, 13, 14, 15], [16] * 9, [17, 18], [19, 20, 21]]
        many = generate(llm, prompts, 24)
        assert drafts_between(before, llm.engine.stats()) == (0, 0), "six rows, for none of which there is room"
        generate(llm, [[*many[0], 3, 4]], 20)
        assert all_accepted(llm, before), "the first tokens are in pages of the prefix cache"


@pytest.mark.parametrize(
    "knobs",
    [
        {"preemption": "swap", "num_host_pages": 64, "num_pages": 20},
        {"preemption": "recompute", "num_pages": 20},
        slow({"prefix_cache": False}),
        slow({"deterministic": True, "max_num_batched_tokens": 16}),
        nightly({"preemption": "recompute", "num_pages": 40, "page_size": 2, "max_num_batched_tokens": 16}),
        nightly({"attention": "reference", "matmul": "xla"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["forked", slow("penalised")])
def test_nor_on_what_happens_to_its_pages(plain, same, knobs, name):
    """Swapped, computed again, copied, shared: always those of both models."""
    params = replace(ASKED[name], n=3)
    expected = answers(plain, params)
    with ahead(same, max_model_len=64, **knobs) as llm:
        check_same(answers(llm, params), expected)
        stats = llm.engine.stats()
        assert stats.accepted_drafts > 0.8 * stats.drafted_tokens > 0
        assert bool(stats.preemptions) == ("preemption" in knobs)


@pytest.mark.parametrize("windows", [(5, None), slow((3, 9))])
def test_the_model_may_have_windows_and_the_draft_model_none(other, windows):
    config = tiny_config(windows=windows, eos_ids=())
    params = SamplingParams(seed=1, max_tokens=40)
    with tiny_llm(config, max_rounds=1) as llm:
        expected = answers(llm, params)
    with tiny_llm(config, draft=other, drafts=16, debug=True) as llm:
        check_same(answers(llm, params), expected)
        assert llm.engine.stats().drafted_tokens


def test_and_the_other_way_round(plain, tmp_path):
    draft = write_model(tmp_path / "mistral", tiny_config(), seed=2, model_type="mistral", sliding_window=6)
    with ahead(draft) as llm:
        assert llm.engine.runner.draft.model.attention[0].window == 6
        check_same(answers(llm, ASKED["forked"]), answers(plain, ASKED["forked"]))
        assert llm.engine.stats().drafted_tokens


def test_what_is_drafted_ends_where_the_draft_model_does(plain, tmp_path):
    draft = write_model(tmp_path / "short", replace(tiny_config(), max_len=32))
    with ahead(draft) as llm:
        before = llm.engine.stats()
        (tokens,) = generate(llm, [[5, 6, 7, 8, 9]], 20)
        assert all_accepted(llm, before)
        before = llm.engine.stats()
        assert generate(llm, [tokens], 40) == generate(plain, [[5, 6, 7, 8, 9]], 60)
        drafted, _ = drafts_between(before, llm.engine.stats())
        assert 0 < drafted <= 32 - len(tokens)


@pytest.mark.parametrize("running", ["keep", "recompute"])
def test_new_weights_are_the_models_own(plain, same, running):
    """The draft model keeps its weights: it guesses worse, and the tokens are those of the new ones."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=4)
    old, new = (tiny_tensors(tiny_config(), seed) for seed in (0, 8))

    def tokens_of(llm: LLM, change_at: int) -> tuple[list[int], int]:
        """What is drawn when weights change behind so many tokens, or a few more; and behind how many they did."""
        engine = llm.engine
        (sequence,) = engine.add(Request(id="a", prompt_token_ids=(5, 6, 7), params=params))
        while sequence.num_output < change_at:
            engine.step()
        changed_at = sequence.num_output
        engine.set_weights(new, running=running)
        while engine.has_work:
            engine.step()
        engine.set_weights(old)
        return sequence.output_token_ids, changed_at

    with ahead(same) as llm:
        tokens, changed_at = tokens_of(llm, 10)
        stats = llm.engine.stats()
        assert 0 < stats.accepted_drafts < stats.drafted_tokens
        assert tokens == tokens_of(plain, changed_at)[0]


def test_an_engine_that_sleeps_has_neither_model(same):
    with ahead(same) as llm:
        tokens, guessing = generate(llm, [[5, 6, 7]], 20), llm.engine.runner.draft
        llm.sleep()
        assert guessing._params == {"layers": [{}, {}]}
        assert all(array.is_deleted() for array in jax.tree.leaves(guessing._caches))
        llm.wake(tiny_params(tiny_config()))
        before = llm.engine.stats()
        assert generate(llm, [[5, 6, 7]], 20) == tokens
        assert all_accepted(llm, before)


def failing_once(runner, monkeypatch, at: int, *, late: bool):
    """Let the step of this number fail: when it is dispatched, or `late`, when it is waited for."""
    run, calls = runner.run, iter(range(1000))

    class Failing:
        def result(self):
            raise RuntimeError("no result")

    def run_or_fail(inputs):
        if next(calls) != at:
            return run(inputs)
        if late:
            run(inputs)
            delete_caches(runner)
            return Failing()
        delete_caches(runner)
        return run(inputs)

    monkeypatch.setattr(runner, "run", run_or_fail)


def delete_caches(runner) -> None:
    """As a program that fails leaves them."""
    for array in jax.tree.leaves(runner._caches):
        array.delete()


def steps_of(llm: LLM, params: SamplingParams) -> tuple[dict, int]:
    """The tokens that the prompts are answered with, and how many steps failed."""
    sequences = [
        sequence
        for i, prompt in enumerate(PROMPTS)
        for sequence in llm.engine.add(Request(id=str(i), prompt_token_ids=tuple(prompt), params=params))
    ]
    failures = 0
    while llm.engine.has_work:
        try:
            llm.engine.step()
        except (RuntimeError, ValueError):
            failures += 1
    llm.engine.audit()
    return {(s.request.prompt_token_ids, s.index): [*s.output_token_ids, s.finish_reason] for s in sequences}, failures


@pytest.mark.parametrize("late", [False, True], ids=["when dispatched", "when waited for"])
@pytest.mark.parametrize("at", [0, 6, 7])
@pytest.mark.parametrize("failing", ["target", "draft"])
def test_a_step_that_fails_costs_a_recomputation_or_a_few_drafts(plain, same, failing, at, late, monkeypatch, caplog):
    expected = answers(plain, ASKED["forked"])
    with ahead(same) as llm:
        failing_once(getattr(llm.engine.runner, failing), monkeypatch, at, late=late)
        tokens, failures = steps_of(llm, ASKED["forked"])
        assert failures == (failing == "target"), "without a draft model it goes on"
        assert tokens == {key: tokens for key, (tokens, _) in expected.items()}
        assert ("a step of the draft model failed" in caplog.text) == (failing == "draft")
        before = llm.engine.stats()
        generate(llm, [[31, 32, 33, 34]], 30)
        assert all_accepted(llm, before), "it has computed anew what it needs"


def test_a_draft_model_that_always_fails_is_asked_less_and_less(plain, same, monkeypatch):
    with ahead(same) as llm:
        monkeypatch.setattr(llm.engine.runner.draft, "run", lambda inputs: 1 / 0)
        params = SamplingParams(max_tokens=120, ignore_eos=True, seed=4)
        tokens = [
            one.token_ids for output in llm.generate([[5, 6, 7]], params, progress=False) for one in output.outputs
        ]
        assert tokens == [
            one.token_ids for output in plain.generate([[5, 6, 7]], params, progress=False) for one in output.outputs
        ]
        assert 0 < llm.engine.stats().drafted_tokens < 20


def test_a_draft_model_that_finds_no_memory_again_disturbs_nobody(plain, same, monkeypatch):
    """A step of it took its cache, and there is none to be had for a while."""
    expected = answers(plain, ASKED["forked"])
    with ahead(same) as llm:
        draft = llm.engine.runner.draft
        create, calls = draft._create_caches, iter(range(1000))

        def create_later():
            if next(calls) < 2:
                raise RuntimeError("out of memory")
            return create()

        monkeypatch.setattr(draft, "_create_caches", create_later)
        failing_once(draft, monkeypatch, 6, late=True)
        tokens, failures = steps_of(llm, ASKED["forked"])
        assert failures == 0
        assert tokens == {key: tokens for key, (tokens, _) in expected.items()}
        for _ in range(3):  # until it is asked again
            before = llm.engine.stats()
            generate(llm, [[31, 32, 33, 34]], 30)
        assert all_accepted(llm, before)


def test_a_compile_of_the_draft_model_is_as_fatal_as_one_of_the_model(same, monkeypatch):
    with ahead(same) as llm:
        draft = llm.engine.runner.draft
        write = draft._write_page_table

        def compile_and_write(*args):
            jax.jit(lambda: jax.numpy.zeros(3))()
            write(*args)

        monkeypatch.setattr(draft, "_write_page_table", compile_and_write)
        llm.engine.add(Request(id="0", prompt_token_ids=(5, 6, 7), params=SamplingParams(max_tokens=8)))
        with pytest.raises(CompileError, match="compiled after warm-up"):
            llm.engine.step()


def test_a_recording_in_which_the_draft_model_failed_replays(same, tmp_path, monkeypatch):
    path = tmp_path / "recording"
    with ahead(same, record=str(path)) as llm:
        failing_once(llm.engine.runner.draft, monkeypatch, 7, late=True)
        assert steps_of(llm, ASKED["forked"])[1] == 0
    assert replay(path).difference is None


def test_a_draft_model_that_is_gone_is_named_when_it_is_read_again(tmp_path):
    draft = write_model(tmp_path / "gone", tiny_config())
    with ahead(draft) as llm:
        llm.sleep()
        (tmp_path / "gone" / "model.safetensors").unlink()
        with pytest.raises(FieldError, match=r"draft='.*gone': ") as caught:
            llm.wake(tiny_params(tiny_config()))
        assert caught.value.field == "draft"
        assert llm.engine.is_asleep


def test_requests_that_draw_nothing_need_no_draft_model(plain, with_same):
    """And what they computed without it, it computes for whoever goes on from there."""
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert with_same.score(tokens) == pytest.approx(plain.score(tokens), abs=1e-4)
    before = with_same.engine.stats()
    generate(with_same, [tokens], 20)
    assert all_accepted(with_same, before)


def test_a_recording_with_a_draft_model_replays(same, tmp_path):
    path = tmp_path / "recording"
    with ahead(same, record=str(path), num_pages=24, max_model_len=64) as llm:
        answers(llm, ASKED["forked"])
        stats = llm.engine.stats()
        assert stats.accepted_drafts
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.steps == stats.steps


def test_both_models_are_split_over_a_mesh(plain, other):
    expected = answers(plain, ASKED["forked"])
    with ahead(other, num_devices=2) as llm:
        check_same(answers(llm, ASKED["forked"]), expected)
        assert llm.engine.stats().drafted_tokens


@pytest.mark.slow
def test_each_of_several_engines_has_a_draft_model(plain, same):
    outputs, num_accepted = asyncio.run(answers_of_two_engines(same))
    assert all(num_accepted), num_accepted
    assert outputs == generate(plain, PROMPTS, 30)


async def answers_of_two_engines(model: str) -> tuple[list[list[int]], list[int]]:
    """The tokens, and how many drafts each engine had accepted."""
    knobs = {"dtype": "float32", "page_size": 4, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=4)
    async with AsyncLLM(model, mesh="data=2", draft=model, drafts=16, quiet=True, **knobs) as llm:
        outputs = await asyncio.gather(*[llm.generate(prompt, params) for prompt in PROMPTS])
        num_accepted = [thread.llm.engine.scheduler.accepted_drafts for thread in llm.engines.threads]
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs], num_accepted


def test_what_measures_the_model_leaves_its_draft_model_alone(with_other):
    bare_side(with_other, rows=2, prompt_len=4, new_tokens=4)([[5, 6, 7, 8], [9, 10, 11, 12]])
    with pytest.raises(FieldError, match="is measured of one model, and simulated so; leave draft out"):
        calibrate(with_other, model="tiny", rows=[1], prompt_len=8, new_tokens=8, repeats=1)


def test_the_pool_has_room_for_the_kv_of_both(same):
    budget = 1 << 20
    with tiny_llm(memory_budget=budget, num_pages=None, max_num_seqs=32) as llm:
        alone = llm.engine.stats().num_pages
    with tiny_llm(memory_budget=budget, num_pages=None, max_num_seqs=32, draft=same) as llm:
        assert alone / 2 * 0.9 < llm.engine.stats().num_pages < alone / 2 * 1.1


@pytest.mark.parametrize(
    ("knobs", "field", "message"),
    [
        ({"draft": 3}, "draft", "draft=3 must be a MODEL"),
        ({"draft": ""}, "draft", "draft='' must be a MODEL"),
        ({"draft_quantize": "int8"}, "draft_quantize", "there is none: give draft"),
        ({"draft": "m", "draft_quantize": "int9"}, "draft_quantize", "must be one of"),
        (
            {"draft": "m", "num_processes": 2, "coordinator": "127.0.0.1:7411"},
            "draft",
            "num_processes=2: leave draft out",
        ),
        ({"draft": "m", "drafts": 3}, "drafts", "drafts=3 must be a whole number from 4 to 1,024, or 0 for 8"),
        (
            {"draft": "m", "max_num_batched_tokens": 4, "max_num_seqs": 4},
            "drafts",
            "drafts=8 .with draft='m'. is more than",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(knobs, field, message):
    with pytest.raises(FieldError, match=message) as caught:
        EngineConfig(**knobs)
    assert caught.value.field == field


def test_a_backend_that_cannot_compute_the_draft_model_says_that_it_is_this_one(tmp_path):
    draft = write_model(tmp_path / "odd", tiny_config(head_dim=6))
    with pytest.raises(FieldError, match=r"draft='.*odd': attention='native'.* not 6") as caught:
        tiny_llm(attention="native", dtype="bfloat16", draft=draft)
    assert caught.value.field == "draft"


def test_a_draft_model_has_drafts_if_nobody_says_how_many():
    assert (EngineConfig(draft="m").drafts, EngineConfig(draft="m", drafts=16).drafts, EngineConfig().drafts) == (
        8,
        16,
        0,
    )


def test_a_model_that_cannot_guess_for_this_one_is_refused(tmp_path):
    with pytest.raises(FieldError, match=r"draft='nowhere': MODEL 'nowhere' does not exist") as caught:
        tiny_llm(draft="nowhere")
    assert caught.value.field == "draft"
    larger = write_model(tmp_path / "larger", tiny_config(vocab_size=1122))
    with pytest.raises(
        FieldError, match=r"other tokens than the model: 1,122 of them, not 97; .* leave draft out"
    ) as caught:
        tiny_llm(draft=larger)
    assert caught.value.field == "draft"
    good = write_model(tmp_path / "good", tiny_config())
    with pytest.raises(FieldError, match=r"draft=.*good': quantize='mxfp4' is for mixtures") as caught:
        tiny_llm(draft=good, draft_quantize="mxfp4")
    assert caught.value.field == "draft_quantize"
    with pytest.raises(FieldError, match=r"draft=.*good': quantize='gguf' keeps") as caught:
        tiny_llm(draft=good, draft_quantize="gguf")
    assert caught.value.field == "draft_quantize"


@pytest.mark.parametrize("vocab_size", [90, 112])
def test_the_padding_of_both_vocabularies_may_differ(plain, tmp_path, monkeypatch, vocab_size):
    """What one of them has no token for is neither given to it nor taken as its guess."""
    padded = tiny_config(vocab_size=vocab_size)
    tensors = tiny_tensors(padded, 0)
    if vocab_size > 97:
        tensors["lm_head.weight"][97:] *= 100  # likely, if it were asked
    draft = write_model(tmp_path / "padded", padded, tensors=tensors)
    load = quire.llm._load_draft
    monkeypatch.setattr(quire.llm, "_load_draft", lambda *args: load(*args)._replace(tokenizer=tiny_tokenizer()))
    params = replace(ASKED["penalised"], logit_bias={94: 3.0})
    with ahead(draft) as llm:
        check_same(answers(llm, params), answers(plain, params))
        assert llm.engine.stats().drafted_tokens


def test_sizes_may_not_differ_where_nobody_knows_the_tokens():
    draft = DraftModel("m", tiny_config(vocab_size=98), {}, dict, tiny_tokenizer())
    check_draft(draft, tiny_config(), tiny_tokenizer())
    with pytest.raises(FieldError, match="other tokens than the model: 98 of them, not 97"):
        check_draft(draft, tiny_config(), None)


def test_a_draft_model_may_keep_its_weights_as_they_are(tmp_path):
    good = write_model(tmp_path / "good", tiny_config())
    config = EngineConfig(draft=good, quantize="int8", draft_quantize="none")
    assert config.quantize_of_draft is None
    assert EngineConfig(draft=good, quantize="int8").quantize_of_draft == "int8"


def test_a_token_id_must_mean_the_same_to_both():
    pieces = list(tiny_tokenizer().pieces)
    pieces[5] = b"?"
    draft = DraftModel("m", tiny_config(), {}, dict, replace_pieces(tiny_tokenizer(), pieces))
    check_draft(draft._replace(tokenizer=tiny_tokenizer()), tiny_config(), tiny_tokenizer())
    check_draft(draft, tiny_config(), None)
    with pytest.raises(FieldError, match=r"draft='m' has other tokens than the model: token 5 is b'\?'"):
        check_draft(draft, tiny_config(), tiny_tokenizer())


def replace_pieces(tokenizer: Tokenizer, pieces: list[bytes]) -> Tokenizer:
    tokenizer._pieces = tuple(pieces)
    return tokenizer


def test_an_engine_is_given_its_draft_model():
    with pytest.raises(FieldError, match=r"draft='m': a draft model is loaded by LLM"):
        Engine(tiny_config(), {}, EngineConfig(draft="m"))
