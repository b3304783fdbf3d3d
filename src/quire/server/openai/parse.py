"""OpenAI's shapes on the way in: from the wire to requests of the engine, and to what their answer will look like."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.server.errors import ApiError
from quire.server.openai import schema
from quire.server.openai.format import Answer, ChatAnswer, CompletionAnswer
from quire.server.openai.tools import tool_style
from quire.server.service import Caller, Service
from quire.structured.form import Structured

SMALLEST_TOP_P = 1e-6
"""What a top_p of 0 means: the likeliest token."""
TEMPLATE_KWARGS = ("enable_thinking", "date_string", "custom_tools", "builtin_tools", "tools_in_user_message")
"""Variables of chat templates that a request may set."""


@dataclass(slots=True)
class Asked:
    """A request off the wire: what to submit, and what its answer looks like."""

    requests: list[Request]
    answer: Answer
    stream: bool
    include_usage: bool
    timeout_s: float | None
    structured: Structured | None = None
    """What the answer must look like, to be compiled; None for anything."""


# -- completions ------------------------------------------------------------------------------------------------------


async def read_completion(
    service: Service, asked: schema.CompletionRequest, caller: Caller, *, default_max_tokens: int | None = 16
) -> Asked:
    """The requests of a completion: one for each prompt. OpenAI's default is 16 tokens; None is as many as fit."""
    service.check_arrival(asked.model)
    prompts = await _prompts(service, asked.prompt, caller)
    scored = asked.echo and asked.logprobs is not None
    params = _sampling(
        asked,
        logprobs=asked.logprobs,
        prompt_logprobs=bool(asked.prompt_logprobs or scored),
        default_max_tokens=default_max_tokens,
    )
    answer = CompletionAnswer(service, asked, prompts)
    return _asked(service, asked, caller, answer, prompts, params, structured=_structured(asked.structured_outputs))


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


async def read_chat(service: Service, asked: schema.ChatRequest, caller: Caller) -> Asked:
    """The request of a chat."""
    service.check_arrival(asked.model)
    if asked.max_tokens is not None and asked.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; send one", param="max_tokens")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    tools, style = _tools(service, asked)
    kwargs = _template_kwargs(asked.chat_template_kwargs or {})
    if tools:
        kwargs["tools"] = tools
    messages = [_message(message) for message in asked.messages]
    prompt = await service.run_in_thread(caller, service.encode_chat_sync, messages, kwargs)
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


def _message(message: schema.Message) -> dict[str, Any]:
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


def _loads(call: schema.ToolCall) -> Any:
    try:
        value = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments
    return value if isinstance(value, dict) else call.function.arguments


def _tools(service: Service, asked: schema.ChatRequest) -> tuple[list[dict[str, Any]], str | None]:
    """The tools for the template, and how calls are written; None where none can come."""
    if asked.tool_choice is not None and not asked.tools and asked.tool_choice != "none":
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if not asked.tools or asked.tool_choice == "none":
        return [], None
    names = [tool.function.name for tool in asked.tools]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two functions have the same name", param="tools")
    if isinstance(asked.tool_choice, schema.NamedTool) and asked.tool_choice.function.name not in names:
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


def _is_forced(asked: schema.ChatRequest) -> bool:
    return bool(asked.tools) and (asked.tool_choice == "required" or isinstance(asked.tool_choice, schema.NamedTool))


def _function(function: schema.Function) -> dict[str, Any]:
    parameters = function.parameters or {"type": "object", "properties": {}}
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def _forced_call(asked: schema.ChatRequest) -> Structured | None:
    """A schema of the calls that may come, when one must."""
    if not _is_forced(asked) or not asked.tools:
        return None
    wanted = asked.tool_choice.function.name if isinstance(asked.tool_choice, schema.NamedTool) else None
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


def _structured(outputs: schema.StructuredOutputs | None, form: Any = None) -> Structured | None:
    """What the answer must look like."""
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
    asked: schema.Sampling,
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
    asked: schema.Sampling,
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


def _priority(service: Service, asked: schema.Sampling) -> int:
    """Who goes first: nobody beyond what the server allows."""
    priority = asked.priority or 0
    if priority > service.max_priority:
        message = f"priority={priority}: at most {service.max_priority} may be asked for here (--max-priority)"
        raise ApiError(400, message, param="priority", code="invalid_value")
    return priority
