"""Weights in a trainer's shapes become those of the same model, and whatever is wrong with them is told by name.

The trees are made here from Hugging Face tensors as the trainers' own converters make them.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config import RopeScaling, RotaryConfig
from quire.device.mesh import make_mesh
from quire.device.models import ARCHITECTURES
from quire.device.models.weights import params_from_tensors
from quire.weights import from_huggingface, from_maxtext, from_tunix
from tests.tiny import tiny_config, tiny_tensors

LLAMA3 = RotaryConfig(
    scaling=RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=64)
)
SOURCES = ("huggingface", "tunix", "maxtext", "maxtext scanned")


def tensors_of(config, seed: int = 3) -> dict[str, np.ndarray]:
    tensors = tiny_tensors(config, seed)
    if config.tie_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def expected_of(config, tensors, dtype: str = "float32"):
    return params_from_tensors(config, tensors, mesh=make_mesh(), dtype=dtype)


def nested(flat: dict[str, np.ndarray], separator: str = ".") -> dict:
    tree = {}
    for path, array in flat.items():
        *keys, last = path.split(separator)
        place = tree
        for key in keys:
            place = place.setdefault(int(key) if key.isdigit() else key, {})
        place[last] = jnp.asarray(array)
    return tree


def tunix_tree(config, tensors) -> dict:
    gemma = config.architecture == "gemma3"
    norm = "scale" if gemma else "w"
    flat = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        f"final_norm.{norm}": tensors["model.norm.weight"],
    }
    if not config.tie_embeddings:
        flat["lm_head.w"] = tensors["lm_head.weight"].T
    for i, attention in enumerate(config.attention):
        hf, layer = f"model.layers.{i}.", f"layers.{i}."
        D, H = config.hidden_size, attention.head_dim
        q, k, v = (tensors[f"{hf}self_attn.{name}_proj.weight"].T.reshape(D, -1, H) for name in "qkv")
        o = tensors[f"{hf}self_attn.o_proj.weight"].T.reshape(-1, H, D)
        flat |= {f"{layer}mlp.{x}_proj.kernel": tensors[f"{hf}mlp.{x}_proj.weight"].T for x in ("gate", "up", "down")}
        if not gemma:
            flat |= {f"{layer}attn.{name}_proj.w": array for name, array in zip("qkvo", (q, k, v, o), strict=True)}
            names = ["input_layernorm", "post_attention_layernorm"]
            flat |= {f"{layer}{name}.w": tensors[f"{hf}{name}.weight"] for name in names}
            if config.architecture == "qwen3":
                flat |= {f"{layer}attn.{x}_norm.w": tensors[f"{hf}self_attn.{x}_norm.weight"] for x in "qk"}
            continue
        q, k, v = (array.transpose(1, 0, 2) for array in (q, k, v))
        if attention.num_heads == attention.num_kv_heads:
            flat[f"{layer}attn.qkv_einsum.w"] = np.stack([q, k, v])
        else:
            flat |= {f"{layer}attn.q_einsum.w": q, f"{layer}attn.kv_einsum.w": np.stack([k, v])}
        flat[f"{layer}attn.attn_vec_einsum.w"] = o
        for name, hf_name in (
            ("pre_attention_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("pre_ffw_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
            ("attn._query_norm", "self_attn.q_norm"),
            ("attn._key_norm", "self_attn.k_norm"),
        ):
            flat[f"{layer}{name}.scale"] = tensors[f"{hf}{hf_name}.weight"]
    return nested(flat)


def maxtext_layer(config, attention, tensors, hf: str, *, adjacent: bool) -> dict[str, np.ndarray]:
    D, H, gemma = config.hidden_size, attention.head_dim, config.architecture == "gemma3"
    q, k, v = (tensors[f"{hf}self_attn.{name}_proj.weight"].T.reshape(D, -1, H) for name in "qkv")
    if adjacent:
        q, k = (np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape) for x in (q, k))
    if config.architecture == "llama":
        q = q / np.float32(H**0.5)
    layer = {f"self_attention-{name}-kernel": x for name, x in (("query", q), ("key", k), ("value", v))}
    layer["self_attention-out-kernel"] = tensors[f"{hf}self_attn.o_proj.weight"].T.reshape(-1, H, D)
    for name, hf_name in (("wi_0", "gate_proj"), ("wi_1", "up_proj"), ("wo", "down_proj")):
        layer[f"mlp-{name}-kernel"] = tensors[f"{hf}mlp.{hf_name}.weight"].T
    norms = {
        "pre_self_attention_layer_norm": "input_layernorm",
        "post_self_attention_layer_norm": "post_attention_layernorm",
    }
    if gemma:
        norms = {
            "pre_self_attention_norm": "input_layernorm",
            "post_self_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    if config.architecture != "llama":
        norms |= {"self_attention-query_norm": "self_attn.q_norm", "self_attention-key_norm": "self_attn.k_norm"}
    return layer | {f"{name}-scale": tensors[f"{hf}{hf_name}.weight"] + gemma for name, hf_name in norms.items()}


def maxtext_tree(config, tensors, *, scanned: bool, adjacent: bool = False) -> dict:
    gemma, D = config.architecture == "gemma3", config.hidden_size
    width = np.float32(jnp.bfloat16(D**0.5)) if gemma else np.float32(1)
    flat = {
        "token_embedder-embedding": tensors["model.embed_tokens.weight"] * width,
        "decoder-decoder_norm-scale": tensors["model.norm.weight"] + gemma,
    }
    if not config.tie_embeddings:
        flat["decoder-logits_dense-kernel"] = tensors["lm_head.weight"].T
    layers = [
        maxtext_layer(config, attention, tensors, f"model.layers.{i}.", adjacent=adjacent)
        for i, attention in enumerate(config.attention)
    ]
    if not scanned:
        flat |= {f"decoder-layers_{i}-{name}": x for i, layer in enumerate(layers) for name, x in layer.items()}
    elif not gemma:
        flat |= {f"decoder-layers-{name}": np.stack([layer[name] for layer in layers], 1) for name in layers[0]}
    else:
        rest = len(layers) % 6
        for i in range(6 if len(layers) >= 6 else 0):
            same = layers[i : len(layers) - rest : 6]
            flat |= {f"decoder-layers-layers_{i}-{x}": np.stack([layer[x] for layer in same], 1) for x in layers[0]}
        for i, layer in enumerate(layers[len(layers) - rest :]):
            flat |= {f"decoder-layers_remainder-layers_{i}-{name}": x for name, x in layer.items()}
    return {"params": nested(flat, "-")}


def tree_of(source: str, config, tensors, **how):
    if source == "huggingface":
        return {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    if source == "tunix":
        return tunix_tree(config, tensors)
    return maxtext_tree(config, tensors, scanned=source.endswith("scanned"), **how)


def mapped(source: str, tree, config, **how):
    functions = {"huggingface": from_huggingface, "tunix": from_tunix, "maxtext": from_maxtext}
    return functions[source.split(maxsplit=1)[0]](tree, config, **how)


def assert_same(got, expected, rtol: float = 0.0) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=rtol, atol=rtol), got, expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("architecture", "tied"), [("qwen3", True), ("qwen3", False), ("llama", False), ("gemma3", True)]
)
def test_a_trainers_weights_are_those_of_the_model(architecture, tied, source):
    """Bit for bit where the trainer only reshapes, without a transfer; MaxText also scales and adds."""
    config = tiny_config(architecture, tie_embeddings=tied)
    tensors = tensors_of(config)
    tree = tree_of(source, config, tensors)
    mapped(source, tree, config, dtype="float32")  # what is compiled may hold constants
    with jax.transfer_guard("disallow_explicit"):
        got = mapped(source, tree, config, dtype="float32")
    assert_same(got, expected_of(config, tensors), rtol=1e-6 if source.startswith("maxtext") else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_architecture_is_mapped_from_hugging_face_names(architecture):
    config = tiny_config(architecture)
    tensors = tensors_of(config)
    got = from_huggingface(tree_of("huggingface", config, tensors), config, dtype="bfloat16")
    assert_same(got, expected_of(config, tensors, "bfloat16"))


@pytest.mark.parametrize("source", SOURCES)
def test_weights_in_bfloat16_are_mapped_too(source):
    """Some of what is joined goes through float32 on the way, some does not."""
    config = tiny_config("llama")
    tensors = {name: np.asarray(x, jnp.bfloat16).astype(np.float32) for name, x in tensors_of(config).items()}
    tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree_of(source, config, tensors))
    got = mapped(source, tree, config, dtype="bfloat16")
    assert_same(got, expected_of(config, tensors, "bfloat16"), rtol=2**-7 if source.startswith("maxtext") else 0.0)


@pytest.mark.parametrize("num_layers", [2, 6, 13])
def test_scanned_blocks_of_gemma_may_leave_layers_over(num_layers):
    config = tiny_config("gemma3", windows=(5, None, 5, None, 5, 5, 5, None, 5, 5, 5, 5, 5)[:num_layers])
    tensors = tensors_of(config)
    got = mapped("maxtext scanned", tree_of("maxtext scanned", config, tensors), config, dtype="float32")
    assert_same(got, expected_of(config, tensors), rtol=1e-6)


@pytest.mark.parametrize("scanned", [False, True])
def test_rotary_pairs_of_llama_3_1_are_put_apart(scanned):
    config = tiny_config("llama", rotary=LLAMA3)
    tensors = tensors_of(config)
    tree = maxtext_tree(config, tensors, scanned=scanned, adjacent=True)
    assert_same(from_maxtext(tree, config, dtype="float32"), expected_of(config, tensors), rtol=1e-6)
    plain = maxtext_tree(config, tensors, scanned=scanned)
    got = from_maxtext(plain, config, dtype="float32", rotary_pairs_adjacent=False)
    assert_same(got, expected_of(config, tensors), rtol=1e-6)


def test_as_many_kv_heads_as_heads_are_one_projection_in_tunix():
    config = tiny_config("gemma3", num_kv_heads=4, tie_embeddings=True)
    tensors = tensors_of(config)
    assert "qkv_einsum" in tunix_tree(config, tensors)["layers"][0]["attn"]
    assert_same(from_tunix(tunix_tree(config, tensors), config, dtype="float32"), expected_of(config, tensors))


# -- what is wrong -----------------------------------------------------------------------------------------------

LEAVES = {
    "huggingface": ("model.layers.1.mlp.down_proj.weight",),
    "tunix": ("layers", 1, "mlp", "down_proj", "kernel"),
    "maxtext": ("params", "decoder", "layers_1", "mlp", "wo", "kernel"),
    "maxtext scanned": ("params", "decoder", "layers", "mlp", "wo", "kernel"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("fault", ["dropped", "renamed", "transposed", "integers", "donated"])
def test_a_wrong_leaf_is_named(source, fault):
    config = tiny_config("qwen3")
    tree = tree_of(source, config, tensors_of(config))
    *keys, last = LEAVES[source]
    place: Any = tree
    for key in keys:
        place = place[key]
    name = ".".join(str(key) for key in LEAVES[source] if key != "params")
    match fault:
        case "dropped":
            del place[last]
            says = f"1 missing: {name}"
        case "renamed":
            place["other"] = place.pop(last)
            says = f"1 missing: {name}; 1 not part of this model: {name.removesuffix(last)}other"
        case "transposed":
            place[last] = place[last].T
            says = f"1 of another shape: {name} is"
        case "integers":
            place[last] = place[last].astype(jnp.int8)
            says = f"{name} is int8"
        case _:
            place[last].delete()
            says = f"tensor {name} is deleted"
    with pytest.raises(ValueError, match=re.escape(says)):
        mapped(source, tree, config)


def test_what_cannot_be_mapped_is_told():
    config = tiny_config("olmo2")
    for function, name in ((from_tunix, "Tunix"), (from_maxtext, "MaxText")):
        with pytest.raises(ValueError, match=f"{name} weights of architecture 'olmo2'.*Hugging Face names"):
            function({}, config)
    with pytest.raises(ValueError, match="dtype='int8' must be one of"):
        from_tunix({}, tiny_config("qwen3"), dtype="int8")
    with pytest.raises(ValueError, match="rotary_pairs_adjacent=True is for Llama"):
        from_maxtext({}, tiny_config("qwen3"), rotary_pairs_adjacent=True)
    tied = tiny_config("llama", tie_embeddings=True)
    tensors = tree_of("huggingface", tied, tensors_of(tied))
    tensors["lm_head.weight"] = jnp.copy(tensors["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"lm_head.weight is given, and the config says tie_embeddings=True"):
        from_huggingface(tensors, tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    from_huggingface(tensors, tied)
    on_host = tensors_of(tied)
    on_host["lm_head.weight"] = on_host["model.embed_tokens.weight"].copy()  # as PyTorch's state_dict has it
    from_huggingface(on_host, tied)
    on_host["lm_head.weight"][0] += 1
    with pytest.raises(ValueError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        from_huggingface(on_host, tied)
    with pytest.raises(ValueError, match=r"two arrays are called model.norm.weight: give one of them"):
        from_huggingface(tensors | {"base_model.model.model.norm.weight": tensors["model.norm.weight"]}, tied)


# -- LoRA, meshes, use -------------------------------------------------------------------------------------------


def test_low_rank_factors_are_merged():
    rng, rank, alpha = np.random.default_rng(0), 3, 6.0
    config = tiny_config("gemma3", tie_embeddings=True)
    tensors = tensors_of(config)
    D, N, K, H = config.hidden_size, 4, 2, 8

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    tree = tunix_tree(config, tensors)
    attn = tree["layers"][1]["attn"]
    factors = {
        "q_einsum": (normal(D, rank), normal(rank, N, H)),
        "kv_einsum": (normal(D, rank), normal(rank, 2, K, H)),
        "attn_vec_einsum": (normal(N, H, rank), normal(rank, D)),
    }
    for name, (a, b) in factors.items():
        attn[name] |= {"w_lora_a": a, "w_lora_b": b}
    with pytest.raises(ValueError, match=r"layers.1.attn.q_einsum.w_lora_a is a LoRA factor: give lora_alpha"):
        from_tunix(tree, config)
    got = from_tunix(tree, config, dtype="float32", lora_alpha=alpha)

    merged, scale = dict(tensors), alpha / rank
    hf = "model.layers.1.self_attn."
    (qa, qb), (kva, kvb), (oa, ob) = (tuple(map(np.asarray, pair)) for pair in factors.values())
    merged[f"{hf}q_proj.weight"] = tensors[f"{hf}q_proj.weight"] + scale * (qa @ qb.reshape(rank, -1)).T
    for i, name in enumerate("kv"):
        delta = (kva @ kvb[:, i].reshape(rank, -1)).T
        merged[f"{hf}{name}_proj.weight"] = tensors[f"{hf}{name}_proj.weight"] + scale * delta
    merged[f"{hf}o_proj.weight"] = tensors[f"{hf}o_proj.weight"] + scale * (oa.reshape(-1, rank) @ ob).T
    assert_same(got, expected_of(config, merged), rtol=1e-5)

    attn["q_einsum"]["w_lora_a"] = jnp.zeros(())
    with pytest.raises(ValueError, match=r"q_einsum.w_lora_a is \[\], expected \[32, 3\]"):
        from_tunix(tree, config, lora_alpha=alpha)
    attn["q_einsum"]["w_lora_a"] = factors["q_einsum"][0]
    del attn["q_einsum"]["w_lora_b"]
    with pytest.raises(ValueError, match=r"1 missing: layers.1.attn.q_einsum.w_lora_b"):
        from_tunix(tree, config, lora_alpha=alpha)


@pytest.mark.parametrize("adapter", ["", ".default"], ids=["saved", "in memory"])
def test_peft_factors_are_merged(adapter):
    rng, alpha = np.random.default_rng(0), 8.0
    config = tiny_config("llama")
    tensors = tensors_of(config)
    name = "model.layers.0.mlp.down_proj"
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 48), (32, 2)))
    given = {f"base_model.model.{key}": value for key, value in tensors.items()}
    given[f"base_model.model.{name}.base_layer.weight"] = given.pop(f"base_model.model.{name}.weight")
    given |= {f"base_model.model.{name}.lora_{x}{adapter}.weight": y for x, y in (("A", a), ("B", b))}
    merged = tensors | {f"{name}.weight": tensors[f"{name}.weight"] + alpha / 2 * (b @ a)}
    assert_same(
        from_huggingface(given, config, dtype="float32", lora_alpha=alpha), expected_of(config, merged), rtol=1e-5
    )


@pytest.mark.parametrize("num_devices", [2, 4])
def test_what_is_mapped_is_in_its_place_on_a_mesh(num_devices):
    mesh = make_mesh(jax.devices()[:num_devices])
    config = tiny_config("qwen3")
    tensors = tensors_of(config)
    tree = jax.device_put(tunix_tree(config, tensors), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    got = from_tunix(tree, config, dtype="float32", mesh=f"model={num_devices}")
    expected = params_from_tensors(config, tensors, mesh=mesh, dtype="float32")
    assert_same(got, expected)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, expected)


@pytest.mark.parametrize(("trainer", "engine"), [([0, 1], [0]), ([0], [0, 1]), ([1, 0], [0, 1]), ([2, 3], [0, 1])])
def test_weights_on_other_devices_are_moved(trainer, engine):
    devices = jax.devices()
    theirs, ours = (make_mesh([devices[i] for i in ids]) for ids in (trainer, engine))
    config = tiny_config("qwen3")
    tensors = tensors_of(config)
    tree = jax.device_put(tunix_tree(config, tensors), jax.sharding.NamedSharding(theirs, jax.sharding.PartitionSpec()))
    got = from_tunix(tree, config, dtype="float32", mesh=ours)
    expected = params_from_tensors(config, tensors, mesh=ours, dtype="float32")
    assert_same(got, expected)
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, expected)


@pytest.mark.slow
def test_an_engine_computes_with_mapped_weights_set_under_a_transfer_guard():
    config = tiny_config("qwen3")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tensors = tensors_of(config)
    with LLM.from_params(config, tensors, dtype="float32", quiet=True) as llm:
        expected = llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids
    tree = tunix_tree(config, tensors)
    with LLM.from_params(config, tensors_of(config, seed=8), dtype="float32", quiet=True) as llm:
        assert llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids != expected
        with jax.transfer_guard("disallow_explicit"):
            llm.set_weights(from_tunix(tree, config, dtype="float32"), copy=False)
        assert llm.generate([[3, 1, 4]], params)[0].outputs[0].token_ids == expected
