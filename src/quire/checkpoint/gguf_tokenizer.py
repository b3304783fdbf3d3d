"""A tokenizer from the `tokenizer.*` metadata of a GGUF file.

Owns: the meaning of `tokenizer.ggml.*`, as llama.cpp defines it, for the models "gpt2" (byte-level BPE) and "llama"
(SentencePiece BPE), and the checks that make a broken file an error that names the field. Refuses to guess: a value
it does not know, above all in `tokenizer.ggml.pre`, is an error, because a wrong pre-tokenizer still runs and only
makes the model a little worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import tokenizers
from gguf import GGUFValueType, TokenType
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from quire.checkpoint.tokenizer_files import MAX_VOCAB_SIZE
from quire.text.pieces import byte_level_piece, sentencepiece_piece
from quire.text.tokenizer import Tokenizer

_MAX_MERGES = 4 * MAX_VOCAB_SIZE
_MAX_TOKEN_CHARS = 1024  # real vocabularies stay below 300; the search for merges is quadratic in this


@dataclass(frozen=True)
class _PreTokenizer:
    """What comes before byte-level BPE for one value of `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]
    """Regular expressions, applied in order: each cuts its matches out of the pieces that the one before left."""
    ignore_merges: bool = False
    """A piece that is a token is that token, even where the merges would not build it."""
    add_bos: bool = False
    """Whether BOS is added when the file has no `tokenizer.ggml.add_bos_token`."""
    nfc: bool = False
    """Text is brought to Unicode NFC first."""


_DIGIT = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The expressions are those of the models' own tokenizer.json; the other columns are llama.cpp's.
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "dbrx": _PreTokenizer((_LLAMA3,)),
    "falcon": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "gpt-4o": _PreTokenizer((_GPT_4O,)),
    "llama-bpe": _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": _PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "phi-2": _PreTokenizer((_GPT2,)),
    "qwen2": _PreTokenizer((_LLAMA3.replace(r"\p{N}{1,3}", _DIGIT),), nfc=True),
    "refact": _PreTokenizer((_DIGIT, _GPT2)),
    "smaug-bpe": _PreTokenizer((_LLAMA3,)),
    "smollm": _PreTokenizer((_DIGIT, _GPT2)),
    "starcoder": _PreTokenizer((_DIGIT, _GPT2)),
    "tekken": _PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def tokenizer_from_gguf(reader: gguf.GGUFReader) -> Tokenizer:
    """The tokenizer of an open GGUF file."""
    metadata = _Metadata(reader)
    tokens, types = _read_vocab(metadata)
    model = metadata.string("tokenizer.ggml.model")
    if model == "gpt2":
        pre = _read_pre_tokenizer(metadata)
        backend = _byte_level_bpe(tokens, _read_merges(metadata, tokens), pre)
        adds_bos, strips_leading_space = pre.add_bos, False
    elif model == "llama":
        strips_leading_space = metadata.boolean("tokenizer.ggml.add_space_prefix", default=True)
        backend = _sentencepiece_bpe(metadata, tokens, types, strips_leading_space)
        adds_bos = True
    else:
        raise ValueError(f"tokenizer.ggml.model {model!r} is not supported; supported are 'gpt2' and 'llama'")

    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (TokenType.CONTROL, TokenType.UNKNOWN)
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == TokenType.USER_DEFINED
        ]
    )
    bos_id, eos_id, eot_id, eom_id = (
        _read_token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom")
    )
    _add_bos_and_eos(
        backend,
        _id_if_added(metadata, "bos", bos_id, default=adds_bos),
        _id_if_added(metadata, "eos", eos_id, default=False),
    )
    return Tokenizer(
        backend,
        [_piece(token, type_, model == "gpt2") for token, type_ in zip(tokens, types, strict=True)],
        special_ids=frozenset(i for i, type_ in enumerate(types) if type_ in (TokenType.CONTROL, TokenType.UNKNOWN)),
        bos_id=bos_id,
        eos_ids=frozenset(i for i in (eos_id, eot_id, eom_id) if i is not None),
        strips_leading_space=strips_leading_space,
        chat_template=metadata.string("tokenizer.chat_template", default=None),
        special_tokens={name: tokens[i] for name, i in (("bos_token", bos_id), ("eos_token", eos_id)) if i is not None},
    )


def _byte_level_bpe(tokens: Sequence[str], merges: list[tuple[str, str]], pre: _PreTokenizer) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_bpe(
    metadata: "_Metadata", tokens: Sequence[str], types: Sequence[int], add_space_prefix: bool
) -> tokenizers.Tokenizer:
    """SentencePiece merges whichever two neighbours make the token of the highest score: merges, ranked by score."""
    scores = metadata.array("tokenizer.ggml.scores", GGUFValueType.FLOAT32, MAX_VOCAB_SIZE)
    _require_length("tokenizer.ggml.scores", scores, len(tokens))
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(f"tokenizer.ggml.scores[{i}] is {score}; scores must be finite numbers")
    normal = {token for token, type_ in zip(tokens, types, strict=True) if type_ == TokenType.NORMAL}
    ranked = [
        (-score, -cut, token)
        for token, score in zip(tokens, scores, strict=True)
        if token in normal
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    ranked.sort(key=lambda merge: merge[:2])  # stable: pieces of one score stay in the order of their ids
    unknown = [token for token, type_ in zip(tokens, types, strict=True) if type_ == TokenType.UNKNOWN]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(token[:-cut], token[-cut:]) for _, cut, token in ranked],
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    # The space is added after every special token too, as llama.cpp does.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space_prefix else spaces
    return backend


def _add_bos_and_eos(backend: tokenizers.Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    added = {"BOS": bos_id, "EOS": eos_id}
    backend.post_processor = processors.TemplateProcessing(
        single=[*(["BOS"] if bos_id is not None else []), "$A", *(["EOS"] if eos_id is not None else [])],
        special_tokens=[(name, token_id) for name, token_id in added.items() if token_id is not None],
    )


def _piece(token: str, type_: int, is_byte_level: bool) -> bytes:
    """The bytes of one token."""
    if type_ == TokenType.UNUSED:
        return b""
    if type_ == TokenType.BYTE or not is_byte_level:
        return sentencepiece_piece(token)
    # Control and user-defined tokens are plain text, not in the byte alphabet.
    return byte_level_piece(token) if type_ == TokenType.NORMAL else token.encode()


def _read_vocab(metadata: "_Metadata") -> tuple[list[str], list[int]]:
    tokens = metadata.array("tokenizer.ggml.tokens", GGUFValueType.STRING, MAX_VOCAB_SIZE)
    if not tokens:
        raise ValueError("tokenizer.ggml.tokens is empty")
    id_of: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN_CHARS:
            raise ValueError(
                f"tokenizer.ggml.tokens[{i}] has {len(token)} characters, at most {_MAX_TOKEN_CHARS} are allowed"
            )
        if id_of.setdefault(token, i) != i:
            raise ValueError(f"tokenizer.ggml.tokens[{i}] {token!r} is already token {id_of[token]}")
    # Not optional: without it `<|im_start|>` would be cut into letters, and every chat would be slightly wrong.
    types = metadata.array("tokenizer.ggml.token_type", GGUFValueType.INT32, MAX_VOCAB_SIZE)
    _require_length("tokenizer.ggml.token_type", types, len(tokens))
    for i, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ not in TokenType:
            raise ValueError(f"tokenizer.ggml.token_type[{i}] is {type_}; known are {[t.value for t in TokenType]}")
        if type_ == TokenType.BYTE and len(sentencepiece_piece(token)) != 1:
            raise ValueError(f"tokenizer.ggml.tokens[{i}] {token!r} is of type byte; it must look like '<0x0A>'")
    return tokens, types


def _read_merges(metadata: "_Metadata", tokens: Sequence[str]) -> list[tuple[str, str]]:
    vocab = set(tokens)
    merges = []
    for i, line in enumerate(metadata.array("tokenizer.ggml.merges", GGUFValueType.STRING, _MAX_MERGES)):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or not right:
            raise ValueError(f"tokenizer.ggml.merges[{i}] {line!r} must be two tokens with a space between")
        for token in (left, right, left + right):
            if token not in vocab:
                raise ValueError(
                    f"tokenizer.ggml.merges[{i}] {line!r} names {token!r}, which is not in tokenizer.ggml.tokens"
                )
        merges.append((left, right))
    return merges


def _read_pre_tokenizer(metadata: "_Metadata") -> _PreTokenizer:
    name = metadata.string("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return _PRE_TOKENIZERS[name]


def _read_token_id(metadata: "_Metadata", field: str, vocab_size: int) -> int | None:
    token_id = metadata.integer(field, default=None)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise ValueError(f"{field} is {token_id}, but tokenizer.ggml.tokens has {vocab_size} tokens")
    return token_id


def _id_if_added(metadata: "_Metadata", name: str, token_id: int | None, default: bool) -> int | None:
    """The id of BOS or EOS if the file says that encoding adds it."""
    if not metadata.boolean(f"tokenizer.ggml.add_{name}_token", default=default):
        return None
    if token_id is None:
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id is missing, but this tokenizer adds {name.upper()}; "
            f"write the id, or write tokenizer.ggml.add_{name}_token = false"
        )
    return token_id


def _require_length(field: str, values: Sequence[Any], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{field} has {len(values)} entries, but tokenizer.ggml.tokens has {length}")


_INTEGERS = {
    GGUFValueType.UINT8,
    GGUFValueType.INT8,
    GGUFValueType.UINT16,
    GGUFValueType.INT16,
    GGUFValueType.UINT32,
    GGUFValueType.INT32,
    GGUFValueType.UINT64,
    GGUFValueType.INT64,
}


class _Required:
    """Default of a field that has none."""


class _Metadata:
    """Typed reads of GGUF metadata. A field that is missing or of another type is an error that names it."""

    def __init__(self, reader: gguf.GGUFReader):
        self._fields = reader.fields

    def string(self, name: str, default: Any = _Required) -> Any:
        return self._scalar(name, {GGUFValueType.STRING}, default)

    def boolean(self, name: str, default: bool) -> bool:
        return self._scalar(name, {GGUFValueType.BOOL}, default)

    def integer(self, name: str, default: int | None) -> int | None:
        return self._scalar(name, _INTEGERS, default)

    def array(self, name: str, element: GGUFValueType, max_len: int) -> list[Any]:
        """All elements of an array; its length is checked before any element is read."""
        field = self._fields.get(name)
        if field is None:
            raise ValueError(f"{name} is missing from the GGUF metadata")
        if field.types not in (
            [GGUFValueType.ARRAY],
            [GGUFValueType.ARRAY, element],
        ):  # an empty one has no element type
            raise ValueError(f"{name} must be an array of {element.name}, got {_type_names(field)}")
        if len(field.data) > max_len:
            raise ValueError(f"{name} has {len(field.data)} entries, at most {max_len} are allowed")
        return _contents(name, field)

    def _scalar(self, name: str, types: set[GGUFValueType], default: Any) -> Any:
        field = self._fields.get(name)
        if field is None:
            if default is _Required:
                raise ValueError(f"{name} is missing from the GGUF metadata")
            return default
        if len(field.types) != 1 or field.types[0] not in types:
            wanted = " or ".join(sorted(type_.name for type_ in types))
            raise ValueError(f"{name} must be {wanted}, got {_type_names(field)}")
        return _contents(name, field)


def _contents(name: str, field: gguf.ReaderField) -> Any:
    try:
        return field.contents()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} holds text that is not UTF-8: {error.reason}") from None


def _type_names(field: gguf.ReaderField) -> str:
    return " of ".join(type_.name for type_ in field.types)
