"""OpenAI's shapes: from the wire to requests of the engine, and from its updates to the JSON that clients read."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.request import Request, SamplingParams, TokenLogprob
from quire.server import wire
from quire.server.errors import ApiError
from quire.server.service import Caller, Service
from quire.server.stream import Stream, Update
from quire.server.tools import ToolParser, tool_style
from quire.structured import Structured
from quire.tokenizer import Tokenizer

SMALLEST_TOP_P = 1e-6
"""What a top_p of 0 means: the likeliest token."""
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
TEMPLATE_KWARGS = ("enable_thinking", "date_string", "custom_tools", "builtin_tools", "tools_in_user_message")
"""Variables of chat templates that a request may set."""


@dataclass(slots=True)
class Asked:
    """A request off the wire: what to submit, and what its answer looks like."""

    requests: list[Request]
    answer: "Answer"
    stream: bool
    include_usage: bool
    timeout_s: float | None
    structured: Structured | None = None
    """What the answer must look like, to be compiled; None for anything."""


class Answer:
    """What completions and chats have in common."""

    object_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, service: Service, asked: wire.Sampling) -> None:
        self.service = service
        self.tokenizer: Tokenizer | None = service.bridge.llm.engine.tokenizer
        self.id = asked.request_id or f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.n = asked.n or 1
        self.return_token_ids = bool(asked.return_token_ids)
        self.prompt_logprobs = bool(asked.prompt_logprobs)

    def head(self, name: str) -> dict[str, Any]:
        """What every object of this answer begins with."""
        return {"id": self.id, "object": name, "created": self.created, "model": self.service.model_name}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        return self.head(self.chunk_name) | {"choices": choices}

    def body(self, streams: list[Stream], wholes: list[dict[int, Update]]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self.choice(i, streams[i], whole)
            for i, updates in enumerate(wholes)
            for _, whole in sorted(updates.items())
        ]
        return self.head(self.object_name) | {"choices": choices, "usage": usage(streams)}

    def begin(self) -> list[dict[str, Any]]:
        """Choices of the stream's first chunk, before anything has been drawn."""
        return []

    def choice(self, prompt: int, stream: Stream, whole: Update) -> dict[str, Any]:
        """A whole choice."""
        raise NotImplementedError

    def delta(self, prompt: int, stream: Stream, update: Update) -> dict[str, Any] | None:
        """What is new of a choice; None for nothing that shows."""
        raise NotImplementedError

    def _extras(self, stream: Stream, update: Update, *, is_whole: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.return_token_ids:
            extras["token_ids"] = update.token_ids
            if is_whole or update.finish_reason:
                extras["prompt_token_ids"] = list(stream.request.prompt_token_ids)
        if self.prompt_logprobs and update.finish_reason:
            extras["prompt_logprobs"] = [
                entry and {"token_id": entry.token_id, "token": self.token(entry.token_id), "logprob": entry.logprob}
                for entry in stream.prompt_logprobs or ()
            ]
        return extras

    def token(self, token_id: int) -> str:
        """A token as text, special ones too."""
        return self.piece(token_id).decode("utf-8", "replace")

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token, special ones too."""
        pieces = self.tokenizer.pieces if self.tokenizer else ()
        return pieces[token_id] if token_id < len(pieces) else b""


# -- completions ------------------------------------------------------------------------------------------------------


class CompletionAnswer(Answer):
    """`text_completion`."""

    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, service: Service, asked: wire.CompletionRequest, prompts: list[list[int]]) -> None:
        super().__init__(service, asked)
        self.echo = bool(asked.echo)
        self.logprobs = asked.logprobs
        self._prompts = prompts
        self._written: Any = asked.prompt
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def choice(self, prompt: int, stream: Stream, whole: Update) -> dict[str, Any]:
        """A whole choice."""
        return self._choice(prompt, stream, whole, is_whole=True)

    def delta(self, prompt: int, stream: Stream, update: Update) -> dict[str, Any] | None:
        """What is new of a choice."""
        if not update.text and not update.finish_reason and not update.logprobs and not self.return_token_ids:
            return None
        return self._choice(prompt, stream, update, is_whole=False)

    def _choice(self, prompt: int, stream: Stream, update: Update, *, is_whole: bool) -> dict[str, Any]:
        index = prompt * self.n + update.index
        is_first = index not in self._begun
        self._begun.add(index)
        text = update.text
        entries: list[TokenLogprob | None] = list(update.logprobs)
        if self.echo and is_first:
            text = self._prefix(prompt) + text
            if self.logprobs is not None:
                entries = list(stream.prompt_logprobs or ()) + entries
        shown = None
        if self.logprobs is not None:
            shown = self._logprobs(index, entries, self._prompts[prompt] if self.echo and is_first else [])
        choice = {
            "index": index,
            "text": text,
            "logprobs": shown,
            "finish_reason": update.finish_reason and FINISH_REASONS[update.finish_reason],
        }
        return choice | self._extras(stream, update, is_whole=is_whole)

    def _prefix(self, prompt: int) -> str:
        """The prompt as its client wrote it."""
        written = self._written if isinstance(self._written, str) else self._written[prompt]
        if isinstance(written, str):
            return written
        return self.tokenizer.decode(self._prompts[prompt]) if self.tokenizer else ""

    def _logprobs(self, index: int, entries: list[TokenLogprob | None], prompt: list[int]) -> dict[str, Any]:
        tokens, offsets, at = [], [], self._offsets.get(index, 0)
        for i, entry in enumerate(entries):
            text = self.token(entry.token_id if entry else prompt[i])
            tokens.append(text)
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [entry and entry.logprob for entry in entries],
            "top_logprobs": [
                entry and {self.token(token_id): logprob for token_id, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }


async def read_completion(
    service: Service, asked: wire.CompletionRequest, caller: Caller, *, default_max_tokens: int | None = 16
) -> Asked:
    """The requests of a completion: one for each prompt. OpenAI's default is 16 tokens; None is as many as fit."""
    prompts = await _prompts(service, asked.prompt)
    scored = asked.echo and asked.logprobs is not None
    params = _sampling(
        asked,
        logprobs=asked.logprobs,
        prompt_logprobs=bool(asked.prompt_logprobs or scored),
        default_max_tokens=default_max_tokens,
    )
    answer = CompletionAnswer(service, asked, prompts)
    return _asked(service, asked, caller, answer, prompts, params, structured=_structured(asked.structured_outputs))


async def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await service.encode(prompt)]
    if isinstance(prompt[0], int):
        return [_ids(service, prompt)]
    if len(prompt) > wire.MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompt)} prompts, at most {wire.MAX_PROMPTS}", param="prompt")
    if all(isinstance(entry, str) for entry in prompt):
        return [await service.encode(entry) for entry in prompt]
    if isinstance(prompt[0], list):
        return [_ids(service, entry) for entry in prompt]
    raise _mixed()


def _ids(service: Service, entry: Any) -> list[int]:
    """A prompt of token ids. Its length comes first: it may be long."""
    if not isinstance(entry, list):
        raise _mixed()
    if len(entry) > service.max_model_len:
        message = f"prompt: {len(entry):,} tokens do not fit into max_model_len={service.max_model_len}"
        raise ApiError(400, message, param="prompt", code="context_length_exceeded")
    if not all(isinstance(token_id, int) for token_id in entry):
        raise _mixed()
    return entry


def _mixed() -> ApiError:
    return ApiError(400, "prompt: strings, token ids and lists of token ids cannot be mixed", param="prompt")


# -- chats ------------------------------------------------------------------------------------------------------------


class ChatAnswer(Answer):
    """`chat.completion`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, service: Service, asked: wire.ChatRequest, style: str | None) -> None:
        super().__init__(service, asked)
        self.wants_logprobs = bool(asked.logprobs)
        self._style = style
        self._parsers: dict[int, ToolParser] = {}

    def begin(self) -> list[dict[str, Any]]:
        """Every choice says who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self.n)]

    def choice(self, prompt: int, stream: Stream, whole: Update) -> dict[str, Any]:
        """A whole choice."""
        content, calls = self._parse(whole)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        shown = {"content": self._logprobs(whole.logprobs), "refusal": None} if self.wants_logprobs else None
        reason = self._finish_reason(whole)
        choice = {"index": whole.index, "message": message, "logprobs": shown, "finish_reason": reason}
        return choice | self._extras(stream, whole, is_whole=True)

    def delta(self, prompt: int, stream: Stream, update: Update) -> dict[str, Any] | None:
        """What is new of a choice."""
        content, calls = self._parse(update)
        if not (content or calls or update.finish_reason or update.logprobs or self.return_token_ids):
            return None
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            first = self._parsers[update.index].num_calls - len(calls)
            delta["tool_calls"] = [{"index": first + i} | call for i, call in enumerate(calls)]
        shown = {"content": self._logprobs(update.logprobs), "refusal": None} if update.logprobs else None
        choice = {
            "index": update.index,
            "delta": delta,
            "logprobs": shown,
            "finish_reason": self._finish_reason(update),
        }
        return choice | self._extras(stream, update, is_whole=False)

    def _parse(self, update: Update) -> tuple[str, list[dict[str, Any]]]:
        if self._style is None:
            return update.text, []
        parser = self._parsers.setdefault(update.index, ToolParser(self._style))
        content, calls = parser.feed(update.text)
        if update.finish_reason:
            more, last = parser.finish()
            content, calls = content + more, calls + last
        return content, [{"id": uuid.uuid4().hex[:9], "type": "function", "function": call} for call in calls]

    def _finish_reason(self, update: Update) -> str | None:
        if update.finish_reason is None:
            return None
        parser = self._parsers.get(update.index)
        called = parser is not None and parser.num_calls > 0
        return "tool_calls" if called and update.finish_reason != "length" else FINISH_REASONS[update.finish_reason]

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


async def read_chat(service: Service, asked: wire.ChatRequest, caller: Caller) -> Asked:
    """The request of a chat."""
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; send one", param="max_tokens")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    tools, style = _tools(service, asked)
    kwargs = _template_kwargs(asked.chat_template_kwargs or {})
    if tools:
        kwargs["tools"] = tools
    tokenizer = service.tokenizer

    def prompt_ids() -> list[int]:
        messages = [_message(message) for message in asked.messages]
        return service.encode_here(tokenizer.render_chat(messages, **kwargs), add_special=False, param="messages")

    prompt = await service.aside(prompt_ids)
    params = _sampling(
        asked,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=bool(asked.prompt_logprobs),
        max_tokens=asked.max_completion_tokens,
        has_marks=style not in (None, "json"),
    )
    structured = _structured(asked.structured_outputs, asked.response_format) or _forced_call(asked)
    answer = ChatAnswer(service, asked, style)
    return _asked(service, asked, caller, answer, [prompt], params, structured=structured)


def _message(message: wire.Message) -> dict[str, Any]:
    """As templates expect it: text for content, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": content or ""}
    if content is None and message.role != "assistant":
        raise ApiError(400, f"messages: a message of role {message.role} needs content", param="messages")
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": _loads(call)}}
            for call in message.tool_calls
        ]
    return shown


def _loads(call: wire.ToolCall) -> Any:
    try:
        value = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return value if isinstance(value, dict) else call.function.arguments


def _tools(service: Service, asked: wire.ChatRequest) -> tuple[list[dict[str, Any]], str | None]:
    """The tools for the template, and how calls are written; None where none can come."""
    if asked.tool_choice is not None and not asked.tools and asked.tool_choice != "none":
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if not asked.tools or asked.tool_choice == "none":
        return [], None
    names = [tool.function.name for tool in asked.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two functions have the same name", param="tools")
    if isinstance(asked.tool_choice, wire.NamedTool) and asked.tool_choice.function.name not in names:
        message = f"tool_choice names {asked.tool_choice.function.name!r}, which is not among tools"
        raise ApiError(400, message, param="tool_choice")
    style = tool_style(service.tokenizer.chat_template_source or "")
    if style is None:
        message = "this model's chat template takes no tools; response_format with a json_schema may serve instead"
        raise ApiError(400, message, param="tools", code="tools_not_supported")
    if _is_forced(asked):
        style = "json"
    tools = [{"type": "function", "function": _function(tool.function)} for tool in asked.tools]
    return tools, style


def _is_forced(asked: wire.ChatRequest) -> bool:
    return bool(asked.tools) and (asked.tool_choice == "required" or isinstance(asked.tool_choice, wire.NamedTool))


def _function(function: wire.Function) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def _forced_call(asked: wire.ChatRequest) -> Structured | None:
    """A schema of the calls that may come, when one must."""
    if not _is_forced(asked) or not asked.tools:
        return None
    wanted = asked.tool_choice.function.name if isinstance(asked.tool_choice, wire.NamedTool) else None
    options = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _function(tool.function)["parameters"],
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in asked.tools
        if wanted in (None, tool.function.name)
    ]
    return Structured(json_schema=options[0] if len(options) == 1 else {"anyOf": options}, name="tools")


def _template_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name not in TEMPLATE_KWARGS:
            message = f"chat_template_kwargs: {name!r} may not be set; {', '.join(TEMPLATE_KWARGS)} may"
            raise ApiError(400, message, param="chat_template_kwargs")
    return dict(kwargs)


# -- both -------------------------------------------------------------------------------------------------------------


def _structured(outputs: wire.StructuredOutputs | None, form: Any = None) -> Structured | None:
    """What the answer must look like."""
    if isinstance(form, wire.JsonObjectFormat | wire.JsonSchemaFormat) and outputs is not None:
        raise ApiError(400, "response_format and structured_outputs exclude each other", param="structured_outputs")
    if isinstance(form, wire.JsonObjectFormat):
        return Structured(json_object=True, name="response_format")
    if isinstance(form, wire.JsonSchemaFormat):
        return Structured(json_schema=form.json_schema.schema, name="response_format")
    if outputs is None:
        return None
    return Structured(
        json_schema=outputs.json,
        json_object=bool(outputs.json_object),
        regex=outputs.regex,
        choice=outputs.choice,
        grammar=outputs.grammar,
        name="structured_outputs",
    )


def _sampling(
    asked: wire.Sampling,
    *,
    logprobs: int | None,
    prompt_logprobs: bool,
    max_tokens: int | None = None,
    default_max_tokens: int | None = None,
    has_marks: bool = False,
) -> SamplingParams:
    max_tokens = asked.max_tokens if max_tokens is None else max_tokens
    # The marks around calls of tools are special tokens in some vocabularies.
    skip_special = not has_marks if asked.skip_special_tokens is None else asked.skip_special_tokens
    return SamplingParams(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p or SMALLEST_TOP_P,
        top_k=max(asked.top_k or 0, 0),
        min_p=asked.min_p or 0.0,
        seed=None if asked.seed is None else asked.seed % (1 << 64),
        n=asked.n or 1,
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        min_tokens=asked.min_tokens or 0,
        stop=asked.stop or (),
        stop_token_ids=asked.stop_token_ids or (),
        ignore_eos=bool(asked.ignore_eos),
        include_stop=bool(asked.include_stop_str_in_output),
        skip_special=skip_special,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logit_bias=asked.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _asked(
    service: Service,
    asked: wire.Sampling,
    caller: Caller,
    answer: Answer,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    structured: Structured | None,
) -> Asked:
    stream = bool(asked.stream)
    if asked.stream_options is not None and not stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    requests = [
        Request(
            id=f"{answer.id}-{i}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=_priority(service, asked),
            cache_salt=caller.salt(asked.cache_salt or ""),
            stream=stream,
        )
        for i, prompt in enumerate(prompts)
    ]
    include_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
    return Asked(requests, answer, stream, include_usage, asked.timeout, structured)


def _priority(service: Service, asked: wire.Sampling) -> int:
    """Who goes first: nobody beyond what the server allows."""
    priority = asked.priority or 0
    if priority > service.max_priority:
        message = f"priority={priority}: at most {service.max_priority} may be asked for here (--max-priority)"
        raise ApiError(400, message, param="priority", code="invalid_value")
    return priority


def usage(streams: list[Stream]) -> dict[str, Any]:
    """Tokens that went in and came out."""
    prompt_tokens = sum(len(stream.request.prompt_token_ids) for stream in streams)
    completion_tokens = sum(stream.num_output_tokens for stream in streams)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens for stream in streams)},
    }
