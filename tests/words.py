"""A tokenizer for the tiny model: letters, digits, what JSON needs, and tokens of several characters."""

import tokenizers

from quire.text.tokenizer import Tokenizer
from tests.tiny import VOCAB

EOS = 0
SPECIAL = 1
CHARACTERS = [c for c in map(chr, range(32, 127)) if c not in "#$%&*@^`|~;=?!_'"] + ["\n"]
WORDS = ['{"', '":', '",', "tr", "ue", "ab", "ba", "  ", "ye", "es", "12", " a", "no", '"}']
PIECES = [b"<eos>", b"<special>", *(text.encode() for text in CHARACTERS + WORDS)]
assert len(PIECES) <= VOCAB


def tiny_tokenizer(strips_leading_space: bool = False) -> Tokenizer:
    """Encodes character by character, as a tokenizer without merges does; the model may still draw the words."""
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
