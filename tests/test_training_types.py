"""One type for sampling and training: masters are cast where an engine wants less, and gradients reach any tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, ModelConfig, SamplingParams
from quire.train import logprobs
from quire.weights import from_huggingface
from tests.tiny import VOCAB, tiny_config, tiny_params, tiny_tensors

KNOBS = {"page_size": 16, "num_pages": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32, "quiet": True}
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 20)).astype(np.int32)
PROMPT, DRAWN = list(map(int, TOKENS[0])), SamplingParams(seed=1, max_tokens=12, ignore_eos=True, logprobs=0)


def drawn_and_trained(llm: LLM, params) -> tuple[np.ndarray, np.ndarray]:
    """The log-probabilities of sampled tokens, by the engine and by the training step, both with their defaults."""
    (output,) = llm.generate([PROMPT], DRAWN, progress=False)
    tokens = np.asarray([PROMPT + output.outputs[0].token_ids])
    trained = jax.jit(lambda params: logprobs(params, tokens, llm.model_config, start=len(PROMPT)))(params)
    return np.asarray([token.logprob for token in output.outputs[0].logprobs]), np.asarray(trained)[0]


def test_float32_masters_give_equal_log_probabilities_with_every_default():
    """`from_params`, `set_weights`, `from_huggingface` and `logprobs` agree on a type when none is given."""
    config = tiny_config()
    masters, others = tiny_params(config), from_huggingface(tiny_tensors(config, 5), config, dtype="float32")
    with LLM.from_params(config, masters, **KNOBS) as llm:
        assert llm.engine.config.dtype == "bfloat16"
        np.testing.assert_array_equal(*drawn_and_trained(llm, masters))
        llm.set_weights(others)
        np.testing.assert_array_equal(*drawn_and_trained(llm, others))
        llm.set_weights(from_huggingface(tiny_tensors(config), config), copy=False)
        np.testing.assert_array_equal(*drawn_and_trained(llm, masters))
    assert masters["embed"].dtype == jnp.float32, "the caller's own stay as they are"


def test_rounding_that_was_not_asked_for_is_reported(capsys):
    config, knobs = tiny_config(), KNOBS | {"quiet": False}
    with LLM.from_params(config, tiny_tensors(config), **knobs):
        assert (
            "the weights are float32 and are rounded to bfloat16; dtype='float32' keeps them" in capsys.readouterr().err
        )
    with LLM.from_params(config, tiny_params(config), dtype="bfloat16", **knobs):
        assert "rounded" not in capsys.readouterr().err


def test_weights_that_have_been_rounded_are_refused_with_the_cast_to_use():
    config = tiny_config()
    expected = r"params\['embed'\] is bfloat16 and the engine computes in float32.*astype\('float32'\).*dtype='float32'"
    with pytest.raises(ValueError, match=expected):
        LLM.from_params(config, tiny_params(config, "bfloat16"), dtype="float32", **KNOBS)
    with pytest.raises(ValueError, match=expected):
        jax.jit(lambda params: logprobs(params, TOKENS, config, dtype="float32"))(tiny_params(config, "bfloat16"))
    with LLM.from_params(config, tiny_params(config), dtype="float32", **KNOBS) as llm:
        with pytest.raises(ValueError, match=expected):
            llm.set_weights(from_huggingface(tiny_tensors(config), config))
        integers = jax.tree.map(lambda x: x.astype(jnp.int8), tiny_params(config))
        with pytest.raises(ValueError, match=r"params\['embed'\] is int8.*bfloat16, float16, float32, float64"):
            llm.set_weights(integers)


# -- a researcher's own model ---------------------------------------------------------------------------------------


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def own_forward(tensors: dict[str, jax.Array], tokens_BW: np.ndarray, config: ModelConfig) -> jax.Array:
    """A Llama in plain jax.numpy under Hugging Face names, as a researcher writes one: logits."""
    tokens_BW = jnp.asarray(tokens_BW)
    width = tokens_BW.shape[1]
    attention = config.attention[0]
    N, K, H = attention.num_heads, attention.num_kv_heads, attention.head_dim
    angles_WH = jnp.arange(width)[:, None] * 10_000.0 ** (-jnp.arange(0, H, 2) / H)
    cos, sin = jnp.cos(angles_WH)[:, None], jnp.sin(angles_WH)[:, None]

    def norm(x, name):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + config.norm_eps) * tensors[name]

    def rotate(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = tensors["model.embed_tokens.weight"][tokens_BW]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."

        def matmul(x, name, layer=layer):
            return x @ tensors[f"{layer}{name}.weight"].T

        h = norm(x, f"{layer}input_layernorm.weight")
        q, k, v = (
            matmul(h, f"self_attn.{name}_proj").reshape(*tokens_BW.shape, heads, H)
            for name, heads in (("q", N), ("k", K), ("v", K))
        )
        k, v = (jnp.repeat(each, N // K, 2) for each in (rotate(k), v))
        scores = jnp.einsum("bqnh,bcnh->bnqc", rotate(q), k) / H**0.5
        scores = jnp.where(jnp.tri(width, dtype=bool), scores, -jnp.inf)
        h = jnp.einsum("bnqc,bcnh->bqnh", jax.nn.softmax(scores), v).reshape(*tokens_BW.shape, -1)
        x = x + matmul(h, "self_attn.o_proj")
        h = norm(x, f"{layer}post_attention_layernorm.weight")
        x = x + matmul(jax.nn.silu(matmul(h, "mlp.gate_proj")) * matmul(h, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T


def own_logprobs(tensors, config):
    scores = jax.nn.log_softmax(own_forward(tensors, TOKENS, config))[:, :-1]
    return jnp.take_along_axis(scores, TOKENS[:, 1:, None], -1)[..., 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_through_from_huggingface_is_that_of_the_models_own_forward(dtype):
    """In bfloat16 the engine's rounding is in it, and masters in float32 keep the gradient's own type."""
    config = tiny_config()
    assert config.attention[0].rotary.theta == 10_000.0
    tensors = {name: jnp.asarray(x) for name, x in tiny_tensors(config).items()}
    weights = np.random.default_rng(1).standard_normal((2, 19)).astype(np.float32)

    def ours(tensors):
        params = from_huggingface(tensors, config, dtype="float32")
        return jnp.sum(weights * logprobs(params, TOKENS, config, dtype=dtype))

    def own(tensors):
        return jnp.sum(weights * own_logprobs(tensors, config))

    expected = jax.grad(own)(tensors)
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))) if dtype == "float32" else (jax.grad,):
        got = transform(ours)(tensors)
        assert got.keys() == expected.keys()
        if dtype == "float32":
            for name, slope in expected.items():
                assert float(jnp.abs(got[name] - slope).max()) < 1e-4 * float(jnp.abs(slope).max()), name
        else:
            one, other = (np.concatenate([np.ravel(tree[name]) for name in tree]) for tree in (got, expected))
            assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.98
