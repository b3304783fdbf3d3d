"""What a caller gets back, and how it is made of sequences."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from quire.core.sequence import Sequence as TokenSequence
from quire.core.sequence import TokenLogprob, Version
from quire.embedding import finish_embedding
from quire.short_repr import short_repr
from quire.text.detokenizer import Detokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    token_ids: list[int]
    """Everything generated, the end token or stop included."""
    text: str
    """The text before the stop; empty without a tokenizer."""
    finish_reason: str
    """"eos", "length", "stop", "abort", or "not_finite" if the model's logits were NaN or infinite."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, when asked for."""
    weight_versions: list[Version] = field(default_factory=list)
    """For each of `token_ids`, the weights it was drawn under."""

    __repr__ = short_repr

    @property
    def top_logprobs(self) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens under the model itself: ids in int32 and log-probabilities in float32, `[tokens, k]`.

        k is the largest number of alternatives of a token; a row that has fewer ends with -1 and -inf. ValueError if
        `logprobs` was not asked for.
        """
        if self.logprobs is None:
            raise ValueError("this output has no log-probabilities: ask with SamplingParams(logprobs=k)")
        shape = len(self.logprobs), max((len(entry.top) for entry in self.logprobs), default=0)
        ids, logprobs = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
        for row, entry in enumerate(self.logprobs):
            for place, (token_id, logprob) in enumerate(entry.top):
                ids[row, place], logprobs[row, place] = token_id, logprob
        return ids, logprobs


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token, None for the first, when asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    index: int = 0
    """Which of the prompts of its call this answers."""
    prompt: str | None = None
    """The prompt as it was given, if that was text."""
    embedding: np.ndarray | None = field(default=None, repr=False, compare=False)
    """With `pooling`: the hidden state of the prompt's last token, or the mean of all, as the model computes it;
    `LLM.embed` normalises it."""

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How likely each token of a sequence was, from a start on; arrays with an entry for each."""

    logprobs: np.ndarray
    """Under the model itself, in float32."""
    processed_logprobs: np.ndarray
    """Under what it is drawn from: -inf where it could not be drawn. NaN where nothing said how to draw."""
    kept_mass: np.ndarray
    """The probability that all tokens which could be drawn had together, at that temperature, before the others were
    cut off: 1 where nothing is cut off."""
    kept_ids: np.ndarray
    """`[tokens, params.logprobs]`: the likeliest tokens that could be drawn. -1 behind the last of them: a row without
    -1 may have had more."""

    __repr__ = short_repr

    @classmethod
    def of(cls, entries: SequenceOf[TokenLogprob | None], num_ids: int) -> "Scores":
        """Of what a request says of its prompt, and of so many kept ids; tokens before its start have no entry."""
        scored = [entry for entry in entries if entry]

        def floats(values: SequenceOf[float | None]) -> np.ndarray:
            return np.array(values, np.float32)  # None is NaN

        kept_ids = np.full((len(scored), num_ids), -1, np.int32)
        for row, entry in zip(kept_ids, scored, strict=True):
            row[: len(entry.processed_top)] = [token_id for token_id, _ in entry.processed_top]
        return cls(
            floats([entry.logprob for entry in scored]),
            floats([entry.processed_logprob for entry in scored]),
            floats([entry.kept_mass for entry in scored]),
            kept_ids,
        )


@dataclass(slots=True)
class TextChunk:
    """A piece of a stream: certain text, its tokens, and at the end why it ended."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None

    __repr__ = short_repr


def embedding_of(output: RequestOutput, *, normalize: bool, dimensions: int | None = None) -> np.ndarray:
    """The embedding in an answer, finished; RuntimeError if there is none."""
    if output.outputs[0].finish_reason == "not_finite":
        raise RuntimeError(
            "the model's hidden states are NaN or infinite; check the weights, and the dtype for overflow"
        )
    if output.embedding is None:
        raise RuntimeError("the prompt was aborted before it was embedded")
    return finish_embedding(output.embedding, normalize=normalize, dimensions=dimensions)


def new_text(sequence: TokenSequence) -> str:
    """Text that has become certain since the last call."""
    if not isinstance(sequence.detokenizer, Detokenizer):
        return ""
    sequence.detokenizer.advance(sequence.output_token_ids)
    return (
        sequence.detokenizer.finish(sequence.num_stop_tokens) if sequence.finish_reason else sequence.detokenizer.take()
    )


def request_output(
    sequences: SequenceOf[TokenSequence],
    *,
    index: int = 0,
    prompt: str | None = None,
    texts: SequenceOf[str] | None = None,
) -> RequestOutput:
    """The answer that finished sequences are; `texts` are theirs, if these have been taken already."""
    first = sequences[0]
    texts = [new_text(sequence) for sequence in sequences] if texts is None else texts
    outputs = [
        CompletionOutput(
            index=sequence.index,
            token_ids=sequence.output_token_ids,
            text=text,
            finish_reason=str(sequence.finish_reason),
            logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
            weight_versions=sequence.weight_versions,
        )
        for sequence, text in zip(sequences, texts, strict=True)
    ]
    return RequestOutput(
        index=index,
        prompt=prompt,
        prompt_token_ids=list(first.request.prompt_token_ids),
        outputs=outputs,
        prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs else None,
        num_cached_tokens=first.num_cached_tokens,
        embedding=first.embedding_D,
    )
