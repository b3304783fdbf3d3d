"""Text to token ids and back, for a Hugging Face folder or a GGUF file.

Owns: encoding (by the `tokenizers` library), decoding, the ids that begin and end a sequence, and the model's chat
template. Refuses to know: models, sampling, requests. It never imports Python from a model folder; `auto_map` is
not read.

Decoding is our own: every token is a piece, bytes of UTF-8, and the text is their concatenation. That is what makes
streaming exact (see `detokenizer`). `tokenizers.DecodeStream` decodes a window of tokens again and again and waits for
U+FFFD to go away, so it stalls on bytes that never become a character; and the library's byte fallback turns a whole
run of byte tokens into U+FFFD when a later byte is invalid, which takes back text a client has already read.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.field_error import FieldError
from quire.text.chat_template import ChatTemplate, default_template
from quire.text.control_tokens import ControlTokens, new_marker

if TYPE_CHECKING:
    import gguf

MAX_VOCAB_SIZE = 2**21
"""More ids than any model has (the largest today have 2**18); a larger id is a broken or hostile file."""

_MAX_TOKENIZER_BYTES = 2**27  # the largest known tokenizer.json has about 2**25
_MAX_CONFIG_BYTES = 2**24
_MAX_TEMPLATE_FILE_BYTES = 2**20

_SENTENCEPIECE_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer. Immutable, so threads may share it."""

    bos_id: int | None
    eos_ids: frozenset[int]
    """Every id that ends a generation, as the model's files say."""
    strips_leading_space: bool
    """Decoded text loses one leading space: SentencePiece put it there to encode the first word like any other."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        *,
        special_ids: frozenset[int],
        bos_id: int | None,
        eos_ids: frozenset[int],
        strips_leading_space: bool,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
    ):
        # A tokenizer.json may ask for truncation and padding; here they would silently change a prompt.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = tuple(pieces)
        self._special_ids = special_ids
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.strips_leading_space = strips_leading_space
        self._chat_template_source = chat_template
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """From tokenizer.json, with tokenizer_config.json, generation_config.json and chat_template.jinja if there."""
        backend = _parse_tokenizer_json(_read_text(folder / "tokenizer.json", _MAX_TOKENIZER_BYTES))
        config = _read_json_object(folder / "tokenizer_config.json")
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
            template = _read_text(folder / "chat_template.jinja", _MAX_TEMPLATE_FILE_BYTES)
        else:
            template = default_template(config.get("chat_template"), "tokenizer_config.json: chat_template")
        return cls(
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

    @classmethod
    def from_gguf(cls, reader: "gguf.GGUFReader") -> "Tokenizer":
        """From the `tokenizer.*` metadata of a GGUF file."""
        from quire.text.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(reader)

    @property
    def vocab_size(self) -> int:
        """Number of ids, 0 to `vocab_size - 1`. The model's embedding may be padded to more."""
        return len(self._pieces)

    @property
    def pieces(self) -> Sequence[bytes]:
        """The bytes of every token, by id; of a special one those of its name, which are no part of the text."""
        return self._pieces

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that mark something and have no text."""
        return self._special_ids

    @cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token: a text of n of them has at least one token for each n."""
        return max(map(len, self._pieces), default=1)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template_source is not None

    @property
    def chat_template_source(self) -> str | None:
        """The template as the model's files have it."""
        return self._chat_template_source

    def encode(self, text: str, add_special: bool = True, *, max_len: int | None = None) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS and the like exactly when the model's own tokenizer does.

        Special tokens written in the text, such as `<|im_start|>`, become their one id. A text that cannot fit into
        `max_len` tokens is refused before it is encoded.
        """
        self._check(text, max_len)
        with _library_errors_as("the model's tokenizer cannot encode the text"):
            return self._backend.encode(text, add_special_tokens=add_special).ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        max_len: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, which alone may write control tokens.

        The name of a control token in a message, or in another value for the template, is encoded as text. Where there
        is none the ids are those of the rendered text.
        """
        template = self._chat_template
        kwargs = template_kwargs | {"add_generation_prompt": add_generation_prompt}
        if not self._control_tokens.are_named_in([messages, template_kwargs]):
            return self.encode(template.render(messages, **kwargs), add_special=False, max_len=max_len)
        control_tokens, marker = self._control_tokens, new_marker()
        rendered = template.render(control_tokens.mark(messages, marker), **control_tokens.mark(kwargs, marker))
        self._check(rendered.replace(marker, ""), max_len)
        with _library_errors_as("the model's tokenizer cannot encode the chat"):
            return control_tokens.encode(rendered, marker)

    def _check(self, text: str, max_len: int | None) -> None:
        if problem := _why_not_text(text):
            raise ValueError(f"text cannot be encoded: {problem}")
        if max_len is not None and len(text) > max_len * self.longest_piece:
            message = f"{len(text):,} characters cannot fit into max_model_len={max_len} tokens"
            raise FieldError(message, code="context_length_exceeded")

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD, an id without a token has no text."""
        joined = b"".join(self.piece(token_id, skip_special) for token_id in token_ids)
        if self.strips_leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")

    def piece(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes a token adds to the text: none for a special token, perhaps half a character for others."""
        if (skip_special and token_id in self._special_ids) or not 0 <= token_id < len(self._pieces):
            return b""
        return self._pieces[token_id]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt of a conversation by the model's chat template, as text to look at.

        `encode_chat` makes its token ids: in this text the template's control tokens look like those of a message.
        """
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **template_kwargs)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self._backend)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        # Compiled at first use: a model whose template is broken still completes plain text.
        if self._chat_template_source is None:
            raise ValueError("the model has no chat template; send a plain prompt, or use an instruction-tuned model")
        return ChatTemplate(self._chat_template_source, self._special_tokens)


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


_SENTENCEPIECE_DECODER = [
    {"type": "Replace", "pattern": {"String": _SENTENCEPIECE_SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_ONE_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


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
    with _library_errors_as("tokenizer.json is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode("")  # a post-processor that names unknown tokens fails only when it is used
        return backend


@contextmanager
def _library_errors_as(what: str) -> Iterator[None]:
    """ValueError for whatever `tokenizers` raises: bare Exception, and for a panic in Rust not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def _generation_eos_ids(path: Path, vocab_size: int) -> set[int]:
    """`eos_token_id` of generation_config.json: one id, a list of ids, or absent."""
    value = _read_json_object(path).get("eos_token_id")
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


def _read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path, _MAX_CONFIG_BYTES))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_text(path: Path, max_bytes: int) -> str:
    """A text file of a model folder. Errors name the file, not where the server keeps it."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes} bytes, which is no sane size for it")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _why_not_text(text: object) -> str | None:
    if not isinstance(text, str):
        return f"it must be a string, got {type(text).__name__}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is no Unicode text"
    return None
