"""What was submitted: calls, their groups, and the requests of the engine that they become."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from quire.async_llm.engine_thread import RequestState
from quire.async_llm.updates import Update
from quire.core.request import Request
from quire.core.sampling_params import MAX_SAMPLES_PER_REQUEST
from quire.job import ReadyPrompt
from quire.outputs import RequestOutput, request_output

_log = logging.getLogger("quire.rollouts")


class Call:
    """One call of `submit`."""

    def __init__(self, is_one: bool, num_prompts: int) -> None:
        self.is_one = is_one
        self.group: Group | None = None
        self.states: list[FoldedRequest] = []
        self.num_left = 0
        """Requests that have not ended."""
        self.outputs: list[Any] = [None] * num_prompts
        self.error: Exception | None = None
        self.oldest: int | None = None
        """The change of weights under which its first token was drawn."""
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # `Rollouts.abort` ends it, not `cancel`

    def settle(self, state: "FoldedRequest", error: Exception | None) -> None:
        """One of its requests has ended."""
        state.is_ended = True
        self.num_left -= 1
        if state.oldest is not None:
            self.oldest = state.oldest if self.oldest is None else min(self.oldest, state.oldest)
        try:
            if error:
                raise error
            for index, output in state.split():
                self.outputs[index] = output
        except Exception as caught:
            self.error = caught
        if not self.num_left:
            self.states = []  # what was answered is kept, and not what answered it

    def finish(self) -> None:
        """All of them have: wake who waits."""
        if self.error:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.outputs[0] if self.is_one else self.outputs)


class Group:
    """The calls under one name."""

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.calls: list[Call] = []

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for call in self.calls for output in call.outputs]

    @property
    def oldest(self) -> int | None:
        """The change of weights under which its first token was drawn."""
        return min((call.oldest for call in self.calls if call.oldest is not None), default=None)

    @property
    def error(self) -> Exception | None:
        return next((call.error for call in self.calls if call.error), None)

    @property
    def is_aborted(self) -> bool:
        outputs = [output for call in self.calls if not call.error for output in call.outputs]
        return any(sample.finish_reason == "abort" for output in outputs for sample in output.outputs)


class _AtOnce:
    """A mailbox that makes calls where they are posted: here these only fill in futures."""

    def post(self, calls: Sequence[Callable[[], object]], /) -> None:
        for call in calls:
            try:
                call()
            except BaseException:  # whoever waits for one request: the others' are told, and the engine goes on
                _log.exception("an end could not be told")


_AT_ONCE = _AtOnce()


class FoldedRequest(RequestState):
    """A request of the engine: equal prompts of one call, the samples of one after those of the other."""

    def __init__(
        self,
        request: Request,
        copies: Sequence[ReadyPrompt],
        call: Call,
        weights_change: Callable[[], int],
        on_end: Callable[["FoldedRequest", Exception | None], None],
    ) -> None:
        """`weights_change()` says which change of weights is in force; `on_end(self, error)` is called at its end."""
        super().__init__(request, _AT_ONCE)
        self.copies, self.call, self.is_ended = copies, call, False
        self.oldest: int | None = None
        """The change of weights under which its first token was drawn."""
        self._weights_change, self._on_end, self._texts = weights_change, on_end, [""] * request.params.n

    def on_started(self) -> None:
        """Nobody waits for this."""

    def on_update(self, update: Update, is_last: bool) -> None:
        self._texts[update.index] += update.text
        if update.token_ids and self.oldest is None:
            self.oldest = self._weights_change()  # those that drew them: `EngineThread.call` tells of tokens first
        if is_last:
            self._on_end(self, None)

    def on_failed(self, error: Exception) -> None:
        self._on_end(self, error)

    def split(self) -> Iterator[tuple[int, RequestOutput]]:
        """The answer to each of the prompts, with its place in the call."""
        whole = request_output(self.sequences, texts=self._texts)
        n = len(whole.outputs) // len(self.copies)
        for i, copy in enumerate(self.copies):
            samples = [replace(sample, index=j) for j, sample in enumerate(whole.outputs[i * n : (i + 1) * n])]
            yield copy.index, replace(whole, outputs=samples, index=copy.index, prompt=copy.text)


def fold(ready: Iterable[ReadyPrompt]) -> Iterator[tuple[Request, list[ReadyPrompt]]]:
    """Requests for prompts, one for all that are equal, as many as a request may have samples."""
    folds: list[list[ReadyPrompt]] = []
    last: dict[tuple[int, ...], list[ReadyPrompt]] = {}
    for prompt in ready:
        request, params = prompt.request, prompt.request.params
        fold = last.get(request.prompt_token_ids)
        has_room = fold and (len(fold) + 1) * params.n <= MAX_SAMPLES_PER_REQUEST
        if fold and has_room and fold[0].request.params == params and params.max_tokens != 0:
            fold.append(prompt)
        else:
            folds.append([prompt])
            last[request.prompt_token_ids] = folds[-1]
    for fold in folds:
        first = fold[0].request
        params = replace(first.params, n=first.params.n * len(fold))
        yield replace(first, params=params), fold
