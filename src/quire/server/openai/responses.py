"""Parses OpenAI's `/v1/responses` as a chat: its items become messages, its fields those of a chat request.

Nothing is kept between requests: each brings the whole conversation.
"""

from typing import Any

from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.parse import FieldNames, ParsedRequest, parse_chat
from quire.server.openai.responses_format import ResponsesFormatter
from quire.server.service import Service

NAMES = FieldNames(
    messages="input", response_format="text.format", reasoning_effort="reasoning.effort", max_tokens="max_output_tokens"
)
LOGPROBS = "message.output_text.logprobs"


async def parse_response(service: Service, body: schema.ResponsesRequest, caller: Caller) -> ParsedRequest:
    """Parse a request for a response: the same as a chat's, formatted otherwise."""
    if body.n not in (None, 1):
        raise ApiError(400, f"n={body.n}: a response is one answer; send the request {body.n} times", param="n")
    if body.max_tokens is not None:
        raise ApiError(400, "max_tokens is called max_output_tokens here", param="max_tokens")
    chat = _chat(body)
    return await parse_chat(
        service,
        chat,
        caller,
        names=NAMES,
        make_formatter=lambda service, *how: ResponsesFormatter(service, body, *how),
    )


def _chat(body: schema.ResponsesRequest) -> schema.ChatRequest:
    """The chat that asks for the same."""
    sampling: dict[str, Any] = {name: getattr(body, name) for name in schema.Sampling.__struct_fields__}
    sampling |= {"store": None}
    tool_choice = body.tool_choice
    if isinstance(tool_choice, schema.NamedFunctionTool):
        tool_choice = schema.NamedTool(function=schema.NamedFunction(tool_choice.name), type="function")
    elif tool_choice == "auto" and not body.tools:
        tool_choice = None  # what clients send without meaning it
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    return schema.ChatRequest(
        **sampling,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=body.top_logprobs if wants_logprobs else None,
        response_format=_response_format(body.text),
        tools=[schema.Tool(function=tool, type="function") for tool in body.tools or ()] or None,
        tool_choice=tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _response_format(text: schema.TextConfig | None) -> Any:
    form = text.format if text else None
    if isinstance(form, schema.NamedJsonSchemaFormat):
        return schema.JsonSchemaFormat(form)
    return form


# -- items ------------------------------------------------------------------------------------------------------------


def _messages(body: schema.ResponsesRequest) -> list[schema.Message]:
    """The messages that a chat of these items has. Calls belong to the assistant's message before them."""
    messages: list[schema.Message] = []
    if body.instructions:
        messages.append(schema.Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, schema.Message(role="user", content=body.input)]
    for i, item in enumerate(body.input):
        if item.type == "function_call":
            call = _call(item, i)
            if not messages or messages[-1].role != "assistant":
                messages.append(schema.Message(role="assistant"))
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
        elif item.type == "function_call_output":
            _need(item, i, "call_id", "output")
            messages.append(schema.Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
        elif item.type in ("message", None):
            _need(item, i, "role", "content")
            messages.append(schema.Message(role=item.role or "user", content=_text(item.content)))
    if all(item.type == "reasoning" for item in body.input):
        raise ApiError(400, "input: reasoning alone is no conversation; send a message", param="input")
    return messages


def _call(item: schema.Item, i: int) -> schema.ToolCall:
    _need(item, i, "call_id", "name", "arguments")
    function = schema.FunctionCall(name=item.name or "", arguments=item.arguments or "")
    return schema.ToolCall(id=item.call_id or "", function=function)


def _need(item: schema.Item, i: int, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            param = f"input[{i}].{name}"
            raise ApiError(
                400,
                f"field {param!r} is missing: a {item.type or 'message'} needs it",
                param=param,
                code="missing_field",
            )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if not isinstance(part, schema.ReasoningText))
