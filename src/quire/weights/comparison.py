"""Does the model in an engine compute what the model computes that its weights came from?

A matrix that was not transposed goes unnoticed where it is square: shapes agree, and texts look plausible. So the two
are compared by what they say of tokens; and where they differ, each square matrix is transposed on trial, to see
whether that explains the difference.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import ModelConfig
from quire.device.models.weight_specs import WeightSpec
from quire.device.models.weights import weight_specs
from quire.train import logprobs

if TYPE_CHECKING:
    from quire.llm import LLM

TOLERANCE = 1e-3
"""Mean difference of log-probabilities that rounding in float32 explains."""
ROUNDING = 3
"""How many times the mean difference between the engine and its own weights in float32 may be explained by rounding."""
QUANTISED_TOLERANCE = 0.2
"""The mean difference that is accepted of a quantised engine, whose weights cannot be read."""
EXPLAINED = 0.5
"""A transposition is a suspect if it leaves at most this part of the mean difference."""
MAX_KINDS = 5
"""Kinds of square matrices of which every combination is tried."""

Forward = Callable[[Any], Any]
"""Token ids `[B, W]` -> logits, or log-probabilities, `[B, W, V]`."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `print` shows the verdict."""

    max_difference: float
    """Largest absolute difference between two log-probabilities of a token."""
    mean_difference: float
    worst: tuple[int, int]
    """Row and position of the token with the largest difference."""
    first_difference: float
    """Mean difference at position 1, which depends on one token: attention has no choice there."""
    tolerance: float
    """Mean difference that the engine's rounding explains."""
    transposed: tuple[str, ...] = ()
    """Hugging Face names of the tensors which, once transposed, explain the difference."""

    @property
    def matches(self) -> bool:
        """True if the difference is within the tolerance and no transposed matrix explains it better."""
        return self.mean_difference <= self.tolerance and not self.transposed

    def __str__(self) -> str:
        row, position = self.worst
        numbers = (
            f"log-probabilities differ by {self.max_difference:.3g} at most (row {row}, position {position}) and by "
            f"{self.mean_difference:.3g} in the mean; tolerance {self.tolerance:.3g}"
        )
        if self.matches:
            return f"The two models agree: {numbers}."
        if self.transposed:
            return f"The two models differ: {numbers}. Transpose these tensors: {', '.join(self.transposed)}."
        return f"The two models differ: {numbers}. No transposed matrix explains it. {self._place}"

    @property
    def _place(self) -> str:
        if self.first_difference <= self.tolerance:
            return (
                "Position 1 agrees, so look at what depends on earlier tokens: q_proj, k_proj, the rotary embedding "
                "(theta, and whether its pairs are neighbours or half a head apart), the mask and the window."
            )
        return (
            "Position 1 differs already, so look at what does not depend on earlier tokens: v_proj, o_proj, the MLP, "
            "the norms and their epsilon, the embedding, the output head and whether it is tied."
        )


def compare(llm: "LLM", forward: Forward, tokens: Any) -> Comparison:
    """Compare an engine with the forward of the model that its weights came from.

    `tokens` are token ids `[B, W]`, random ones if need be. `forward(tokens)` returns logits `[B, W, V]`. The
    difference is that of the log-probabilities of `tokens[:, 1:]`. The tolerance is measured: it is 3 times what the
    engine differs by from its own weights in float32. `Comparison.transposed` names square matrices whose
    transposition explains the difference; these are not searched for in a quantised engine, whose weights cannot be
    read.
    """
    if not hasattr(llm, "score") or not callable(forward):
        kinds = f"llm is of type {type(llm).__name__} and forward of type {type(forward).__name__}"
        raise ValueError(f"{kinds}: give compare(llm, forward, tokens), an LLM, a function and token ids")
    tokens_BW = np.asarray(tokens)
    if tokens_BW.ndim != 2 or tokens_BW.shape[1] < 2 or not np.issubdtype(tokens_BW.dtype, np.integer):
        message = f"tokens is {tokens_BW.dtype}{list(tokens_BW.shape)}: give whole numbers [rows, at least 2]"
        raise ValueError(message)
    tokens_BW = tokens_BW.astype(np.int32)
    own_BX = _own(forward, tokens_BW, llm.model_config)
    engine_BX = np.stack(llm.score(tokens_BW.tolist()))
    off_BX = np.abs(own_BX - engine_BX)
    tolerance, transposed = QUANTISED_TOLERANCE, ()
    if not llm.engine.config.quantize:
        params, score = llm.params, jax.jit(partial(_score, llm.model_config, jnp.asarray(tokens_BW)))
        exact_BX = np.asarray(score(params))
        tolerance = TOLERANCE + ROUNDING * float(np.abs(engine_BX - exact_BX).mean())
        transposed = _transposed(llm.model_config, params, score, own_BX, float(np.abs(own_BX - exact_BX).mean()))
    row, column = np.unravel_index(np.argmax(np.where(np.isnan(off_BX), np.inf, off_BX)), off_BX.shape)
    return Comparison(
        max_difference=float(off_BX[row, column]),
        mean_difference=float(off_BX.mean()),
        worst=(int(row), int(column) + 1),
        first_difference=float(off_BX[:, 0].mean()),
        tolerance=tolerance,
        transposed=transposed,
    )


def _own(forward: Forward, tokens_BW: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The log-probabilities by the caller's model."""
    logits_BWV = jnp.asarray(forward(jnp.asarray(tokens_BW)))
    wanted = (*tokens_BW.shape, config.vocab_size)
    if logits_BWV.shape != wanted:
        raise ValueError(
            f"forward(tokens) returned {list(logits_BWV.shape)}: logits are {list(wanted)} for these tokens"
        )
    scores_BXV = jax.nn.log_softmax(logits_BWV[:, :-1].astype(jnp.float32), axis=-1)
    return np.asarray(jnp.take_along_axis(scores_BXV, tokens_BW[:, 1:, None], axis=-1)[..., 0])


def _score(config: ModelConfig, tokens_BW: jax.Array, params: Any) -> jax.Array:
    """The log-probabilities by the engine's weights, computed in float32."""
    exact = jax.tree.map(lambda array: array.astype(jnp.float32), params)
    return logprobs(exact, tokens_BW, config, dtype="float32")


def _transposed(
    config: ModelConfig, params: Any, score: Callable[[Any], jax.Array], own_BX: np.ndarray, before: float
) -> tuple[str, ...]:
    """The tensors whose transposition explains most of the mean difference `before`; () if there are none."""
    names = _square(config)
    if not names or not before > 0:
        return ()

    def difference(transposed: Iterable[str]) -> float:
        return float(np.abs(own_BX - np.asarray(score(_transpose(config, params, frozenset(transposed))))).mean())

    left, best = min((difference(trial), trial) for trial in _trials(names))
    return best if left <= EXPLAINED * before else ()


def _square(config: ModelConfig) -> list[str]:
    """The names of a model's square matrices."""
    tensors = [tensor for spec in jax.tree.leaves(weight_specs(config)) for tensor in spec.tensors]
    return [tensor.name for tensor in tensors if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] > 1]


def _trials(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Which tensors to transpose together: every combination of kinds in all layers, then each tensor by itself."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        kinds.setdefault(kind, []).append(name)
    sizes = range(1, len(kinds) + 1) if len(kinds) <= MAX_KINDS else (1, len(kinds))
    for size in sizes:
        for chosen in combinations(kinds.values(), size):
            yield tuple(name for each in chosen for name in each)
    yield from ((name,) for name in names)


def _transpose(config: ModelConfig, params: Any, names: Set[str]) -> Any:
    """The weights that would have been converted, had these tensors been given transposed."""
    return jax.tree.map(partial(_transpose_in, names=names), weight_specs(config), params)


def _transpose_in(spec: WeightSpec, array: jax.Array, *, names: Set[str]) -> jax.Array:
    if not any(tensor.name in names for tensor in spec.tensors):
        return array
    sizes = [int(np.prod(tensor.shape)) for tensor in spec.tensors]
    starts = np.cumsum([0, *sizes[:-1]])
    # Numbers that are told apart take the place of the weights: joining says where each of them goes.
    given = [
        start + np.arange(size, dtype=np.int32).reshape(tensor.shape)
        for start, size, tensor in zip(starts, sizes, spec.tensors, strict=True)
    ]
    turned = [each.T if tensor.name in names else each for each, tensor in zip(given, spec.tensors, strict=True)]
    places, sources = (np.asarray(spec.join(each)).ravel() for each in (given, turned))
    where = np.empty_like(places)
    where[places] = np.arange(len(places), dtype=places.dtype)
    return array.ravel()[where[sources]].reshape(array.shape)
