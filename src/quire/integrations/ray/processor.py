"""Datasets of Ray Data through an engine on each worker: `QuireProcessor`, for `map_batches`.

    ds = ray.data.from_items([{"prompt": "The capital of France is"}, ...])
    ds = ds.map_batches(
        QuireProcessor,
        fn_constructor_kwargs={"model": "Qwen/Qwen3-0.6B", "params": SamplingParams(max_tokens=64)},
        concurrency=2,
        batch_size=256,
    )
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from quire.config import EngineKnobs
from quire.core.sampling_params import SamplingParams
from quire.field_error import FieldError
from quire.llm import LLM, plain
from quire.outputs import RequestOutput

COLUMNS = ("generated_text", "generated_token_ids", "logprobs", "finish_reason", "error")
"""What is added to every row. Of a row with an error the others are null; `logprobs` are, too, if not asked for."""


class QuireProcessor:
    """Continues the prompt of every row. Ray Data makes one on each worker, which loads the model.

    A row has `prompt` (text or token ids) or `messages` (a conversation), and may have `sampling_params`: fields of
    SamplingParams that go before those given here, such as `{"seed": 7}`. All other columns stay. Rows come back
    with `generated_text`, `generated_token_ids`, `logprobs` (of the generated tokens, under the model),
    `finish_reason` and `error`: a row that is wrong has its error there and keeps none of the others from running.
    """

    def __init__(
        self,
        model: str,
        params: SamplingParams | None = None,
        *,
        revision: str | None = None,
        **knobs: Unpack[EngineKnobs],
    ) -> None:
        """Load the model; the arguments are those of `LLM`, and `params` those of all rows."""
        self._llm = LLM(model, revision=revision, quiet=True, **knobs)
        self._params = params or self._llm.default_params

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The same batch with more columns."""
        taken = [name for name in COLUMNS if name in batch]
        if taken:
            raise ValueError(f"the dataset has columns {taken}, which this writes; rename them")
        if "prompt" not in batch and "messages" not in batch:
            raise ValueError(f"the dataset has columns {sorted(batch)}; there must be 'prompt' or 'messages'")
        num_rows = len(next(iter(batch.values())))
        rows: list[dict[str, Any]] = [dict.fromkeys(COLUMNS) for _ in range(num_rows)]
        requests: list[tuple[int, list[int], SamplingParams]] = []
        for i, row in enumerate(rows):
            try:
                requests.append((i, *self._request({name: plain(column[i]) for name, column in batch.items()})))
            except (FieldError, TypeError, ValueError) as error:
                row["error"] = str(error)
        outputs = self._llm.generate([ids for _, ids, _ in requests], [how for _, _, how in requests], progress=False)
        for (i, _, _), output in zip(requests, outputs, strict=True):
            rows[i] |= _columns(output)
        return dict(batch) | {name: [row[name] for row in rows] for name in COLUMNS}

    def _request(self, row: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
        """The token ids of a row's prompt, and how they are continued; an error if it cannot run."""
        given = row.get("sampling_params") or {}
        params = replace(self._params, **{name: value for name, value in given.items() if value is not None})
        if params.n != 1:
            raise ValueError(f"n={params.n}: a row has one answer; repeat the row {params.n} times, with other seeds")
        prompt = row.get("prompt")
        if prompt is None:
            messages = row.get("messages")
            if messages is None:
                raise ValueError("this row has neither prompt nor messages")
            prompt = self._llm.chat_prompt([dict(message) for message in messages])
        (ready,) = self._llm.checked([prompt], params)
        return list(ready.request.prompt_token_ids), params


def _columns(output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "generated_text": answer.text,
        "generated_token_ids": answer.token_ids,
        "logprobs": None if answer.logprobs is None else [one.logprob for one in answer.logprobs],
        "finish_reason": str(answer.finish_reason),
    }
