"""A form as it reads one sequence's tokens: which may come next, and whether the text may end. By way of llguidance.

Owns: the vocabulary as llguidance wants it, and the limits under which it works. A form that needs more than these
fails, and with it the sequences that it constrains, nobody else.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 20_000,  # about 1 kB each, shared by the sequences of a form
    "verbose_errors": False,  # they would quote the output
}
_MASK_SECONDS, _GRACE_SECONDS = 0.005, 0.5
"""What a mask may cost on average, and how far a sequence may exceed that: every sequence of a step waits for it.

A collection of garbage that begins within a mask counts as its time, and a large heap takes a tenth of a second."""
_WORDS = ("[a-z]{1,16}", "[a-z ]{1,16}", "[A-Za-z ]{1,16}")
"""Kinds of text of which a form often allows everything: a mask takes the tokens of such a kind as one set, without a
look at each. They stand beside llguidance's own kinds, which are those of JSON."""
_MAX_PIECE_BYTES = 1000
"""A longer token is never allowed: llguidance's tree of tokens is 1,024 bytes deep."""
_AHEAD = 64
"""Characters of forced text that are put into tokens at a time: it is done anew for each of them."""
_ENOUGH = 8
"""Tokens after which the first is certain, whatever follows: llguidance takes up to four back."""
_MAX_SPELLED = 1024
"""Beginnings of forced text whose tokens are remembered: the keys of JSON come again in every row and every item."""
_MAX_ERROR_LEN = 500
_DEAD_END = "NoExtensionBias"

_log = logging.getLogger("quire")


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

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these may come next, one after another. Reads nothing."""
        words = self._text_words
        texts = list(itertools.takewhile(lambda token_id: words[token_id >> 5] >> (token_id & 31) & 1, token_ids))
        with self._timed():
            return self._matcher.validate_tokens(texts)

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
        self._spell_beginning = lru_cache(_MAX_SPELLED)(self._spell)
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

        kinds = [*LLTokenizer.general_slices(), *_WORDS]
        return LLTokenizer(self, eos_token=self.eos_ids or None, slices=kinds)  # pyright: ignore

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell a text, or its beginning if it is long: llguidance takes only the first."""
        beginning = text[:_AHEAD]
        ids = self._spell_beginning(beginning)
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
