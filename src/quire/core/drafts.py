"""Drafts: tokens that may come next in a sequence. A smaller model guesses them, or they are looked up in the sequence.

Looked up is what followed the same tokens earlier in it:

    tokens    | ... the old lighthouse could not be seen ......... In 1874 the old lighthouse |
                    ^^^^^^^^^^^^^^^^^^                                     ^^^^^^^^^^^^^^^^^^
                    the same           could not be seen          -> drafted

A step computes a row's newest token and its drafts behind it, and draws behind each. The draws are accepted up to the
first that is not what was drafted, that one included: what a step for each token would have drawn, whatever was
drafted. A draft that is wrong costs the time to compute it, so how many pay is learned for each sequence by itself.

Refuses to know: sequences, pages, models, and what a step costs.
"""

import math
from array import array
from collections.abc import Sequence as SequenceOf

SHORTEST_MATCH, LONGEST_MATCH = 2, 5
"""Tokens at the end of a sequence that are looked up in it: as many as are found."""
FIRST_DRAFTS = 3
"""Drafted where nothing is known yet."""
FIRST_PAUSE, LONGEST_PAUSE = 2, 64
"""Tokens without drafts, after drafts of which none was accepted: each time twice as many."""
HOPE = 32
"""Tokens after a draft that was accepted among which there may be more: until then the host looks after few rounds."""
ITEM = array("i").itemsize
MAX_FALSE_MATCHES = 64
"""Bytes that match, but begin inside of a token: a prompt can be made of nothing else."""
UNKNOWN = 0
"""Stands for a token that the draft model guesses only in the step that computes it."""
WORTH = 0.4
"""How likely a draft of a model must be to be accepted, with all before it, to pay for its time in both models."""
FIRST_RATE, HIGHEST_RATE = 0.75, 0.98
RATE_WINDOW = 8
"""Drafts over which the rate of acceptance is averaged, about."""


class Drafter:
    """Of one sequence: its tokens, in a form to search, and how good its drafts have been."""

    def __init__(self, num_tokens: int) -> None:
        """The sequence has `num_tokens` when it begins to decode."""
        self._tokens = bytearray()
        self.most = FIRST_DRAFTS
        """Drafts that are likely to be accepted together."""
        self.pause = FIRST_PAUSE
        """Tokens of the next pause."""
        self.resume_at = 0
        """How many tokens the sequence has when it is looked up again."""
        self.hopes_until = num_tokens + min(num_tokens // 8, HOPE)  # the more there is, the more it may repeat
        """How many tokens the sequence has when the host need no longer look at it soon."""

    @property
    def num_read(self) -> int:
        """Tokens of the sequence that it knows."""
        return len(self._tokens) // ITEM

    def read(self, token_ids: SequenceOf[int]) -> None:
        """Take in the sequence's next tokens."""
        self._tokens += array("i", token_ids).tobytes()

    def find(self, most: int) -> list[int]:
        """The tokens behind the last earlier occurrence of the sequence's end, the longest that has one; [] if none.

        Where these reach the end, the sequence repeats itself, and so do they.
        """
        found = None
        for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1):
            start = self._after_match(length * ITEM)
            if start is None:
                break
            found = start
        if found is None:
            return []
        followers = array("i", bytes(self._tokens[found : found + most * ITEM]))
        return [followers[i % len(followers)] for i in range(most)]

    def _after_match(self, length: int) -> int | None:
        """Where the last earlier occurrence of the last `length` bytes ends; None if there is none."""
        tokens, before = self._tokens, len(self._tokens) - ITEM
        for _ in range(MAX_FALSE_MATCHES):
            start = tokens.rfind(tokens[-length:], 0, before)
            if start < 0:
                return None
            if start % ITEM == 0:
                return start + length
            before = start + length - 1  # it began inside of a token
        return None

    def learn(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """The sequence has `num_tokens`, now that so many of its drafts were accepted."""
        if num_accepted == 0:
            self.most = FIRST_DRAFTS
            self.resume_at = num_tokens + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        else:
            if num_accepted == num_drafted:
                self.most = 2 * num_drafted + 1
            elif num_accepted <= num_drafted // 2:
                self.most = FIRST_DRAFTS
            self.pause = FIRST_PAUSE
            self.hopes_until = num_tokens + HOPE


class Guesses:
    """Of one sequence that a draft model guesses for: how many tokens at once pay, by how many were accepted before.

    A model's guess may be wrong now and right the next time, so it is the rate that counts, not the last of them.
    """

    hopes_until = 0
    """As `Drafter` has it: as long as guesses pay there are some in every step, and else there is nothing to hope."""

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        """How likely the next guess is to be accepted."""
        self.pause = FIRST_PAUSE
        """Tokens of the next pause."""
        self.resume_at = 0
        """How many tokens the sequence has when there are guesses again."""

    @property
    def most(self) -> int:
        """Tokens of which the last is still accepted often enough."""
        return int(math.log(WORTH) / math.log(self.rate) + 1e-9)

    def learn(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """The sequence has `num_tokens`, now that so many of its drafts were accepted."""
        for _ in range(num_accepted):
            self.rate += (1 - self.rate) / RATE_WINDOW
        if num_accepted < num_drafted:  # what stood behind the first wrong one says nothing
            self.rate -= self.rate / RATE_WINDOW
        else:
            self.pause = FIRST_PAUSE
        self.rate = min(self.rate, HIGHEST_RATE)
        if self.rate < WORTH:
            self.rate = WORTH  # after the pause, one is tried
            self.resume_at = num_tokens + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
