"""Formats responses as OpenAI does: from the engine's updates to the JSON that clients read."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from quire.async_llm.stream import Stream
from quire.async_llm.updates import Update
from quire.core.sequence import TokenLogprob
from quire.server.errors import ApiError
from quire.server.openai import schema
from quire.server.openai.answer_parser import AnswerParser
from quire.server.openai.json_parts import JsonParts, encode, parts_of
from quire.server.service import Service
from quire.text.reasoning import Part, text_of
from quire.text.tokenizer import Tokenizer

Columns = dict[str, list[Any]]
"""Log-probabilities of a completion: lists of one entry per token, by the name of their field."""
NewParser = Callable[[], AnswerParser]
"""Makes what reads the text of one sequence."""
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class ResponseFormatter:
    """Makes the JSON of one response, whole or as the events of a stream: what all kinds have in common."""

    object_name: str
    chunk_name: str
    id_prefix: str
    ends_with_done = True
    """Whether `[DONE]` follows the last event of a stream."""
    num_copies = 1
    """How often the events of a stream repeat each log-probability."""

    def __init__(self, service: Service, body: schema.Sampling) -> None:
        self.service = service
        self.tokenizer: Tokenizer | None = service.engine.llm.engine.tokenizer
        self.id = body.request_id or f"{self.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.n = body.n or 1
        self.include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self.return_token_ids = bool(body.return_token_ids)
        self.prompt_logprobs = bool(body.prompt_logprobs)
        self._shared: dict[tuple[str, str], JsonParts] = {}

    def head(self, name: str) -> dict[str, Any]:
        """The fields that every object of this response begins with."""
        return {"id": self.id, "object": name, "created": self.created, "model": self.service.model_name}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a streamed response."""
        return self.head(self.chunk_name) | {"choices": choices}

    def response(self, streams: list[Stream], wholes: list[list[Update]]) -> dict[str, Any]:
        """The whole response; `wholes` has one update for each sequence of each stream."""
        choices = list(self._choices(streams, wholes))
        return self.head(self.object_name) | {"choices": choices, "usage": usage_of(streams)}

    def parts(self, streams: list[Stream], wholes: list[list[Update]]) -> Iterator[bytes]:
        """Yield the JSON of the whole response, choice by choice; what choices share is the same bytes in each."""
        yield encode(self.head(self.object_name))[:-1] + b',"choices":['
        for number, choice in enumerate(self._choices(streams, wholes)):
            if number:
                yield b","
            yield from parts_of(choice)
        yield b'],"usage":' + encode(usage_of(streams)) + b"}"

    def _choices(self, streams: list[Stream], wholes: list[list[Update]]) -> Iterator[dict[str, Any]]:
        return (self.choice(i, streams[i], whole) for i, updates in enumerate(wholes) for whole in updates)

    def first_events(self, streams: list[Stream]) -> list[dict[str, Any]]:
        """The events of a stream before any token has been generated."""
        choices = self.begin()
        return [self.chunk(choices)] if choices else []

    def events(self, prompt: int, stream: Stream, update: Update) -> list[dict[str, Any]]:
        """The events for what is new of one sequence; `prompt` is the index of its prompt."""
        delta = self.delta(prompt, stream, update)
        return [] if delta is None else [self.chunk([delta])]

    def last_events(self, streams: list[Stream]) -> list[dict[str, Any]]:
        """The events of a stream after its last token."""
        return [self.chunk([]) | {"usage": usage_of(streams)}] if self.include_usage else []

    def error_events(self, streams: list[Stream], error: ApiError) -> list[dict[str, Any]]:
        """The events that end a stream which cannot be finished."""
        return [error.body]

    def begin(self) -> list[dict[str, Any]]:
        """Choices of the first chunk of a stream, before any token has been generated."""
        return []

    def choice(self, prompt: int, stream: Stream, whole: Update) -> dict[str, Any]:
        """One choice of a whole response; `prompt` is the index of its prompt."""
        raise NotImplementedError

    def delta(self, prompt: int, stream: Stream, update: Update) -> dict[str, Any] | None:
        """What a chunk adds to a choice; None if it adds nothing that is shown."""
        raise NotImplementedError

    def _extras(self, stream: Stream, update: Update, *, is_whole: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.return_token_ids:
            extras["token_ids"] = update.token_ids
            if is_whole or update.finish_reason:
                ids = stream.request.prompt_token_ids
                extras["prompt_token_ids"] = self._share("prompt_token_ids", stream, lambda: ids)
        if self.prompt_logprobs and update.finish_reason:
            extras["prompt_logprobs"] = self._share("prompt_logprobs", stream, lambda: self._prompt_logprobs(stream))
        return extras

    def _share(self, name: str, stream: Stream, make: Callable[[], Any]) -> JsonParts:
        """JSON of a field that all choices of one prompt have: made for the first of them."""
        key = (name, stream.request.id)
        if key not in self._shared:
            self._shared[key] = JsonParts([encode(make())])
        return self._shared[key]

    def _prompt_logprobs(self, stream: Stream) -> list[dict[str, Any] | None]:
        return [
            entry and {"token_id": entry.token_id, "token": self.token(entry.token_id), "logprob": entry.logprob}
            for entry in stream.prompt_logprobs or ()
        ]

    def token(self, token_id: int) -> str:
        """A token as text, special tokens too."""
        return self.piece(token_id).decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token, special tokens too."""
        pieces = self.tokenizer.pieces if self.tokenizer else ()
        return pieces[token_id] if token_id < len(pieces) else b""


# -- completions ------------------------------------------------------------------------------------------------------


class _Echo(NamedTuple):
    """What `echo` puts before the text of every choice of one prompt."""

    text: bytes
    """JSON of the prompt's text without quotes."""
    columns: dict[str, bytes]
    """JSON of the prompt's log-probabilities without brackets, by the name of their field."""
    end: int
    """Offset in the text at which the prompt ends."""


class CompletionFormatter(ResponseFormatter):
    """Formats the response to `/v1/completions`: `text_completion`."""

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, service: Service, body: schema.CompletionRequest, prompts: list[list[int]]) -> None:
        super().__init__(service, body)
        self.echo = bool(body.echo)
        self.logprobs = body.logprobs
        self._prompts = prompts
        self._given_prompts: Any = body.prompt
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._echoes: dict[int, _Echo] = {}

    def choice(self, prompt: int, stream: Stream, whole: Update) -> dict[str, Any]:
        """One choice of a whole completion."""
        return self._choice(prompt, stream, whole, is_whole=True)

    def delta(self, prompt: int, stream: Stream, update: Update) -> dict[str, Any] | None:
        """What a chunk adds to a choice of a completion; None if it adds nothing that is shown."""
        if not update.text and not update.finish_reason and not update.logprobs and not self.return_token_ids:
            return None
        return self._choice(prompt, stream, update, is_whole=False)

    def _choice(self, prompt: int, stream: Stream, update: Update, *, is_whole: bool) -> dict[str, Any]:
        index = prompt * self.n + update.index
        is_first = index not in self._begun
        self._begun.add(index)
        echo = self._echo(prompt, stream) if self.echo and is_first else None
        shown = None
        if self.logprobs is not None:
            at = echo.end if echo else self._offsets.get(index, 0)
            columns, self._offsets[index] = self._logprobs(update.logprobs, [], at)
            shown = _joined(echo.columns, columns) if echo else columns
        text = JsonParts((b'"', echo.text, encode(update.text)[1:])) if echo else update.text
        choice = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": update.finish_reason and FINISH_REASONS[update.finish_reason],
        }
        return choice | self._extras(stream, update, is_whole=is_whole)

    def _echo(self, prompt: int, stream: Stream) -> _Echo:
        if prompt not in self._echoes:
            columns, end = {}, 0
            if self.logprobs is not None:
                shown, end = self._logprobs(stream.prompt_logprobs or (), self._prompts[prompt], 0)
                columns = {name: encode(column)[1:-1] for name, column in shown.items()}
            self._echoes[prompt] = _Echo(encode(self._prefix(prompt))[1:-1], columns, end)
        return self._echoes[prompt]

    def _prefix(self, prompt: int) -> str:
        """The prompt as the client sent it, for `echo`."""
        given = self._given_prompts if isinstance(self._given_prompts, str) else self._given_prompts[prompt]
        if isinstance(given, str):
            return given
        return self.tokenizer.decode(self._prompts[prompt]) if self.tokenizer else ""

    def _logprobs(
        self, entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], at: int
    ) -> tuple[Columns, int]:
        """The columns of tokens whose text begins at an offset, and the offset at which it ends.

        `token_ids` are those of tokens that may have no entry.
        """
        tokens, offsets = [], []
        for i, entry in enumerate(entries):
            text = self.token(entry.token_id if entry else token_ids[i])
            tokens.append(text)
            offsets.append(at)
            at += len(text)
        columns = {
            "tokens": tokens,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [
                entry and {self.token(token_id): logprob for token_id, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }
        return columns, at


def _joined(before: dict[str, bytes], columns: Columns) -> JsonParts:
    """JSON of columns that follow others, which are JSON already and are not copied."""
    return JsonParts.of_object({name: _list_of(before[name], column) for name, column in columns.items()})


def _list_of(before: bytes, column: list[Any]) -> JsonParts:
    after = encode(column)[1:-1]
    return JsonParts((b"[", before, b"," if before and after else b"", after, b"]"))


# -- chats ------------------------------------------------------------------------------------------------------------


class ChatFormatter(ResponseFormatter):
    """Formats the response to `/v1/chat/completions`: `chat.completion`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service, body: schema.ChatRequest, new_parser: NewParser) -> None:
        super().__init__(service, body)
        self.wants_logprobs = bool(body.logprobs)
        self._parsers = [new_parser() for _ in range(self.n)]
        """For each sequence."""
        self._num_calls = [0] * self.n
        """Calls of each sequence that have been shown."""

    def begin(self) -> list[dict[str, Any]]:
        """The first chunk of a chat has the role of every choice."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self.n)]

    def choice(self, prompt: int, stream: Stream, whole: Update) -> dict[str, Any]:
        """One choice of a whole chat response, with the tool calls that its text holds."""
        reasoning, content, calls = self._parse(whole)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        shown = {"content": self._logprobs(whole.logprobs), "refusal": None} if self.wants_logprobs else None
        reason = self._finish_reason(whole)
        choice = {"index": whole.index, "message": message, "logprobs": shown, "finish_reason": reason}
        return choice | self._extras(stream, whole, is_whole=True)

    def delta(self, prompt: int, stream: Stream, update: Update) -> dict[str, Any] | None:
        """What a chunk adds to a choice of a chat; None if it adds nothing that is shown."""
        reasoning, content, calls = self._parse(update)
        if not (reasoning or content or calls or update.finish_reason or update.logprobs or self.return_token_ids):
            return None
        delta: dict[str, Any] = {"content": content} if content else {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if calls:
            first = self._num_calls[update.index] - len(calls)
            delta["tool_calls"] = [{"index": first + i} | call for i, call in enumerate(calls)]
        shown = {"content": self._logprobs(update.logprobs), "refusal": None} if update.logprobs else None
        choice = {
            "index": update.index,
            "delta": delta,
            "logprobs": shown,
            "finish_reason": self._finish_reason(update),
        }
        return choice | self._extras(stream, update, is_whole=False)

    def _parse(self, update: Update) -> tuple[str, str, list[dict[str, Any]]]:
        """The reasoning, the content and the calls that are new."""
        parts = self._parsers[update.index].feed(update.text, is_last=update.finish_reason is not None)
        calls = [_call(part) for part in parts if part.kind == "call"]
        self._num_calls[update.index] += len(calls)
        return text_of("reasoning", parts), text_of("content", parts), calls

    def _finish_reason(self, update: Update) -> str | None:
        if update.finish_reason is None:
            return None
        has_calls = self._num_calls[update.index] > 0
        return "tool_calls" if has_calls and update.finish_reason != "length" else FINISH_REASONS[update.finish_reason]

    def _logprobs(self, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._logprob(entry.token_id, entry.logprob)
            | {"top_logprobs": [self._logprob(token_id, logprob) for token_id, logprob in entry.top]}
            for entry in entries
        ]

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self.piece(token_id)
        token = piece.decode("utf-8", "replace")
        return {"token": token, "logprob": max(logprob, -9999.0), "bytes": list(piece)}


def _call(part: Part) -> dict[str, Any]:
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": part.function, "arguments": part.text},
    }


def usage_of(streams: list[Stream]) -> dict[str, Any]:
    """The `usage` of a response to these streams."""
    return usage(
        sum(len(stream.request.prompt_token_ids) for stream in streams),
        sum(stream.num_output_tokens for stream in streams),
        sum(stream.num_cached_tokens for stream in streams),
    )


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`: the tokens of prompts and of generated text."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
