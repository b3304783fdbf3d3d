"""A model that guesses for another: what it is made from, and whether it can."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from quire.config import ModelConfig
from quire.field_error import FieldError
from quire.text.tokenizer import Tokenizer

MAX_PADDING = 1024
"""Rows by which embeddings of one family may differ: they are padded to what suits a mesh."""


class DraftModel(NamedTuple):
    """A smaller model with the tokens of the one that answers."""

    name: str
    """What the config calls it."""
    config: ModelConfig
    params: Any
    load: Callable[[], Any]
    """Reads its weights again, for an engine that wakes."""
    tokenizer: Tokenizer | None = None


@contextmanager
def naming_draft(name: str) -> Iterator[None]:
    """Say of an error which of two models it is about."""
    try:
        yield
    except FieldError as error:
        if error.field == "quantize":
            plain = "draft_quantize says how the draft model keeps its weights, 'none' for as they are"
            raise FieldError(f"draft={name!r}: {error} ({plain})", field="draft_quantize") from error
        raise FieldError(f"draft={name!r}: {error}", field="draft") from error
    except (ValueError, OSError) as error:
        raise FieldError(f"draft={name!r}: {error}", field="draft") from error


def check_vocabulary(name: str, draft: ModelConfig, model: ModelConfig) -> None:
    """Raise FieldError unless both models draw from as many tokens, but for padding. Needs no weights."""
    if abs(draft.vocab_size - model.vocab_size) > MAX_PADDING:
        raise _other_tokens(name, f"{draft.vocab_size:,} of them, not {model.vocab_size:,}")


def check_draft(draft: DraftModel, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise FieldError unless a token id means the same to both models, as far as is known."""
    name, num_tokens = draft.name, draft.config.vocab_size
    check_vocabulary(name, draft.config, model)
    if tokenizer is None or draft.tokenizer is None:
        if num_tokens != model.vocab_size:  # nobody knows whether that is padding
            raise _other_tokens(name, f"{num_tokens:,} of them, not {model.vocab_size:,}")
        return
    for token_id, (mine, other) in enumerate(zip(tokenizer.pieces, draft.tokenizer.pieces, strict=False)):
        if mine != other:
            raise _other_tokens(name, f"token {token_id} is {other!r}, not {mine!r}")


def _other_tokens(name: str, difference: str) -> FieldError:
    return FieldError(
        f"draft={name!r} has other tokens than the model: {difference}; take a smaller model of the same family, or "
        "leave draft out",
        field="draft",
    )
