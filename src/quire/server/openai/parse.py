"""Parses OpenAI's requests: from the types of `schema` to requests of the engine and a formatter for the response."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quire.core.request import Request
from quire.core.request_id import part_id
from quire.core.sampling_params import DECLARED, SamplingParams
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.answer_parser import AnswerParser
from quire.server.openai.format import ChatFormatter, CompletionFormatter, NewParser, ResponseFormatter
from quire.server.openai.tools import ToolParser, tool_style
from quire.server.service import Service
from quire.structured.form import Structured
from quire.text.reasoning import MAX_CALLS, ReasoningParser, has_special_marks, is_opened, reasoning_style

TEMPLATE_KWARGS = (
    "enable_thinking",
    "reasoning_effort",
    "date_string",
    "custom_tools",
    "builtin_tools",
    "tools_in_user_message",
)
"""Variables of chat templates that a request may set."""


MAX_RESPONSE_BYTES = 64 << 20
"""Maximum bytes of JSON that the log-probabilities and token ids of one response may come to, as estimated.

Formatting them takes about five times as much memory for a while. The constants below are the bytes of one entry with
a token of six bytes.
"""
COMPLETION_TOKEN_BYTES, COMPLETION_ALTERNATIVE_BYTES = 40, 30
CHAT_TOKEN_BYTES, CHAT_ALTERNATIVE_BYTES = 120, 100
"""A chat repeats the bytes of each token as numbers."""
PROMPT_LOGPROB_BYTES = 70
"""An entry of `prompt_logprobs`."""
TOKEN_ID_BYTES = 8
"""A token id, or a token of the text that `echo` repeats."""


@dataclass(slots=True)
class ParsedRequest:
    """A client's request, parsed: what to submit to the engine, and how to format the response."""

    requests: list[Request]
    formatter: ResponseFormatter
    stream: bool
    timeout_s: float | None
    structured: Structured | None = None
    """The form that the generated text must have, not yet compiled; None for any text."""
    prompt_field: str = "prompt"
    """The field that the prompt came in, which errors name."""


# -- completions ------------------------------------------------------------------------------------------------------


async def parse_completion(
    service: Service, body: schema.CompletionRequest, caller: Caller, *, default_max_tokens: int | None = 16
) -> ParsedRequest:
    """Parse a completion: one request for each prompt. `default_max_tokens` of None is as many tokens as fit."""
    service.check_arrival(body.model, caller)
    prompts = await token_ids_of(service, body.prompt, caller, "prompt", schema.MAX_PROMPTS)
    params = _sampling(
        body,
        service.default_params,
        max_tokens=default_max_tokens if body.max_tokens is None else None,
        logprobs=body.logprobs,
        prompt_logprobs=True if body.echo and body.logprobs is not None else None,
    )
    formatter = CompletionFormatter(service, body, prompts)
    return _parsed_request(
        service, body, caller, formatter, prompts, params, structured=_structured(body.structured_outputs)
    )


async def token_ids_of(service: Service, given: Any, caller: Caller, field: str, most: int) -> list[list[int]]:
    """The token ids of each prompt that a field has: text, several texts, token ids or several lists of them."""
    if isinstance(given, str):
        return [await service.encode(caller, given, param=field)]
    if isinstance(given[0], int):
        return [_ids(service, given, field)]
    if len(given) > most:
        raise ApiError(400, f"{field}: {len(given)} prompts, at most {most}", param=field)
    if all(isinstance(entry, str) for entry in given):
        return [await service.encode(caller, entry, param=field) for entry in given]
    if isinstance(given[0], list):
        return [_ids(service, entry, field) for entry in given]
    raise _mixed(field)


def _ids(service: Service, entry: Any, field: str) -> list[int]:
    """Check a prompt of token ids; its length first, because it may be long."""
    if not isinstance(entry, list):
        raise _mixed(field)
    service.check_length(entry, field)
    if not all(isinstance(token_id, int) for token_id in entry):
        raise _mixed(field)
    return entry


def _mixed(field: str) -> ApiError:
    return ApiError(400, f"{field}: strings, token ids and lists of token ids cannot be mixed", param=field)


# -- chats ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What errors call the fields of a chat, where a route has other names for them."""

    messages: str = "messages"
    response_format: str = "response_format"
    reasoning_effort: str = "reasoning_effort"
    max_tokens: str = "max_tokens"


CHAT_NAMES = FieldNames()
MakeFormatter = Callable[[Service, schema.ChatRequest, NewParser], ResponseFormatter]


async def parse_chat(
    service: Service,
    body: schema.ChatRequest,
    caller: Caller,
    *,
    names: FieldNames = CHAT_NAMES,
    make_formatter: MakeFormatter = ChatFormatter,
) -> ParsedRequest:
    """Parse a chat: one request, whose prompt the model's chat template renders."""
    service.check_arrival(body.model, caller)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; send one", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    tools, style = _tools(service, body, names)
    kwargs = _template_kwargs(body, names)
    if tools:
        kwargs["tools"] = tools
    messages = [_message(message) for message in body.messages]
    prompt = await service.run_in_thread(caller, service.encode_chat_sync, messages, kwargs, names.messages)
    structured = _structured(body.structured_outputs, body.response_format, names) or _forced_call(body)
    # A form holds from the first token on: there are no thoughts before it.
    reasoning = None if structured else reasoning_style(service.tokenizer)
    # The marks around calls of tools, and around thoughts, are special tokens in some vocabularies.
    has_marks = style not in (None, "json") or (reasoning and has_special_marks(service.tokenizer, reasoning))
    if 0 in (body.max_tokens, body.max_completion_tokens) and not body.prompt_logprobs:
        name = "max_completion_tokens" if body.max_tokens is None and names == CHAT_NAMES else names.max_tokens
        raise ApiError(400, f"{name}=0 asks for nothing; ask for 1 or more", param=name, code="invalid_value")
    params = _sampling(
        body,
        service.default_params,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        max_tokens=body.max_completion_tokens,
        skip_special=False if has_marks and body.skip_special_tokens is None else None,
    )
    is_open = reasoning == "think" and is_opened(service.tokenizer, prompt)
    functions = [tool["function"]["name"] for tool in tools]

    def new_parser() -> AnswerParser:
        return AnswerParser(
            ReasoningParser(reasoning, is_open=is_open, functions=functions) if reasoning else None,
            ToolParser(style, functions)
            if style not in (None, "harmony")
            else None,  # those it reads with the thoughts
            max_calls=1 if body.parallel_tool_calls is False else MAX_CALLS,
        )

    formatter = make_formatter(service, body, new_parser)
    parsed = _parsed_request(service, body, caller, formatter, [prompt], params, structured=structured, names=names)
    parsed.prompt_field = names.messages
    return parsed


def _message(message: schema.Message) -> dict[str, Any]:
    """A message as chat templates expect it: text for content, arguments of tool calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    shown: dict[str, Any] = {"role": role, "content": content or ""}
    if content is None and message.role != "assistant":
        raise ApiError(400, f"messages: a message of role {message.role} needs content", param="messages")
    if message.reasoning_content:
        shown |= dict.fromkeys(
            ("reasoning_content", "thinking"), message.reasoning_content
        )  # templates have both names
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


def _loads(call: schema.ToolCall) -> Any:
    try:
        value = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return value if isinstance(value, dict) else call.function.arguments


def _tools(service: Service, body: schema.ChatRequest, names: FieldNames) -> tuple[list[dict[str, Any]], str | None]:
    """The tools for the chat template, and the style in which the model writes calls; None where it can write none."""
    if body.tool_choice is not None and not body.tools and body.tool_choice != "none":
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if not body.tools or body.tool_choice == "none":
        return [], None
    functions = [tool.function.name for tool in body.tools]
    if len(set(functions)) < len(functions):
        raise ApiError(400, "tools: two functions have the same name", param="tools")
    if isinstance(body.tool_choice, schema.NamedTool) and body.tool_choice.function.name not in functions:
        message = f"tool_choice names {body.tool_choice.function.name!r}, which is not among tools"
        raise ApiError(400, message, param="tool_choice")
    style = tool_style(service.tokenizer.chat_template_source or "")
    if style is None:
        instead = f"{names.response_format} with a json_schema may serve instead"
        message = f"this model's chat template takes no tools; {instead}"
        raise ApiError(400, message, param="tools", code="tools_not_supported")
    if _is_forced(body):
        style = "json"
    tools = [{"type": "function", "function": _function(tool.function)} for tool in body.tools]
    return tools, style


def _is_forced(body: schema.ChatRequest) -> bool:
    return bool(body.tools) and (body.tool_choice == "required" or isinstance(body.tool_choice, schema.NamedTool))


def _function(function: schema.Function) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def _forced_call(body: schema.ChatRequest) -> Structured | None:
    """The form of a tool call, if `tool_choice` forces the model to make one."""
    if not _is_forced(body) or not body.tools:
        return None
    wanted = body.tool_choice.function.name if isinstance(body.tool_choice, schema.NamedTool) else None
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
        for tool in body.tools
        if wanted in (None, tool.function.name)
    ]
    return Structured(json_schema=options[0] if len(options) == 1 else {"anyOf": options}, name="tools")


def _template_kwargs(body: schema.ChatRequest, names: FieldNames) -> dict[str, Any]:
    """The variables of the chat template that a request sets."""
    kwargs = dict(body.chat_template_kwargs or {})
    for name in kwargs:
        if name not in TEMPLATE_KWARGS:
            message = f"chat_template_kwargs: {name!r} may not be set; {', '.join(TEMPLATE_KWARGS)} may"
            raise ApiError(400, message, param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        if "reasoning_effort" in kwargs:
            message = f"{names.reasoning_effort} and chat_template_kwargs.reasoning_effort are the same; send one"
            raise ApiError(400, message, param=names.reasoning_effort)
        kwargs["reasoning_effort"] = body.reasoning_effort
    return kwargs


# -- both -------------------------------------------------------------------------------------------------------------


def _structured(
    outputs: schema.StructuredOutputs | None, form: Any = None, names: FieldNames = CHAT_NAMES
) -> Structured | None:
    """The form that `structured_outputs` or `response_format` wants the generated text to have."""
    if isinstance(form, schema.JsonObjectFormat | schema.JsonSchemaFormat) and outputs is not None:
        message = f"{names.response_format} and structured_outputs exclude each other"
        raise ApiError(400, message, param="structured_outputs")
    if isinstance(form, schema.JsonObjectFormat):
        return Structured(json_object=True, name=names.response_format)
    if isinstance(form, schema.JsonSchemaFormat):
        return Structured(json_schema=form.json_schema.schema, name=names.response_format)
    if outputs is None:
        return None
    return Structured(
        json_schema=outputs.json,
        json_object=bool(outputs.json_object),
        regex=outputs.regex,
        choice=outputs.choice,
        grammar=outputs.grammar,
        compact=outputs.compact,
        name="structured_outputs",
    )


def _sampling(body: schema.Sampling, defaults: SamplingParams, **computed: Any) -> SamplingParams:
    """What a request asks for; `defaults` where it says nothing. What is `computed` and not None goes before."""
    given: dict[str, Any] = {name: getattr(body, name) for name in ("stop", "stop_token_ids", "logit_bias")}
    for name, declared in DECLARED.items():
        if declared.on_wire:
            value = getattr(body, declared.wire_name)
            given[name] = declared.from_wire(value) if declared.from_wire and value is not None else value
    given |= {name: value for name, value in computed.items() if value is not None}
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _parsed_request(
    service: Service,
    body: schema.Sampling,
    caller: Caller,
    formatter: ResponseFormatter,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    structured: Structured | None,
    names: FieldNames = CHAT_NAMES,
) -> ParsedRequest:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    _check_response_size(service, body, params, prompts, formatter.num_copies if stream else 1, names)
    requests = [
        Request(
            id=part_id(caller.request_id or formatter.id, i),
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=checked_priority(service, body.priority),
            cache_salt=caller.salt(body.cache_salt or ""),
            tenant=caller.tenant,
            group=body.prompt_cache_key or "",
            stream=stream,
        )
        for i, prompt in enumerate(prompts)
    ]
    return ParsedRequest(requests, formatter, stream, body.timeout, structured)


def _check_response_size(
    service: Service,
    body: schema.Sampling,
    params: SamplingParams,
    prompts: list[list[int]],
    num_copies: int,
    names: FieldNames,
) -> None:
    """Raise ApiError if the log-probabilities and token ids of a response could be too large."""
    num_bytes = most_generated = 0
    for prompt in prompts:
        room = max(service.max_model_len - len(prompt), 0)
        num_generated = room if params.max_tokens is None else min(params.max_tokens, room)
        most_generated = max(most_generated, num_generated)
        num_bytes += num_copies * params.n * choice_bytes(body, params, len(prompt), num_generated)
    if num_bytes <= MAX_RESPONSE_BYTES:
        return
    is_chat = isinstance(body, schema.ChatRequest)
    lower = {"n": params.n > 1, names.max_tokens: most_generated > 1 and choice_bytes(body, params, 0, 1) > 0}
    lower["top_logprobs" if is_chat else "logprobs"] = bool(params.logprobs)
    leave_out = {name: bool(getattr(body, name, None)) for name in ("echo", "prompt_logprobs", "return_token_ids")}
    fields = [name for name, may_help in (lower | leave_out).items() if may_help]
    steps = ["send fewer prompts"] * (len(prompts) > 1)
    for verb, names_of in (("lower", lower), ("leave out", leave_out)):
        if given := [name for name in fields if name in names_of]:
            steps.append(f"{verb} {_listed(given, ' or ')}")
    message = (
        f"{fields[0]}: the log-probabilities and token ids of the response may come to {num_bytes:,} bytes, at most "
        f"{MAX_RESPONSE_BYTES:,} bytes are allowed; {_listed(steps, ', or ')}"
    )
    raise ApiError(400, message, param=fields[0], code="response_too_large")


def choice_bytes(body: schema.Sampling, params: SamplingParams, num_prompt_tokens: int, num_generated: int) -> int:
    """Estimate the bytes of JSON of one choice's log-probabilities and token ids, with an echoed prompt."""
    of_token, of_alternative = COMPLETION_TOKEN_BYTES, COMPLETION_ALTERNATIVE_BYTES
    if isinstance(body, schema.ChatRequest):
        of_token, of_alternative = CHAT_TOKEN_BYTES, CHAT_ALTERNATIVE_BYTES
    logprobs = 0 if params.logprobs is None else of_token + params.logprobs * of_alternative
    ids, is_echo = TOKEN_ID_BYTES * bool(body.return_token_ids), bool(getattr(body, "echo", None))
    of_prompt = ids + PROMPT_LOGPROB_BYTES * bool(body.prompt_logprobs) + is_echo * (logprobs + TOKEN_ID_BYTES)
    return num_generated * (logprobs + ids) + num_prompt_tokens * of_prompt


def _listed(words: list[str], last: str) -> str:
    """Return words with commas between them, and `last` before the last one."""
    return last.join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def checked_priority(service: Service, priority: int | None) -> int:
    """A request's priority, if the server allows it."""
    priority = priority or 0
    if priority > service.max_priority:
        message = f"priority={priority}: this server allows at most {service.max_priority} (--max-priority)"
        raise ApiError(400, message, param="priority", code="invalid_value")
    return priority
