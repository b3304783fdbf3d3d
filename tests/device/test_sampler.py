"""The sampler draws what the distribution says, from the request's own counter, whoever shares the batch."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from quire.core.plan import Sample
from quire.core.request import Request
from quire.core.sampling_params import DECLARED, DRAWS, PENALTIES, SamplingParams
from quire.core.sequence import Sequence
from quire.device import native
from quire.device.inputs import NOT_FINITE, default_samples, mask_words, with_defaults
from quire.device.sampler import (
    PAGES_AT_ONCE,
    TILE,
    _count_seen,
    _cut_sigma,
    _deviation,
    _draw_tiled,
    sample,
    sample_natively,
    take_likeliest,
    token_logprobs,
    uniform,
)
from quire.device.top_k_top_p import top_k_top_p
from quire.engine.packer import pack_samples
from tests.effort import each_float_isa, nightly, slow

VOCAB = 1000
HAS_NATIVE = native.unavailable_reason() is None
jitted = jax.jit(sample, static_argnames=("native", "rows_at_once", "num_parts", "max_logprobs"))
each_draw = pytest.mark.parametrize("native", [False, *[True] * HAS_NATIVE], ids=["xla", *["native"] * HAS_NATIVE])
"""For tests of both ways to draw."""
CUTS = {"top_k": 5, "top_p": 0.6, "min_p": 0.2, "top_n_sigma": 1.0}
"""A typical value of each number that leaves tokens out."""
EACH_CUT = [{name: value} for name, value in CUTS.items()]


def run(logits_SV, samples, seen=((1, 1, 1, 1),), native: bool = HAS_NATIVE, **options):
    """`seen` is the one page of tokens that the samples' only row has."""
    samples = with_defaults(samples, default_samples(len(samples.packed_index_S), logits_SV.shape[1]))
    return jitted(logits_SV, samples, np.array(seen, np.int32), np.zeros((1, 1), np.int32), native=native, **options)


def inputs(params: list[SamplingParams], positions: list[int] | None = None, seeds=None, pad: int = 0, eos=frozenset()):
    samples = []
    for i, one in enumerate(params):
        request = Request(id=str(i), prompt_token_ids=(1,), params=one)
        seed = (seeds[i] if seeds else one.seed) or 0
        sequence = Sequence(request, index=0, arrival=i, seed=seed, max_tokens=9, eos_ids=frozenset(eos))
        samples.append(Sample(sequence, 0, i, positions[i] if positions else 5))
    return pack_samples(samples, len(params) + pad)


def with_masks(samples, allowed: list[list[int] | None], vocab: int = VOCAB):
    """Each sample may draw only what is listed for it; None for everything."""
    bits = np.zeros((len(samples.packed_index_S), 32 * mask_words(vocab)), bool)
    for i, ids in enumerate(allowed):
        bits[i, slice(None) if ids is None else ids] = True
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return dataclasses.replace(samples, mask_SW=words, has_mask_S=np.array([ids is not None for ids in allowed]))


def logits(rows: int, seed: int = 0, vocab: int = VOCAB, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def expected_distribution(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The textbook version, in float64."""
    x = row.astype(np.float64)
    if params.top_n_sigma:
        possible = x[x > -np.inf]
        x = np.where(x >= possible.max() - params.top_n_sigma * possible.std(), x, -np.inf)
    scaled = x / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.ones(len(p), bool)
    if params.top_k:
        kept[order[params.top_k :]] = False
    q = np.where(kept, p, 0)
    q /= q.sum()
    before = np.cumsum(q[order]) - q[order]
    if params.top_p < 1:
        kept[order[(before >= params.top_p) & (np.arange(len(p)) > 0)]] = False
    kept &= p >= params.min_p * p.max()
    q = np.where(kept, p, 0)
    return q / q.sum()


@each_draw
def test_greedy_takes_the_first_of_the_most_likely(native):
    x = logits(3)
    x[1, 700] = x[1, 30] = 50
    assert run(x, inputs([SamplingParams(temperature=0)] * 3), native=native).tokens_SR[:, 0].tolist() == [
        x[0].argmax(),
        30,
        x[2].argmax(),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        nightly({"temperature": 0.5}),
        {"top_k": 7},
        nightly({"top_k": 1}),
        nightly({"top_p": 0.6}),
        {"top_k": 40, "top_p": 0.5},
        nightly({"min_p": 0.2}),
        {"top_p": 0.9, "min_p": 0.1},
        nightly({"top_n_sigma": 1.5}),
        {"top_n_sigma": 2.0, "top_p": 0.9, "temperature": 3.0},
        nightly({"top_p": 0.999, "temperature": 3.0}),
        {"top_k": 356, "top_p": 0.97, "temperature": 4.0},
    ],
    ids=str,
)
@each_draw
def test_draws_follow_the_distribution(params, native):
    """20,000 draws at 20,000 positions against the textbook: never outside the cut, and chi-square small."""
    one = SamplingParams(**params)
    row = logits(1, spread=2.0)
    n = 4000
    counts = np.zeros(VOCAB)
    for batch in range(5):
        made = inputs([one] * n, list(range(batch * n, batch * n + n)))
        drawn = run(np.repeat(row, n, 0), made, native=native).tokens_SR[:, 0]
        counts += np.bincount(drawn, minlength=VOCAB)
    p = expected_distribution(row[0], one)
    assert counts[p == 0].sum() == 0
    # Pool rare tokens so that every cell expects at least 20 draws.
    order = np.argsort(-p)
    common = order[p[order] * 5 * n >= 20]
    cells = np.append(p[common], max(1 - p[common].sum(), 0)) * 5 * n
    seen = np.append(counts[common], 5 * n - counts[common].sum())
    chi2 = ((seen - cells) ** 2 / np.maximum(cells, 1e-9))[cells > 1e-6].sum()
    freedom = max(len(common), 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_there_is_a_typical_value_of_every_cut():
    assert {"temperature", *CUTS} == set(DRAWS)


@each_draw
def test_a_token_does_not_depend_on_batch_mates_or_their_cuts(native):
    """Nor does what it is drawn from."""
    mates = [
        SamplingParams(top_p=0.9999, temperature=9.0, seed=3),
        SamplingParams(temperature=0),
        SamplingParams(seed=6),
        *(SamplingParams(**cut, logprobs=4, seed=7 + i) for i, cut in enumerate(EACH_CUT)),
    ]
    x = logits(len(mates))
    together = run(x, inputs(mates), native=native)
    for i, one in enumerate(mates):
        alone = run(x[i : i + 1], inputs([one], pad=0), native=native)
        assert alone.tokens_SR[0, 0] == together.tokens_SR[i, 0], f"row {i} changed with its batch"
        if one.logprobs:
            tops = [(out.processed_top_ids_SRX, out.processed_top_logprobs_SRX) for out in (alone, together)]
            mine, ours = by_token(*tops[0], 0, VOCAB), by_token(*tops[1], i, VOCAB)
            np.testing.assert_allclose(mine, ours, rtol=1e-6)  # the same tokens; XLA sums their weights as it likes


ASKING = [
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {3: 4.0}, "logprobs": 2},
    {"top_n_sigma": 1.0},
    {"logprobs": 0},
    {"frequency_penalty": -2.0, "top_p": 0.7, "logprobs": 3},
]
"""More than a draw, in five ways."""


@each_draw
@pytest.mark.parametrize("num_asking", [0, 1, 5, 9])
def test_rows_that_ask_for_more_than_a_draw_are_what_they_are_alone_and_so_are_the_others(native, num_asking):
    """Wherever they are among nine, some with masks."""
    rng = np.random.default_rng(num_asking)
    asking = set(rng.permutation(9)[:num_asking].tolist())
    params = [SamplingParams(seed=i, **ASKING[i % len(ASKING)] if i in asking else {}) for i in range(9)]
    allowed = [rng.integers(0, VOCAB, 20).tolist() if i % 3 == 1 else None for i in range(9)]
    x, seen = logits(9), (rng.integers(0, VOCAB, 4).tolist(),)
    together = run(x, with_masks(inputs(params, [4] * 9), allowed), seen, native)
    for i, one in enumerate(params):
        alone = run(x[i : i + 1], with_masks(inputs([one], [4]), allowed[i : i + 1]), seen, native)
        token = int(together.tokens_SR[i, 0])
        assert token == alone.tokens_SR[0, 0]
        assert allowed[i] is None or token in allowed[i]
        if one.logprobs is not None:
            for name in ("logprobs_SR", "processed_logprobs_SR", "kept_mass_SR"):
                np.testing.assert_allclose(getattr(together, name)[i], getattr(alone, name)[0], rtol=1e-5, err_msg=name)
        if one.logprobs:
            np.testing.assert_array_equal(together.top_ids_SRX[i], alone.top_ids_SRX[0])


@pytest.mark.parametrize("name", [*DRAWS, *PENALTIES])
@each_draw
def test_every_declared_number_has_a_say_in_what_is_drawn_from(name, native):
    """Alone among requests that leave it out, somewhere in its range: another log-probability of what is drawn."""
    declared, params = DECLARED[name], [SamplingParams(seed=1, logprobs=0)]
    assert declared.limits is not None
    low, high, _ = declared.limits
    values = {declared.kind(low + (high - low) / 2**i) for i in range(32)}
    params += [dataclasses.replace(params[0], **{name: value}) for value in values]
    # Each token of the page, 5 to 8, is likely; the output begins at the second.
    x = np.repeat(logits(1), len(params), 0)
    x[:, 5:9] += 10
    output = run(x, inputs(params, [4] * len(params)), seen=((5, 6, 7, 8),), native=native)
    drawn = [
        (int(t), float(p)) for t, p in zip(output.tokens_SR[:, 0], output.processed_logprobs_SR[:, 0], strict=True)
    ]
    assert any(one[0] != drawn[0][0] or abs(one[1] - drawn[0][1]) > 1e-3 for one in drawn[1:]), f"{name}: no influence"


def test_seed_index_and_position_each_change_the_draw_and_repeat_it():
    x = np.zeros((1, VOCAB), np.float32)

    def draw(seed=1, index=0, position=9):
        made = inputs([SamplingParams(seed=seed)], [position])
        return int(run(x, dataclasses.replace(made, index_S=np.array([index], np.int32))).tokens_SR[0, 0])

    assert draw() == draw()
    assert (
        len({draw(), draw(seed=2), draw(index=1), draw(position=10), draw(seed=1 << 40), draw(seed=1 | 1 << 33)}) == 6
    )


@each_draw
def test_log_probabilities_are_the_models_own_whatever_was_cut(native):
    x = logits(2)
    out = run(
        x,
        inputs([SamplingParams(temperature=0.3, top_k=2, seed=1, logprobs=3), SamplingParams(temperature=0)]),
        native=native,
    )
    log_p = x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
    token = int(out.tokens_SR[0, 0])
    np.testing.assert_allclose(out.logprobs_SR[0, 0], log_p[0, token], atol=1e-5)
    best = np.argsort(-log_p[0])[:20]
    assert out.top_ids_SRX[0, 0].tolist() == best.tolist()
    np.testing.assert_allclose(out.top_logprobs_SRX[0, 0], log_p[0, best], atol=1e-5)


@pytest.mark.parametrize("vocab", [10, VOCAB])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_of_equal_alternatives_the_first_come_first(vocab, num_parts):
    """Also where the vocabulary is searched part by part: values that every part has several times."""
    x = np.random.default_rng(vocab).integers(0, 4, (3, vocab)).astype(np.float32)
    samples = inputs([SamplingParams(temperature=0, logprobs=20)] * 3)
    out = run(x, samples, native=False, num_parts=num_parts)
    best = np.argsort(-x, axis=-1, kind="stable")[:, :20]
    assert out.top_ids_SRX[:, 0, : best.shape[1]].tolist() == best.tolist()


@pytest.mark.parametrize("how", [{}, {"rows_at_once": 2}, {"num_parts": 5}, *[{"native": True}] * HAS_NATIVE], ids=str)
@pytest.mark.parametrize("max_logprobs", [1, 100, 1024])
def test_alternatives_are_as_many_as_the_program_has_room_for(max_logprobs, how):
    """By every way of sampling, of logits in no order, in falling order, in rising order, and with many equal ones."""
    x = np.stack([logits(1)[0], *np.sort(logits(2)), np.round(logits(1)[0]) + 0.0])  # XLA ranks -0.0 below 0.0
    x[1] = x[1, ::-1]
    samples = inputs([SamplingParams(top_k=50, logprobs=20, seed=1), *[SamplingParams(temperature=0, logprobs=20)] * 3])
    out = run(x, samples, **{"native": False} | how, max_logprobs=max_logprobs)
    best = np.argsort(-x, axis=-1, kind="stable")[:, :max_logprobs]
    missing = max(max_logprobs - VOCAB, 0)
    log_p = x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))
    expected = np.take_along_axis(log_p, best, axis=-1)
    np.testing.assert_array_equal(out.top_ids_SRX[:, 0], np.pad(best, ((0, 0), (0, missing))))
    np.testing.assert_allclose(
        out.top_logprobs_SRX[:, 0], np.pad(expected, ((0, 0), (0, missing)), constant_values=-np.inf), atol=2e-5
    )
    num_listed = np.isfinite(out.processed_top_logprobs_SRX[:, 0]).sum(-1)
    assert num_listed.tolist() == [min(50, max_logprobs), 1, 1, 1]
    np.testing.assert_array_equal(out.processed_top_ids_SRX[0, 0, :50], best[0, :50])


@each_draw
def test_a_target_is_scored_not_drawn(native):
    x = logits(1)
    made = inputs([SamplingParams(seed=1)])
    made = dataclasses.replace(made, target_S=np.array([123], np.int32), want_logprobs_S=np.array([True]))
    out = run(x, made, native=native)
    assert out.tokens_SR[0, 0] == 123
    np.testing.assert_allclose(
        out.logprobs_SR[0, 0], x[0, 123] - np.log(np.exp(x[0].astype(np.float64)).sum()), atol=1e-5
    )


@each_draw
@pytest.mark.parametrize("fields", [{}, *EACH_CUT, {"top_k": 40, "top_p": 0.7}], ids=str)
def test_a_target_is_scored_under_what_would_be_drawn_from(fields, native):
    """One that is left, one that is cut off, and the mass of what is left: as float64 finds them."""
    params = SamplingParams(temperature=0.7, **fields)
    x = logits(2, vocab=500)
    x[1] = x[0]
    probabilities = expected_distribution(x[0], params)
    left, cut = int(probabilities.argmax()), int(x[0].argmin())
    made = dataclasses.replace(
        inputs([params] * 2), target_S=np.array([left, cut], np.int32), want_logprobs_S=np.array([True, True])
    )
    out = run(x, made, native=native)
    assert out.tokens_SR[:, 0].tolist() == [left, cut]
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(out.processed_logprobs_SR[:, 0], np.log(probabilities[[left, cut]]), rtol=1e-4)
    whole = expected_distribution(x[0], SamplingParams(temperature=0.7))
    np.testing.assert_allclose(out.kept_mass_SR[:, 0], [whole[probabilities > 0].sum()] * 2, rtol=1e-4)
    assert (out.processed_logprobs_SR[1, 0] == -np.inf) == bool(fields)


@each_draw
@pytest.mark.parametrize("fields", [{"top_k": 3}, {"top_p": 0.5}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_what_was_drawn_scores_as_it_was_drawn(fields, native):
    """Bit for bit, and nothing that was drawn is found impossible: not beside equals, nor where rounding decides."""
    params = SamplingParams(temperature=1.7, seed=3, logprobs=0, **fields)
    x = logits(64, vocab=200, spread=1.0).round(1)
    x[::2] += np.random.default_rng(1).standard_normal(x[::2].shape).astype(np.float32) * 1e-7
    made = inputs([params] * 64, positions=list(range(1, 65)))
    drawn = run(x, made, native=native)
    scored = run(x, dataclasses.replace(made, target_S=drawn.tokens_SR[:, 0]), native=native)
    np.testing.assert_array_equal(scored.processed_logprobs_SR, drawn.processed_logprobs_SR)
    np.testing.assert_array_equal(scored.kept_mass_SR, drawn.kept_mass_SR)
    assert np.isfinite(drawn.processed_logprobs_SR).all()


@pytest.mark.parametrize("kind", [np.int32, np.uint16, np.uint32])
@each_draw
def test_the_score_of_a_token_is_the_same_whatever_type_its_id_has(kind, native):
    x, tokens = logits(3), np.array([0, 123, VOCAB - 1])
    expected = np.log(expected_distribution(x[1], SamplingParams(temperature=0.7)))[123]
    score = jax.jit(partial(token_logprobs, temperature=0.7, native=native))
    np.testing.assert_allclose(score(x, tokens.astype(kind))[1], expected, rtol=1e-5)
    assert np.isnan(score(x, np.full(3, VOCAB, kind))).all(), "there is no such token"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@each_draw
def test_forbidden_tokens_are_never_drawn(temperature, native):
    x = np.zeros((200, VOCAB), np.float32)
    x[:, [3, 4]] = 20
    params = SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=(4,))
    drawn = run(x, inputs([params] * 200, list(range(200)), eos={3}), native=native).tokens_SR
    assert not np.isin(drawn, [3, 4]).any()
    free = SamplingParams(temperature=temperature, stop_token_ids=(4,))
    assert np.isin(run(x, inputs([free] * 200, list(range(200)), eos={3}), native=native).tokens_SR, [3, 4]).all()


@each_draw
def test_a_vocabulary_smaller_than_a_tile(native):
    x = logits(1, vocab=11)
    for params in ({"top_k": 3}, {"top_p": 0.5}, {}, {"logprobs": 20}):
        out = run(x, inputs([SamplingParams(seed=2, **params)]), native=native)
        assert 0 <= out.tokens_SR[0, 0] < 11
    for kind in ("top", "processed_top"):  # the last: all there are, and nothing behind them
        ids, values = (np.asarray(getattr(out, f"{kind}_{what}_SRX"))[0, 0] for what in ("ids", "logprobs"))
        assert sorted(ids[:11]) == list(range(11))
        assert np.isfinite(values[:11]).all()
        assert np.isneginf(values[11:]).all()


KINDS = {
    "spread": lambda x: x,
    "ties": np.round,
    "equal": np.zeros_like,
    "one": lambda x: np.where(np.arange(x.shape[1]) == 5, 60, x),
    "underflow": lambda x: 60 * x,
}


def random_cuts(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forty rows of logits of a kind, with a top-k and a top-p each."""
    rng = np.random.default_rng(3)
    x = KINDS[kind](rng.standard_normal((40, 700)) * np.linspace(0.1, 6, 40)[:, None]).astype(np.float32)
    top_k = rng.choice([0, 0, 1, 2, 7, 100, 699, 700, 5000], size=40).astype(np.int32)
    top_p = rng.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-6, 0.999], size=40).astype(np.float32)
    return x, top_k, top_p


def sorted_cut(weights: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """What a sort in float64 surely keeps, and what it keeps perhaps: within rounding of a token's edge."""
    left = np.argsort(-weights, kind="stable")[: top_k or None]
    if top_p == 1:
        return left, left
    before = np.cumsum(weights[left], dtype=np.float64) - weights[left]
    goal = float(top_p) * weights[left].sum(dtype=np.float64)
    return left[before < goal * (1 - 1e-6)], left[(before < goal * (1 + 1e-6)) | (np.arange(len(left)) == 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_is_what_sorting_would_cut(kind):
    x, top_k, top_p = random_cuts(kind)
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    weights[weights < 1e-37] = 0  # a device takes smaller numbers for 0
    kept = np.asarray(jax.jit(top_k_top_p)(weights, top_k, top_p))
    for row in range(len(x)):
        surely, perhaps = sorted_cut(weights[row], top_k[row], top_p[row])
        assert kept[row, np.argmax(weights[row])]
        assert set(surely) <= set(np.flatnonzero(kept[row])) <= set(perhaps)


@each_float_isa
@pytest.mark.parametrize("kind", KINDS)
def test_the_native_draw_is_where_the_number_points_among_what_sorting_keeps(kind, isa):
    """Against float64, row by row: which are kept, what they weigh, and the token whose stretch holds the point."""
    x, top_k, top_p = random_cuts(kind)
    rng = np.random.default_rng(4)
    temperature = rng.choice([0.0, 0.3, 1.0, 1.0, 2.5], size=len(x)).astype(np.float32)
    min_p = rng.choice([0.0, 0.0, 0.0, 1e-3, 0.6], size=len(x)).astype(np.float32)
    everybody = np.ones(len(x), np.bool_)
    chosen = {"temperature_S": temperature, "top_k_S": top_k, "top_p_S": top_p, "min_p_S": min_p}
    chosen |= {"want_logprobs_S": everybody, "want_top_S": everybody}
    made = dataclasses.replace(inputs([SamplingParams(seed=i) for i in range(len(x))]), **chosen)
    is_allowed = rng.random(x.shape) < rng.choice([0.0, 0.01, 0.9, 1.0], size=(len(x), 1))  # 1.0: a row without a mask
    is_allowed[:, 7] = True
    allowed = [None if row.all() else np.flatnonzero(row).tolist() for row in is_allowed]
    made = with_defaults(with_masks(made, allowed, x.shape[1]), default_samples(*x.shape))
    no_history = np.zeros((1, 1), np.int32)
    out = jax.jit(partial(sample_natively, instruction_set=isa))(x, made, no_history, no_history)
    out = jax.tree.map(lambda array: np.asarray(array)[:, 0], out)
    numbers = np.asarray(jax.jit(uniform)(made), np.float64)
    x = np.where(is_allowed, x, -np.inf)
    for row in range(len(x)):
        token, num_listed = out.tokens_SR[row], np.isfinite(out.processed_top_logprobs_SRX[row]).sum()
        order = np.argsort(-x[row], kind="stable")[:20]
        np.testing.assert_array_equal(out.processed_top_ids_SRX[row][:num_listed], order[:num_listed])
        if temperature[row] == 0:
            assert (token, num_listed, out.kept_mass_SR[row]) == (x[row].argmax(), 1, 1)
            assert out.processed_logprobs_SR[row] == 0
            continue
        weights = np.exp((x[row] - x[row].max()).astype(np.float64) / temperature[row])
        whole = weights.sum()
        weights[weights < 2.0**-126] = 0
        surely, perhaps = sorted_cut(weights, top_k[row], top_p[row])
        surely = surely[weights[surely] > min_p[row] * (1 + 1e-6)]
        perhaps = perhaps[weights[perhaps] >= min_p[row] * (1 - 1e-6)]
        assert min((weights[surely] > 0).sum(), 20) <= num_listed <= len(perhaps)
        assert token in perhaps
        assert weights[token] > 0
        if len(surely) == len(perhaps):
            kept = np.zeros_like(weights)
            kept[surely] = weights[surely]
            ends = np.cumsum(kept)
            np.testing.assert_allclose(out.kept_mass_SR[row], ends[-1] / whole, rtol=4e-6)
            np.testing.assert_allclose(
                out.processed_logprobs_SR[row], np.log(weights[token] / ends[-1]), rtol=1e-5, atol=1e-5
            )
            point = numbers[row] * ends[-1]
            slack = 1e-6 * ends[-1]
            assert ends[token] - kept[token] - slack <= point <= ends[token] + slack


@each_float_isa
def test_what_is_sampled_natively_is_what_xla_samples(isa):
    """Everything that a sample may ask for, at random, of histories of many pages: also what is asked for by nobody."""
    x, made, tokens_MZ, page_table_BP = random_samples(64)
    xla = jitted(x, made, tokens_MZ, page_table_BP)
    out = jax.jit(partial(sample_natively, instruction_set=isa))(x, made, tokens_MZ, page_table_BP)
    np.testing.assert_array_equal(out.tokens_SR, xla.tokens_SR)
    for name in ("logprobs_SR", "processed_logprobs_SR", "kept_mass_SR"):
        asked = made.want_logprobs_S
        np.testing.assert_allclose(getattr(out, name)[asked], getattr(xla, name)[asked], rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(getattr(out, name)[~asked], float(name == "kept_mass_SR"))
    asked = made.want_top_S
    for kind in ("top", "processed_top"):
        ids, values = (getattr(out, f"{kind}_{what}_SRX") for what in ("ids", "logprobs"))
        np.testing.assert_allclose(values[asked], getattr(xla, f"{kind}_logprobs_SRX")[asked], rtol=1e-5, atol=2e-5)
        is_there = np.isfinite(values[asked])
        np.testing.assert_array_equal(ids[asked][is_there], getattr(xla, f"{kind}_ids_SRX")[asked][is_there])
        assert not ids[~asked].any()
        assert not values[~asked].any()


NOT_NUMBERS = {
    "one NaN": {17: np.nan},
    "NaN at the beginning of tiles": {0: np.nan, 256: np.nan},
    "all NaN": {slice(None): np.nan},
    "two infinite": {3: np.inf, 300: np.inf},
    "nothing possible": {slice(None): -np.inf},
}


@pytest.mark.parametrize("row", NOT_NUMBERS)
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, *EACH_CUT], ids=str)
@each_draw
def test_a_row_that_is_not_finite_draws_no_token_and_others_are_not_affected(params, native, row):
    x = logits(2)
    for place, value in NOT_NUMBERS[row].items():
        x[0, place] = value
    out = run(x, inputs([SamplingParams(logprobs=5, seed=3, **params)] * 2), native=native)
    assert int(out.tokens_SR[0, 0]) == NOT_FINITE
    for ids in (out.tokens_SR[1:], out.top_ids_SRX, out.processed_top_ids_SRX):
        assert (np.asarray(ids) >= 0).all()
        assert (np.asarray(ids) < VOCAB).all()
    assert np.isnan(out.logprobs_SR[0, 0])
    assert np.isfinite(out.logprobs_SR[1, 0])


@pytest.mark.parametrize("num_samples", [1, 6, 64])
@each_draw
def test_a_nan_is_found_whatever_the_number_of_samples(num_samples, native):
    x = logits(num_samples)
    x[-1, 17] = np.nan
    out = run(x, inputs([SamplingParams(temperature=0)] * num_samples), native=native)
    found = np.asarray(out.tokens_SR[:num_samples, 0]) == NOT_FINITE
    assert found.tolist() == [False] * (num_samples - 1) + [True]


ASKED = {
    "temperature_S": (0.0, 0.7, 1.0, 1.0),
    "top_k_S": (0, 0, 3, 50),
    "top_p_S": (1.0, 1.0, 0.4, 0.9),
    "min_p_S": (0.0, 0.0, 0.1),
    "top_n_sigma_S": (0.0, 0.0, 1.5),
    "repetition_penalty_S": (1.0, 1.0, 1.3),
    "presence_penalty_S": (0.0, 0.0, -0.5),
    "frequency_penalty_S": (0.0, 0.0, 0.8),
}
"""What a sample may ask for, as it is most often and otherwise."""


def random_samples(num_samples: int):
    """Logits, samples that ask for this and that, and histories of many pages: what `sample` takes."""
    vocab, page_size, num_pages = 700, 4, 150
    rng = np.random.default_rng(5)
    x = np.round(logits(num_samples, vocab=vocab) * 4) / 4  # with ties
    tokens_MZ = rng.integers(0, vocab, (300, page_size)).astype(np.int32)
    page_table_BP = rng.integers(0, 300, (num_samples, num_pages)).astype(np.int32)
    defaults = default_samples(num_samples, vocab)
    asked = {
        name: rng.choice(values, num_samples).astype(getattr(defaults, name).dtype) for name, values in ASKED.items()
    }
    is_scored = np.arange(num_samples) % 5 == 4
    asked["temperature_S"][4] = 0  # as the packer has it for a sample that is scored by the model only
    made = dataclasses.replace(
        defaults,
        **asked,
        seed_S2=rng.integers(0, 2**32, (num_samples, 2), np.uint32),
        position_S=rng.integers(1, num_pages * page_size, num_samples).astype(np.int32),
        prompt_len_S=rng.integers(0, 300, num_samples).astype(np.int32),
        row_S=np.arange(num_samples, dtype=np.int32),
        bias_ids_SE=np.where(rng.random(defaults.bias_ids_SE.shape) < 0.01, 7, defaults.bias_ids_SE),
        bias_SE=np.ones_like(defaults.bias_SE),
        mask_SW=rng.integers(0, 2**32, defaults.mask_SW.shape, np.uint32) | np.uint32(1),
        target_S=np.where(is_scored, rng.integers(0, vocab, num_samples), defaults.target_S).astype(np.int32),
        has_mask_S=rng.random(num_samples) < 0.5,
        want_logprobs_S=np.arange(num_samples) % 3 > 0,
        want_top_S=np.arange(num_samples) % 3 > 1,
    )
    return x, made, tokens_MZ, page_table_BP


@pytest.mark.slow
@pytest.mark.parametrize("rows", [nightly(1), 5, nightly(16), nightly(40)])
def test_a_few_rows_at_a_time_draw_what_all_rows_do(rows):
    """21 samples, so that the last piece overlaps the one before it."""
    x, made, tokens_MZ, page_table_BP = random_samples(21)
    everybody = np.ones(21, np.bool_)
    made = dataclasses.replace(made, want_logprobs_S=everybody, want_top_S=everybody)
    whole = jitted(x, made, tokens_MZ, page_table_BP)
    pieces = jitted(x, made, tokens_MZ, page_table_BP, rows_at_once=rows)
    np.testing.assert_array_equal(pieces.tokens_SR, whole.tokens_SR)
    np.testing.assert_array_equal(pieces.top_ids_SRX, whole.top_ids_SRX)
    np.testing.assert_array_equal(pieces.processed_top_ids_SRX, whole.processed_top_ids_SRX)
    for name in ("logprobs_SR", "processed_logprobs_SR", "top_logprobs_SRX", "processed_top_logprobs_SRX"):
        np.testing.assert_allclose(getattr(pieces, name), getattr(whole, name), rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_history_longer_than_a_piece_of_it_is_counted_once_and_only_up_to_the_position():
    """Three pieces of pages, the last overlapping the second, against counting by hand."""
    vocab, page_size, num_pages = 50, 2, 2 * PAGES_AT_ONCE + 3
    rng = np.random.default_rng(6)
    tokens_MZ = rng.integers(0, vocab, (num_pages, page_size)).astype(np.int32)
    page_table_BP = rng.permutation(num_pages).astype(np.int32)[None]
    history = tokens_MZ[page_table_BP[0]].ravel()
    for position in (1, 2 * PAGES_AT_ONCE, 4 * PAGES_AT_ONCE + 1, num_pages * page_size):
        for prompt_len in (0, position // 3, position):
            made = dataclasses.replace(
                default_samples(1, vocab),
                position_S=np.array([position], np.int32),
                prompt_len_S=np.array([prompt_len], np.int32),
                frequency_penalty_S=np.array([1], np.float32),
            )
            seen, counts = jax.jit(_count_seen, static_argnums=0)(vocab, made, tokens_MZ, page_table_BP)
            np.testing.assert_array_equal(seen[0], np.bincount(history[:position], minlength=vocab) > 0)
            np.testing.assert_array_equal(counts[0], np.bincount(history[prompt_len:position], minlength=vocab))


def test_one_program_serves_every_mix():
    x = logits(2, seed=9)
    run(x, inputs([SamplingParams(temperature=0)] * 2))
    before = jitted._cache_size()
    for params in (
        *EACH_CUT,
        {"logprobs": 2},
        {"min_tokens": 2},
        {"presence_penalty": 1.0},
        {"logit_bias": {1: 2.0}},
    ):
        run(x, inputs([SamplingParams(**params), SamplingParams(temperature=0)]))
    assert jitted._cache_size() == before


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-36, 1e-37, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("cut", [{}, *EACH_CUT], ids=str)
@each_draw
def test_a_tiny_temperature_is_greedy(temperature, cut, native):
    x = logits(1)
    out = run(x, inputs([SamplingParams(temperature=temperature, seed=1, **cut)]), native=native)
    assert out.tokens_SR[0, 0] == x[0].argmax()


def test_a_point_on_the_edge_of_a_tile_never_lands_on_a_token_of_weight_0():
    """The rest after a tile's edge may round below zero; the first token of the next tile may be cut."""
    rng = np.random.default_rng(1)
    weights = rng.random((64, 4 * TILE)).astype(np.float32)
    weights[:, ::TILE] = 0  # the first token of every tile is cut
    weights[:, TILE - 1 :: TILE] = 0  # and the last
    totals = weights.reshape(64, 4, TILE).sum(-1, dtype=np.float32)
    edges = (np.cumsum(totals, axis=1, dtype=np.float32) / totals.sum(1, keepdims=True, dtype=np.float32)).ravel()
    step = np.float32(2**-23)
    for offset in range(-3, 4):
        uniform = np.clip(edges + offset * step, 0, 1 - step).astype(np.float32)
        repeated = np.repeat(weights, 4, axis=0)
        drawn = np.asarray(jax.jit(_draw_tiled)(repeated, uniform))
        assert (repeated[np.arange(256), drawn] > 0).all()


SEEN = ((3, 3, 7, 9),)
"""A row's only page: position 0 is the prompt, the rest is output, but for what lies beyond the position drawn."""


def penalised(row: np.ndarray, params: SamplingParams, tokens: list[int], prompt_len: int) -> np.ndarray:
    """By the book: repetition over prompt and output, presence and frequency over the output."""
    x = row.astype(np.float64).copy()
    for token in set(tokens):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(tokens[prompt_len:]):
        x[token] -= params.presence_penalty + params.frequency_penalty * tokens[prompt_len:].count(token)
    return x


def by_token(ids, logprobs, i: int, vocab: int = 12) -> np.ndarray:
    """Log-probabilities of the whole vocabulary, in order, from the alternatives of one sample."""
    found = np.full(vocab, np.nan)
    found[np.asarray(ids)[i, 0, :vocab]] = np.asarray(logprobs)[i, 0, :vocab]
    return found


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.8},
        {"frequency_penalty": -0.6},
        {"repetition_penalty": 0.5, "presence_penalty": -1.0, "frequency_penalty": 2.0},
    ],
    ids=str,
)
@each_draw
def test_penalties_are_those_of_the_book_and_only_for_who_asked(penalties, native):
    x = logits(2, seed=4, vocab=12)
    params = SamplingParams(temperature=0.7, seed=5, logprobs=12, **penalties)
    plain = SamplingParams(temperature=0.7, seed=5, logprobs=12)
    out = run(x, inputs([params, plain], positions=[3, 3]), SEEN, native)
    for i, (one, history) in enumerate([(params, [3, 3, 7]), (plain, [])]):
        p = expected_distribution(penalised(x[i], one, history, 1).astype(np.float32), one)
        top = by_token(out.processed_top_ids_SRX, out.processed_top_logprobs_SRX, i)
        np.testing.assert_allclose(top, np.log(p), atol=2e-5)
        raw = by_token(out.top_ids_SRX, out.top_logprobs_SRX, i)
        expected = x[i] - np.log(np.exp(x[i].astype(np.float64)).sum())
        np.testing.assert_allclose(raw, expected, atol=2e-5)


@each_draw
def test_a_bias_moves_a_token_and_min_tokens_still_forbids_the_end(native):
    x = logits(3, seed=6)
    pushed, banned = int(x[0].argmin()), int(x[1].argmax())
    params = [
        SamplingParams(temperature=0, logit_bias={pushed: 100.0}),
        SamplingParams(temperature=0, logit_bias={banned: -100.0, 3: 1.0}),
        SamplingParams(temperature=0, min_tokens=2, logit_bias={5: 100.0}),
    ]
    out = run(x, inputs(params, eos=[5]), native=native)
    assert out.tokens_SR[0, 0] == pushed
    assert out.tokens_SR[1, 0] not in (banned,)
    assert out.tokens_SR[2, 0] != 5


@pytest.mark.parametrize(
    "cut",
    [{}, *EACH_CUT, CUTS, {"top_k": 400, "top_p": 0.95}, {"temperature": 0.0}],
    ids=str,
)
@each_draw
def test_processed_log_probabilities_are_of_what_was_drawn_from(cut, native):
    x = logits(1, seed=8)
    params = SamplingParams(**{"temperature": 1.3, "seed": 3, "logprobs": 20} | cut)
    out = run(x, inputs([params]), native=native)
    token = int(out.tokens_SR[0, 0])
    if params.temperature == 0:
        assert out.processed_logprobs_SR[0, 0] == 0
        assert np.isneginf(out.processed_top_logprobs_SRX[0, 0, 1:]).all()
        return
    p = expected_distribution(x[0], params)
    np.testing.assert_allclose(out.processed_logprobs_SR[0, 0], np.log(p[token]), atol=3e-5)
    ids, values = out.processed_top_ids_SRX[0, 0], np.asarray(out.processed_top_logprobs_SRX[0, 0])
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(values, np.log(p[ids]), atol=3e-5)


@pytest.mark.parametrize(("cut", "kept"), [({"temperature": 0.0}, 1), ({"top_k": 2}, 2), ({"top_k": 3}, 3)], ids=str)
@each_draw
def test_of_tied_tokens_only_those_that_could_be_drawn_are_listed(cut, kept, native):
    x = np.full((1, 40), -9.0, np.float32)
    x[0, [7, 9, 11]] = 4.0
    out = run(x, inputs([SamplingParams(**{"temperature": 1.0, "seed": 1, "logprobs": 20} | cut)]), native=native)
    values = np.asarray(out.processed_top_logprobs_SRX[0, 0])
    assert np.isfinite(values).sum() == kept
    np.testing.assert_allclose(np.exp(values).sum(), 1, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 7, 32, 257, 512, 768, 1025])
def test_the_likeliest_is_the_first_of_the_highest_however_the_vocabulary_is_tiled(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 3, size=(40, vocab)).astype(np.float32)  # many ties
    tokens, peaks = take_likeliest(jax.numpy.asarray(logits))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_array_equal(peaks, logits.max(axis=1))
    logits[3, vocab // 2] = np.nan
    tokens, _ = take_likeliest(jax.numpy.asarray(logits))
    assert 0 <= int(tokens[3]) < vocab, "a row that is lost draws a token that exists"
    np.testing.assert_array_equal(np.delete(tokens, 3), np.delete(logits, 3, axis=0).argmax(axis=1))


def by_hand(row: np.ndarray, allowed: list[int] | None) -> np.ndarray:
    """Logits with -inf where a token is not allowed."""
    out = row.copy()
    if allowed is not None:
        out[np.setdiff1d(np.arange(len(row)), allowed)] = -np.inf
    return out


MASKS = [None, [3], [0, 999], [31, 32, 33, 63, 64], list(range(500, 1000)), None, list(range(0, 1000, 7))]


@pytest.mark.parametrize("vocab", [slow(33), slow(96), 97, slow(1000)])
@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, {}, *EACH_CUT, {"logit_bias": {7: 50.0, 8: 50.0}}],
    ids=str,
)
@each_draw
def test_only_what_a_mask_allows_is_drawn_and_greedy_takes_the_best_of_it(params, vocab, native):
    x = logits(len(MASKS), seed=10, vocab=vocab)
    allowed = [ids and [i % vocab for i in ids] for ids in MASKS]
    for position in range(30):
        made = inputs([SamplingParams(seed=i, **params) for i in range(len(MASKS))], [position] * len(MASKS))
        tokens = np.asarray(run(x, with_masks(made, allowed, vocab), native=native).tokens_SR[:, 0])
        free = np.asarray(run(x, made, native=native).tokens_SR[:, 0])
        for i, ids in enumerate(allowed):
            assert ids is None or tokens[i] in ids
            assert ids is not None or tokens[i] == free[i], "who has no mask draws what it would alone"
            if params == {"temperature": 0}:
                assert tokens[i] == by_hand(x[i], ids).argmax()


@pytest.mark.parametrize(
    "cut", [{}, *EACH_CUT, {"repetition_penalty": 1.4}, {"repetition_penalty": 1.4, "top_n_sigma": 1.0}], ids=str
)
@each_draw
def test_processed_log_probabilities_are_those_of_the_tokens_that_were_allowed(cut, native):
    x = logits(2, seed=12, vocab=64)
    ids = [3, 7, 31, 32, 50, 63]
    params = SamplingParams(**{"temperature": 0.8, "seed": 2, "logprobs": 20} | cut)
    out = run(x, with_masks(inputs([params] * 2, positions=[3, 3]), [ids, None], 64), SEEN, native)
    for i, allowed in enumerate((ids, None)):
        history = [3, 3, 7] if params.has_penalty else []
        p = expected_distribution(by_hand(penalised(x[i], params, history, 1).astype(np.float32), allowed), params)
        token = int(out.tokens_SR[i, 0])
        np.testing.assert_allclose(out.processed_logprobs_SR[i, 0], np.log(p[token]), atol=3e-5)
        tops, values = np.asarray(out.processed_top_ids_SRX[i, 0]), np.asarray(out.processed_top_logprobs_SRX[i, 0])
        assert set(tops[np.isfinite(values)]) <= set(range(64) if allowed is None else allowed)
        np.testing.assert_allclose(np.exp(values[np.isfinite(values)]), p[tops[np.isfinite(values)]], atol=3e-5)
        raw = x[i] - np.log(np.exp(x[i].astype(np.float64)).sum())
        np.testing.assert_allclose(out.logprobs_SR[i, 0], raw[token], atol=1e-5)
    assert np.isfinite(np.asarray(out.processed_top_logprobs_SRX[0, 0])).sum() <= len(ids)


def test_masks_are_the_same_program():
    x = logits(2, seed=9)
    run(x, inputs([SamplingParams(temperature=0)] * 2))
    before = jitted._cache_size()
    run(x, with_masks(inputs([SamplingParams(temperature=0)] * 2), [[1], None]))
    assert jitted._cache_size() == before


@pytest.mark.parametrize("vocab", [97, 1000])
def test_the_edge_of_top_n_sigma_is_the_same_to_the_last_bit_in_every_batch(vocab):
    x = logits(33, vocab=vocab)
    deviation = jax.jit(_deviation)
    together = np.asarray(deviation(x))
    for rows in (1, 2, 8):
        np.testing.assert_array_equal(deviation(x[:rows]), together[:rows])


def rows_for_sigma(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of any shape and level, with tokens that cannot be drawn, and how many deviations each row leaves."""
    rng = np.random.default_rng(vocab)
    n = np.array([0, 0.3, 1, 1, 1.5, 2, 3, 1e4, 1e-30], np.float32)
    x = (rng.standard_normal((len(n), vocab)) * rng.choice([0.1, 3, 40], size=(len(n), 1))).astype(np.float32)
    x += rng.choice([-200, 0, 90], size=(len(n), 1)).astype(np.float32)
    x[:, 1:][rng.random((len(n), vocab - 1)) < 0.3] = -np.inf
    x[3] = 2.5  # no deviation at all: nothing is left out
    return x, n


def surely_left_and_out(row: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens float64 leaves and which it does not; neither is what is within rounding of the edge."""
    row = row.astype(np.float64)
    possible = row[row > -np.inf]  # what cannot be drawn has no part in the deviation
    lowest = possible.max() - float(n) * possible.std() if n else -np.inf
    rounding = 1e-5 * possible.std() + 1e-6 * np.abs(possible).max()  # of the edge in float32
    surely_left = (row >= lowest + rounding) | (row == possible.max())
    return surely_left & (row > -np.inf), (row < lowest - rounding) | (row == -np.inf)


@pytest.mark.parametrize("vocab", [1, 7, 1000, 20_001])
def test_top_n_sigma_leaves_what_a_float64_leaves(vocab):
    x, n = rows_for_sigma(vocab)
    kept = np.asarray(jax.jit(_cut_sigma)(x, inputs([SamplingParams(top_n_sigma=float(one)) for one in n])))
    for row, one, left in zip(x, n, kept, strict=True):
        surely_left, surely_out = surely_left_and_out(row, one)
        is_left = left > -np.inf
        assert is_left[surely_left].all()
        assert not is_left[surely_out].any()
        np.testing.assert_array_equal(left[is_left], row[is_left])


@pytest.mark.parametrize("vocab", [1, 7, 1000, 20_001])
@each_draw
def test_a_token_has_no_probability_where_top_n_sigma_leaves_it_out(vocab, native):
    """The lowest of those that are left, and the highest of the others."""
    x, n = rows_for_sigma(vocab)
    for row, one in zip(x, n, strict=True):
        surely_left, surely_out = surely_left_and_out(row, one)
        left, out = (ids[np.argsort(row[ids])] for ids in (np.flatnonzero(surely_left), np.flatnonzero(surely_out)))
        edges = [left[0], *out[-1:]]
        params = [SamplingParams(temperature=50.0, top_n_sigma=float(one))] * len(edges)
        targets = {"target_S": np.array(edges, np.int32), "want_logprobs_S": np.ones(len(edges), np.bool_)}
        scored = run(np.stack([row] * len(edges)), dataclasses.replace(inputs(params), **targets), native=native)
        assert np.isfinite(scored.processed_logprobs_SR[0, 0])
        assert np.isneginf(scored.processed_logprobs_SR[1:, 0]).all()


def test_a_scored_token_is_scored_whatever_the_mask():
    x = logits(1)
    made = dataclasses.replace(
        inputs([SamplingParams()]), target_S=np.array([5], np.int32), want_logprobs_S=np.array([True])
    )
    out = run(x, with_masks(made, [[6]]))
    assert out.tokens_SR[0, 0] == 5
    np.testing.assert_allclose(
        out.logprobs_SR[0, 0], x[0, 5] - np.log(np.exp(x[0].astype(np.float64)).sum()), atol=1e-5
    )
