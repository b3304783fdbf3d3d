"""Samples as the padded arrays that a training step takes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.config import MAX_DIMENSION, check_whole
from quire.outputs import CompletionOutput, RequestOutput
from quire.rollouts.rollouts import RolloutGroup

NO_VERSION = -1


@dataclass(slots=True, eq=False)
class RolloutBatch:
    """Samples in arrays: one row for each, prompts padded on the left, outputs on the right.

    So `np.concatenate([batch.prompts, batch.tokens], axis=1)` has every output where its prompt ends. B are samples, P
    is the longest prompt, T the longest output, or what `of` was asked for.
    """

    prompts: np.ndarray
    """`[B, P]` int32."""
    prompt_mask: np.ndarray
    """`[B, P]` bool: False is padding."""
    tokens: np.ndarray
    """`[B, T]` int32: what was generated, the end token or stop included."""
    mask: np.ndarray
    """`[B, T]` bool: False is padding."""
    logprobs: np.ndarray
    """`[B, T]` float32, under the model itself; 0 where there is no token."""
    processed_logprobs: np.ndarray
    """`[B, T]` float32, under what each token was drawn from: after penalties, temperature and cuts."""
    versions: np.ndarray
    """`[B, T]`, the weights that each token was drawn under: int64, -1 where there is no token; if one of them was
    called by a string, all are strings, and "" where there is no token."""
    groups: list[Hashable]
    """The name of the group of each sample; None for an output that came without one."""
    was_cut: np.ndarray
    """`[B]` bool: the sample was ended by its limit of tokens, not by the model or by a stop."""

    def __len__(self) -> int:
        return len(self.groups)

    def __repr__(self) -> str:
        (rows, prompt), tokens = self.prompts.shape, self.tokens.shape[1]
        return f"<RolloutBatch of {rows} samples, prompts of {prompt} and outputs of {tokens} tokens at most>"

    @classmethod
    def of(
        cls,
        samples: Iterable[RolloutGroup | RequestOutput],
        *,
        pad_id: int = 0,
        prompt_len: int | None = None,
        max_tokens: int | None = None,
    ) -> "RolloutBatch":
        """The samples of these groups or outputs, in their order, drawn with `logprobs=0` or more.

        `prompt_len` and `max_tokens` are the widths of the arrays, by default those of the longest: give them where a
        jitted step should not be compiled for every batch anew. ValueError if a sample is longer, or has no
        log-probabilities.
        """
        if isinstance(samples, RolloutGroup | RequestOutput):
            raise ValueError(f"samples is one {type(samples).__name__}: give a list of them")
        rows = list(_rows(samples))
        if not rows:
            raise ValueError("samples is empty: give groups, or outputs")
        outputs = [output for _, _, output in rows]
        prompts = [prompt for _, prompt, _ in rows]
        for i, output in enumerate(outputs):
            if output.logprobs is None:
                raise ValueError(f"sample {i} has no log-probabilities: draw with SamplingParams(logprobs=0)")
        prompt_width = _width("prompt_len", prompt_len, prompts)
        width = _width("max_tokens", max_tokens, [output.token_ids for output in outputs])
        scores = [output.logprobs or [] for output in outputs]
        versions = [output.weight_versions for output in outputs]
        are_numbers = all(isinstance(version, int) for row in versions for version in row)
        if not are_numbers:
            versions = [list(map(str, row)) for row in versions]

        def right(values: Sequence[Sequence[Any]], dtype: Any, empty: Any) -> np.ndarray:
            return _padded(values, width, dtype, empty, lambda row: slice(0, len(row)))

        def left(values: Sequence[Sequence[Any]], dtype: Any, empty: Any) -> np.ndarray:
            return _padded(values, prompt_width, dtype, empty, lambda row: slice(prompt_width - len(row), None))

        return cls(
            prompts=left(prompts, np.int32, pad_id),
            prompt_mask=left([[True] * len(prompt) for prompt in prompts], bool, False),
            tokens=right([output.token_ids for output in outputs], np.int32, pad_id),
            mask=right([[True] * len(output.token_ids) for output in outputs], bool, False),
            logprobs=right([[entry.logprob for entry in row] for row in scores], np.float32, 0),
            processed_logprobs=right([[entry.processed_logprob for entry in row] for row in scores], np.float32, 0),
            versions=right(versions, np.int64, NO_VERSION) if are_numbers else right(versions, object, "").astype(str),
            groups=[group for group, _, _ in rows],
            was_cut=np.array([output.finish_reason == "length" for output in outputs]),
        )


def _rows(
    samples: Iterable[RolloutGroup | RequestOutput],
) -> Iterable[tuple[Hashable, list[int], CompletionOutput]]:
    for one in samples:
        group, answers = (one.group, one.outputs) if isinstance(one, RolloutGroup) else (None, [one])
        for answer in answers:
            for output in answer.outputs:
                yield group, answer.prompt_token_ids, output


def _width(name: str, asked: int | None, rows: Sequence[Sequence[int]]) -> int:
    longest = max(map(len, rows))
    if asked is None:
        return longest
    check_whole(name, asked, 1, MAX_DIMENSION)
    if longest > asked:
        raise ValueError(f"{name}={asked}, and a sample has {longest}: give at least that, or leave it out")
    return asked


def _padded(
    rows: Sequence[Sequence[Any]], width: int, dtype: Any, empty: Any, place: Callable[[Sequence[Any]], slice]
) -> np.ndarray:
    array = np.full((len(rows), width), empty, dtype)
    for i, row in enumerate(rows):
        if row:
            array[i, place(row)] = row
    return array
