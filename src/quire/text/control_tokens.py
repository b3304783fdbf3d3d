"""Keeps the names of control tokens in a chat's messages from becoming control tokens.

A chat template writes names of control tokens, such as `<|im_start|>`, around what people say; whoever writes such a
name into a message could begin a turn in somebody else's role. So a chat whose texts hold a character that begins or
ends a name is rendered twice: as it is, and with a marker inside of every name that its texts could make, whatever the
template does to them.

    as many names both times    all are the template's own: the prompt is encoded as it was rendered
    fewer with markers          those left are its own: each is replaced by an alias, the markers are removed,
                                and the prompt is encoded by a copy of the tokenizer that knows the aliases and takes
                                names for text

The whole prompt is encoded at once, so that text becomes the same tokens as in a chat without such names.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

_MARKER_DIGITS = 12


class ControlTokens:
    """The control tokens of one tokenizer, and how a prompt is encoded in which only the template may write them."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str) -> None:
        """A control token is one that the tokenizer calls special, or that the template writes."""
        self._tokens = {
            token.content: (token_id, token)
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special or token.content in template
        }
        self._name = re.compile(_any_of(self._tokens))
        self._first = {char for name in self._tokens for char in (name[0].lower(), name[0].upper())}
        self._last = {char for name in self._tokens for char in (name[-1].lower(), name[-1].upper())}
        is_normalized = any(token.normalized for _, token in self._tokens.values())
        self._normalizer = backend.normalizer if is_normalized else None
        self._backend = backend

    @cached_property
    def _aliases(self) -> "_Aliases":
        # Made at first use: most models never see a chat that needs it.
        definition = json.loads(self._backend.to_str())
        definition["added_tokens"] = [t for t in definition["added_tokens"] if t["content"] not in self._tokens]
        backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
        alias_of = {name: f"<{secrets.token_hex(16)}>" for name in self._tokens}
        for name, (_, token) in self._tokens.items():
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            backend.add_tokens([AddedToken(alias_of[name], **flags, normalized=False, special=False)])
        id_of: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        # Ids of added tokens follow their order, so that those which are no control tokens may have moved as well.
        added = self._backend.get_added_tokens_decoder().items()
        token_id_of = {id_of[alias_of.get(token.content, token.content)]: token_id for token_id, token in added}
        return _Aliases(backend, alias_of, token_id_of)

    def may_be_in(self, value: Any) -> bool:
        """Whether any text in a value holds a character with which the name of a control token begins or ends."""
        edges = self._first | self._last
        return any(char in text for text in _texts(value) for char in edges)

    def count(self, text: str) -> int:
        """How many names of control tokens the tokenizer would find in a text."""
        normalized = self._normalizer.normalize_str(text) if self._normalizer else ""
        return sum(1 for _ in self._name.finditer(text)) + sum(1 for _ in self._name.finditer(normalized))

    def mark(self, value: Any, marker: str) -> Any:
        """A value of whose texts no name can be made: markers stand behind first characters and before last ones."""
        marks = {ord(char): char + marker for char in self._first} | {ord(char): marker + char for char in self._last}
        marks |= {ord(char): marker + char + marker for char in self._first & self._last}
        return _map_texts(value, lambda text: text.translate(marks))

    def encode(self, rendered: str, marker: str) -> list[int]:
        """Token ids of a prompt rendered from marked texts: control tokens are only those that have no marker."""
        backend, alias_of, token_id_of = self._aliases
        text = self._name.sub(lambda match: alias_of[match[0]], rendered).replace(marker, "")
        ids = encode_text(backend, text, add_special=False)
        return [token_id_of.get(token_id, token_id) for token_id in ids]


class _Aliases(NamedTuple):
    """A tokenizer that takes names of control tokens for text, and aliases, which nobody can guess, for the tokens."""

    backend: tokenizers.Tokenizer
    alias_of: dict[str, str]
    """Name -> alias."""
    token_id_of: dict[int, int]
    """Id of an alias, or of any other added token -> its id in the model's tokenizer."""


def encode_text(backend: tokenizers.Tokenizer, text: str, *, add_special: bool) -> list[int]:
    """Return the token ids of a text. Other threads run meanwhile: `Tokenizer.encode` would hold the GIL."""
    return backend.encode_batch([text], add_special_tokens=add_special)[0].ids


def new_marker(rendered: str) -> str:
    """Digits that a rendered chat does not hold, and that no template changes.

    The first is 0 and no other is: two markers, or a marker and digits beside it, never overlap.
    """
    while True:
        marker = "0" + "".join(secrets.choice("123456789") for _ in range(_MARKER_DIGITS - 1))
        if marker not in rendered:
            return marker


def _any_of(names: Mapping[str, Any]) -> str:
    """An expression for the longest of several names, by their common beginnings: each character is looked at once."""
    if not names:
        return "(?!)"
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        ways = [re.escape(char) + expression(child) for char, child in node.items() if char]
        if not ways:
            return ""
        return f"(?:{'|'.join(ways)})" + ("?" if "" in node else "")

    return expression(tree)


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


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of mappings and lists with every text in it changed; names of a mapping's entries too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(name, change): _map_texts(item, change) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_map_texts(item, change) for item in value]
    return value
