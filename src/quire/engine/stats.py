"""What an engine says of itself: counters, timing, and a snapshot of both with the state of its pool."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace

from quire.core.audit import PoolStats
from quire.core.plan import StepPlan
from quire.core.sequence import TokenEvent, Version
from quire.core.stopping import FinishReason

_log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the time of all steps went, in seconds; subtract an earlier reading for what came after it."""

    plan_s: float = 0.0
    """Deciding who runs, and laying it out in arrays."""
    dispatch_s: float = 0.0
    """Handing the arrays to the device."""
    wait_s: float = 0.0
    """Until the device was done; what the caller did meanwhile is hidden in it."""
    output_s: float = 0.0
    """Judging and recording what came back."""

    @property
    def host_s(self) -> float:
        """What the device spends waiting for the host."""
        return self.plan_s + self.dispatch_s + self.output_s

    def __sub__(self, earlier: "StepTiming") -> "StepTiming":
        return StepTiming(
            self.plan_s - earlier.plan_s,
            self.dispatch_s - earlier.dispatch_s,
            self.wait_s - earlier.wait_s,
            self.output_s - earlier.output_s,
        )

    def __str__(self) -> str:
        total = self.host_s + self.wait_s or 1.0
        parts = ("plan", self.plan_s), ("dispatch", self.dispatch_s), ("wait", self.wait_s), ("output", self.output_s)
        return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts)


@dataclass(frozen=True, slots=True)
class Progress:
    """What all steps so far add up to; subtract an earlier reading for what came after it. Costs nothing to take."""

    steps: int = 0
    rounds: int = 0
    rows: int = 0
    """Rows of every step together."""
    computed_tokens: int = 0
    generated_tokens: int = 0
    timing: StepTiming = StepTiming()

    def __sub__(self, earlier: "Progress") -> "Progress":
        return Progress(
            self.steps - earlier.steps,
            self.rounds - earlier.rounds,
            self.rows - earlier.rows,
            self.computed_tokens - earlier.computed_tokens,
            self.generated_tokens - earlier.generated_tokens,
            self.timing - earlier.timing,
        )


class StepCounters:
    """Adds up what steps did, as they are committed."""

    def __init__(self) -> None:
        self.steps = self.rounds = self.rows = 0
        self.computed_tokens = self.generated_tokens = self.page_copies = self.not_finite = 0

    def count(self, plan: StepPlan, events: Sequence[TokenEvent]) -> int:
        """Take in a committed step; returns the number of its rounds."""
        rounds_of = {row.sequence: row.max_rounds for row in plan.rows}
        drawn = [min(len(event.token_ids), rounds_of.get(event.sequence, 1)) for event in events]
        rounds = max(drawn, default=1)
        self.steps += 1
        self.rounds += rounds
        self.rows += len(plan.rows)
        self.computed_tokens += plan.num_tokens + sum(n - 1 for n in drawn if n > 1)  # but for what it drew last
        self.generated_tokens += sum(len(event.token_ids) for event in events)
        self.not_finite += sum(event.finish_reason is FinishReason.NOT_FINITE for event in events)
        self.page_copies += sum(len(operations.copies) for operations in plan.operations)
        return rounds


class StepTimer:
    """Adds the time since it was last looked at to one part of a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(("plan_s", "dispatch_s", "wait_s", "output_s"), 0.0)
        self._last = 0.0

    def start(self) -> None:
        """A step begins."""
        self._last = self._clock()

    def lap(self, part: str) -> float:
        """A part of the step is done; returns its seconds."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._seconds[part] += seconds
        return seconds

    def read(self) -> StepTiming:
        """The sums so far."""
        return StepTiming(**self._seconds)


@dataclass(frozen=True, slots=True)
class EngineStats(PoolStats):
    """A reading of the engine, taken between two steps."""

    num_pages: int
    num_host_pages: int
    free_host_pages: int
    running: int
    waiting: int
    """Sequences without a row; the swapped ones are not among them."""
    swapped: int
    steps: int
    """Dispatches: round trips between host and device."""
    rounds: int
    """Rounds in all of them: a decoding sequence gets a token in each."""
    preemptions: int
    recomputes: int
    """Preemptions whose pages are computed again."""
    swaps: int
    """Preemptions whose pages went to host memory."""
    evictions: int
    """Pages that the prefix cache gave up."""
    prompt_tokens: int
    """Prompt tokens of every request added."""
    cached_tokens: int
    """Positions that were found in the prefix cache, or with a relative, instead of computed."""
    computed_tokens: int
    """Tokens put through the model, recomputed ones included."""
    generated_tokens: int
    drafted_tokens: int
    """Tokens that were guessed and put through the model, to be drawn at once if they are what comes next."""
    accepted_drafts: int
    """Those of them that came next."""
    not_finite: int
    """Sequences that ended because the model's logits were NaN or infinite."""
    page_copies: int
    """Pages copied because a fork began in the middle of one."""
    weight_version: Version
    programs: int
    compiles_after_warmup: int
    timing: StepTiming


def add_up(readings: Sequence[EngineStats]) -> EngineStats:
    """What several engines of one model come to: sums, but for refcounts and their mean usage."""
    first = readings[0]
    named = {field.name: [getattr(reading, field.name) for reading in readings] for field in fields(EngineStats)}
    timings = [astuple(timing) for timing in named.pop("timing")]
    del named["weight_version"]
    sums = {name: sum(values) for name, values in named.items()}
    return replace(
        first,
        **sums
        | {
            "min_refcount": min(named["min_refcount"]),
            "max_refcount": max(named["max_refcount"]),
            "usage_ratio": sums["usage_ratio"] / len(readings),
            "timing": StepTiming(*map(sum, zip(*timings, strict=True))),
        },
    )


class TimingLog:
    """Logs a line a second: how fast the engine is, and where its time goes."""

    def __init__(self) -> None:
        self._before: EngineStats | None = None
        self._logged_at = 0.0

    def maybe_log(self, read: Callable[[], EngineStats]) -> None:
        """Log what happened since the last line, if that is a second ago."""
        seconds = time.perf_counter() - self._logged_at
        if seconds < 1:
            return
        stats, before = read(), self._before
        if before:
            tokens, rounds = stats.generated_tokens - before.generated_tokens, stats.rounds - before.rounds
            per_step = rounds / max(stats.steps - before.steps, 1)
            _log.info(
                f"{tokens / seconds:.0f} tokens/s, {stats.running} running, {stats.waiting} waiting, "
                f"{per_step:.1f} rounds a step; {stats.timing - before.timing}"
            )
        self._before, self._logged_at = stats, time.perf_counter()
