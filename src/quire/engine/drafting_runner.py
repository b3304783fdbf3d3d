"""A model whose tokens a smaller one guesses: two runners that take the same steps.

The draft model has a pool of its own in which every page id means the same positions as in the target's. So whatever is
done to pages of the one is done to those of the other, and nobody else need know of them.

    catch up    tokens that the draft model lacks       only the draft model
    guess       newest token -> a -> b -> c             only the draft model, in rounds
    check       newest token, a, b, c                   the target, in one step: it draws behind each

The guesses go by way of the host: on it a step has to wait for them.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from quire.core.errors import AuditError
from quire.device.inputs import StepInputs, StepOutput
from quire.engine.runner import Handle, Runner


class DraftedHandle:
    """A step under way whose drafts are known."""

    def __init__(self, handle: Handle, drafted_BR: np.ndarray) -> None:
        self._handle = handle
        self._drafted_BR = drafted_BR

    def result(self) -> StepOutput:
        """Wait, and fetch what the step produced, with what was guessed before it."""
        output = self._handle.result()
        if not isinstance(output, StepOutput):
            raise AuditError(f"a step gave {type(output).__name__} instead of a StepOutput")
        return replace(output, drafted_BR=self._drafted_BR)


class DraftingRunner:
    """The model that answers, its draft model, and the KV caches of both."""

    failure = None
    """There are no other processes that could be lost."""

    def __init__(self, target: Runner, draft: Runner, load_draft: Callable[[], Any]) -> None:
        """`load_draft` reads the draft model's weights again, when they have been given up."""
        self.target = target
        self.draft = draft
        self._load_draft = load_draft
        self.pages_per_move = target.pages_per_move
        self.seconds_per_move = target.seconds_per_move + draft.seconds_per_move
        """To move up to so many pages of both models to host memory or back."""
        self.notes = (*target.notes, *(f"of the draft model: {note}" for note in draft.notes))
        """What a person should know at start, each in one sentence."""

    @property
    def num_compiles(self) -> int:
        """Programs compiled since both were ready."""
        return self.target.num_compiles + self.draft.num_compiles

    @property
    def num_programs(self) -> int:
        """Programs of both."""
        return self.target.num_programs + self.draft.num_programs

    def run(self, inputs: StepInputs) -> Handle:
        """Dispatch one step. Where it has drafts, this waits until they have been guessed."""
        draft = inputs.draft
        if draft is None:
            return self.target.run(inputs)
        if draft.guess is None:
            handle = self.target.run(inputs)  # first: its tokens are waited for
            if draft.catch_up is not None:
                self.draft.run(draft.catch_up)
            return handle
        if draft.catch_up is not None:
            self.draft.run(draft.catch_up)
        drafted_BR = self.draft.run(draft.guess).result().tokens_SR
        return DraftedHandle(self.target.run(_with_drafts(inputs, drafted_BR)), drafted_BR)

    def recover(self) -> bool:
        """After a failed step: True if both caches survived it, else there are new ones and every page is lost."""
        survived = [self.target.recover(), self.draft.recover()]
        return all(survived)

    def set_weights(self, params: Any, *, copy: bool = True) -> None:
        """Compute with these from the next step on. The draft model keeps its own."""
        self.target.set_weights(params, copy=copy)

    def get_weights(self) -> Any:
        """Those of the model that answers."""
        return self.target.get_weights()

    def sleep(self) -> None:
        """Let go of weights and pages of both, and keep the programs."""
        self.target.sleep()
        self.draft.sleep()

    def wake(self) -> None:
        """Have pages again, and the draft model's weights; the target's come by `set_weights`."""
        self.draft.set_weights(self._load_draft(), copy=False)
        self.target.wake()
        self.draft.wake()

    def zero(self) -> None:
        """Clear every page on the device."""
        self.target.zero()
        self.draft.zero()

    def close(self) -> None:
        """Let go of weights, pages and programs; nothing runs afterwards."""
        self.target.close()
        self.draft.close()


def _with_drafts(inputs: StepInputs, drafted_BR: np.ndarray) -> StepInputs:
    """A step with what was guessed in the place of its rows' tokens behind the first."""
    tokens_T, cu_q_lens = inputs.tokens_T.copy(), inputs.layout.cu_q_lens_B1.tolist()
    drafted = [(first + 1, end) for first, end in pairwise(cu_q_lens) if end - first > 1]
    for (first, end), guessed in zip(drafted, drafted_BR, strict=False):
        tokens_T[first:end] = guessed[: end - first]
    return replace(inputs, tokens_T=tokens_T)
