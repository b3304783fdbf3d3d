"""The schema of requests: OpenAI's fields and ours, with their types and limits.

Types are strict (no number as a string, no boolean as a number), and every limit is stated here, so that the OpenAPI
document at `/openapi.json` and the errors say the same. The numbers and switches of `SamplingParams` become fields here
by themselves.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core.request import MAX_PRIORITY, MAX_SALT_LEN
from quire.core.sampling_params import (
    DECLARED,
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
    MAX_TOKEN_ID,
    MAX_WIRE_TOKENS,
    Range,
)

MAX_TOP_LOGPROBS = 20
"""Alternatives of a token, as in OpenAI's API, also where the engine's `max_logprobs` is higher."""
MAX_PROMPTS = 64
MAX_INPUTS = 2048
"""Prompts of one request for embeddings."""
MAX_PROMPT_CHARS = 4 << 20
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TIMEOUT_S = 24 * 3600

Count = Annotated[int, Meta(ge=0, le=MAX_WIRE_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARS)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
JsonObject = dict[str, Any]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Prompts = Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Salt = Annotated[str, Meta(max_length=MAX_SALT_LEN)]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]


class Struct(msgspec.Struct, forbid_unknown_fields=True):
    """Base of every object in a request. It has no unknown fields; over HTTP they are left out before (`http`)."""


class StreamOptions(Struct):
    """`stream_options`: whether the last chunk of a stream has the usage."""

    include_usage: bool | None = None
    """Send a last chunk with the numbers of tokens."""
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
    """Taken and not used: tell the model in a message."""
    strict: bool | None = None
    """Taken and not used: the schema is always kept to."""


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """`response_format` that allows JSON of a schema."""

    json_schema: JsonSchema


class StructuredOutputs(Struct, kw_only=True):
    """`structured_outputs`: the form of the generated text, by exactly one of these fields."""

    json: JsonObject | None = None
    """JSON that this JSON Schema allows, properties in the schema's order."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: Text | None = None
    """A regular expression for the whole text, as Rust writes them."""
    choice: Annotated[list[Text], Meta(min_length=1, max_length=1024)] | None = None
    """One of these texts."""
    grammar: Text | None = None
    """A grammar in llguidance's variant of Lark."""
    compact: bool | None = None
    """No whitespace between the parts of JSON. By default so with `json`, and not with `json_object`."""


def _wire_type(kind: type, limits: Range | None) -> Any:
    if limits is None:
        return kind
    low, high, above = limits
    return Annotated[kind, Meta(gt=low, le=high) if above else Meta(ge=low, le=high)]


if TYPE_CHECKING:

    class DeclaredFields(Struct):
        """Every number and switch of `SamplingParams` by its name in a request, which may leave it out."""

        def __getattr__(self, name: str) -> Any: ...
else:
    DeclaredFields = msgspec.defstruct(
        "DeclaredFields",
        [
            (declared.wire_name, _wire_type(declared.kind, declared.wire) | None, None)
            for declared in DECLARED.values()
            if declared.on_wire
        ],
        bases=(Struct,),
        kw_only=True,
    )


class Sampling(DeclaredFields, kw_only=True):
    """The fields that completions and chats have in common: how tokens are sampled and when a sequence ends."""

    model: Name
    """What `/v1/models` calls it."""
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    logit_bias: (
        Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)] | None
    ) = None
    stream: bool | None = None
    """Send the text as it is generated, as server-sent events; completions and chats end with `[DONE]`."""
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    """Taken and not used."""
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    """Taken and not used."""
    store: Literal[False] | None = None
    """Nothing is stored."""
    service_tier: Literal["auto", "default"] | None = None
    """Taken and not used."""
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    """Taken and not used."""
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    """Where a server has several engines, requests with the same key go to the same one. `cache_salt` keeps prefixes
    apart."""
    # Beyond OpenAI's, in `extra_body`:
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    return_token_ids: bool | None = None
    """Report token ids beside text."""
    priority: Priority | None = None
    """Higher runs first; `--max-priority` is the highest."""
    cache_salt: Salt | None = None
    """Requests share cached prefixes only under the same salt."""
    request_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$(?!\n)")] | None = None
    """The id of the response."""
    timeout: Timeout | None = None
    """Seconds after which the request ends, wherever it is."""
    structured_outputs: StructuredOutputs | None = None
    """A form that the text must have."""


class CompletionRequest(Sampling, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompts
    """Text, several texts, token ids, or several lists of token ids."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Report each token's log-probability, and so many alternatives."""
    best_of: Literal[1] | None = None
    """Not supported: all `n` sequences are returned."""
    suffix: None = None
    """Not supported."""


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
    type: Literal["function"] | None = None
    index: Annotated[int, Meta(ge=0, le=MAX_TOOLS)] | None = None


class Message(Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; `developer` is the same as `system`."""
    content: Text | Annotated[list[TextPart], Meta(max_length=1024)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    """Of a message of role `tool`: the call that it answers."""
    reasoning_content: Text | None = None
    """Of a message of the assistant: what it thought; the chat template decides whether the model sees it again."""
    # A client that sends a response of ours back sends these along.
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class Function(Struct, kw_only=True):
    """A function the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    """A JSON Schema of the arguments; by default there are none."""
    strict: bool | None = None
    """Taken and not used: arguments of a forced call always keep to the schema."""


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
    """The conversation so far, oldest first."""
    max_completion_tokens: Count | None = None
    """The same as `max_tokens`."""
    logprobs: bool | None = None
    """Report each token's log-probability."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """With `logprobs`: report so many alternatives, too."""
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    """The form of the answer: any text, any JSON object, or JSON of a schema."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call, if its chat template takes them."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether the model may or must call a function, or which."""
    parallel_tool_calls: bool | None = None
    """Whether the answer may hold several calls; if not, those after the first are left out."""
    reasoning_effort: ReasoningEffort | None = None
    """How much the model thinks: the variable `reasoning_effort` of the chat template, if it has one."""
    chat_template_kwargs: Annotated[JsonObject, Meta(max_length=16)] | None = None
    """Variables of the chat template, of those that a request may set."""
    modalities: list[Literal["text"]] | None = None
    """Answers are text."""


# -- responses --------------------------------------------------------------------------------------------------------

Id = Annotated[str, Meta(max_length=256)]
Included = Literal[
    "message.output_text.logprobs",
    # Of items that this server never makes:
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class InputText(Struct, tag_field="type", tag="input_text"):
    """A part of an item's content: text for the model."""

    text: Text


class OutputText(Struct, tag_field="type", tag="output_text"):
    """A part of an item's content: text that the model generated earlier, with what came with it."""

    text: Text
    annotations: list[Any] | None = None
    """Taken and not used."""
    logprobs: list[Any] | None = None
    """Taken and not used."""


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """A part of an item's content: what a model thought. It is not shown to the model again."""

    text: Text


class Item(Struct, kw_only=True):
    """One item of `input`. Which fields it needs depends on its type."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    """What it is, by default a message; `reasoning` is taken and not used."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Who speaks, in a message."""
    content: Text | Annotated[list[InputText | OutputText | ReasoningText], Meta(max_length=1024)] | None = None
    """What a message says: text, or parts that are joined."""
    call_id: Id | None = None
    """Which call this is, or is the output of."""
    name: ToolName | None = None
    """The function of a call."""
    arguments: Text | None = None
    """The arguments of a call: JSON as text."""
    output: Text | Annotated[list[InputText], Meta(max_length=1024)] | None = None
    """What the function returned."""
    # What else clients send along with items of earlier responses:
    id: Id | None = None
    """Taken and not used."""
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    """Taken and not used."""
    phase: Literal["commentary", "final_answer"] | None = None
    """Taken and not used."""
    summary: list[Any] | None = None
    """Taken and not used."""
    encrypted_content: Text | None = None
    """Taken and not used."""


class FunctionTool(Function, kw_only=True):
    """An entry of `tools`: a function that the model may call."""

    type: Literal["function"]


class NamedFunctionTool(Struct, kw_only=True):
    """`tool_choice` as an object: the model has to call this function."""

    name: ToolName
    type: Literal["function"]


class NamedJsonSchemaFormat(JsonSchema, tag_field="type", tag="json_schema"):
    """`text.format` that allows JSON of a schema."""


class TextConfig(Struct, kw_only=True):
    """`text`: the form of the generated text."""

    format: TextFormat | JsonObjectFormat | NamedJsonSchemaFormat | None = None
    """Any text, any JSON object, or JSON of a schema."""


class ReasoningConfig(Struct, kw_only=True):
    """`reasoning`: how the model thinks before it answers."""

    effort: ReasoningEffort | None = None
    """How much: the variable `reasoning_effort` of the chat template, if it has one."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Taken and not used: thoughts are returned as they are."""


class ResponsesRequest(Sampling, kw_only=True):
    """The body of `POST /v1/responses`. Nothing is kept: each request brings the whole conversation."""

    input: Text | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation so far, oldest first; text is one message of the user."""
    instructions: Text | None = None
    """A system message before all others."""
    max_output_tokens: Count | None = None
    """The most tokens to generate; by default as many as fit."""
    text: TextConfig | None = None
    """The form of the answer."""
    reasoning: ReasoningConfig | None = None
    """How the model thinks before it answers."""
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call, if its chat template takes them."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    """Whether the model may or must call a function, or which."""
    parallel_tool_calls: bool | None = None
    """Whether the answer may hold several calls; if not, those after the first are left out."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """Report each token's log-probability, and so many alternatives."""
    include: Annotated[list[Included], Meta(max_length=16)] | None = None
    """`message.output_text.logprobs` to report each token's log-probability."""
    store: bool | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Taken and not used: nothing is stored."""
    truncation: Literal["disabled"] | None = None
    """What does not fit is refused."""
    chat_template_kwargs: Annotated[JsonObject, Meta(max_length=16)] | None = None
    """Variables of the chat template, of those that a request may set."""
    previous_response_id: None = None
    """Not supported: nothing is stored."""
    conversation: None = None
    """Not supported: nothing is stored."""
    prompt: None = None
    """Not supported: nothing is stored."""
    background: Literal[False] | None = None
    """Not supported: nothing is stored."""


# -- embeddings -------------------------------------------------------------------------------------------------------


class EmbeddingsRequest(Struct, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    model: Name
    """What `/v1/models` calls it."""
    input: Prompts
    """Text, several texts, token ids, or several lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    """Numbers, or the bytes of float32 numbers, least significant first, in base64; by default numbers."""
    dimensions: Annotated[int, Meta(ge=1, le=MAX_WIRE_TOKENS)] | None = None
    """Keep the first so many numbers of each embedding, and normalise these."""
    user: Annotated[str, Meta(max_length=512)] | None = None
    """Taken and not used."""
    # Beyond OpenAI's, in `extra_body`:
    priority: Priority | None = None
    """Higher runs first; `--max-priority` is the highest."""
    cache_salt: Salt | None = None
    """Requests share cached prefixes only under the same salt."""
    timeout: Timeout | None = None
    """Seconds after which the request ends, wherever it is."""


# -- batches ----------------------------------------------------------------------------------------------------------

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]


class BatchRequest(Struct, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: Id
    """A file of `/v1/files`, one request a line: `{"custom_id", "method": "POST", "url", "body"}`."""
    endpoint: BatchEndpoint
    """The `url` of every line."""
    completion_window: Literal["24h"]
    """When it is to be done; what is not by then is an error."""
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    """Kept with the batch."""
    output_expires_after: None = None
    """Not supported: files stay until they are deleted."""


# -- tokens -----------------------------------------------------------------------------------------------------------


class TokenizeRequest(Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    prompt: Text
    add_special_tokens: bool | None = None
    """Add tokens such as a beginning of text, where the model's tokenizer does; by default true."""
    model: Name | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_WIRE_TOKENS)]
    model: Name | None = None
