"""Keeps the names of control tokens in a chat's messages from becoming control tokens.

A chat template writes names of control tokens, such as `<|im_start|>`, around what people say; whoever writes such a
name into a message could begin a turn in somebody else's role. Most chats hold no such name and are encoded as they
are rendered. For the others:

    messages    a marker is put into every name that they hold, so that it is none any more
    rendered    the names that are left are the template's own: each is replaced by its alias; the markers are removed
    encoded     by a copy of the tokenizer that takes names for text and knows the aliases, whose ids are then replaced

The whole prompt is encoded at once, so that text becomes the same tokens as in a chat without such names.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

_MIN_PART_CHARS = 2  # of a name that may be completed by the text beside it


class ControlTokens:
    """The control tokens of one tokenizer, and how a prompt is encoded in which only the template may write them."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._special = {
            token.content: (token_id, token)
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1  # a marker has to fit in
        }
        names = sorted(self._special, key=len, reverse=True)  # the longest first, as the library looks for them
        self._name = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._start_of_name = re.compile(f"(?={self._name.pattern})")
        self._beginnings = {name[:end] for name in names for end in range(_MIN_PART_CHARS, len(name))}
        self._endings = {name[-length:] for name in names for length in range(_MIN_PART_CHARS, len(name))}
        self._longest_part = max(map(len, names), default=1) - 1
        is_normalized = any(token.normalized for _, token in self._special.values())
        self._normalizer = backend.normalizer if is_normalized else None
        self._backend = backend

    @cached_property
    def _aliases(self) -> "_Aliases":
        # Made at first use: most models never see a chat that needs it.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        alias_of = {name: f"<{secrets.token_hex(16)}>" for name in self._special}
        for name, (_, token) in self._special.items():
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            backend.add_tokens([AddedToken(alias_of[name], **flags, normalized=False, special=False)])
        id_of: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        token_id_of = {id_of[alias_of[name]]: token_id for name, (token_id, _) in self._special.items()}
        return _Aliases(backend, alias_of, token_id_of)

    def are_named_in(self, value: Any) -> bool:
        """Whether a text in a value, or two that stand side by side, may hold the name of a control token."""
        return any(self._is_risky(text) for text in _texts(value))

    def _is_risky(self, text: str) -> bool:
        if self._name.search(text) or any(self._parts(text)):
            return True
        return self._normalizer is not None and bool(self._name.search(self._normalizer.normalize_str(text)))

    def _parts(self, text: str) -> Iterator[int]:
        """Where to break names of which a text holds the beginning at its end, or the end at its beginning."""
        for length in range(_MIN_PART_CHARS, min(self._longest_part, len(text)) + 1):
            if text[-length:] in self._beginnings:
                yield len(text) - length + 1
            if text[:length] in self._endings:
                yield length - 1

    def mark(self, value: Any, marker: str) -> Any:
        """A value in which no text holds a name: a marker stands in each."""
        if isinstance(value, str):
            breaks = {match.start() + 1 for match in self._start_of_name.finditer(value)} | set(self._parts(value))
            edges = [0, *sorted(breaks), len(value)]
            return marker.join(value[start:end] for start, end in pairwise(edges))
        if isinstance(value, Mapping):
            return {self.mark(name, marker): self.mark(item, marker) for name, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.mark(item, marker) for item in value]
        return value

    def encode(self, rendered: str, marker: str) -> list[int]:
        """Token ids of a prompt rendered from marked messages: control tokens are only those that have no marker."""
        backend, alias_of, token_id_of = self._aliases
        text = self._name.sub(lambda match: alias_of[match[0]], rendered).replace(marker, "")
        ids = backend.encode(text, add_special_tokens=False).ids
        return [token_id_of.get(token_id, token_id) for token_id in ids]


class _Aliases(NamedTuple):
    """A tokenizer that takes names of control tokens for text, and aliases, which nobody can guess, for the tokens."""

    backend: tokenizers.Tokenizer
    alias_of: dict[str, str]
    """Name -> alias."""
    token_id_of: dict[int, int]
    """Id of an alias -> id of the control token."""


def new_marker() -> str:
    """A text that nobody can have written: digits only, which no template changes."""
    return f"{secrets.randbelow(10**32):032}"


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value of mappings and lists; names of a mapping's entries too."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, Sequence) and not isinstance(item, bytes):
            pending += item
