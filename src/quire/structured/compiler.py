"""Constrains a sequence's tokens to a form: a `Structured` becomes masks over the vocabulary, by way of llguidance.

Owns: the vocabulary as llguidance wants it, what a form is in llguidance's language, the limits under which it works,
and the few compiled forms that are kept. Refuses to know: sampling, sequences, devices.

A form is read byte by byte, and the bytes are those of `Tokenizer.pieces`: what the masks allow is what the text will
be. Where only one text can follow, the mask leaves the one token that the model's own tokenizer would put there.

llguidance works masks out when they are needed; nothing is enumerated ahead. What it spends on one of them is limited:
a form that needs more fails, and with it the sequences that it constrains, nobody else. What it spends on compiling is
not: see `quire.structured.sandbox`.
"""

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.field_error import FieldError
from quire.structured.form import Structured
from quire.structured.sandbox import GrammarTrial
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 32
"""Compiled forms that are kept."""
MAX_REFUSED = 1024
"""Refused forms that are remembered, about 1 kB each."""
REFUSED_SECONDS = 300
"""For how long: what a form takes depends a little on the machine, so that it is tried again at some time."""

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,  # about 1 kB each, shared by the sequences of a form
    "verbose_errors": False,  # they would quote the output
}
_MASK_SECONDS, _GRACE_SECONDS = 0.005, 0.1
"""What a mask may cost on average, and how far a sequence may exceed that: every sequence of a step waits for it."""
_WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the parts of JSON: enough to indent it, and not the endless blank that small models fall into."""
_MAX_PIECE_BYTES = 1000
"""A longer token is never allowed: llguidance's tree of tokens is 1,024 bytes deep."""
_AHEAD = 64
"""Characters of forced text that are put into tokens at a time: it is done anew for each of them."""
_ENOUGH = 8
"""Tokens after which the first is certain, whatever follows: llguidance takes up to four back."""
_MAX_ERROR_LEN = 500
_DEAD_END = "NoExtensionBias"

_log = logging.getLogger("quire")


class GrammarCompiler:
    """Compiles forms for one model and keeps the last few. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_ids)
        self._trial = GrammarTrial(self._vocabulary)
        self._kept: OrderedDict[tuple[Structured, str], TokenMatcher] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Digest of form and salt -> what is wrong with it, and until when that holds; oldest first."""
        self._lock = threading.Lock()
        self._library: llguidance.LLTokenizer | None = None

    def compile(self, structured: Structured, salt: str = "", *, trusted: bool = False) -> "TokenMatcher":
        """A matcher that takes a sequence, and copies of it, through a form. FieldError if it is none, or too costly.

        Matchers of the same form and salt share what they have worked out and, should it come to that, their failure:
        give each tenant a salt of its own. A form that is not `trusted` is tried in a process of its own first: the
        first one takes a second longer, for that process to start, and any one a second at most.
        """
        key, where = (structured, salt), f"{structured.name}.{structured.kind}"
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key].copy()
        try:
            first = self._compile(structured, salt, where, trusted=trusted)
        except ImportError:
            message = f"{where} needs the library llguidance: pip install quire[server]"
            raise FieldError(message, field=structured.name) from None
        matcher = TokenMatcher(first, self._vocabulary.text_words, partial(self._forget, key))
        with self._lock:
            self._kept[key] = matcher
            if len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)
        return matcher.copy()

    def _compile(self, structured: Structured, salt: str, where: str, *, trusted: bool) -> "llguidance.LLMatcher":
        import llguidance  # noqa: F401  first of all, so that it is missed by name

        text = to_llguidance(structured)
        if not trusted and (problem := self._try(text, salt)):
            raise FieldError(f"{where} is refused: {problem}", field=structured.name)
        with self._lock:
            if self._library is None:
                self._library = self._vocabulary.as_library()
            library = self._library
        matcher = start(library, text)
        if matcher.is_error():
            raise FieldError(f"{where} is refused: {reason(matcher)}", field=structured.name)
        return matcher

    def _try(self, text: str, salt: str) -> str | None:
        """What is wrong with a form; one that was refused a while ago under this salt is refused again at once."""
        digest = hashlib.sha256(f"{len(salt)} {salt}{text}".encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            problem, until = self._refused.get(digest, ("", 0.0))
        if time.monotonic() < until:
            return problem
        verdict = self._trial.run(text)
        if verdict.problem and verdict.is_final:
            with self._lock:
                self._refused.pop(digest, None)
                self._refused[digest] = verdict.problem, time.monotonic() + REFUSED_SECONDS
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
        return verdict.problem

    def _forget(self, key: tuple[Structured, str]) -> None:
        with self._lock:
            self._kept.pop(key, None)


class TokenMatcher:
    """How far one sequence is in its form: a `quire.core.stopping.Grammar`."""

    def __init__(self, matcher: "llguidance.LLMatcher", text_words: np.ndarray, give_up: Callable[[], None]) -> None:
        """`text_words` has the bits of all tokens that are text; `give_up` is called when the form fails."""
        self._matcher = matcher
        self._text_words = text_words
        self._give_up = give_up
        self._num_read = 0
        self._seconds_left = _GRACE_SECONDS

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> np.ndarray:
        """The tokens of text that may come next; none once the form has failed."""
        with self._timed():
            words = np.frombuffer(self._matcher.compute_bitmask(), "<u4")
        if self._matcher.is_error():
            self._fail(reason(self._matcher))
        return words[: len(self._text_words)] & self._text_words

    def advance(self, output_token_ids: Sequence[int]) -> bool:
        """Read on in the output, given whole; False if a token may not be there, or if the form fails."""
        with self._timed():
            for token_id in output_token_ids[self._num_read :]:
                if not self._matcher.consume_token(token_id):
                    self._fail(reason(self._matcher))
                    return False
                self._num_read += 1
                self._seconds_left = min(self._seconds_left + _MASK_SECONDS, _GRACE_SECONDS)
        if self._seconds_left < 0:
            self._fail("it takes too long")
        return self._seconds_left >= 0

    def copy(self) -> "TokenMatcher":
        """Another matcher that has read the same tokens."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Take the time of a block off what is left. Computing only: other work on the machine must not count."""
        begin = time.thread_time()
        yield
        self._seconds_left -= time.thread_time() - begin

    def _fail(self, why: str) -> None:
        _log.warning("a grammar failed after %d tokens: %s", self._num_read, why)
        self._give_up()


class Vocabulary:
    """The tokens that a model can draw, in the shape of llguidance's `TokenizerWrapper`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: list[bytes],
        special_ids: list[int],
        eos_ids: list[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`encode` is how the model's own tokenizer puts text into tokens; without it, the longest that fit."""
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_ids = eos_ids
        self.eos_token_id = min(eos_ids, default=None)
        """Without one llguidance adds its own, behind the vocabulary."""
        self._encode = encode
        is_text = np.ones(len(tokens), bool)
        is_text[eos_ids] = False
        padded = np.pad(is_text, (0, -len(tokens) % 32))
        self.text_words = np.packbits(padded, bitorder="little").view("<u4")
        """The bits of all tokens but the end tokens."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> "Vocabulary":
        """The vocabulary of a model, which may draw more tokens than its tokenizer has, or fewer."""
        pieces = [piece if len(piece) <= _MAX_PIECE_BYTES else b"" for piece in tokenizer.pieces[:vocab_size]]
        pieces += [b""] * (vocab_size - len(pieces))
        special_ids = [i for i in tokenizer.special_ids | eos_ids if i < vocab_size]
        return cls(pieces, special_ids, sorted(eos_ids), partial(tokenizer.encode, add_special=False))

    def as_library(self) -> "llguidance.LLTokenizer":
        """The tree of tokens with which llguidance matches every form. It refers to this: keep it elsewhere."""
        from llguidance import LLTokenizer

        return LLTokenizer(self, eos_token=self.eos_ids or None)  # pyright: ignore

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell a text, or its beginning if it is long: llguidance takes only the first."""
        beginning = text[:_AHEAD]
        ids = self._spell(beginning)
        return ids if len(ids) >= _ENOUGH or beginning == text else self._spell(text)

    def _spell(self, text: str) -> list[int]:
        """Tokens that spell a text exactly, even if the tokenizer adds a space, normalises, or finds special tokens."""
        goal = text.encode()
        if self._encode is not None:
            ids = self._encode(text)
            pieces = [self._plain[i] if i < len(self._plain) else b"" for i in ids]
            if all(pieces) and b"".join(pieces) == goal:
                return ids
        ids, position = [], 0
        while position < len(goal):
            pieces = (goal[position : position + length] for length in self._lengths)
            piece = next((piece for piece in pieces if piece in self._id_of), None)
            ids += [] if piece is None else [self._id_of[piece]]
            position += len(piece or b"?")  # a byte that no token has cannot be generated either
        return ids

    @cached_property
    def _plain(self) -> list[bytes]:
        special = set(self.special_token_ids)
        return [b"" if i in special else piece for i, piece in enumerate(self.tokens)]

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {piece: i for i, piece in enumerate(self._plain) if piece}

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(piece) for piece in self._id_of}, reverse=True)


def start(library: "llguidance.LLTokenizer", text: str) -> "llguidance.LLMatcher":
    """Compile a form in llguidance's language, and find out what it may begin with. Errors are in the matcher."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(library, text, log_level=0, limits=LLParserLimits(**_LIMITS))
    matcher.compute_bitmask()
    return matcher


def to_llguidance(structured: Structured) -> str:
    """A form in llguidance's language, as JSON."""
    if structured.json_object:
        grammar = {"json_schema": _with_bounded_whitespace({"type": "object"})}
    elif structured.json_schema is not None:
        grammar = {"json_schema": _with_bounded_whitespace(json.loads(str(structured.json_schema)))}
    elif structured.regex is not None:
        from llguidance import regex_to_lark

        grammar = {"lark_grammar": f"start: /{regex_to_lark(structured.regex)}/"}
    elif structured.choice is not None:
        texts = (json.dumps(text).replace("\x7f", "\\u007f") for text in structured.choice)
        grammar = {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(texts)}"}
    else:
        grammar = {"lark_grammar": structured.grammar}
    return json.dumps({"grammars": [grammar]})


def _with_bounded_whitespace(schema: Any) -> Any:
    """The schema with a limit on whitespace, unless it has a rule of its own for llguidance."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict) or options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": _WHITESPACE} | options}


def is_dead_end(matcher: "llguidance.LLMatcher") -> bool:
    """Whether a matcher has failed because no token can follow, and not because it needed too much."""
    return matcher.get_error().startswith(_DEAD_END)


def reason(matcher: "llguidance.LLMatcher") -> str:
    """Why a matcher has failed, in one line, without its state and the addresses of llguidance's own code."""
    error = matcher.get_error()
    for mark in ("<non-verbose/>", "<backtrace>", "<state>"):
        error = error.partition(mark)[0]
    error = " ".join(error.split()).replace(_DEAD_END, "there is no text that it allows and the vocabulary can spell")
    return error if len(error) <= _MAX_ERROR_LEN else error[:_MAX_ERROR_LEN] + "..."
