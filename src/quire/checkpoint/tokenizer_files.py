"""A tokenizer from the files of a Hugging Face folder: tokenizer.json and those beside it.

Owns: what these files mean, and the checks that make a broken one an error that names it. It never imports Python from
a model folder; `auto_map` is not read.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from quire.checkpoint.json_file import read_json, read_text
from quire.text.chat_template import ChatTemplate
from quire.text.pieces import byte_level_piece, sentencepiece_piece
from quire.text.tokenizer import Tokenizer, library_errors_as

MAX_VOCAB_SIZE = 2**21
"""More ids than any model has (the largest today have 2**18); a larger id is a broken or hostile file."""

_MAX_TOKENIZER_BYTES = 2**27  # the largest known tokenizer.json has about 2**25
_MAX_TEMPLATE_FILE_BYTES = 2**20
_SENTENCEPIECE_DECODER = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class ChatTemplateFile(NamedTuple):
    """The chat template in a file that the caller named, to use instead of the model's own."""

    name: str
    """The file's name, for errors."""
    source: str


def read_chat_template(path: Path) -> ChatTemplateFile:
    """Read a Jinja chat template; ValueError with the file's name and line if it does not compile in the sandbox."""
    template = ChatTemplateFile(f"chat template {path.name}", read_text(path.expanduser(), _MAX_TEMPLATE_FILE_BYTES))
    ChatTemplate(template.source, {}, name=template.name)
    return template


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a folder: of tokenizer.json, and of the files beside it that are there."""
    backend = _parse_tokenizer_json(read_text(folder / "tokenizer.json", _MAX_TOKENIZER_BYTES))
    config = _optional_json(folder / "tokenizer_config.json")
    vocab = backend.get_vocab(with_added_tokens=True)
    special_tokens = {name: _named_token(config, name) for name in ("bos_token", "eos_token")}
    special_tokens = {name: text for name, text in special_tokens.items() if text is not None}
    for name, text in special_tokens.items():
        if text not in vocab:
            raise ValueError(f"tokenizer_config.json: {name} {text!r} is not in the vocabulary of tokenizer.json")
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([text for text in special_tokens.values() if text not in added])

    piece_of, strips_leading_space = _read_decoder(backend)
    pieces = _read_pieces(backend, piece_of)
    eos_ids = _generation_eos_ids(folder / "generation_config.json", len(pieces))
    if "eos_token" in special_tokens:
        eos_ids |= {vocab[special_tokens["eos_token"]]}
    if (folder / "chat_template.jinja").exists():
        template = read_text(folder / "chat_template.jinja", _MAX_TEMPLATE_FILE_BYTES)
    else:
        template = default_template(config.get("chat_template"), "tokenizer_config.json: chat_template")
    return Tokenizer(
        backend,
        pieces,
        special_ids=frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        ),
        bos_id=vocab[special_tokens["bos_token"]] if "bos_token" in special_tokens else None,
        eos_ids=frozenset(eos_ids),
        strips_leading_space=strips_leading_space,
        chat_template=template,
        special_tokens=special_tokens,
    )


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How the decoder of a tokenizer.json turns a token into bytes, and whether it strips a leading space."""
    decoder: Any = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return byte_level_piece, False
    if steps == _SENTENCEPIECE_DECODER:
        return sentencepiece_piece, False
    if steps == [*_SENTENCEPIECE_DECODER, _STRIP_ONE_SPACE]:
        return sentencepiece_piece, True
    raise ValueError(
        f"tokenizer.json: decoder {[step['type'] for step in steps]} is not supported; supported are ByteLevel and "
        "SentencePiece's Replace, ByteFallback, Fuse, with or without Strip of one leading space"
    )


def _read_pieces(backend: tokenizers.Tokenizer, piece_of: Callable[[str], bytes]) -> list[bytes]:
    """The bytes of every token, by id."""
    vocab = backend.get_vocab(with_added_tokens=True)
    last_id = max(vocab.values(), default=-1)
    if not 0 <= last_id < MAX_VOCAB_SIZE:
        raise ValueError(f"tokenizer.json: the largest token id is {last_id}, must be 0..{MAX_VOCAB_SIZE - 1}")
    pieces = [b""] * (last_id + 1)
    for token, token_id in vocab.items():
        pieces[token_id] = piece_of(token)
    if piece_of is byte_level_piece:  # added tokens are plain text, not in the byte alphabet
        for token_id, token in backend.get_added_tokens_decoder().items():
            pieces[token_id] = token.content.encode()
    return pieces


def _parse_tokenizer_json(text: str) -> tokenizers.Tokenizer:
    with library_errors_as("tokenizer.json is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode("")  # a post-processor that names unknown tokens fails only when it is used
        return backend


def _generation_eos_ids(path: Path, vocab_size: int) -> set[int]:
    """`eos_token_id` of generation_config.json: one id, a list of ids, or absent."""
    value = _optional_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ValueError(f"{path.name}: eos_token_id {token_id!r} is not a token id (0..{vocab_size - 1})")
    return set(ids)


def _named_token(config: Mapping[str, Any], name: str) -> str | None:
    """`bos_token` and the like: text, or an object with the text as `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"tokenizer_config.json: {name} must be text or an object with `content`, got {value!r}")
    return value


def default_template(value: Any, field: str) -> str | None:
    """The template of a `chat_template` entry: text, or a list of `{name, template}` of which `default` is taken."""
    if value is None:
        return None
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        if not named:
            raise ValueError(f"{field} is a list of templates, but none of them is named 'default'")
        value = named[0].get("template")
    if not isinstance(value, str):
        raise ValueError(f"{field} must be text or a list of {{name, template}}, got {type(value).__name__}")
    return value


def _optional_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; an empty one when there is no such file."""
    return read_json(path) if path.exists() else {}
