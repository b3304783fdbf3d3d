"""Parses OpenAI's requests: from the types of `schema` to requests of the engine and a formatter for the response."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.server.errors import ApiError
from quire.server.openai import schema
from quire.server.openai.format import ChatFormatter, CompletionFormatter, ResponseFormatter
from quire.server.openai.tools import tool_style
from quire.server.service import Caller, Service
from quire.structured.form import Structured

SMALLEST_TOP_P = 1e-6
"""What a top_p of 0 means: the likeliest token."""
TEMPLATE_KWARGS = ("enable_thinking", "date_string", "custom_tools", "builtin_tools", "tools_in_user_message")
"""Variables of chat templates that a request may set."""


@dataclass(slots=True)
class ParsedRequest:
    """A client's request, parsed: what to submit to the engine, and how to format the response."""

    requests: list[Request]
    formatter: ResponseFormatter
    stream: bool
    include_usage: bool
    timeout_s: float | None
    structured: Structured | None = None
    """The form that the generated text must have, not yet compiled; None for any text."""


# -- completions ------------------------------------------------------------------------------------------------------


async def parse_completion(
    service: Service, body: schema.CompletionRequest, caller: Caller, *, default_max_tokens: int | None = 16
) -> ParsedRequest:
    """Parse a completion: one request for each prompt. `default_max_tokens` of None is as many tokens as fit."""
    service.check_arrival(body.model)
    prompts = await _prompts(service, body.prompt, caller)
    scored = body.echo and body.logprobs is not None
    params = _sampling(
        body,
        logprobs=body.logprobs,
        prompt_logprobs=bool(body.prompt_logprobs or scored),
        default_max_tokens=default_max_tokens,
    )
    formatter = CompletionFormatter(service, body, prompts)
    return _parsed_request(
        service, body, caller, formatter, prompts, params, structured=_structured(body.structured_outputs)
    )


async def _prompts(service: Service, prompt: Any, caller: Caller) -> list[list[int]]:
    if isinstance(prompt, str):
        return [await service.encode(caller, prompt)]
    if isinstance(prompt[0], int):
        return [_ids(service, prompt)]
    if len(prompt) > schema.MAX_PROMPTS:
        raise ApiError(400, f"prompt: {len(prompt)} prompts, at most {schema.MAX_PROMPTS}", param="prompt")
    if all(isinstance(entry, str) for entry in prompt):
        return [await service.encode(caller, entry) for entry in prompt]
    if isinstance(prompt[0], list):
        return [_ids(service, entry) for entry in prompt]
    raise _mixed()


def _ids(service: Service, entry: Any) -> list[int]:
    """Check a prompt of token ids; its length first, because it may be long."""
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


async def parse_chat(service: Service, body: schema.ChatRequest, caller: Caller) -> ParsedRequest:
    """Parse a chat: one request, whose prompt the model's chat template renders."""
    service.check_arrival(body.model)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; send one", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    tools, style = _tools(service, body)
    kwargs = _template_kwargs(body.chat_template_kwargs or {})
    if tools:
        kwargs["tools"] = tools
    messages = [_message(message) for message in body.messages]
    prompt = await service.run_in_thread(caller, service.encode_chat_sync, messages, kwargs)
    params = _sampling(
        body,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=bool(body.prompt_logprobs),
        max_tokens=body.max_completion_tokens,
        has_marks=style not in (None, "json"),
    )
    structured = _structured(body.structured_outputs, body.response_format) or _forced_call(body)
    formatter = ChatFormatter(service, body, style)
    return _parsed_request(service, body, caller, formatter, [prompt], params, structured=structured)


def _message(message: schema.Message) -> dict[str, Any]:
    """A message as chat templates expect it: text for content, arguments of tool calls as objects."""
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


def _loads(call: schema.ToolCall) -> Any:
    try:
        value = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return value if isinstance(value, dict) else call.function.arguments


def _tools(service: Service, body: schema.ChatRequest) -> tuple[list[dict[str, Any]], str | None]:
    """The tools for the chat template, and the style in which the model writes calls; None where it can write none."""
    if body.tool_choice is not None and not body.tools and body.tool_choice != "none":
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if not body.tools or body.tool_choice == "none":
        return [], None
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two functions have the same name", param="tools")
    if isinstance(body.tool_choice, schema.NamedTool) and body.tool_choice.function.name not in names:
        message = f"tool_choice names {body.tool_choice.function.name!r}, which is not among tools"
        raise ApiError(400, message, param="tool_choice")
    style = tool_style(service.tokenizer.chat_template_source or "")
    if style is None:
        message = "this model's chat template takes no tools; response_format with a json_schema may serve instead"
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


def _template_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    for name in kwargs:
        if name not in TEMPLATE_KWARGS:
            message = f"chat_template_kwargs: {name!r} may not be set; {', '.join(TEMPLATE_KWARGS)} may"
            raise ApiError(400, message, param="chat_template_kwargs")
    return dict(kwargs)


# -- both -------------------------------------------------------------------------------------------------------------


def _structured(outputs: schema.StructuredOutputs | None, form: Any = None) -> Structured | None:
    """The form that `structured_outputs` or `response_format` wants the generated text to have."""
    if isinstance(form, schema.JsonObjectFormat | schema.JsonSchemaFormat) and outputs is not None:
        raise ApiError(400, "response_format and structured_outputs exclude each other", param="structured_outputs")
    if isinstance(form, schema.JsonObjectFormat):
        return Structured(json_object=True, name="response_format")
    if isinstance(form, schema.JsonSchemaFormat):
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
    body: schema.Sampling,
    *,
    logprobs: int | None,
    prompt_logprobs: bool,
    max_tokens: int | None = None,
    default_max_tokens: int | None = None,
    has_marks: bool = False,
) -> SamplingParams:
    max_tokens = body.max_tokens if max_tokens is None else max_tokens
    # The marks around calls of tools are special tokens in some vocabularies.
    skip_special = not has_marks if body.skip_special_tokens is None else body.skip_special_tokens
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p or SMALLEST_TOP_P,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=None if body.seed is None else body.seed % (1 << 64),
        n=body.n or 1,
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=body.stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=skip_special,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _parsed_request(
    service: Service,
    body: schema.Sampling,
    caller: Caller,
    formatter: ResponseFormatter,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    structured: Structured | None,
) -> ParsedRequest:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    requests = [
        Request(
            id=f"{formatter.id}-{i}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=_priority(service, body),
            cache_salt=caller.salt(body.cache_salt or ""),
            stream=stream,
        )
        for i, prompt in enumerate(prompts)
    ]
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    return ParsedRequest(requests, formatter, stream, include_usage, body.timeout, structured)


def _priority(service: Service, body: schema.Sampling) -> int:
    """The request's priority, if the server allows it."""
    priority = body.priority or 0
    if priority > service.max_priority:
        message = f"priority={priority}: this server allows at most {service.max_priority} (--max-priority)"
        raise ApiError(400, message, param="priority", code="invalid_value")
    return priority
