"""A fork that differs from its parent: other sampling parameters, and tokens that the caller puts behind the parent's.

It is judged as a sequence that has had its parameters from the beginning: every token that it starts with must be one
that it goes on after. So a fork is never born finished, and never breaks its own form.
"""

from collections.abc import Sequence as SequenceOf

from quire.core.commit import stop_reason
from quire.core.errors import RequestError
from quire.core.sequence import Sequence, SequenceState, Version
from quire.core.stopping import FinishReason

WAYS_ON = {
    FinishReason.EOS: "ignore_eos=True goes on after it",
    FinishReason.STOP: "min_tokens says from where on a stop counts; a whole text of structured always ends",
    FinishReason.LENGTH: "raise max_tokens, which counts the parent's tokens and the forced ones",
    FinishReason.ABORT: "structured allows no such output",
}


def fork_of(parent: Sequence, changed: Sequence | None, token_ids: SequenceOf[int], version: Version) -> Sequence:
    """A child with the parent's tokens and these behind them, not yet of the family. RequestError if there is none.

    `changed` is a sequence without tokens that has the child's parameters; None for the parent's own.
    """
    if parent.state is SequenceState.FINISHED or not parent.num_output:
        state = parent.state if parent.num_output else "without a token of its own"
        raise RequestError(
            f"sequence {parent.name} is {state}: fork one that has drawn a token and "
            "has not finished, or ask for n sequences at once"
        )
    if changed is None:
        child = parent.begin_fork()
    else:
        child = changed
        child.inherit(parent)
        _append(child, parent.output_token_ids, "params", "output token {} of the parent, {},")
    _append(child, token_ids, "token_ids", "token_ids[{}]={}")
    child.weight_versions += [version] * len(token_ids)
    return child


def _append(child: Sequence, token_ids: SequenceOf[int], field: str, called: str) -> None:
    """Append tokens that were not drawn, each judged as if it had been; `called` is what to call one in an error."""

    def refuse(i: int, reason: FinishReason) -> RequestError:
        what = "may not be there" if reason is FinishReason.ABORT else f"ends a sequence with these params ({reason})"
        message = f"{called.format(i, token_ids[i])} {what}: {WAYS_ON[reason]}"
        return RequestError(message, field=field, request_id=child.request.id)

    if child.grammar is not None and token_ids:
        num_allowed = child.grammar.num_allowed(token_ids)
        if num_allowed < len(token_ids):
            raise refuse(num_allowed, FinishReason.ABORT)
    for i, token_id in enumerate(token_ids):
        child.output_token_ids.append(token_id)
        child.num_tokens += 1
        reason = stop_reason(child)
        if reason is not None:
            raise refuse(i, reason)
