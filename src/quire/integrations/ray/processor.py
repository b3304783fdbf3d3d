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
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Unpack

from quire.async_llm.errors import GenerationError, UnavailableError
from quire.config import EngineKnobs
from quire.core.errors import RequestError
from quire.core.sampling_params import SamplingParams
from quire.llm import is_one_prompt, plain
from quire.outputs import RequestOutput
from quire.rollouts import Rollouts

COLUMNS = ("generated_text", "generated_token_ids", "logprobs", "finish_reason", "error")
"""What is added to every row. Of a row with an error the others are null; `logprobs` are, too, if not asked for."""


class QuireProcessor:
    """Continues the prompt of every row. Ray Data makes one on each worker, which loads the model.

    A row has `prompt` (text or token ids) or `messages` (a conversation), and may have `sampling_params`: fields of
    SamplingParams that go before those given here, such as `{"seed": 7}`. All other columns stay. Rows come back
    with `generated_text`, `generated_token_ids`, `logprobs` (of the generated tokens, under the model),
    `finish_reason` and `error`: a row that is wrong, or fails, has its error there and keeps none of the others from
    running.
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
        self._engine = Rollouts(model, revision=revision, quiet=True, **knobs)  # Ray Data calls from another thread
        self._params = params or self._engine.llm.default_params

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The same batch with more columns."""
        taken = [name for name in COLUMNS if name in batch]
        if taken:
            raise ValueError(f"the dataset has columns {taken}, which this writes; rename them")
        if "prompt" not in batch and "messages" not in batch:
            raise ValueError(f"the dataset has columns {sorted(batch)}; there must be 'prompt' or 'messages'")
        rows: list[dict[str, Any]] = []
        answers: list[tuple[dict[str, Any], Future[RequestOutput]]] = []
        for i in range(len(next(iter(batch.values())))):
            row: dict[str, Any] = dict.fromkeys(COLUMNS)
            rows.append(row)
            try:
                answers.append((row, self._submit({name: plain(column[i]) for name, column in batch.items()})))
            except (TypeError, ValueError) as error:
                row["error"] = str(error)
        for row, answer in answers:
            try:
                row.update(_columns(answer.result()))
            except UnavailableError:
                raise  # no row will run here any more: Ray is to start another worker
            except (GenerationError, RequestError) as error:
                row["error"] = str(error)
        return dict(batch) | {name: [row[name] for row in rows] for name in COLUMNS}

    def _submit(self, row: Mapping[str, Any]) -> Future[RequestOutput]:
        """Have a row's prompt continued; an error if it cannot run."""
        given = row.get("sampling_params") or {}
        params = replace(self._params, **{name: value for name, value in given.items() if value is not None})
        if params.n != 1:
            raise ValueError(f"n={params.n}: a row has one answer; repeat the row {params.n} times, with other seeds")
        prompt = row.get("prompt")
        if prompt is None:
            messages = row.get("messages")
            if messages is None:
                raise ValueError("this row has neither prompt nor messages")
            prompt = self._engine.llm.chat_prompt([dict(message) for message in messages])
        if not is_one_prompt(prompt):
            raise ValueError(f"prompt={prompt!r} must be text or a list of token ids")
        return self._engine.submit(prompt, params)


def _columns(output: RequestOutput) -> dict[str, Any]:
    answer = output.outputs[0]
    return {
        "generated_text": answer.text,
        "generated_token_ids": answer.token_ids,
        "logprobs": None if answer.logprobs is None else [one.logprob for one in answer.logprobs],
        "finish_reason": str(answer.finish_reason),
    }
