"""Runs in the environment of .ci/tunix-env: a model of Tunix and Quire on its weights, log-probabilities of both.

Prints one JSON object: name of the model -> [largest difference, largest log-probability].
"""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

from quire import LLM
from quire.config import RotaryConfig
from quire.weights import from_tunix
from tests.tiny import VOCAB, tiny_config

LENGTH = 20
IDS = np.arange(3, 3 + LENGTH) * 7 % 90 + 1
ROTARY = RotaryConfig(theta=1e6)
"""Tunix's Qwen3 and Llama rotate by this base, whatever `rope_theta` of their config says."""
SHAPE = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
LORA = {"rank": 3, "alpha": 6.0}


def randomise[Model: nnx.Module](model: Model) -> Model:
    """Weights that make every part of it matter, LoRA factors too."""
    rng = np.random.default_rng(0)

    def draw(array: jax.Array) -> jax.Array:
        values = rng.standard_normal(array.shape).astype(np.float32)
        return jnp.asarray(0.3 * values if array.ndim > 1 else 1 + 0.1 * values)

    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.Param)))
    return model


def compare(model, config, **how) -> list[float]:
    positions, mask = jnp.arange(LENGTH)[None], jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool))
    logits, _ = model(jnp.asarray(IDS)[None], positions, None, mask)
    expected = jax.nn.log_softmax(logits[0].astype(jnp.float32))[np.arange(LENGTH - 1), IDS[1:]]
    params = from_tunix(nnx.state(model, nnx.Param), config, dtype="float32", **how)
    knobs = {
        "dtype": "float32",
        "matmul": "xla",
        "attention": "xla",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_rounds": 1,
    }
    with LLM.from_params(config, params, quiet=True, **knobs) as llm:
        got = np.array(llm.score(IDS.tolist()))
    return [float(np.abs(got - np.asarray(expected)).max()), float(np.abs(expected).max())]


def compare_qwen3() -> list[float]:
    config = tiny_config("qwen3", rotary=ROTARY, norm_eps=1e-6)
    model = qwen3.Qwen3(
        qwen3.ModelConfig(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **SHAPE), rngs=nnx.Rngs(0)
    )
    provider = qwix.LoraProvider(module_path=".*(q|v|o|gate|down)_proj", **LORA)
    adapted = qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(0), **model.get_model_input())
    return compare(randomise(adapted), config, lora_alpha=LORA["alpha"])


def compare_llama3() -> list[float]:
    config = tiny_config("llama", rotary=ROTARY, norm_eps=1e-5)
    shape = llama3.ModelConfig(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-5, **SHAPE)
    return compare(randomise(llama3.Llama3(shape, rngs=nnx.Rngs(0))), config)


def compare_gemma3() -> list[float]:
    """Five layers with a window, then one without."""
    config = tiny_config(
        "gemma3",
        windows=(6,) * 5 + (None,),
        rotaries=(RotaryConfig(), RotaryConfig()),
        norm_eps=1e-6,
        tie_embeddings=True,
        softmax_scale=8**-0.5,
    )
    shape = SHAPE | {"num_layers": 6}
    model = gemma3.Gemma3(gemma3.ModelConfig(num_embed=VOCAB, sliding_window_size=6, **shape), rngs=nnx.Rngs(0))
    return compare(randomise(model), config)


if __name__ == "__main__":
    comparisons: dict[str, Callable[[], list[float]]] = {
        "qwen3 with LoRA": compare_qwen3,
        "llama3": compare_llama3,
        "gemma3": compare_gemma3,
    }
    print(json.dumps({name: run() for name, run in comparisons.items()}))
