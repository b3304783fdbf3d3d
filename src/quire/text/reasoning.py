"""What a model thinks before it answers, told apart from the answer in its text.

    think     <think> ... </think> answer                   Qwen3, SmolLM3, DeepSeek-R1; the prompt may open the mark
    harmony   <|channel|>analysis<|message|> ... <|end|>    gpt-oss: messages, each in a channel
              <|start|>assistant<|channel|>final<|message|>answer

In harmony a message `to=functions.NAME` is the call of a function, the channel `analysis` holds thoughts, and all else
is for the reader. The text is a stranger's: it is searched for fixed marks, and a call's arguments are read as JSON.
"""

import json
import re
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from quire.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"
CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKS = {"think": (THINK, END_THINK), "harmony": (CHANNEL, MESSAGE, START, CONSTRAIN, *ENDS)}
RECIPIENT = "to=functions."
ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})
MAX_HEADER_LEN = 256
"""Characters before `<|message|>`, at most; what is longer is text without a channel."""
MAX_CALLS = 128
_LONGEST_TAIL = 64
"""Tokens at the end of a prompt in which an open mark is looked for."""


Kind = Literal["reasoning", "content", "call"]


class Part(NamedTuple):
    """A piece of a model's text: a thought, content for the reader, or the call of a function."""

    kind: Kind
    text: str
    """Of a call, its arguments as JSON."""
    function: str = ""
    """Which function a call is of."""


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same parts in the same order; neighbours of one kind are one part, and calls stay apart."""
    texts: list[tuple[Part, list[str]]] = []
    for part in parts:
        if texts and part.kind == texts[-1][0].kind != "call":
            texts[-1][1].append(part.text)
        elif part.kind == "call" or part.text:
            texts.append((part, [part.text]))
    return [first._replace(text="".join(pieces)) for first, pieces in texts]


def text_of(kind: Kind, parts: Sequence[Part]) -> str:
    """The text of all parts of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def is_harmony(template: str) -> bool:
    """Whether a chat template has a model write harmony's messages."""
    return CHANNEL in template and MESSAGE in template


def reasoning_style(tokenizer: Tokenizer) -> str | None:
    """How a model's chat template has thoughts written; None where it knows of none."""
    template = tokenizer.chat_template_source or ""
    if is_harmony(template):
        return "harmony"
    return "think" if THINK in template and END_THINK in template else None


def has_special_marks(tokenizer: Tokenizer, style: str) -> bool:
    """Whether the marks are special tokens, which are left out of text unless it is asked to have them."""
    marks = {mark.encode() for mark in MARKS[style]}
    return any(tokenizer.pieces[token_id] in marks for token_id in tokenizer.special_ids)


def is_opened(tokenizer: Tokenizer, prompt: list[int]) -> bool:
    """Whether a prompt ends with an open `<think>`, so that the answer begins with thoughts."""
    return tokenizer.decode(prompt[-_LONGEST_TAIL:], skip_special=False).rstrip().endswith(THINK)


class ReasoningParser:
    """Separates the text of a sequence, as it is generated, into reasoning, content and calls of functions, in order.

    How the text is cut makes no difference, and every character is looked at a bounded number of times.
    """

    def __init__(self, style: str, *, is_open: bool = False, functions: Collection[str] = ()) -> None:
        """`is_open` if the prompt has opened the reasoning. A call of what is not among `functions` is content."""
        self._tail = ""
        """The end of the text that may be the beginning of a mark."""
        self._state: _Think | _Harmony = _Think(is_open) if style == "think" else _Harmony(functions)

    @property
    def place(self) -> Kind | None:
        """What the text is in the middle of; None between, and before it has said so."""
        return self._state.place

    def feed(self, text: str) -> list[Part]:
        """Take more text; returns what is certain."""
        text, self._tail, at = self._tail + text, "", 0
        while pattern := self._state.pattern:
            found = pattern.search(text, at)
            if found is None:
                kept = _tail_len(text, at, self._state.marks)
                self._state.add_text(text[at : len(text) - kept])
                if self._state.pattern is not None:  # else nothing is looked for any more
                    self._tail, at = text[len(text) - kept :], len(text)
                    break
                at = len(text) - kept
            else:
                self._state.add_text(text[at : found.start()])
                self._state.add_mark(found[0])
                at = found.end()
        self._state.add_text(text[at:])
        return self._take()

    def finish(self) -> list[Part]:
        """End the text; returns what was held back."""
        self._state.add_text(self._tail)
        self._tail = ""
        self._state.finish()
        return self._take()

    def _take(self) -> list[Part]:
        """What is certain and has not been taken."""
        parts, self._state.parts = merged(self._state.parts), []
        return parts


def _tail_len(text: str, at: int, marks: tuple[str, ...]) -> int:
    """How many characters at the end may be the beginning of a mark."""
    most = min(max(map(len, marks)) - 1, len(text) - at)
    lengths = range(most, 0, -1)
    return next((length for length in lengths if any(m.startswith(text[len(text) - length :]) for m in marks)), 0)


def _pattern(*marks: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


_OPENING, _CLOSING = _pattern(THINK), _pattern(END_THINK)


class _Think:
    """Thoughts come first, between two marks. Whitespace around them belongs to the marks."""

    def __init__(self, is_open: bool) -> None:
        self.parts: list[Part] = []
        self.place: Kind | None = "reasoning" if is_open else None
        self._is_blank = True
        """Whether only whitespace has come in this place."""
        self._spaces: list[str] = []
        """Whitespace that may belong to a mark."""
        self._has_thought = is_open

    @property
    def pattern(self) -> re.Pattern[str] | None:
        return {None: _OPENING, "reasoning": _CLOSING}.get(self.place)

    @property
    def marks(self) -> tuple[str, ...]:
        return (THINK,) if self.place is None else (END_THINK,)

    def add_text(self, text: str) -> None:
        if self._is_blank and self._has_thought:
            text = text.lstrip()
        if not text:
            return
        if self.place == "reasoning":
            self._is_blank = False
            end = text.rstrip()
            if end:
                self.parts += [Part("reasoning", one) for one in (*self._spaces, end)]
                self._spaces = []
            self._spaces.append(text[len(end) :])
            return
        if self.place is None:
            self._spaces.append(text)
            if text.isspace():
                return
            text, self._spaces, self.place = "".join(self._spaces), [], "content"
        self._is_blank = False
        self.parts.append(Part("content", text))

    def add_mark(self, mark: str) -> None:
        if self.place == "content":  # text that came before it said so
            self.add_text(mark)
            return
        self.place = "reasoning" if mark == THINK else "content"
        self._spaces, self._is_blank, self._has_thought = [], True, True

    def finish(self) -> None:
        if self.place is None:
            self.parts += [Part("content", one) for one in self._spaces]


class _Harmony:
    """Messages with a header, which says the channel and to whom; the first header has begun in the prompt."""

    marks = MARKS["harmony"]
    pattern = _pattern(*marks)

    def __init__(self, functions: Collection[str]) -> None:
        self.parts: list[Part] = []
        self.place: Kind | None = None
        """None in a header."""
        self._functions = frozenset(functions)
        self._header: list[str] = []
        self._header_len = 0
        self._has_role = False
        """Whether the header begins with `<|start|>`, and so with a role."""
        self._channel_at: int | None = None
        """Where in the header the channel's name begins; None before its mark."""
        self._function = ""
        self._arguments: list[str] = []
        self._num_calls = 0

    def add_text(self, text: str) -> None:
        if not text:
            return
        if self.place == "call":
            self._arguments.append(text)
        elif self.place is not None:
            self.parts.append(Part(self.place, text))
        else:
            self._header.append(text)
            self._header_len += len(text)
            if self._header_len > MAX_HEADER_LEN:
                self.parts.append(Part("content", "".join(self._header)))
                self.place = "content"

    def add_mark(self, mark: str) -> None:
        if mark == MESSAGE and self.place is None:
            self._begin_body()
        elif mark == START or mark in ENDS or (mark == CHANNEL and self.place is not None):
            self.finish()
            self._has_role = mark == START
            self._channel_at = 0 if mark == CHANNEL else None
        elif self.place is None and mark in (CHANNEL, CONSTRAIN):
            self.add_text(" ")  # what stands on its two sides are two words
            if mark == CHANNEL:
                self._channel_at = len(self._header)
        else:
            self.add_text(mark)

    def finish(self) -> None:
        """End a message, or a header that none follows; another header may."""
        if self.place == "call":
            self._end_call()
        if self.place is None and self._channel_at is None:
            self._end_bare_header()
        self.place, self._header, self._header_len, self._channel_at = None, [], 0, None

    def _begin_body(self) -> None:
        """The header is complete: where does what follows belong?"""
        words = "".join(self._header).split()
        channel = "" if self._channel_at is None else "".join(self._header[self._channel_at :])
        to = next((word for word in words if word.startswith(RECIPIENT)), None)
        if to is None:
            self.place = "reasoning" if channel.split()[:1] == ["analysis"] else "content"
        else:
            self._function = to.removeprefix(RECIPIENT)
            self.place = "call" if self._function in self._functions else "content"
        self._header, self._header_len, self._channel_at = [], 0, None

    def _end_bare_header(self) -> None:
        """What a header without a channel held, but for a role, is text of a model that does not know the format."""
        text = "".join(self._header)
        if not (self._has_role and text.strip() in ROLES):
            self.parts.append(Part("content", text))

    def _end_call(self) -> None:
        text, self._arguments = "".join(self._arguments), []
        if self._num_calls < MAX_CALLS and _is_object(text):
            self._num_calls += 1
            self.parts.append(Part("call", text.strip(), self._function))
        else:
            self.parts.append(Part("content", text))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
