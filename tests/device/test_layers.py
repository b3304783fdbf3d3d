"""Layers of one model may attend differently, each as its own config says; held against the model in plain NumPy."""

import dataclasses

import jax
import numpy as np
import pytest

from quire.config import AttentionConfig, ModelConfig, RotaryConfig
from tests.effort import nightly
from tests.tiny import tiny_config, tiny_llm, tiny_tensors

LOCAL = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, window=5)
GLOBAL = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16, rotary=RotaryConfig(theta=1e6), softmax_scale=0.2)
CONFIG = tiny_config(attention=(LOCAL, LOCAL, GLOBAL, LOCAL))
PROMPT = [(7 * i) % 90 + 1 for i in range(40)]


def hidden_states(config: ModelConfig, tokens: list[int]) -> np.ndarray:
    """Of each token, after the last norm, computed densely in float64."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tiny_tensors(config).items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weights[name]

    x, positions = weights["model.embed_tokens.weight"][tokens], np.arange(len(tokens))
    for i, attention in enumerate(config.attention):
        prefix, heads, size = f"model.layers.{i}.", attention.num_heads, attention.head_dim

        def project(x, name, prefix=prefix):
            return x @ weights[f"{prefix}{name}.weight"].T

        def rotated(x, size=size, theta=attention.rotary.theta):
            angles = positions[:, None, None] * theta ** -(np.arange(0, size, 2) / size)
            a, b = np.split(x.reshape(len(tokens), -1, size), 2, axis=-1)
            return np.concatenate(
                [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
            )

        normed = norm(x, f"{prefix}input_layernorm.weight")
        q, k = rotated(project(normed, "self_attn.q_proj")), rotated(project(normed, "self_attn.k_proj"))
        v = project(normed, "self_attn.v_proj").reshape(len(tokens), -1, size)
        k, v = (np.repeat(x, attention.group_size, axis=1) for x in (k, v))
        behind = positions[:, None] - positions[None, :]
        seen = (behind >= 0) & (behind < (attention.window or len(tokens)))
        scores = np.where(seen, np.einsum("qnh,cnh->nqc", q, k) * attention.scale, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + project(np.einsum("nqc,cnh->qnh", shares, v).reshape(-1, heads * size), "self_attn.o_proj")
        normed = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate = project(normed, "mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(normed, "mlp.up_proj"), "mlp.down_proj")
    return norm(x, "model.norm.weight")


def logprobs(config: ModelConfig, tokens: list[int]) -> np.ndarray:
    """Of each token after the first."""
    logits = hidden_states(config, tokens) @ tiny_tensors(config)["lm_head.weight"].T.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "num_devices"),
    [
        ("native", 1),
        ("xla", 2),
        nightly("reference", 1),
    ],
)
def test_layers_differ_in_window_heads_head_size_scale_and_rotary_base(attention, num_devices):
    with tiny_llm(CONFIG, num_devices, attention=attention, max_num_seqs=1, max_num_batched_tokens=16) as llm:
        np.testing.assert_allclose(llm.score(PROMPT), logprobs(CONFIG, PROMPT), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"window": 6}, nightly({"rotary": RotaryConfig(theta=2e4)}), nightly({"softmax_scale": 0.3})]
)
def test_what_one_layer_says_is_heard(change):
    other = dataclasses.replace(LOCAL, **change)
    changed = dataclasses.replace(CONFIG, attention=(LOCAL, other, GLOBAL, LOCAL))
    assert np.abs(logprobs(changed, PROMPT) - logprobs(CONFIG, PROMPT)).max() > 1e-2
    with tiny_llm(changed, max_num_seqs=1) as llm:
        np.testing.assert_allclose(llm.score(PROMPT), logprobs(changed, PROMPT), atol=2e-4)


@pytest.mark.slow
def test_a_layer_is_traced_once_for_each_kind_and_so_is_a_rotary_table():
    with tiny_llm(CONFIG, attention="xla", matmul="xla", max_num_seqs=1) as llm:
        runner = llm.engine.runner
        shape = next(shape for shape in runner.shapes if not shape.decode)
        program = runner.programs.trace(shape).jaxpr
    layers = [eqn for eqn in program.eqns if eqn.params.get("name") == "decoder_layer"]
    assert (len(layers), len({id(eqn.params["jaxpr"]) for eqn in layers})) == (4, 2)
    assert sum(eqn.primitive is jax.lax.cos_p for eqn in program.eqns) == 2
