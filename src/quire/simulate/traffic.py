"""Requests by their lengths and moments: from a CSV of a trace, or from a recording.

A CSV has the columns `num_prefill_tokens` and `num_decode_tokens`, and `arrived_at` in seconds; without that, requests
come at random moments, as many a second as are asked for. A column `tenant` names the tenant of each request.
"""

import csv
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import check_above_zero, check_whole
from quire.core.sequence import Sequence
from quire.field_error import FieldError
from quire.recording.recording_file import RecordingError, read_records
from quire.recording.replay import Replay, read_header

MAX_CSV_ROWS = 20_000_000


class Arrival(NamedTuple):
    """One request."""

    at: float
    """Seconds."""
    prompt_len: int
    new_tokens: list[int]
    """Of each of its samples."""
    prefix: Hashable = None
    """Requests with the same one begin with the same `prefix_tokens` tokens."""
    names: tuple[bytes, ...] = ()
    """The names of its pages, of a recording: pages with the same name hold the same tokens."""
    more: dict[str, Any] = {}  # noqa: RUF012
    """What else a recording says that decides."""


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival."""

    arrivals: list[Arrival]
    prefix_tokens: int = 0
    page_size: int | None = None
    """Of the recording that names of pages come from."""

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at

    def at_rate(self, rate: float) -> "Traffic":
        """The same requests, so many a second."""
        first, stretch = self.arrivals[0].at, len(self.arrivals) / rate / max(self.seconds, 1e-9)
        arrivals = [one._replace(at=(one.at - first) * stretch) for one in self.arrivals]
        return Traffic(arrivals, self.prefix_tokens, self.page_size)

    def sharing(self, prefix_tokens: int, groups: int, seed: int = 0) -> "Traffic":
        """The same requests, each with one of so many beginnings before its own prompt, as system prompts are."""
        rng = random.Random(seed)
        arrivals = [
            one._replace(prompt_len=one.prompt_len + prefix_tokens, prefix=rng.randrange(groups))
            for one in self.arrivals
        ]
        return Traffic(arrivals, prefix_tokens, self.page_size)


def read_trace(path: Path, *, requests: int | None = None, scale: float = 1.0, max_len: int | None = None) -> Traffic:
    """Requests of a CSV, lengths times `scale`; repeated from its beginning when it has fewer than are asked for."""
    if requests is not None:
        check_whole("requests", requests, 1, MAX_CSV_ROWS)
    check_above_zero("scale", scale)
    arrivals, offset = [], 0.0
    rows = list(_rows(path))
    more: dict[str, dict[str, Any]] = {name: {"tenant": name} if name else {} for *_, name in rows}
    if not rows:
        raise FieldError(f"trace={str(path)!r} has no requests", field="trace")
    span = rows[-1][0] + rows[-1][0] / max(len(rows) - 1, 1) or float(len(rows))
    while True:
        for at, *lengths, tenant in rows:
            if requests is not None and len(arrivals) == requests:
                return Traffic(arrivals)
            prompt_len, new_tokens = (max(round(length * scale), 1) for length in lengths)
            if max_len is not None:
                new_tokens = min(new_tokens, max_len // 2)
                prompt_len = min(prompt_len, max_len - new_tokens)
            arrivals.append(Arrival(offset + at, prompt_len, [new_tokens], more=more[tenant]))
        if requests is None:
            return Traffic(arrivals)
        offset += span


def _rows(path: Path) -> Iterator[tuple[float, int, int, str]]:
    rng, random_time, first = random.Random(0), 0.0, None
    try:
        with open(path, newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                if number > MAX_CSV_ROWS:
                    raise FieldError(f"trace={str(path)!r} has more than {MAX_CSV_ROWS:,} rows", field="trace")
                random_time += rng.expovariate(1)
                at = float(row["arrived_at"]) if "arrived_at" in row else random_time
                first = at if first is None else first
                prompt_len, new_tokens = int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
                if not 0 <= at - first < 1e9 or not 0 <= prompt_len < 1 << 24 or not 0 <= new_tokens < 1 << 24:
                    raise ValueError(f"line {number}")
                yield at - first, prompt_len, new_tokens, row.get("tenant") or ""
    except OSError as error:
        raise FieldError(f"trace={str(path)!r} cannot be read: {error.strerror}", field="trace") from None
    except (KeyError, TypeError, ValueError, csv.Error, UnicodeDecodeError) as error:
        if isinstance(error, FieldError):
            raise
        columns = "num_prefill_tokens, num_decode_tokens and perhaps arrived_at and tenant"
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise FieldError(f"trace={str(path)!r} is no CSV with {columns}: {reason}", field="trace") from None


def read_recording(path: Path) -> Traffic:
    """Requests of a recording: when they came, how long they got, and which pages they have in common.

    Its decisions are replayed on the way, which tells the lengths. Forks of running sequences are left out.
    """
    first, records = read_records(path)
    header = read_header(first)
    ended: dict[tuple[int, int], tuple[int, tuple[bytes, ...]]] = {}

    def on_end(sequence: Sequence) -> None:
        ended[sequence.arrival, sequence.index] = sequence.num_output, tuple(sequence.page_hashes)

    one, asked = Replay(header, on_end=on_end), []
    for record in records:
        difference = one.tell(record)
        if difference is not None:
            raise RecordingError(f"{path.name} cannot be simulated: step {difference.step} is decided otherwise now")
        if record[0] == "add":
            asked.append(record)
    arrivals = []
    for _, time_us, arrival, prompt_len, max_tokens, more in asked:
        lengths = [ended[arrival, i][0] for i in range(more.get("n", 1)) if (arrival, i) in ended]
        if max_tokens and any(lengths):
            known = {
                name: more[name] for name in ("tenant", "priority", "stream", "max_rounds", "grammar") if name in more
            }
            names = ended[arrival, 0][1] if (arrival, 0) in ended else ()
            arrivals.append(Arrival(time_us / 1e6, prompt_len, [max(n, 1) for n in lengths], None, names, known))
    if not arrivals:
        raise RecordingError(f"{path.name} has no request that generated anything")
    return Traffic(arrivals, page_size=header.config.page_size)
