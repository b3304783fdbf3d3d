"""The policy of a training step: its gradient, its padding, its errors. Its bits are test_same_bits.py's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import RolloutBatch, SamplingParams
from quire.device.models import ARCHITECTURES
from quire.train import logprobs
from tests.effort import nightly, slow
from tests.tiny import VOCAB, tiny_config, tiny_llm, tiny_params

NAMES = ["llama", slow("gemma3"), slow("gpt_oss")]
NAMES += [nightly(name) for name in sorted(ARCHITECTURES.keys() - {"llama", "gemma3", "gpt_oss"})]
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (3, 40)).astype(np.int32)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def gradient(params, config, dtype, weights) -> np.ndarray:
    def loss(params):
        return jnp.sum(logprobs(params, TOKENS, config, dtype=dtype) * weights)

    return flat(jax.jit(jax.grad(loss))(params))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_plain_jax_in_float32(name):
    config = tiny_config(name)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), tiny_params(config, "float32", 1))
    weights = np.random.default_rng(1).standard_normal((3, 39)).astype(np.float32)
    ours, plain = (gradient(params, config, dtype, weights) for dtype in ("bfloat16", "float32"))
    assert ours.dtype == plain.dtype
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(plain), rel=0.02)
    assert ours @ plain / np.linalg.norm(ours) / np.linalg.norm(plain) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_plain_jax_computes_what_the_engine_does(name):
    """In float32, where the function and its gradient are one program."""
    config = tiny_config(name)
    with tiny_llm(config, max_num_batched_tokens=16) as llm:
        expected = np.stack(llm.score(TOKENS.tolist()))
        got = jax.jit(lambda params: logprobs(params, TOKENS, config, dtype="float32"))(llm.params)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_the_gradient_points_where_the_loss_falls():
    """Against differences of the function itself, in float32."""
    config = tiny_config()
    params = tiny_params(config, "float32", 1)

    def loss(params):
        return jnp.mean(logprobs(params, TOKENS, config, dtype="float32", temperature=1.3))

    value, slope = jax.jit(jax.value_and_grad(loss))(params)
    square = sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(slope))
    step = 1e-3 / square
    moved = jax.jit(loss)(jax.tree.map(lambda x, g: x + step * g, params, slope))
    assert float(moved - value) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_changes_nothing_and_gets_nothing(dtype):
    """On the left, on the right, and a row of it alone."""
    config = tiny_config()
    params = tiny_params(config, "float32", 1)
    lengths, before = (40, 17, 1, 0), (0, 9, 20, 0)
    tokens, mask = np.full((4, 48), 3, np.int32), np.zeros((4, 48), bool)
    for row, (length, first) in enumerate(zip(lengths, before, strict=True)):
        tokens[row, first : first + length] = TOKENS[row % 3, :length]
        mask[row, first : first + length] = True

    def loss(params, tokens, mask=None, start=1):
        return logprobs(params, tokens, config, mask=mask, start=start, dtype=dtype)

    got = np.asarray(jax.jit(loss)(params, tokens, mask))
    alone = np.asarray(jax.jit(loss)(params, TOKENS))
    for row, (length, first) in enumerate(zip(lengths, before, strict=True)):
        expected = np.zeros(47, np.float32)
        if length > 1:
            expected[first : first + length - 1] = alone[row, : length - 1]
        np.testing.assert_allclose(got[row], expected, atol=0 if dtype == "bfloat16" else 1e-4)
    late = jax.jit(lambda *args: loss(*args, start=11))(params, tokens, mask)
    np.testing.assert_allclose(late, got[:, 10:], atol=0 if dtype == "bfloat16" else 1e-4)

    def total(params, tokens):
        return jnp.sum(loss(params, tokens, mask))

    slope, other = (flat(jax.jit(jax.grad(total))(params, tokens)) for tokens in (tokens, np.where(mask, tokens, 50)))
    assert np.abs(slope).max() > 0
    np.testing.assert_array_equal(slope, other)


CUTS = [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9, "temperature": 0.8}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncated_log_probabilities_are_those_of_what_the_engine_drew_from(cut, dtype):
    config = tiny_config(eos_ids=())
    prompts = [row[:8].tolist() for row in TOKENS]
    params = SamplingParams(**{"temperature": 1.0} | cut, max_tokens=12, seed=3, logprobs=0)
    with tiny_llm(config, dtype=dtype, page_size=16) as llm:
        batch = RolloutBatch.of(llm.generate(prompts, params, progress=False))
        tokens = np.concatenate([batch.prompts, batch.tokens], axis=1)
        got = jax.jit(lambda params: logprobs(params, tokens, config, start=8, dtype=dtype, **cut))(llm.params)
    np.testing.assert_allclose(got, batch.processed_logprobs, atol=0 if dtype == "bfloat16" else 1e-4)
    assert np.abs(batch.processed_logprobs - batch.logprobs).max() > 0.05, "the two kinds differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_that_is_cut_off_has_no_probability_and_no_gradient(dtype):
    config = tiny_config()
    params = tiny_params(config, "float32", 1)

    def policy(params):
        return logprobs(params, TOKENS, config, top_k=30, dtype=dtype)

    cut_off = np.isneginf(np.asarray(policy(params)))
    assert 0.3 < cut_off.mean() < 0.95
    for rows, is_moved in ((cut_off, False), (~cut_off, True)):
        slope = flat(jax.grad(lambda params, rows=rows: jnp.sum(jnp.where(rows, jnp.exp(policy(params)), 0.0)))(params))
        assert np.isfinite(slope).all()
        assert (np.abs(slope).max() > 0) == is_moved


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": TOKENS[0]}, r"tokens \(40,\): tokens are \[rows, length\]"),
        ({"mask": np.ones((3, 39), bool)}, r"mask \(3, 39\): .* mask has their shape"),
        ({"start": 0}, "start=0 must be from 1"),
        ({"start": 40}, "start=40 must be from 1, .* to 39, the last of a row"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k=-1"),
    ],
)
def test_what_cannot_be_scored_is_refused(given, message):
    config = tiny_config()
    given = {"tokens": TOKENS} | given
    with pytest.raises(ValueError, match=message):
        logprobs(tiny_params(config, "float32", 1), given.pop("tokens"), config, **given)
