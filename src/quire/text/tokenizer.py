"""Text to token ids and back. Files are read elsewhere: `quire.checkpoint.tokenizer_files` and `gguf_tokenizer`.

Owns: encoding (by the `tokenizers` library), decoding, the ids that begin and end a sequence, and the model's chat
template. Refuses to know: files, models, sampling, requests.

Decoding is our own: every token is a piece, bytes of UTF-8, and the text is their concatenation. That is what makes
streaming exact (see `detokenizer`). `tokenizers.DecodeStream` decodes a window of tokens again and again and waits for
U+FFFD to go away, so it stalls on bytes that never become a character; and the library's byte fallback turns a whole
run of byte tokens into U+FFFD when a later byte is invalid, which takes back text a client has already read.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tokenizers

from quire.field_error import FieldError
from quire.text.chat_template import ChatTemplate
from quire.text.control_tokens import ControlTokens, encode_text, new_marker


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
        self._chat_template_name = "chat template"
        self._special_tokens = dict(special_tokens)

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

    def with_chat_template(self, source: str, name: str = "chat template") -> "Tokenizer":
        """Return this tokenizer with another chat template, which errors call `name`."""
        changed = copy.copy(self)
        for compiled in ("_chat_template", "_control_tokens"):
            changed.__dict__.pop(compiled, None)
        changed._chat_template_source, changed._chat_template_name = source, name
        return changed

    def encode(self, text: str, add_special: bool = True, *, max_len: int | None = None) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS and the like exactly when the model's own tokenizer does.

        Special tokens written in the text, such as `<|im_start|>`, become their one id. A text that cannot fit into
        `max_len` tokens is refused before it is encoded.
        """
        self._check(text, max_len)
        with library_errors_as("the model's tokenizer cannot encode the text"):
            return encode_text(self._backend, text, add_special=add_special)

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
        template, control_tokens = self._chat_template, self._control_tokens
        kwargs = template_kwargs | {"add_generation_prompt": add_generation_prompt}
        rendered = template.render(messages, **kwargs)
        self._check(rendered, max_len)
        if control_tokens.may_be_in([messages, template_kwargs]):
            marker = new_marker(rendered)
            marked = template.render(control_tokens.mark(messages, marker), **control_tokens.mark(kwargs, marker))
            if control_tokens.count(marked) != control_tokens.count(rendered):
                with library_errors_as("the model's tokenizer cannot encode the chat"):
                    return control_tokens.encode(marked, marker)
        return self.encode(rendered, add_special=False)

    def _check(self, text: str, max_len: int | None) -> None:
        if problem := _why_not_text(text):
            raise ValueError(f"text cannot be encoded: {problem}")
        if max_len is not None and len(text) > max_len * self.longest_piece:
            message = f"{len(text):,} characters cannot fit into max_model_len={max_len} tokens"
            raise FieldError(message, code="context_length_exceeded")

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD, an id without a token has no text."""
        if isinstance(token_ids, str):
            raise FieldError(f"token_ids={token_ids!r} must be a list of token ids", field="token_ids")
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
        return ControlTokens(self._backend, self._chat_template_source or "")

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        # Compiled at first use: a model whose template is broken still completes plain text.
        if self._chat_template_source is None:
            raise ValueError(
                "the model has no chat template; send a plain prompt, use an instruction-tuned model, or give a "
                "template with chat_template=FILE (--chat-template FILE)"
            )
        return ChatTemplate(self._chat_template_source, self._special_tokens, name=self._chat_template_name)


@contextmanager
def library_errors_as(what: str) -> Iterator[None]:
    """ValueError for whatever `tokenizers` raises: bare Exception, and for a panic in Rust not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def _why_not_text(text: object) -> str | None:
    if not isinstance(text, str):
        return f"it must be a string, got {type(text).__name__}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is no Unicode text"
    return None
