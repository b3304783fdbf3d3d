"""Reads the text of an answer: thoughts, content for the reader and calls of functions, in the order of the text."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

from quire.async_llm.updates import Update
from quire.core.sequence import TokenLogprob
from quire.server.openai.tools import ToolParser
from quire.text.detokenizer import Detokenizer
from quire.text.reasoning import MAX_CALLS, Kind, Part, ReasoningParser, merged


class AnswerParser:
    """Separates the text of a sequence, as it is generated, into parts. How the text is cut makes no difference."""

    def __init__(
        self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None, max_calls: int = MAX_CALLS
    ) -> None:
        """`reasoning` for a model with thoughts, `tools` for calls in its content; calls after `max_calls` are lost."""
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self.num_calls = 0

    @property
    def place(self) -> Kind | None:
        """What the text is in the middle of; None between, and before it has said so."""
        return self._reasoning.place if self._reasoning else "content"

    def feed(self, text: str, *, is_last: bool = False) -> list[Part]:
        """Take more text; returns what is certain, and with the last text all that was held back."""
        parts = self._reasoning.feed(text) if self._reasoning else [Part("content", text)]
        if self._reasoning and is_last:
            parts += self._reasoning.finish()
        if self._tools:
            parts = list(itertools.chain(*map(self._read_calls, parts)))
            parts += self._tools.finish() if is_last else []
        return [part for part in parts if self._is_shown(part)]

    def _read_calls(self, part: Part) -> list[Part]:
        return self._tools.feed(part.text) if self._tools and part.kind == "content" else [part]

    def _is_shown(self, part: Part) -> bool:
        """Whether there is something to show; counts the calls."""
        if part.kind != "call":
            return bool(part.text)
        self.num_calls += 1
        return self.num_calls <= self._max_calls


class TokenTexts:
    """Cuts the text of a sequence where its tokens end, so that each token is known with its text.

    The text may come later than its tokens, and its end may be missing: a stop string, or tokens without text.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        """`detokenizer` knows no stops: it tells the text that the tokens alone have."""
        self._detokenizer = detokenizer
        self._token_ids: list[int] = []
        self._num_chars = 0
        """Of all tokens."""
        self._ends: deque[int] = deque()
        """Where the text of each token ends that has not been handed out."""
        self._text = ""
        """What has come and has not been handed out."""
        self._num_taken = 0

    def feed(self, update: Update) -> Iterator[tuple[str, int]]:
        """Take what is new; returns pieces of text, each with the number of tokens that end there: 0 or 1."""
        for token_id in update.token_ids:
            self._token_ids.append(token_id)
            self._detokenizer.advance(self._token_ids)
            self._num_chars += len(self._detokenizer.take())
            self._ends.append(self._num_chars)
        text, at = self._text + update.text, 0
        while self._ends and self._ends[0] - self._num_taken <= len(text):
            end = max(self._ends.popleft() - self._num_taken, at)
            yield text[at:end], 1
            at = end
        if not self._ends or update.finish_reason:
            yield text[at:], 0
            at = len(text)
        self._text = text[at:]
        self._num_taken += at
        if update.finish_reason:
            yield from (("", 1) for _ in self._ends)


class TokenParser:
    """Reads an answer token by token, so that each part is known with the log-probabilities of its tokens."""

    def __init__(self, parser: AnswerParser, detokenizer: Detokenizer) -> None:
        """`detokenizer` is as `TokenTexts` wants it."""
        self._parser = parser
        self._texts = TokenTexts(detokenizer)
        self._logprobs: deque[TokenLogprob] = deque()
        """Of tokens whose text has not come."""
        self._left: list[TokenLogprob] = []
        """Of tokens that were read, and are of no thought, before the part is known that they belong to."""
        self.num_reasoning_tokens = 0
        """Tokens of thoughts, the marks on their two sides too."""

    def feed(self, update: Update) -> list[tuple[Part, list[TokenLogprob]]]:
        """Take what is new; returns the parts that are certain. Only content has log-probabilities."""
        self._logprobs += update.logprobs
        groups: list[tuple[list[Part], list[TokenLogprob]]] = []
        for text, num_tokens in self._texts.feed(update):
            self._group(groups, self._read(text, num_tokens))
        if update.finish_reason:
            self._group(groups, self._parser.feed("", is_last=True))
        return [(merged(parts)[0], logprobs) for parts, logprobs in groups]

    def take_left(self) -> list[TokenLogprob]:
        """Log-probabilities of tokens after the last part, such as one that ends the sequence."""
        left, self._left = self._left, []
        return left

    def _read(self, text: str, num_tokens: int) -> list[Part]:
        before = self._parser.place
        parts = self._parser.feed(text)
        after = self._parser.place
        logprobs = [self._logprobs.popleft() for _ in range(min(num_tokens, len(self._logprobs)))]
        if "reasoning" in (before, after):
            self.num_reasoning_tokens += num_tokens
        else:
            self._left += logprobs
        if before != after and not parts:
            self._left = []  # they were a mark, or a header, which nobody reads
        return parts

    def _group(self, groups: list[tuple[list[Part], list[TokenLogprob]]], parts: Sequence[Part]) -> None:
        """Add parts to those before, neighbours of one kind together."""
        for part in parts:
            left = self.take_left()
            logprobs = left if part.kind == "content" else []
            if groups and groups[-1][0][0].kind == part.kind != "call":
                groups[-1][0].append(part)
                groups[-1][1].extend(logprobs)
            else:
                groups.append(([part], logprobs))
