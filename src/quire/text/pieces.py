"""The bytes of tokens, by how a vocabulary writes them down."""

import re

_SENTENCEPIECE_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_piece(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary, where every byte is written as one printable character."""
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()


def sentencepiece_piece(token: str) -> bytes:
    """Bytes of a SentencePiece token: `▁` is a space and `<0x0A>` is the byte 10."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _printable_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _printable_bytes()
