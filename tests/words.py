"""Tokenizers for the tiny model and for the engine without one."""

import tokenizers

from quire.text.tokenizer import Tokenizer
from tests.tiny import VOCAB

EOS = 0
SPECIAL = 1
CHARACTERS = [c for c in map(chr, range(32, 127)) if c not in "#$%&*@^`|~;=?!_'"] + ["\n"]
WORDS = ['{"', '":', '",', "tr", "ue", "ab", "ba", "  ", "ye", "es", "12", " a", "no", '"}']
PIECES = [b"<eos>", b"<special>", *(text.encode() for text in CHARACTERS + WORDS)]
assert len(PIECES) <= VOCAB


TOY_EOS, TOY_SPECIAL = 0, 8
TOY_PIECES = [
    b"<eos>", b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x91\x8d", b"<special>", b" a", b"ba",
]  # fmt: skip
"""Half characters too: "é" and "👍" take two tokens each."""


def toy_tokenizer() -> Tokenizer:
    """Eleven tokens, for an engine without a model: every few random ones make a stop string or cut a character."""
    vocab = {piece.decode("latin-1"): i for i, piece in enumerate(TOY_PIECES)}
    return Tokenizer(
        tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])),
        TOY_PIECES,
        special_ids=frozenset({TOY_EOS, TOY_SPECIAL}),
        bos_id=None,
        eos_ids=frozenset({TOY_EOS}),
        strips_leading_space=False,
        chat_template=None,
        special_tokens={},
    )


def tiny_tokenizer(strips_leading_space: bool = False) -> Tokenizer:
    """Letters, digits, what JSON needs, and words; it encodes character by character, the model may draw the words."""
    vocab = {piece.decode(): i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(["<eos>", "<special>"])
    return Tokenizer(
        backend,
        PIECES,
        special_ids=frozenset({EOS, SPECIAL}),
        bos_id=None,
        eos_ids=frozenset({EOS}),
        strips_leading_space=strips_leading_space,
        chat_template=None,
        special_tokens={},
    )
