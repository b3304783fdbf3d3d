"""What is new of a request's sequences, and what becomes of it while nobody reads it."""

from dataclasses import dataclass, field

from quire.core.sequence import TokenLogprob


@dataclass(slots=True)
class Update:
    """What is new of one sequence."""

    index: int
    """Which sequence of the request."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None


class UpdateBuffer:
    """Updates that have not been read, merged to one for each sequence. Its cost is linear in what it is given."""

    def __init__(self) -> None:
        self._merged: dict[int, Update] = {}
        """By sequence, all but their texts."""
        self._texts: dict[int, list[str]] = {}
        """By sequence: joined when they are read, because joining at each update would copy the whole text again."""

    def __bool__(self) -> bool:
        return bool(self._merged)

    def add(self, update: Update) -> None:
        """Put an update to those before it."""
        merged = self._merged.setdefault(update.index, Update(update.index))
        self._texts.setdefault(update.index, []).append(update.text)
        merged.token_ids += update.token_ids
        merged.logprobs += update.logprobs
        merged.finish_reason = update.finish_reason

    def take(self) -> list[Update]:
        """What has been added since the last call: one update for each sequence, in their order."""
        updates = [update for _, update in sorted(self._merged.items())]
        for update in updates:
            update.text = "".join(self._texts[update.index])
        self._merged, self._texts = {}, {}
        return updates
