"""Many turns of one sequence: token ids in, token ids out, and between them the KV stays.

A session holds tokens and no page. Each turn is a request for all tokens so far and the new ones, which keeps its end
(`Request.keeps_end`): the next turn finds every page in the prefix cache, the last and partial one too, and computes
only what is new. Pages that the pool needs for others meanwhile, or of weights that are gone, are computed again.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from quire.core.sampling_params import SamplingParams
from quire.llm import plain
from quire.outputs import RequestOutput


class Session:
    """Turns of one sequence, as `Rollouts.session` begins them. One thread at a time may use it."""

    def __init__(
        self,
        submit: Callable[..., Future[RequestOutput]],
        token_ids: Sequence[int] = (),
        cache_salt: str = "",
        tenant: str | None = None,
    ) -> None:
        """`submit` is that of `Rollouts`."""
        self._submit = submit
        self._token_ids = _checked(token_ids)
        self._cache_salt = cache_salt
        self._tenant = tenant
        self._turn: Future[RequestOutput] | None = None
        """The answer that has not been taken over yet."""

    def __repr__(self) -> str:
        state = "waits for an answer" if self._turn and not self._turn.done() else f"{len(self.token_ids)} tokens"
        return f"<Session, {state}>"

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far, sent and answered. RuntimeError while an answer is under way."""
        turn = self._turn
        if turn is not None:
            if not turn.done():
                raise RuntimeError("an answer is under way: wait for the future that send() returned")
            self._turn = None
            if turn.exception() is None and turn.result().outputs[0].finish_reason != "abort":
                self._token_ids = [*turn.result().prompt_token_ids, *turn.result().outputs[0].token_ids]
        return list(self._token_ids)

    def send(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        group: Hashable = None,
        priority: int = 0,
        wait_s: float | None = None,
    ) -> Future[RequestOutput]:
        """Append these tokens and have all of it continued, as `Rollouts.submit` does with a prompt.

        The answer becomes part of the session when it ends; one that is aborted or fails leaves the session as it was
        before this call. With `max_tokens=0, prompt_logprobs=True` the tokens are appended and scored, and nothing is
        drawn.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} must be SamplingParams(...)")
        if params is not None and params.n != 1:
            raise ValueError(f"n={params.n} answers to go on from: a session has one; fork() makes others")
        prompt = [*self.token_ids, *_checked(token_ids)]
        how = {"group": group, "priority": priority, "wait_s": wait_s, "tenant": self._tenant}
        self._turn = self._submit(prompt, params, cache_salt=self._cache_salt, keeps_end=True, **how)
        return self._turn

    def fork(self) -> "Session":
        """Another session with the tokens of this one, and its KV: both go on from there."""
        return Session(self._submit, self.token_ids, self._cache_salt, self._tenant)


def _checked(token_ids: Any) -> list[int]:
    given = plain(token_ids)
    given = [plain(one) for one in given] if isinstance(given, Sequence) else None
    if given is None or not all(isinstance(one, int) for one in given):
        raise ValueError(f"token_ids={token_ids!r} must be a list of token ids; encode text with the tokenizer")
    return given
