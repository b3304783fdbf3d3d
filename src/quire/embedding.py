"""What an embedding of a prompt is: which hidden states make it, and what becomes of them."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from quire.field_error import FieldError

Pooling = Literal["last", "mean"]
"""Which hidden states of a prompt make its embedding: that of its last token, or the mean of all."""


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How a model embeds where nobody says otherwise, as its files state it."""

    pooling: Pooling = "last"
    normalize: bool = True
    """Whether embeddings have the length 1."""

    def changed(self, pooling: Any = None, normalize: Any = None) -> "EmbeddingConfig":
        """With what is not None in the place of the model's own; FieldError where that makes no sense."""
        pooling = self.pooling if pooling is None else pooling
        normalize = self.normalize if normalize is None else normalize
        check_pooling(pooling)
        if not isinstance(normalize, bool):
            raise FieldError(f"normalize={normalize!r} must be True, False or None", field="normalize")
        return EmbeddingConfig(pooling, normalize)


def check_pooling(pooling: Any) -> None:
    """FieldError unless it is a way to pool."""
    if pooling not in get_args(Pooling):
        raise FieldError(f"pooling={pooling!r} must be 'last' or 'mean'", field="pooling")


def check_dimensions(dimensions: Any, hidden_size: int) -> None:
    """FieldError unless an embedding has so many numbers, or None is given."""
    is_count = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (is_count and 1 <= dimensions <= hidden_size):
        message = f"dimensions={dimensions!r} must be a whole number from 1 to {hidden_size}, the model's hidden size"
        raise FieldError(message, field="dimensions")


def finish_embedding(pooled_D: np.ndarray, *, normalize: bool, dimensions: int | None = None) -> np.ndarray:
    """What is handed out of a pooled hidden state: its first `dimensions` numbers, of length 1 if asked for."""
    embedding_D = pooled_D[:dimensions].astype(np.float64)
    if normalize:
        embedding_D /= max(float(np.linalg.norm(embedding_D)), np.finfo(np.float64).tiny)
    return embedding_D.astype(np.float32)
