"""Padded and repeated heads, columns and tokens change no number, and weights come back bit by bit."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import AttentionConfig, ModelConfig
from quire.device import kv_cache
from quire.device.attention import get_backend
from quire.device.inputs import BatchLayout, default_samples
from quire.device.linear import MatmulKind
from quire.device.mesh import make_mesh
from quire.device.models import get_architecture, padding
from quire.device.models.layers import ModelStatics, decoder, unembed
from quire.device.models.padding import output_sources, padded_attention, padded_config, qkv_sources
from quire.device.models.weights import (
    abstract_params,
    arrays_from_tensors,
    params_from_tensors,
    place_params,
    prepare,
    replace_params,
    restore_params,
)
from quire.device.sampler import sample
from tests.effort import nightly, slow
from tests.tiny import check_schema, tiny_config, tiny_params, tiny_tensors

PLAIN, INT8 = MatmulKind(native=False, int8=False), MatmulKind(native=False, int8=True)
ACCELERATOR = MatmulKind(native=False, int8=False, input_second=True)
ODD = {"num_heads": 9, "num_kv_heads": 3, "vocab_size": 99, "intermediate_size": 50}
"""Nothing that a mesh splits divides by 2 or by 4."""


def devices(count: int):
    return make_mesh(jax.devices()[:count])


# -- which heads run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "num_devices", "padded"),
    [
        ((64, 8), 8, (64, 8)),
        ((64, 8), 16, (64, 16)),  # Llama-70B: each KV head twice, with half of its query heads
        ((64, 8), 64, (64, 64)),
        ((9, 3), 2, (12, 4)),  # SmolLM2-135M: a fourth KV head
        ((9, 3), 4, (12, 4)),
        ((9, 3), 16, (16, 16)),  # each KV head with each of its query heads, and 7 for nothing
        ((14, 2), 4, (16, 4)),  # Qwen2-0.5B: 7 query heads are 4 and 3
        ((5, 5), 4, (8, 8)),
        ((8, 1), 4, (8, 4)),
        ((40, 8), 12, (60, 12)),
    ],
)
def test_as_few_heads_on_a_device_as_can_be(heads, num_devices, padded):
    given = AttentionConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64)
    got = padded_attention(given, num_devices)
    assert (got.num_heads, got.num_kv_heads) == padded
    assert got.unpadded_heads in (heads, None)
    assert dataclasses.replace(got, num_heads=heads[0], num_kv_heads=heads[1], unpadded_heads=None) == given


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 20))
def test_every_query_head_runs_once_beside_its_own_kv_head(num_kv_heads, group_size, num_devices):
    public = AttentionConfig(num_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads, head_dim=8)
    padded = padded_attention(public, num_devices)
    assert padded.num_kv_heads % num_devices == 0
    qkv = qkv_sources(public, padded).reshape(padded.num_kv_heads, -1)
    output = output_sources(public, padded).reshape(padded.num_kv_heads, -1)
    assert sorted(output[output < public.num_heads]) == list(range(public.num_heads))
    assert set(range(num_kv_heads * (group_size + 2))) <= set(qkv.flat), "nothing is lost on the way back"
    for *queries, key, value in qkv:
        kv_head = key // (group_size + 2)
        assert (key, value) == (kv_head * (group_size + 2) + group_size, key + 1) or kv_head == num_kv_heads
        assert {query // (group_size + 2) for query in queries} == {kv_head}, "its own, or zeros all over"
    for place, head in np.ndenumerate(output):
        if head < public.num_heads:
            kv_head, query = divmod(head, group_size)
            assert qkv[place] == kv_head * (group_size + 2) + query


# -- the same numbers --------------------------------------------------------------------------------------------


def hidden_states(
    config: ModelConfig, num_devices: int = 1, *, kind: MatmulKind = PLAIN, attention: str = "xla", count: int = 13
):
    """Of 13 packed tokens, of which the first `count` are a prompt and the others padding; and the model's weights."""
    mesh, tokens = devices(num_devices), (np.arange(13, dtype=np.int32) * 7) % 90 + 1
    padded, backend = padded_config(config, mesh), get_backend(attention)
    statics = ModelStatics(config=padded, backend=backend, mesh=mesh)
    params = prepare(
        config, dict(place_params(config, tiny_params(config), mesh=mesh, dtype="float32")), mesh=mesh, kind=kind
    )
    size = {"num_pages": 4, "page_size": 4, "dtype": jnp.dtype("float32")}
    caches = (kv_cache.create(kv_cache.abstract(backend, padded.attention, **size, mesh=mesh)),)
    positions = np.arange(len(tokens), dtype=np.int32)
    layout = BatchLayout(
        positions_T=positions,
        destinations_T=np.where(positions < count, positions, 4 * 4),
        page_table_BP=np.arange(4, dtype=np.int32)[None],
        kv_lens_B=np.array([count], np.int32),
        cu_q_lens_B1=np.array([0, count], np.int32),
        decode=False,
    )
    run = jax.jit(partial(decoder, get_architecture(config.architecture).layer, statics=statics))
    hidden_TD, _ = run(params, caches, tokens, layout)
    return hidden_TD, params


def logits(config: ModelConfig, num_devices: int, **how) -> np.ndarray:
    """Of every position of one prompt, by the model alone."""
    hidden_TD, params = hidden_states(config, num_devices, **how)
    out = np.asarray(unembed(params, hidden_TD, padded_config(config, devices(num_devices))))
    assert np.isneginf(out[:, config.vocab_size :]).all()
    return out[:, : config.vocab_size]


CASES = [
    slow("llama", ODD, 2, "xla"),
    ("llama", ODD, 4, "native"),
    nightly("llama", {}, 4, "xla"),  # 2 KV heads, each twice
    slow("qwen2", {"num_heads": 7, "num_kv_heads": 1, "tie_embeddings": True}, 4, "xla"),  # 2 query heads each, and one
    slow("qwen3", ODD, 4, "reference"),
    slow("gemma2", {}, 2, "native"),
    slow("olmo2", ODD, 2, "xla"),  # the mean of a norm is over the 9 query heads and 3 KV heads of the model
    slow("olmo2", {"num_heads": 7, "num_kv_heads": 1}, 4, "xla"),  # its one KV head four times, and a query head twice
    slow("phi3", ODD, 2, "xla"),
    slow("gpt_oss", ODD, 2, "xla"),  # sinks and biases go with their heads
    *(nightly(name, ODD, 4, "xla") for name in ("gemma3", "granite", "mixtral", "qwen2", "qwen3_moe", "smollm3")),
]


@pytest.mark.parametrize(("architecture", "changes", "num_devices", "attention"), CASES)
def test_logits_are_those_of_one_device(architecture, changes, num_devices, attention):
    config = tiny_config(architecture, **changes)
    got = logits(config, num_devices, attention=attention)
    np.testing.assert_allclose(got, logits(config, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "num_devices"), [nightly({"num_heads": 7, "num_kv_heads": 1}, 4), (ODD, 2)])
def test_int8_is_int8_of_one_device(changes, num_devices):
    """The last bit of an activation may round otherwise: 1 / 127 / 127 of the largest of its token."""
    config = tiny_config("qwen2", **changes)
    np.testing.assert_allclose(logits(config, num_devices, kind=INT8), logits(config, 1, kind=INT8), atol=2e-3)


@pytest.mark.parametrize(
    "architecture", ["llama", slow("qwen2"), slow("gemma2"), slow("qwen3_moe"), slow("olmo2"), slow("gpt_oss")]
)
def test_padded_tokens_are_zeros_and_change_no_other(architecture):
    """Zeros are what the native library does not multiply: a step costs what its tokens do, padded or not."""
    config = tiny_config(architecture)
    padded_TD, _ = hidden_states(config, attention="native", count=9)
    assert not np.asarray(padded_TD)[9:].any()
    whole_TD, _ = hidden_states(config, attention="native")
    np.testing.assert_allclose(padded_TD[:9], whole_TD[:9], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_a_padded_vocabulary_is_no_part_of_what_is_sampled():
    """The mask of 64 tokens fills its words: padded logits have no bit there."""
    rng = np.random.default_rng(0)
    logits_SV = rng.standard_normal((4, 64)).astype(np.float32)
    more_SV = np.concatenate([logits_SV, np.full((4, 4), -np.inf, np.float32)], axis=1)
    inputs = dataclasses.replace(
        default_samples(4, 64),
        has_mask_S=np.ones(4, np.bool_),
        want_logprobs_S=np.ones(4, np.bool_),
        want_top_S=np.ones(4, np.bool_),
        mask_SW=rng.integers(0, 1 << 32, (4, 2), dtype=np.uint32),
        temperature_S=np.array([0, 0.7, 1, 2], np.float32),
        seed_S2=rng.integers(0, 1 << 32, (4, 2), dtype=np.uint32),
        top_n_sigma_S=np.array([0, 0, 1, 2], np.float32),
    )
    run = jax.jit(sample)
    pages = (np.zeros((1, 4), np.int32), np.zeros((4, 1), np.int32))
    expected, got = (run(values, inputs, *pages) for values in (logits_SV, more_SV))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, expected)


# -- weights, in and out -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("changes", [ODD, {}, {"num_heads": 7, "num_kv_heads": 1, "tie_embeddings": True}])
@pytest.mark.parametrize(("architecture", "kind"), [("qwen2", ACCELERATOR), ("llama", PLAIN), ("qwen3", PLAIN)])
def test_weights_come_back_bit_by_bit(architecture, kind, changes, num_devices):
    config, mesh = tiny_config(architecture, **changes), devices(num_devices)
    tensors, others = (tiny_tensors(config, seed=seed) for seed in (0, 1))
    exact = partial(params_from_tensors, config, mesh=make_mesh(), dtype="bfloat16")
    ready = prepare(config, params_from_tensors(config, tensors, mesh=mesh, dtype="bfloat16"), mesh=mesh, kind=kind)
    placed = jax.tree.map(lambda array: (array.shape, array.sharding), ready)
    same = partial(jax.tree.map, np.testing.assert_array_equal)
    same(restore_params(config, ready, mesh=mesh), exact(tensors))
    for new in (
        exact(others),
        jax.tree.map(np.asarray, exact(tensors)),
        arrays_from_tensors(config, others, dtype="bfloat16"),
        place_params(config, exact(tensors), mesh=mesh, dtype="bfloat16"),
    ):
        replace_params(config, ready, new, mesh=mesh, kind=kind)
        values = jax.tree.map(lambda array: array() if callable(array) else array, new)
        same(restore_params(config, ready, mesh=mesh), values)
        assert jax.tree.map(lambda array: (array.shape, array.sharding), ready) == placed


@pytest.mark.parametrize("kind", [PLAIN, INT8, ACCELERATOR], ids=["plain", "int8", "accelerator"])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_programs_are_traced_for_the_arrays_that_there_are(num_devices, kind):
    config, mesh = tiny_config("qwen2", **ODD, tie_embeddings=True), devices(num_devices)
    ready = prepare(config, params_from_tensors(config, tiny_tensors(config), mesh=mesh), mesh=mesh, kind=kind)
    schema = abstract_params(config, mesh=mesh, dtype="bfloat16", kind=kind)
    check_schema(ready, schema)


def test_on_one_device_nothing_is_made():
    config, mesh = tiny_config(**ODD), make_mesh()
    assert padded_config(config, mesh) is config
    given = tiny_params(config)
    ready = prepare(config, jax.tree.map(lambda x: x, given), mesh=mesh, kind=PLAIN)
    assert all(ready["layers"][1][name] is array for name, array in given["layers"][1].items())


@pytest.mark.parametrize("num_devices", [2, 4])
def test_no_device_ever_holds_a_whole_matrix(num_devices, monkeypatch):
    config, mesh = tiny_config(**ODD), devices(num_devices)
    programs, take = [], padding._take

    def watched(array, *args):
        programs.append(take.lower(array, *args).compile().as_text())
        return take(array, *args)

    monkeypatch.setattr(padding, "_take", watched)
    loaded = params_from_tensors(config, tiny_tensors(config), mesh=mesh, dtype="float32")
    arrays = [array for array in jax.tree.leaves(loaded) if array.ndim > 1]
    ready = prepare(config, loaded, mesh=mesh, kind=PLAIN)
    arrays += [array for array in jax.tree.leaves(ready) if array.ndim > 1]
    arrays += [array for array in jax.tree.leaves(restore_params(config, ready, mesh=mesh)) if array.ndim > 1]
    for array in arrays:
        assert {shard.data.size for shard in array.addressable_shards} == {array.size // num_devices}
    assert programs
    assert not any("all-gather" in program or "all-reduce" in program for program in programs)
