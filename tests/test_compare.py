"""`quire.weights.compare` names a forgotten transpose, and agrees with a model that is mapped as it should be."""

import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM
from quire.weights import compare
from tests.test_training_types import own_forward
from tests.tiny import VOCAB, tiny_config, tiny_tensors

CONFIG = tiny_config()
TENSORS = {name: jnp.asarray(tensor) for name, tensor in tiny_tensors(CONFIG).items()}
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 24))
KNOBS = {"page_size": 16, "num_pages": 16, "max_num_seqs": 2, "max_num_batched_tokens": 32, "quiet": True}
Q, O = ([f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2)] for name in "qo")  # noqa: E741


def forward(tokens):
    return own_forward(TENSORS, tokens, CONFIG)


def compared(given, dtype="float32", **knobs):
    with LLM.from_params(CONFIG, given, dtype=dtype, **KNOBS, **knobs) as llm:
        return compare(llm, forward, TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_is_mapped_well_agrees(dtype):
    found = compared(TENSORS, dtype)
    assert found.matches, str(found)
    assert str(found).startswith("The two models agree: log-probabilities differ by ")
    assert 0 < found.mean_difference <= found.max_difference


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("planted", [Q, O, Q + O, O[1:]], ids=["q", "o", "q and o", "o of one layer"])
def test_a_forgotten_transpose_is_named(planted, dtype):
    found = compared(TENSORS | {name: TENSORS[name].T for name in planted}, dtype)
    assert not found.matches
    assert set(found.transposed) == set(planted)
    assert f"Transpose these tensors: {', '.join(found.transposed)}." in str(found)


def test_a_transpose_whose_effect_is_below_the_tolerance_is_named_too():
    """Weights of a model that has just been initialised are small: shapes and numbers look right."""
    small = {name: x * 0.008 if "proj" in name else x for name, x in TENSORS.items()}
    with LLM.from_params(CONFIG, small | {O[0]: small[O[0]].T}, dtype="float32", **KNOBS) as llm:
        found = compare(llm, lambda tokens: own_forward(small, tokens, CONFIG), TOKENS)
    assert found.mean_difference < found.tolerance
    assert found.transposed == (O[0],)
    assert not found.matches


def test_another_difference_is_not_taken_for_a_transpose():
    found = compared(TENSORS | {"model.norm.weight": 1.5 * TENSORS["model.norm.weight"]})
    assert not found.matches
    assert found.transposed == ()
    assert "No transposed matrix explains it. Position 1 differs already" in str(found)
    swapped = {
        name: x.reshape(-1, 2, 4, 32).swapaxes(1, 2).reshape(x.shape) for name, x in TENSORS.items() if name in Q
    }
    found = compared(TENSORS | swapped)
    assert "Position 1 agrees" in str(found), "the pairs of the rotary embedding are neighbours"


def test_a_quantised_engine_is_compared_without_a_search():
    found = compared(TENSORS, "bfloat16", quantize="int8")
    assert found.transposed == ()
    assert found.max_difference > 0


def test_mistakes_are_named():
    with LLM.from_params(CONFIG, TENSORS, dtype="float32", **KNOBS) as llm:
        with pytest.raises(ValueError, match=r"forward\(tokens\) returned \[2, 97\]: logits are \[2, 24, 97\]"):
            compare(llm, lambda tokens: forward(tokens)[:, 0], TOKENS)
        with pytest.raises(ValueError, match=r"tokens is int64\[24\]"):
            compare(llm, forward, TOKENS[0])
