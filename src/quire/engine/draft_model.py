"""A model that guesses for another: what it is made from, and whether it can."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from quire.config import ModelConfig
from quire.field_error import FieldError
from quire.text.tokenizer import Tokenizer


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
    except ValueError as error:
        raise FieldError(f"draft={name!r}: {error}", field="draft") from error


def check_vocabulary(name: str, draft: ModelConfig, model: ModelConfig) -> None:
    """Raise FieldError unless both models draw from as many tokens. Needs no weights."""
    if draft.vocab_size != model.vocab_size:
        raise FieldError(
            f"draft={name!r} has {draft.vocab_size:,} tokens and the model {model.vocab_size:,}: a draft model must "
            "have the same ones; take a smaller model of the same family, or leave draft out",
            field="draft",
        )


def check_draft(draft: DraftModel, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Raise FieldError unless a token id means the same to both models, as far as is known."""
    check_vocabulary(draft.name, draft.config, model)
    if tokenizer is None or draft.tokenizer is None:
        return
    for token_id, (mine, other) in enumerate(zip(tokenizer.pieces, draft.tokenizer.pieces, strict=False)):
        if mine != other:
            raise FieldError(
                f"draft={draft.name!r} has other tokens than the model: token {token_id} is {other!r}, not {mine!r}; "
                "take a smaller model of the same family, or leave draft out",
                field="draft",
            )
