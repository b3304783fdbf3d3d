"""A model whose tokens a smaller one guesses: two runners that take the same steps.

The draft model has a pool of its own in which every page id means the same positions as in the target's. So whatever is
done to pages of the one is done to those of the other, and nobody else need know of them.

    catch up    tokens that the draft model lacks       only the draft model
    guess       newest token -> a -> b -> c             only the draft model, in rounds
    check       newest token, a, b, c                   the target, in one step: it draws behind each

The guesses go by way of the host: the target's step begins when they are waited for. The draft model is a help and no
more: when a step of it fails, nothing is guessed, and it computes anew what it needs.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from quire.core.errors import AuditError
from quire.device.inputs import DraftInputs, StepInputs, StepOutput
from quire.device.runner import CompileError
from quire.engine.runner import Handle, Runner

_log = logging.getLogger("quire")


class DraftedHandle:
    """A step under way: the draft model guesses, and the target waits for that."""

    def __init__(self, result: Callable[[], StepOutput]) -> None:
        self.result = result


class DraftingRunner:
    """The model that answers, its draft model, and the KV caches of both."""

    failure = None
    """There are no other processes that could be lost."""

    def __init__(self, target: Runner, draft: Runner, load_draft: Callable[[], Any], num_tokens: int) -> None:
        """`load_draft` reads the draft model's weights again, when they have been given up.

        `num_tokens` is how many both models have: what pads a vocabulary is neither given nor taken as a guess.
        """
        self.target = target
        self.draft = draft
        self._load_draft = load_draft
        self._last_token = num_tokens - 1
        self._has_kv = True
        """False once a step of the draft model failed, until whoever plans is told."""
        self._has_failed = False
        """Whether a step failed since the draft model last ran, and may have taken its cache."""
        self._is_told = False
        """Whether the log has said why the draft model failed."""
        self.pages_per_move = target.pages_per_move
        self.seconds_per_move = target.seconds_per_move + draft.seconds_per_move
        """To move up to so many pages of both models to host memory or back."""
        self.notes = (*target.notes, *(f"of the draft model: {note}" for note in draft.notes))
        """What a person should know at start, each in one sentence."""

    @property
    def growth_bytes(self) -> int:
        """Bytes of host memory that steps of both can still take."""
        return self.target.growth_bytes + self.draft.growth_bytes

    @property
    def num_compiles(self) -> int:
        """Programs compiled since both were ready."""
        return self.target.num_compiles + self.draft.num_compiles

    @property
    def num_programs(self) -> int:
        """Programs of both."""
        return self.target.num_programs + self.draft.num_programs

    def run(self, inputs: StepInputs) -> Handle:
        """Dispatch one step, or where it has drafts, the guesses of them."""
        if inputs.draft is None:
            return self.target.run(inputs)
        if inputs.draft.guess is None:
            handle = self.target.run(inputs)  # first: its tokens are waited for
            self._guess(inputs.draft)
            return handle
        return DraftedHandle(partial(self._finish, inputs, self._guess(inputs.draft)))

    def _finish(self, inputs: StepInputs, guesses: Handle | None) -> StepOutput:
        """Wait for the guesses, run the step with them, and fetch what it produced."""
        drafted_BR = self._guessed(guesses)
        output = self.target.run(_with_drafts(inputs, drafted_BR)).result()
        if not isinstance(output, StepOutput):
            raise AuditError(f"a step gave {type(output).__name__} instead of a StepOutput")
        self._has_kv = True  # as far as whoever plans knows: if not, this output says so
        return replace(output, drafted_BR=drafted_BR)

    def _guess(self, inputs: DraftInputs) -> Handle | None:
        """Dispatch steps of the draft model, of which the last is waited for. None if that failed."""
        handle = None
        try:
            if self._has_failed:
                self._has_kv &= self.draft.recover()
                self._has_failed = False
            for step in filter(None, (inputs.catch_up, inputs.guess) if self._has_kv else ()):
                handle = self.draft.run(replace(step, tokens_T=np.minimum(step.tokens_T, self._last_token)))
        except CompileError:
            raise
        except Exception as error:  # whatever it is: the target needs no draft model
            handle = None
            self._lose_kv(error)
        return handle

    def _guessed(self, handle: Handle | None) -> np.ndarray:
        """What was guessed, no column of it if the draft model failed since the last time."""
        try:
            if handle is not None:
                return np.minimum(handle.result().tokens_SR, self._last_token)
        except Exception as error:  # whatever it is: the target needs no draft model
            self._lose_kv(error)
        return np.zeros((0, 0), np.int32)

    def _lose_kv(self, error: Exception) -> None:
        what = "a step of the draft model failed; it computes anew what it needs"
        if self._is_told:
            _log.warning("%s (%s)", what, type(error).__name__)
        else:
            _log.warning(what, exc_info=error)
        self._is_told, self._has_kv, self._has_failed = True, False, True

    def recover(self) -> bool:
        """After a failed step: whether the target's cache survived it; else it is new, and every page is lost.

        The draft model recovers when it is next asked: where that fails, nothing is guessed.
        """
        self._has_failed = True
        return self.target.recover()

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
