"""How far each page holds the KV of the draft model, too.

A page id means the same positions in the target's pool and in the draft model's. The target computes every position;
the draft model leaves some out, as in rounds without drafts, and catches up before it guesses:

    sequence      | page 5    | page 9    | page 2    |
    target        xxxxxxxxxxx xxxxxxxxxxx xxxxxx
    draft model   xxxxxxxxxxx xxxx                       lens: 11, 4, 0 -> it goes on inside of page 9

What stands here decides how good guesses are, never what is drawn. Refuses to know: sequences, models.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from quire.core.plan import PageOperations


class DraftPages:
    """For each page on the device and in host memory: how many of its positions, from the first, the draft model has.

    Nothing is to be reset when a page gets another owner: who gets one writes it from its first position on.
    """

    def __init__(self, num_pages: int, num_host_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._lens = np.zeros(num_pages, np.int32)
        self._host_lens = np.zeros(num_host_pages, np.int32)

    def move(self, operations: PageOperations) -> None:
        """Pages are moved and copied in both models' pools, in the order of a step."""
        for page, host_page in operations.swap_outs:
            self._host_lens[host_page] = self._lens[page]
        for source, target in operations.copies:
            self._lens[target] = self._lens[source]
        for host_page, page in operations.swap_ins:
            self._lens[page] = self._host_lens[host_page]

    def forget(self) -> None:
        """The draft model has nothing of any page."""
        self._lens[:] = 0
        self._host_lens[:] = 0

    def end(self, pages: SequenceOf[int], most: int) -> int:
        """Up to which position, `most` at the highest, the draft model has all that a table holds."""
        num_pages = -(-most // self.page_size)
        lens = self._lens[pages[:num_pages]]
        partial = np.flatnonzero(lens < self.page_size)
        if len(partial) == 0:
            return most  # every page is full
        first = int(partial[0])
        return min(most, first * self.page_size + int(lens[first]))

    def write(self, pages: SequenceOf[int], first: int, end: int, *, is_drafted: bool) -> None:
        """Positions `first .. end-1` of a table hold something new: from the target alone, or the draft model too."""
        size = self.page_size
        for i in range(first // size, -(-end // size)):
            page, start, stop = pages[i], max(first - i * size, 0), min(end - i * size, size)
            if not is_drafted:
                self._lens[page] = min(self._lens[page], start)
            elif self._lens[page] >= start:
                self._lens[page] = stop
