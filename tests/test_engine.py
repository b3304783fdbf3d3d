"""One engine, many requests: a token never depends on who else runs, how a prompt was cut, or what was preempted."""

import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, SamplingParams, Structured
from quire.core.errors import AuditError, RequestError
from quire.core.request import Request
from quire.device.mesh import make_mesh
from quire.device.models.weights import place_params
from tests.effort import nightly
from tests.tiny import VOCAB, tiny_config, tiny_llm, tiny_params

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, VOCAB, size=n).tolist() for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 60)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(seed=11, max_tokens=24, top_p=0.9, temperature=0.8)
BOTH = [prompt for prompt in PROMPTS for _ in range(2)], [GREEDY, SEEDED] * len(PROMPTS)
"""Every prompt twice, and how each is asked."""


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(debug=True, max_rounds=1) as llm:  # a token a step; what it is compared with runs many rounds
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    """What each of `BOTH` says when nobody else runs."""
    return [tokens(llm.generate([prompt], params))[0] for prompt, params in zip(*BOTH, strict=True)]


def test_batched_equals_alone(llm, alone):
    assert tokens(llm.generate(*BOTH)) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "budget"), [nightly(1, 11), (4, 8), (4, 200), nightly(128, 8)])
def test_chunked_equals_whole_at_any_page_size(alone, budget, page_size):
    with tiny_llm(max_num_batched_tokens=budget, page_size=page_size, num_pages=1024 // page_size, debug=True) as other:
        assert tokens(other.generate(*BOTH)) == alone


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_and_chunked_equals_undisturbed(alone, preemption):
    knobs = {"num_pages": 21, "max_num_batched_tokens": 11, "prefix_cache": False}
    host = {"num_host_pages": 64} if preemption == "swap" else {}
    with tiny_llm(preemption=preemption, debug=True, **knobs, **host) as small:
        assert tokens(small.generate(*BOTH)) == alone
        stats = small.engine.stats()
        assert (stats.swaps if preemption == "swap" else stats.recomputes) == stats.preemptions >= 3
        assert (stats.held_pages, stats.free_host_pages) == (0, stats.num_host_pages)


@pytest.mark.slow
def test_the_reference_backend_agrees(alone):
    with tiny_llm(attention="reference", debug=True) as other:
        assert tokens(other.generate(*BOTH)) == alone


@pytest.mark.slow
def test_two_devices_agree(alone):
    assert len(jax.devices()) >= 2
    with tiny_llm(num_devices=2) as other:
        assert tokens(other.generate(*BOTH)) == alone


def test_weights_of_this_program_are_checked_by_name_and_not_copied():
    config, mesh = tiny_config(), make_mesh()
    params = dict(tiny_params(config))
    placed = place_params(config, params, mesh=mesh, dtype="float32")
    assert placed["layers"][1]["qkv"] is params["layers"][1]["qkv"]
    cast = place_params(config, params, mesh=mesh, dtype="bfloat16")
    assert {array.dtype for array in jax.tree.leaves(cast)} == {np.dtype("bfloat16")}
    with pytest.raises(ValueError, match=r"params\['unembed'\] is missing"):
        LLM.from_params(config, {k: v for k, v in params.items() if k != "unembed"})
    with pytest.raises(ValueError, match=r"params\['extra'\] is not part"):
        LLM.from_params(config, params | {"extra": params["norm"]})
    with pytest.raises(ValueError, match=r"params\['norm'\] is float32\[2, 16\], expected bfloat16\[32\]"):
        LLM.from_params(config, params | {"norm": params["norm"].reshape(2, 16)})


def test_mistakes_in_a_call_name_what_was_expected(llm):
    config, params = tiny_config(), dict(tiny_params(tiny_config()))
    with pytest.raises(ValueError, match=r"must be SamplingParams"):
        llm.generate([[1]], {"max_tokens": 2})
    with pytest.raises(ValueError, match="stream takes one prompt, 2 were given"):
        llm.stream([[1], [2]])
    with pytest.raises(RequestError, match="must be a Request"):
        llm.engine.add("hello")
    with pytest.raises(ValueError, match=r"EngineConfig has no max_modellen; did you mean max_model_len\?"):
        LLM.from_params(config, params, max_modellen=3)
    with pytest.raises(ValueError, match="EngineConfig has no zzz; there are dtype, quantize"):
        LLM("nowhere", zzz=3)
    with pytest.raises(ValueError, match=r"20 missing: model.layers.0.+ model.norm.weight, lm_head.weight$"):
        LLM.from_params(config, {"model.embed_tokens.weight": params["embed"]})
    with pytest.raises(ValueError, match="no 'embed' and no Hugging Face names, it has 'weights'"):
        LLM.from_params(config, {"weights": params})


def test_numbers_of_numpy_are_numbers(llm):
    ours = SamplingParams(
        seed=np.int32(4), temperature=np.float32(0.5), max_tokens=jnp.int32(9), stop_token_ids=np.array([3])
    )
    assert ours == SamplingParams(seed=4, temperature=0.5, max_tokens=9, stop_token_ids=[3])
    assert tokens(llm.generate([[1]], ours)) == tokens(
        llm.generate([[1]], SamplingParams(seed=4, temperature=0.5, max_tokens=9, stop_token_ids=[3]))
    )


def test_arrays_are_as_good_as_lists_of_ids(llm):
    expected = tokens(llm.generate([[5, 6, 7], [8, 9, 10]], GREEDY))
    assert tokens(llm.generate(np.array([[5, 6, 7], [8, 9, 10]]), GREEDY)) == expected
    assert tokens(llm.generate([np.array([5, 6, 7]), jnp.array([8, 9, 10])], GREEDY)) == expected
    assert tokens(llm.generate(np.array([5, 6, 7], np.uint16), GREEDY)) == expected[:1]
    np.testing.assert_array_equal(llm.score(np.array([5, 6, 7])), llm.score([5, 6, 7]))


def test_a_restarted_engine_gives_the_same(alone):
    with tiny_llm() as other:
        assert tokens(other.generate(BOTH[0][::-1], BOTH[1][::-1]))[::-1] == alone


def test_each_of_n_samples_is_its_own_and_the_first_is_that_of_n_1(llm):
    one = llm.generate([PROMPTS[5]], SEEDED)[0]
    many = llm.generate([PROMPTS[5]], SamplingParams(seed=11, max_tokens=24, top_p=0.9, temperature=0.8, n=4))[0]
    assert many.outputs[0].token_ids == one.outputs[0].token_ids
    assert [output.index for output in many.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in many.outputs}) == 4


def test_without_a_seed_two_calls_differ(llm):
    params = SamplingParams(max_tokens=24)
    assert tokens(llm.generate([PROMPTS[5]], params)) != tokens(llm.generate([PROMPTS[5]], params))


def test_freed_pages_are_nan_and_nobody_notices(alone):
    """No stray read: with debug every freed page is poisoned, and the pool is used many times over."""
    with tiny_llm(num_pages=40, debug=True) as other:
        for _ in range(3):
            assert tokens(other.generate(*BOTH)) == alone
        poisoned = sum(
            bool(np.isnan(np.asarray(array)).any())
            for layer in other.engine.runner._caches[0].layers
            for array in layer.arrays
        )
        assert poisoned == 4, "the pages really were poisoned"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "poison"), [("auto", np.nan), ("auto", -np.inf), ("xla", np.inf), ("reference", np.nan)]
)
def test_whatever_lies_in_unwritten_pages_changes_nothing(attention, poison, alone):
    with tiny_llm(attention=attention) as other:
        runner = other.engine.runner
        runner._caches = jax.tree.map(
            lambda x: jax.device_put(np.full(x.shape, poison if x.dtype == np.float32 else -1, x.dtype), x.sharding),
            runner._caches,
        )
        assert tokens(other.generate(*BOTH)) == alone


def test_every_layer_has_its_own_pages(llm):
    """Pitfall 2.8.3 of the seeds: all layers sharing one cache."""
    llm.generate(PROMPTS[:3], GREEDY)
    arrays = [np.asarray(array) for layer in llm.engine.runner._caches[0].layers for array in layer.arrays]
    assert len(arrays) == 2 * llm.engine.model.num_layers
    for i, a in enumerate(arrays):
        for b in arrays[i + 1 :]:
            assert not np.array_equal(a, b, equal_nan=True)


def test_log_probabilities_are_those_of_scoring(llm):
    out = llm.generate([PROMPTS[9]], SamplingParams(seed=3, max_tokens=12, logprobs=2, ignore_eos=True))[0]
    completion = out.outputs[0]
    scores = llm.score(out.prompt_token_ids + completion.token_ids)
    assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
    np.testing.assert_allclose([entry.logprob for entry in completion.logprobs], scores[-12:], atol=1e-4)
    for entry in completion.logprobs:
        assert len(entry.top) == 2
        assert entry.top[0][1] >= entry.top[1][1] >= -50
        assert entry.top[0][1] >= entry.logprob - 1e-6


def test_scores_do_not_depend_on_chunks_or_company(llm):
    long = RNG.integers(1, VOCAB, size=120).tolist()
    whole = llm.score(long)
    assert len(whole) == 119
    with tiny_llm(max_num_batched_tokens=8, debug=True) as other:
        np.testing.assert_allclose(other.score(long), whole, atol=1e-4)
        params = [SamplingParams(max_tokens=0, prompt_logprobs=True), *[GREEDY] * 5]
        out = other.generate([long, *PROMPTS[:5]], params)[0]
        np.testing.assert_allclose([e.logprob for e in out.prompt_logprobs[1:]], whole, atol=1e-4)
        assert out.outputs[0].token_ids == []


def test_tokens_are_scored_under_what_they_were_drawn_from(llm):
    params = SamplingParams(
        temperature=1.3, top_k=12, top_p=0.9, seed=5, logprobs=20, n=3, max_tokens=90, ignore_eos=True
    )
    prompt = PROMPTS[4]
    outputs = llm.generate([prompt], params)[0].outputs
    sequences = [prompt + output.token_ids for output in outputs]
    scores = llm.score_drawn(sequences, params, start=len(prompt))
    for output, score in zip(outputs, scores, strict=True):
        drawn = output.logprobs
        np.testing.assert_allclose(score.logprobs, [entry.logprob for entry in drawn], atol=1e-4)
        np.testing.assert_allclose(score.processed_logprobs, [e.processed_logprob for e in drawn], atol=1e-4)
        np.testing.assert_allclose(score.kept_mass, [entry.kept_mass for entry in drawn], atol=1e-4)
        assert (score.kept_mass < 1).any()
        assert score.kept_ids.shape == (90, 20)
        assert (score.kept_ids[:, 12:] == -1).all()
        for ids, entry in zip(score.kept_ids.tolist(), drawn, strict=True):
            kept = [token_id for token_id, _ in entry.processed_top]
            assert ids == kept + [-1] * (len(ids) - len(kept))
            assert entry.token_id in kept
    other = llm.score_drawn(sequences[0], SamplingParams(top_k=1), start=len(prompt))
    is_likeliest = [entry.token_id == entry.top[0][0] for entry in outputs[0].logprobs]
    assert [value == 0 for value in other.processed_logprobs] == is_likeliest
    assert [value == -np.inf for value in other.processed_logprobs] == [not found for found in is_likeliest]
    assert other.kept_ids.shape == (90, 0)


def test_scores_are_of_the_budget_and_cost_no_draw(llm):
    """As many tokens of a step are scored as it has, in the company of others, and none is an output."""
    long = RNG.integers(1, VOCAB, size=240).tolist()
    with tiny_llm(max_num_batched_tokens=96, max_num_seqs=4, debug=True) as other:
        before = other.engine.stats().steps
        np.testing.assert_allclose(other.score(long), llm.score(long), atol=1e-4)
        assert other.engine.stats().steps - before == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("presence_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("structured", Structured(regex="a")),
        ("min_tokens", 2),
    ],
)
def test_what_scores_cannot_follow_is_refused(llm, field, value):
    with pytest.raises(ValueError, match=field):
        llm.score_drawn([1, 2, 3], SamplingParams(**{field: value}))


def test_stop_ids_eos_and_min_tokens(llm):
    free = tokens(llm.generate([PROMPTS[4]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)))[0]
    stop = free[5]
    first = free.index(stop)
    cut = llm.generate(
        [PROMPTS[4]], SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], ignore_eos=True)
    )
    assert cut[0].outputs[0].token_ids == free[: first + 1]
    assert cut[0].outputs[0].finish_reason == "stop"
    pair = llm.generate([PROMPTS[4]], SamplingParams(temperature=0, max_tokens=24, stop=[free[3:5]], ignore_eos=True))
    assert pair[0].outputs[0].token_ids == free[:5]
    later = llm.generate(
        [PROMPTS[4]],
        SamplingParams(temperature=0, max_tokens=24, min_tokens=10, stop_token_ids=[stop], ignore_eos=True),
    )[0].outputs[0]
    assert len(later.token_ids) >= 10
    assert stop not in later.token_ids[:9]


def test_requests_that_can_never_run_are_refused_before_anything_runs(llm):
    bad = {
        "empty": ([], SamplingParams()),
        r"prompt token 97 .* \(0 to 96\)": ([97], SamplingParams()),
        "prompt token -1": ([-1], SamplingParams()),
        "prompt token True": ([1, True], SamplingParams()),
        r"a prompt of 4 tokens \+ max_tokens=253 is more than max_model_len=256": (
            [1] * 4,
            SamplingParams(max_tokens=253),
        ),
        "leaves 0 for new ones": ([1] * 256, SamplingParams()),
        "there is no tokenizer": ([1], SamplingParams(stop="x")),
    }
    before = llm.engine.stats().steps
    for match, (prompt, params) in bad.items():
        with pytest.raises(RequestError, match=match):
            llm.generate([[1, 2, 3], prompt], [GREEDY, params])
    assert llm.engine.stats().steps == before
    assert not llm.engine.has_work


@pytest.mark.slow
def test_a_request_larger_than_the_pool_names_the_pool():
    with tiny_llm(num_pages=8) as small:
        with pytest.raises(RequestError, match=r"needs 9 pages .* the pool has 8 pages of 4 tokens"):
            small.generate([[1] * 20], SamplingParams(max_tokens=14))
        out = small.generate([[1] * 20], SamplingParams(temperature=0, ignore_eos=True))[0]
        assert len(out.outputs[0].token_ids) == 13, "max_tokens=None gives what fits"


def test_more_requests_than_rows_all_come_back_in_order(llm):
    """Levanter's generate returned requests beyond the first batch empty."""
    prompts = [[1 + i % 90] for i in range(50)]
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert [o.prompt_token_ids for o in out] == prompts
    assert {len(o.outputs[0].token_ids) for o in out} == {5}


def test_calls_from_another_thread_raise(llm):
    errors = []

    def call():
        for method in (llm.engine.step, llm.engine.stats, llm.engine.audit, llm.engine.reset):
            try:
                method()
            except RuntimeError as error:
                errors.append(str(error))

    thread = threading.Thread(target=call, name="stranger")
    thread.start()
    thread.join()
    assert len(errors) == 4
    assert "'stranger'" in errors[0]


def request(i, prompt=(1, 2, 3), **params):
    return Request(id=str(i), prompt_token_ids=tuple(prompt), params=SamplingParams(**params))


def test_add_step_abort_reset(llm):
    engine = llm.engine
    engine.add(request("a", max_tokens=200, ignore_eos=True))
    engine.add(request("b", prompt=(1, 2), max_tokens=200, n=3, ignore_eos=True))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add(request("a"))
    assert len(engine.step()) == 4, "one token each: b's three come from one row"
    assert (engine.stats().running, engine.stats().waiting) == (2, 2)
    assert len(engine.step()) == 4
    assert engine.stats().running == 4
    assert engine.stats().held_pages == 4
    assert engine.abort("b") == 3
    assert engine.abort("b") == 0
    assert engine.abort("nobody") == 0
    assert engine.stats().running == 1
    assert engine.reset() == 1
    stats = engine.stats()
    assert (stats.free_pages + stats.cached_pages, stats.held_pages, stats.running) == (64, 0, 0)
    assert stats.sum_refcounts == stats.cached_pages
    assert engine.step() == []
    engine.audit()


def test_audit_finds_a_lost_page(llm):
    engine = llm.engine
    (sequence,) = engine.add(request("lost", prompt=range(1, 10), max_tokens=20, ignore_eos=True))
    engine.step()
    page = sequence.pages.pop()
    with pytest.raises(AuditError):
        engine.audit()
    sequence.pages.append(page)
    engine.audit()
    engine.reset()


def test_no_compile_after_warm_up_and_few_programs(llm):
    stats = llm.engine.stats()
    assert stats.compiles_after_warmup == 0
    assert stats.programs <= 16


def test_a_compile_inside_a_run_is_counted_and_can_be_fatal():
    with tiny_llm(fail_on_compile=True) as other:
        runner = other.engine.runner
        shape = runner.shapes[0]
        program = runner._compiled[shape]

        def with_compile(*args):
            jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(np.float32(time.time())))
            return program(*args)

        runner._compiled[shape] = with_compile
        with pytest.raises(RuntimeError, match="compiled after warm-up"):
            other.generate([[1]], GREEDY)
        assert runner.num_compiles == 1


class Breaks:
    """Stands in for the programs of steps and fails as told, once for each entry: before or after it has run."""

    def __init__(self, runner, when, error):
        self.runner, self.when, self.error = runner, list(when), error
        self.shapes = dict(runner._compiled)
        steps = {shape: self.program(self.shapes[shape]) for shape in runner.shapes}
        runner._compiled = self.shapes | steps

    def program(self, real):
        def run(*args):
            when = self.when.pop(0) if self.when else None
            if when == "before":
                raise self.error
            out = real(*args)
            if when == "after":  # the cache has been donated and what came back is lost
                raise self.error
            return out

        return run


def drive(engine, prompts, each):
    """Step to the end, whatever a step raises; returns the sequences and what was raised."""
    sequences = [
        engine.add(Request(id=f"d{i}", prompt_token_ids=tuple(prompt), params=params))[0]
        for i, (prompt, params) in enumerate(zip(prompts, each, strict=True))
    ]
    raised = []
    while engine.has_work:
        try:
            engine.step()
        except (Exception, KeyboardInterrupt) as error:
            raised.append(error)
        engine.audit()
    return sequences, raised


@pytest.mark.parametrize("error", [RuntimeError("the device failed"), KeyboardInterrupt()], ids=["device", "ctrl-c"])
def test_a_step_lost_on_the_device_is_recomputed(alone, error):
    with tiny_llm() as other:
        other.engine.step()
        Breaks(other.engine.runner, [None, None, "after", None, None], error)
        sequences, raised = drive(other.engine, *BOTH)
        assert raised == [error]
        assert [sequence.output_token_ids for sequence in sequences] == alone
        assert other.engine.stats().held_pages == 0
        assert not other.engine._requests


def test_a_second_failure_on_the_device_ends_those_it_hit_and_nobody_else():
    with tiny_llm(max_num_seqs=4) as other:
        Breaks(other.engine.runner, [None, "after", "after"], RuntimeError("the device failed"))
        sequences, raised = drive(other.engine, PROMPTS[:6], [GREEDY] * 6)
        assert len(raised) == 2
        reasons = [str(sequence.finish_reason) for sequence in sequences]
        assert reasons.count("abort") == 4
        assert reasons[4:] == ["length", "length"] or "eos" in reasons[4:]
        assert other.engine.stats().held_pages == 0


def test_no_memory_for_another_cache_ends_who_ran_and_nobody_who_comes_later(alone, monkeypatch):
    with tiny_llm() as other:
        runner = other.engine.runner
        create, failing = runner._create_caches, [MemoryError("no room")]

        def create_later():
            if failing:
                raise failing.pop()
            return create()

        monkeypatch.setattr(runner, "_create_caches", create_later)
        Breaks(runner, [None, None, "after"], RuntimeError("the device failed"))
        sequences, raised = drive(other.engine, *BOTH)
        assert [type(error) for error in raised] == [MemoryError, RuntimeError]
        assert "abort" in {str(sequence.finish_reason) for sequence in sequences}
        assert other.engine.stats().held_pages == 0
        sequences, raised = drive(other.engine, *BOTH)
        assert not raised
        assert [sequence.output_token_ids for sequence in sequences] == alone


def test_a_step_that_never_reached_the_device_ends_its_own_requests_only(alone):
    with tiny_llm(max_num_seqs=4) as other:
        engine = other.engine
        real, calls = engine._packer.pack, []

        def pack(plan):
            calls.append(plan)
            if len(calls) == 2:
                raise OverflowError("a number that does not fit")
            return real(plan)

        engine._packer.pack = pack
        sequences, raised = drive(engine, *BOTH)
        assert [str(error) for error in raised] == ["a number that does not fit"]
        ended = {row.sequence for row in calls[1].rows}
        assert {s for s in sequences if s.finish_reason == "abort"} == ended
        for sequence, expected in zip(sequences, alone, strict=True):
            assert sequence in ended or sequence.output_token_ids == expected


class Trips:
    """A stop watch that raises at its third token."""

    def advance(self, output_token_ids):
        if len(output_token_ids) == 3:
            raise ValueError("tripped")
        return False


def test_a_commit_that_fails_half_way_leaves_the_engine_whole(alone):
    with tiny_llm(max_num_seqs=4) as other:
        engine = other.engine
        (bad,) = engine.add(
            request("bad", prompt=PROMPTS[3], temperature=0, max_tokens=9, ignore_eos=True, stop=[[96, 96]])
        )
        bad.detokenizer, bad.has_stop_strings = Trips(), True
        ends = engine.add(request("ends", prompt=PROMPTS[4], max_tokens=3, ignore_eos=True))  # in the same commit
        sequences, raised = drive(engine, *BOTH)
        assert [str(error) for error in raised] == ["tripped"]
        assert bad.finish_reason == "abort"
        assert ends[0].finish_reason in ("abort", "length")
        whole = [s for s in sequences if s.finish_reason != "abort"]
        assert len(whole) >= len(sequences) - 2
        assert all(s.output_token_ids == alone[int(s.request.id[1:])] for s in whole)


def test_ctrl_c_while_requests_are_added_leaves_none_behind(llm):
    engine, real = llm.engine, llm.engine.add

    def add(request):
        if request.id.endswith("-2"):
            signal.raise_signal(signal.SIGINT)
        return real(request)

    engine.add = add
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:5], GREEDY)
    finally:
        del engine.add
    assert not engine.has_work
    assert not engine._requests


def test_a_stream_dropped_on_another_thread_is_aborted_before_the_next_step(llm):
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    thread = threading.Thread(target=stream.close)
    thread.start()
    thread.join()
    llm.generate([[4]], SamplingParams(max_tokens=1))
    assert llm.engine.stats().held_pages == 0
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "bad", [{"stop_token_ids": [VOCAB]}, {"stop": [[1, VOCAB]]}, {"stop_token_ids": [(1 << 31) - 1]}]
)
def test_a_stop_id_outside_the_vocabulary_is_refused(llm, bad):
    with pytest.raises(RequestError, match=r"stop(_token_ids)? holds \d+, .* 97"):
        llm.generate([[1]], SamplingParams(min_tokens=1, max_tokens=4, **bad))
    with pytest.raises(ValueError, match="stop_token_ids=2147483648"):
        SamplingParams(stop_token_ids=[1 << 31])


@pytest.mark.parametrize("eos", [(VOCAB,), (-1,), (True,), tuple(range(17))])
def test_end_tokens_of_a_model_file_are_checked(eos):
    with pytest.raises(ValueError, match="eos_ids"):
        tiny_config(eos_ids=eos)


@pytest.mark.alone
def test_reset_costs_the_same_for_any_pool():
    def measure(num_pages):
        with tiny_llm(num_pages=num_pages, max_model_len=64) as other:
            times = []
            for i in range(30):
                for j in range(8):
                    other.engine.add(request(f"{i}-{j}", max_tokens=20))
                other.engine.step()
                start = time.thread_time()
                other.engine.reset()
                times.append(time.thread_time() - start)
            return np.median(times)

    small, large = measure(1000), measure(64_000)
    print(f"reset: {small * 1e6:.0f} us at 1,000 pages, {large * 1e6:.0f} us at 64,000")
    assert large < 2 * small + 20e-6


def test_any_knobs_stay_within_16_programs():
    from quire.config import EngineConfig
    from quire.engine.step_shapes import step_shapes

    powers = [1 << i for i in range(21)]
    for seqs in [n for n in (*powers, 3, 5, 48, 1000) if n <= 65_536]:
        for budget in [n for n in (*powers, 7, 100, 1000) if n >= seqs]:
            config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
            shapes = step_shapes(config)
            assert len(shapes) + 2 <= 16, (seqs, budget)
            assert len(set(shapes)) == len(shapes)
            assert min(shape.num_rows for shape in shapes) >= 4
            assert max(shape.num_tokens for shape in shapes) >= budget
            decode = [shape for shape in shapes if shape.decode]
            assert max(shape.num_rows for shape in decode) >= seqs
            assert shapes[-1].num_samples >= config.max_num_samples
