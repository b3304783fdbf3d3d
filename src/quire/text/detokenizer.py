"""One sequence's output tokens become text that a client may already have read.

Owns: incremental UTF-8 decoding, stop strings, and how much text must wait because later tokens may still take it
back. Text that was handed out is never revised. Knows nothing about sampling: matching a stop id or a stop id
sequence is the engine's decision, told to `finish`; here their tokens are only held back.

Text is decoded as soon as its token arrives, but is handed out only up to the earlier of two marks:

    taken by the client | certain      | may begin a stop string or a stop id sequence | (bytes of half a character)
    0 ............ _num_taken ... _num_certain ............................... _num_chars

Both marks come from an Aho-Corasick automaton, over characters and over token ids, so the cost of a token does not
depend on the number or the length of the stops.
"""

import codecs
from collections import deque
from collections.abc import Hashable, Sequence
from copy import copy
from io import StringIO
from typing import NamedTuple

from quire.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decode of one sequence's output with stops. Append-only.

    The stop string that is complete first wins, and of those that end on the same character the longest: what the
    client reads does not depend on how the text was cut into tokens.
    """

    num_tokens: int
    """Output tokens consumed so far; after a stop string, the token that completed it is the last."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str] = (),
        stop_sequences: Sequence[tuple[int, ...]] = (),
        min_tokens: int = 0,
        *,
        keeps_space: bool = False,
        skip_special: bool = True,
        include_stop: bool = False,
    ):
        """A stop string that is complete before `min_tokens` tokens is text like any other.

        `keeps_space` leaves a leading space where the tokenizer would strip it: a grammar has counted it. Special
        tokens have no text if they are skipped; a stop string that ended the sequence has some only if it is included.
        """
        self._tokenizer = tokenizer
        self._string_match = _build_automaton(stop_strings, "stop_strings")
        self._id_match = _build_automaton(stop_sequences, "stop_sequences")
        self._min_tokens = min_tokens
        self._strips_space = tokenizer.strips_leading_space and not keeps_space
        self._skip_special = skip_special
        self._include_stop = include_stop
        self.num_tokens = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._buffer = StringIO(newline="")  # newline="": "\r\n" stays what the model wrote
        self._num_chars = 0
        self._num_certain = 0
        self._num_taken = 0
        self._stop_at: int | None = None  # where the text before a completed stop string ends
        # The state before each of the last tokens: as many as `finish` may be asked to drop.
        most_dropped = max([1, *map(len, stop_sequences)])
        self._checkpoints: deque[_Checkpoint] = deque(maxlen=most_dropped)

    def fork(self) -> "Detokenizer":
        """Another stream that has consumed the same tokens. Its text is that of the whole output, all still to take.

        The stops are shared: they are many nodes, and never change.
        """
        other = copy(self)
        other._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        other._utf8.setstate(self._utf8.getstate())
        other._buffer = StringIO(newline="")
        other._buffer.write(self._read(0, self._num_chars))
        other._num_taken = 0
        other._checkpoints = self._checkpoints.copy()
        return other

    def advance(self, output_token_ids: Sequence[int]) -> bool:
        """Consume what is new of the output, given whole; True once a stop string ended."""
        while self._stop_at is None and self.num_tokens < len(output_token_ids):
            self._consume(output_token_ids[self.num_tokens])
        return self._stop_at is not None

    def take(self) -> str:
        """Text that is now certain and has not been taken yet."""
        delta = self._read(self._num_taken, self._num_certain)
        self._num_taken = self._num_certain
        return delta

    def finish(self, drop_tokens: int = 0) -> str:
        """The sequence ended: the last delta, without the text of the last `drop_tokens` tokens.

        Half a character at the end becomes U+FFFD, as `Tokenizer.decode` has it. Text that was already taken stays.
        """
        if not 0 <= drop_tokens <= len(self._checkpoints):
            raise ValueError(
                f"drop_tokens must be 0..{len(self._checkpoints)} (the tokens seen, at most the longest of "
                f"stop_sequences), got {drop_tokens}"
            )
        if drop_tokens:
            self._rewind(self._checkpoints[-drop_tokens])
        if self._stop_at is None:
            self._append(self._utf8.decode(b"", final=True))
        end = self._num_chars if self._stop_at is None else self._stop_at
        self._num_certain = max(end, self._num_taken)
        return self.take()

    @property
    def text(self) -> str:
        """Everything taken so far. Builds the string: read it at the end, not for every token."""
        return self._read(0, self._num_taken)

    def _consume(self, token_id: int) -> None:
        self._checkpoints.append(
            _Checkpoint(self._num_chars, self._at_start, self._utf8.getstate(), self._string_match)
        )
        self.num_tokens += 1
        piece = self._tokenizer.piece(token_id, self._skip_special)
        if self._at_start and piece:
            self._at_start = False
            if self._strips_space:
                piece = piece.removeprefix(b" ")
        self._append(self._utf8.decode(piece))
        self._id_match = self._id_match.step(token_id)
        certain = self._num_chars - self._string_match.depth if self._stop_at is None else self._stop_at
        if self._id_match.depth:
            certain = min(certain, self._checkpoints[-self._id_match.depth].num_chars)
        self._num_certain = certain

    def _append(self, text: str) -> None:
        """Add decoded text, up to and including the first stop string in it."""
        self._buffer.seek(self._num_chars)
        self._buffer.write(text)
        if self._string_match.is_empty:
            self._num_chars += len(text)
            return
        for char in text:
            self._num_chars += 1
            self._string_match = self._string_match.step(char)
            if self._string_match.match_len and self.num_tokens >= self._min_tokens:
                self._stop_at = self._num_chars - (0 if self._include_stop else self._string_match.match_len)
                return

    def _rewind(self, checkpoint: "_Checkpoint") -> None:
        """Forget the tokens since `checkpoint`, unless a stop string began before them."""
        if self._stop_at is not None and self._stop_at <= checkpoint.num_chars:
            return
        self._stop_at = None
        self._num_chars = checkpoint.num_chars
        self._at_start = checkpoint.at_start
        self._utf8.setstate(checkpoint.utf8_state)
        self._string_match = checkpoint.string_match

    def _read(self, start: int, end: int) -> str:
        self._buffer.seek(start)
        return self._buffer.read(end - start)


class _Checkpoint(NamedTuple):
    """What `Detokenizer` knew before a token."""

    num_chars: int
    at_start: bool
    utf8_state: tuple[bytes, int]
    string_match: "_Node"


class _Node:
    """A state of an Aho-Corasick automaton: the longest suffix of the input that begins a pattern."""

    __slots__ = ("children", "depth", "fallback", "match_len")

    def __init__(self, depth: int, fallback: "_Node | None"):
        self.children: dict[Hashable, _Node] = {}
        self.depth = depth  # length of that suffix
        self.fallback = fallback  # the state of the next shorter such suffix; None at the root
        self.match_len = 0  # length of the longest pattern that ends here, 0 for none

    @property
    def is_empty(self) -> bool:
        """No pattern at all: the root is the only state."""
        return self.fallback is None and not self.children

    def step(self, symbol: Hashable) -> "_Node":
        """The state after `symbol`. Amortised O(1): every fallback gives back depth that an earlier step gained."""
        node = self
        while symbol not in node.children:
            if node.fallback is None:
                return node
            node = node.fallback
        return node.children[symbol]


def _build_automaton(patterns: Sequence[Sequence[Hashable]], field: str) -> _Node:
    root = _Node(0, None)
    for index, pattern in enumerate(patterns):
        if not pattern:
            raise ValueError(f"{field}[{index}] is empty; an empty stop would end every sequence before it starts")
        node = root
        for symbol in pattern:
            node = node.children.setdefault(symbol, _Node(node.depth + 1, root))
        node.match_len = len(pattern)
    queue = deque(root.children.values())
    while queue:  # breadth first: a fallback is shorter, so it is already complete
        node = queue.popleft()
        for symbol, child in node.children.items():
            assert node.fallback is not None
            child.fallback = node.fallback.step(symbol)
            child.match_len = child.match_len or child.fallback.match_len
            queue.append(child)
    return root
