"""What a caller gets back."""

from dataclasses import dataclass, field

from quire.core.sequence import TokenLogprob, Version


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    token_ids: list[int]
    """Everything generated, the end token or stop included."""
    text: str
    """The text before the stop; empty without a tokenizer."""
    finish_reason: str
    """"eos", "length", "stop" or "abort"."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, when asked for."""
    weight_versions: list[Version] = field(default_factory=list)
    """For each of `token_ids`, the weights it was drawn under."""


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token, None for the first, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""


@dataclass(slots=True)
class TextChunk:
    """A piece of a stream: certain text, its tokens, and at the end why it ended."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
