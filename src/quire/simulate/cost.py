"""How long a step takes: by what was measured on a machine, or by what the data sheet of a chip allows.

Both know the few shapes that steps are padded to. A step that only decodes costs by its rounds and by the positions its
rows read, a mixed one by its tokens and by the positions these see. Padding costs what it was seen to cost: next to
nothing where the native library multiplies, as much as tokens do in plain XLA.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from quire.config import check_whole
from quire.core.plan import StepPlan
from quire.field_error import FieldError

FORMAT, VERSION = "quire calibration", 2
MAX_FILE_BYTES = 1 << 20
FITS = 3
COSTS = ("dispatch", "row", "decode_token", "decode_position", "mixed_token", "mixed_position")
"""Fields of `Calibration`: what a step costs beside its shape."""


class PlanSize(NamedTuple):
    """What of a plan decides how long it takes."""

    rows: int
    tokens: int
    rounds: int
    positions: int
    """That the tokens of the step see, all together; of the first round."""

    @property
    def decodes(self) -> bool:
        """Whether it runs in a program that only decodes."""
        return self.tokens == self.rows


def size_of(plan: StepPlan) -> PlanSize:
    """The size of a plan."""
    rows, tokens = plan.rows, plan.num_tokens
    count = len(rows)
    if tokens == count:
        return PlanSize(count, tokens, max([row[3] for row in rows]), sum([row[1] for row in rows]) + count)
    return PlanSize(count, tokens, 1, sum([n * first + n * (n + 1) // 2 for _, first, n, _ in rows]))


class Cost(Protocol):
    """Says how long steps take."""

    @property
    def seconds_per_move(self) -> float:
        """To move up to `pages_per_move` pages to host memory or back."""
        ...

    @property
    def pages_per_move(self) -> int:
        """See `seconds_per_move`."""
        ...

    def seconds(self, size: PlanSize) -> float:
        """Of one step, host and device."""
        ...


@dataclass(frozen=True)
class Calibration:
    """What steps cost on one machine, with one model and one engine: measured by `quire bench steps`."""

    model: str
    machine: str
    knobs: dict[str, Any]
    """The engine's: page_size, num_pages, max_num_seqs, ..."""
    decode: dict[int, float]
    """Rows that a program can decode -> seconds of one round, beside those of its rows."""
    mixed: dict[int, float]
    """Tokens that a mixed program can hold -> seconds, beside those of its tokens."""
    decode_token: float
    """Seconds of each row in a round."""
    mixed_token: float
    """Seconds of each token of a mixed step."""
    dispatch: float
    """Seconds of any step."""
    row: float
    """Seconds of each row, for the host."""
    decode_position: float
    """Seconds of each position that a decoding token sees."""
    mixed_position: float
    """The same in a mixed step."""
    seconds_per_move: float
    """To move up to `pages_per_move` pages to host memory or back."""
    pages_per_move: int
    error: float
    """How far off it is for the steps it was made from: the median of |predicted / measured - 1|."""
    _ladders: dict[str, list[int]] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._ladders.update(decode=sorted(self.decode), mixed=sorted(self.mixed))

    def seconds(self, size: PlanSize) -> float:
        """See `Cost`. Beyond the largest shape that was measured, in proportion to it."""
        if size.decodes:
            a_round = _at(self._ladders["decode"], self.decode, size.rows)
            a_round += self.decode_token * size.rows + self.decode_position * size.positions
            return self.dispatch + self.row * size.rows + a_round * size.rounds
        device = _at(self._ladders["mixed"], self.mixed, size.tokens)
        device += self.mixed_token * size.tokens + self.mixed_position * size.positions
        return self.dispatch + self.row * size.rows + device

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        fields = asdict(self)
        del fields["_ladders"]
        path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1) + "\n")


def _at(ladder: list[int], seconds: dict[int, float], size: int) -> float:
    """Of the smallest shape that holds a step."""
    i = bisect_left(ladder, size)
    if i < len(ladder):
        return seconds[ladder[i]]
    return seconds[ladder[-1]] * size / ladder[-1]


def load_calibration(path: Path) -> Calibration:
    """Read what `Calibration.save` wrote; FieldError if it is something else."""
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(MAX_FILE_BYTES))
        if data.pop("format") != FORMAT or data.pop("version") != VERSION:
            raise ValueError(f"it is not {FORMAT!r} {VERSION}")
        for name in ("decode", "mixed"):
            data[name] = {int(size): _seconds(value) for size, value in data[name].items()}
            if not data[name] or min(data[name]) < 1:
                raise ValueError(f"{name} has no shapes")
        for name in (*COSTS, "seconds_per_move", "error"):
            data[name] = _seconds(data[name])
        check_whole("pages_per_move", data["pages_per_move"], 1, 1 << 20)
        if not isinstance(data["knobs"], dict):
            raise ValueError("knobs is no object")
        return Calibration(**data)
    except OSError as error:
        raise FieldError(f"calibration={str(path)!r} cannot be read: {error.strerror}", field="calibration") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        message = f"calibration={str(path)!r} is not what quire bench steps writes: {reason}"
        raise FieldError(message, field="calibration") from None


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def fit(
    steps: Sequence[tuple[PlanSize, float]],
    *,
    decode_shapes: Sequence[int],
    mixed_shapes: Sequence[int],
    **about: Any,
) -> Calibration:
    """The costs that explain measured steps best, none below 0: least squares, of errors relative to what is predicted.

    Relative to what was measured, slow steps would count less, and their sum would come out too small.
    """
    decode, mixed = sorted(decode_shapes), sorted(mixed_shapes)
    columns = [*COSTS, *decode, *[-n for n in mixed]]
    matrix, seconds = np.zeros((len(steps), len(columns))), np.array([took for _, took in steps])
    for line, (size, _) in zip(matrix, steps, strict=True):
        line[:2] = 1, size.rows
        ladder, most = (decode, size.rows) if size.decodes else (mixed, size.tokens)
        shape = ladder[min(bisect_left(ladder, most), len(ladder) - 1)]
        at = 2 if size.decodes else 4
        line[at : at + 2] = size.tokens * size.rounds, size.positions * size.rounds
        line[columns.index(shape if size.decodes else -shape)] = size.rounds
    predicted, found = seconds, np.zeros(len(columns))
    for _ in range(FITS):
        found = _non_negative(matrix / predicted[:, None], seconds / predicted)
        predicted = np.maximum(matrix @ found, seconds.min())
    costs = dict(zip(columns, found.tolist(), strict=True))
    seen = {column for column, values in zip(columns, matrix.T, strict=True) if values.any()}
    return Calibration(
        decode=_filled({n: costs[n] if n in seen else None for n in decode}),
        mixed=_filled({n: costs[-n] if -n in seen else None for n in mixed}),
        **{name: costs[name] for name in COSTS},
        error=float(np.median(np.abs(predicted / seconds - 1))),
        **about,
    )


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Some x >= 0 such that matrix @ x is about the target: what would be negative is left out, the worst first."""
    used, found = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while True:
        solution = np.linalg.lstsq(matrix[:, used], target, rcond=None)[0]
        if solution.min() >= 0:
            found[used] = solution
            return found
        del used[int(solution.argmin())]


def _filled(costs: dict[int, float | None]) -> dict[int, float]:
    """A shape that no step had costs what the next larger one does, or else what the largest one that had any does."""
    known = next((cost for _, cost in sorted(costs.items(), reverse=True) if cost is not None), 0.0)
    filled = {}
    for size, cost in sorted(costs.items(), reverse=True):
        filled[size] = known = known if cost is None else cost
    return filled
