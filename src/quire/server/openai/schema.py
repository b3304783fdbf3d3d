"""The schema of requests: OpenAI's fields and ours, with their types and limits. A field that is not here is refused.

Types are strict (no number as a string, no boolean as a number), and every limit is stated here, so that the OpenAPI
document at `/openapi.json` and the errors say the same.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core.request import MAX_PRIORITY, MAX_SALT_LEN
from quire.core.sampling_params import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_IDS, MAX_TOKEN_ID

MAX_TOKENS = 1 << 24
MAX_SEQUENCES = 128
MAX_PROMPTS = 64
MAX_PROMPT_CHARS = 4 << 20
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TIMEOUT_S = 24 * 3600

Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
JsonObject = dict[str, Any]


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every object in a request: unknown fields are refused."""


class StreamOptions(Struct):
    """`stream_options`: whether the last chunk of a stream has the usage."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    """`response_format` that allows any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """`response_format` that allows any JSON object."""


class JsonSchema(Struct, kw_only=True):
    """`response_format.json_schema`: a JSON Schema and its name."""

    name: Name
    schema: JsonObject
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """`response_format` that allows JSON of a schema."""

    json_schema: JsonSchema


class StructuredOutputs(Struct, kw_only=True):
    """`structured_outputs`: the form of the generated text, by exactly one of these fields."""

    json: JsonObject | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1, max_length=1024)] | None = None
    grammar: Text | None = None


class Sampling(Struct, kw_only=True):
    """The fields that completions and chats have in common: how tokens are sampled and when a sequence ends."""

    model: Name
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    max_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    # Beyond OpenAI's, in `extra_body`:
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_LEN)] | None = None
    request_id: Annotated[str, Meta(pattern="^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Seconds after which the request ends, wherever it is."""
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(Sampling, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TextPart(Struct, tag_field="type", tag="text"):
    """A part of a message's content; text is the only kind."""

    text: Text


class FunctionCall(Struct, kw_only=True):
    """The function and the arguments of a tool call; the arguments are JSON as text."""

    name: ToolName
    arguments: Text


class ToolCall(Struct, kw_only=True):
    """A tool call that the model made earlier in the conversation."""

    id: Annotated[str, Meta(max_length=256)]
    function: FunctionCall
    type: Literal["function"] = "function"
    index: Annotated[int, Meta(ge=0, le=MAX_TOOLS)] | None = None


class Message(Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Meta(max_length=1024)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    # A client that sends a response of ours back sends these along.
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class Function(Struct, kw_only=True):
    """A function the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: JsonObject = {}
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """An entry of `tools`: a function that the model may call."""

    function: Function
    type: Literal["function"]


class NamedFunction(Struct):
    """The name of the function that `tool_choice` forces the model to call."""

    name: ToolName


class NamedTool(Struct, kw_only=True):
    """`tool_choice` as an object: the model has to call this function."""

    function: NamedFunction
    type: Literal["function"]


class ChatRequest(Sampling, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[JsonObject, Meta(max_length=16)] | None = None
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None


class TokenizeRequest(Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    prompt: Text
    add_special_tokens: bool = True
    model: Name | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: Name | None = None
