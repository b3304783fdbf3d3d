"""The scheduler over a recording: is every decision the same?

Runs without a device and without jax. Stops at the first difference: what comes after it follows from it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.config import MAX_DIMENSION, MAX_DRAFTS, MAX_ROUNDS, PREEMPTIONS, WindowPoolSize, check_whole
from quire.core.errors import AuditError, RequestError, StateError
from quire.core.plan import NOT_FINITE, StepPlan
from quire.core.prefix_cache import PrefixCache, page_root
from quire.core.request import MAX_PRIORITY
from quire.core.sampling_params import MAX_SAMPLES_PER_REQUEST
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, SequenceState, Weights
from quire.core.stopping import FinishReason
from quire.recording.decisions import Decision, WatchedScheduler, describe
from quire.recording.fields import FIELDS, hashed_id
from quire.recording.recording_file import FORMAT, VERSION, RecordingError, read_records
from quire.recording.stand_ins import END_OF, OTHER, PLAIN, StandInResult, stand_in

# Beyond these a file is an attack: what a replay keeps in memory follows from them.
MAX_PAGES = 1 << 24
MAX_LIVE = 1 << 20
MAX_LIVE_TOKENS = 1 << 26
NAME_LEN = 16
"""Hexadecimal digits of a page's name."""
MORE = {*FIELDS, "logprobs", "priority", "salt", "tenant", "stream", "keeps_end", "grammar", "request"}
"""What a request may say beside its lengths."""
REASONS = {str(reason): reason for reason in FinishReason}

Key = tuple[int, int]
"""Arrival and index of a sequence."""


class Difference(NamedTuple):
    """Where a replay decides something else."""

    step: int
    """Counted from 1."""
    lines: tuple[str, ...]
    """What differs."""


class FoundRequest(NamedTuple):
    """A request of a recording that was found by its id."""

    arrival: int
    added_s: float
    """Seconds from the start of the recording to the request's arrival."""
    prompt_len: int
    max_tokens: int


@dataclass
class ReplayResult:
    """What was replayed."""

    requests: int = 0
    forks: int = 0
    steps: int = 0
    preemptions: int = 0
    difference: Difference | None = None
    found: list[FoundRequest] = field(default_factory=list)
    """Requests of the id that was looked for."""


class Header(NamedTuple):
    """What a recording says of the scheduler that made it."""

    config: SchedulerConfig
    seconds_per_move: float
    pages_per_move: int


def read_header(header: dict[str, Any]) -> Header:
    """The first record of a file; RecordingError if this is no recording, or one of another version."""
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        what = f"{header.get('format')!r:.40} {header.get('version')!r:.10}"
        raise RecordingError(f"the file says it is {what}; this is for {FORMAT!r} {VERSION}")
    try:
        seconds, pages = header["costs"]
        config = _scheduler_config(**header["scheduler"])
        check_whole("pages_per_move", pages, 1, MAX_PAGES)
        return Header(config, _real(seconds), pages)
    except (TypeError, KeyError, ValueError) as error:
        raise RecordingError(f"the header is not what a scheduler can be made from: {error}") from None


def _scheduler_config(**fields: Any) -> SchedulerConfig:
    windows = [WindowPoolSize(**window) for window in fields.pop("windows", [])]
    on_host = fields.pop("window_host_pages", [])
    config = SchedulerConfig(**fields, windows=tuple(windows), window_host_pages=tuple(on_host))
    counts = {
        "page_size": 4096,
        "num_pages": MAX_PAGES,
        "max_num_seqs": 1 << 16,
        "max_num_batched_tokens": 1 << 20,
        "max_num_samples": 1 << 20,
        "max_rounds": MAX_ROUNDS,
    }
    for name, high in counts.items():
        check_whole(name, getattr(config, name), 1, high)
    check_whole("drafts", config.drafts, 0, MAX_DRAFTS)
    check_whole("draft_len", config.draft_len, 0, MAX_DIMENSION)
    for window in windows:
        for name in ("window", "num_pages", "pages_per_row"):
            check_whole(f"windows: {name}", getattr(window, name), 1, MAX_PAGES)
    for count in (config.num_host_pages, *config.window_host_pages):
        check_whole("num_host_pages", count, 0, MAX_PAGES)
    if len(windows) > 8 or config.preemption not in PREEMPTIONS:
        raise ValueError(f"{len(windows)} windows, preemption={config.preemption!r}")
    return config


class KnownNames(PrefixCache):
    """A prefix cache in which pages have the names that they had when they were recorded."""

    def __init__(self, empty: PrefixCache) -> None:
        super().__init__(empty._allocator, empty._page_size)
        self.names: dict[Key, dict[int, bytes]] = {}
        self.ends: dict[Key, dict[int, list[bytes]]] = {}
        self._num_unknown = 0

    def hashes(self, sequence: Sequence, weights: Weights, count: int) -> list[bytes]:
        """See `PrefixCache`. A page that never had a name gets one that no other page has."""
        root = page_root(self._page_size, sequence.request.cache_salt, weights)
        if sequence.hash_root != root:
            sequence.hash_root, sequence.page_hashes = root, []
        hashes, names = sequence.page_hashes, self.names.get((sequence.arrival, sequence.index), {})
        while len(hashes) < count:
            hashes.append(names.pop(len(hashes), None) or self._unknown())
        return hashes

    def end_hashes(self, sequence: Sequence, weights: Weights, num_full: int, end: int) -> list[bytes]:
        """See `PrefixCache`."""
        self.hashes(sequence, weights, num_full)
        names = self.ends.get((sequence.arrival, sequence.index), {}).get(num_full, [])
        count = end - num_full * self._page_size
        return [*names[:count], *(self._unknown() for _ in range(count - len(names)))]

    def forget(self, key: Key) -> None:
        """A sequence has ended."""
        self.names.pop(key, None)
        self.ends.pop(key, None)

    def _unknown(self) -> bytes:
        self._num_unknown += 1
        return b"unknown %d" % self._num_unknown


class Replay:
    """One scheduler that is told what the recorded one was told."""

    def __init__(
        self,
        header: Header,
        kind: Callable[..., WatchedScheduler] = WatchedScheduler,
        on_end: Callable[[Sequence], None] | None = None,
        request_id: str | None = None,
    ) -> None:
        """`on_end` gets every sequence that has ended; requests of `request_id` are noted in the result."""
        self._on_end = on_end
        self._wanted = None if request_id is None else hashed_id(request_id)
        self.scheduler = scheduler = header.config.build(kind)
        scheduler.costs.seconds_per_move = header.seconds_per_move
        scheduler.costs.pages_per_move = header.pages_per_move
        self._names: KnownNames | None = None
        if scheduler.tables.pool.prefix_cache is not None:
            self._names = scheduler.tables.pool.prefix_cache = KnownNames(scheduler.tables.pool.prefix_cache)
        self.result = ReplayResult()
        self._alive: dict[Key, Sequence] = {}
        self._num_live_tokens = 0
        self._plan: StepPlan | None = None
        self._do: dict[str, Callable[..., Iterable[str] | None]] = {
            "add": self._add,
            "fork": self._fork,
            "abort": self._abort,
            "names": self._take_names,
            "plan": self._schedule,
            "result": self._commit,
            "preempt": self._preempt,
            "weights": self._set_version,
            "fail": self._fail,
            "recompute": self._recompute,
            "tenants": self.scheduler.set_tenant_weights,
            "reset": self._reset,
            "lose_pages": self.scheduler.lose_pages,
            "lose_pending_swaps": self.scheduler.lose_pending_swaps,
            "clear_prefix_cache": self._clear_prefix_cache,
        }

    def tell(self, record: list[Any]) -> Difference | None:
        """Do what a record says; returns what was decided otherwise."""
        kind, *rest = record
        if kind == "broken":
            raise RecordingError("the recording ends where a step was interrupted in the middle of its commit")
        do = self._do.get(kind) if isinstance(kind, str) else None
        if do is None:
            raise RecordingError(f"there is no record of the kind {kind!r:.40}")
        try:
            lines = tuple(do(*rest) or ())
        except RecordingError:
            raise
        except (AuditError, StateError, RequestError, RuntimeError) as error:
            lines = (f"{kind}: the scheduler refuses now: {error}",)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            raise RecordingError(f"a record of the kind {kind!r} is not what it should be: {error!r:.100}") from None
        self.result.preemptions = self.scheduler.num_preemptions
        return Difference(self.result.steps, lines) if lines else None

    # -- requests ------------------------------------------------------------------------------------------------

    def _add(self, time_us: int, arrival: int, prompt_len: int, max_tokens: int, more: dict[str, Any]) -> None:
        check_request(time_us, arrival, prompt_len, max_tokens, more)
        decisive = {name: more[name] for name in more if name != "request"}
        first = stand_in(arrival, prompt_len, max_tokens, **decisive)
        for _ in range(first.params.n - 1):
            first.fork()
        for sequence in first.family:
            self._live(sequence)
        self.scheduler.add(first)
        self.result.requests += 1
        if self._wanted and more.get("request") == self._wanted:
            self.result.found.append(FoundRequest(arrival, time_us / 1e6, prompt_len, max_tokens))

    def _fork(
        self, time_us: int, arrival: int, index: int, child_index: int, num_forced: int, other: list[Any] | None
    ) -> Iterator[str]:
        parent, changed = self._sequence(arrival, index), None
        check_whole("forced tokens", num_forced, 0, MAX_DIMENSION)
        if other is not None:
            max_tokens, more = other
            check_request(time_us, arrival, parent.prompt_len, max_tokens, more)
            changed = stand_in(arrival, parent.prompt_len, max_tokens, index=parent.family[0].next_index, **more)
        self._count_tokens(parent.num_output + num_forced)
        child = self.scheduler.fork(parent, changed, [PLAIN] * num_forced)
        self._live(child)
        self.result.forks += 1
        if child.index != child_index:
            yield f"a fork of {parent.name}: index {child_index} in the recording, {child.index} now"

    def _abort(self, arrival: int, index: int) -> None:
        sequence = self._sequence(arrival, index)
        self.scheduler.abort(sequence)
        self._forget_finished([sequence])

    def _preempt(self, arrival: int, index: int, swap: bool | None) -> None:
        self.scheduler.preempt(self._sequence(arrival, index), swap=swap)

    def _set_version(self, running: str) -> None:
        self.scheduler.set_version(self.scheduler.tables.weights.change + 1, running)
        self._forget_finished()

    def _reset(self) -> None:
        self.scheduler.reset()
        self._plan = None
        self._forget_finished()

    def _clear_prefix_cache(self) -> None:
        self.scheduler.clear_prefix_cache()

    def _take_names(self, *entries: list[Any]) -> None:
        if self._names is None:
            raise RecordingError("pages have names, and the header says that there is no prefix cache")
        for arrival, index, first, joined, *is_end in entries:
            key, digits = (arrival, index), bytes.fromhex(joined)
            names = [digits[i : i + NAME_LEN // 2] for i in range(0, len(digits), NAME_LEN // 2)]
            if key not in self._alive:
                raise RecordingError(f"names for the sequence {arrival}/{index}, which is not alive")
            if is_end:
                self._names.ends.setdefault(key, {})[first] = names
            else:
                self._names.names.setdefault(key, {}).update(enumerate(names, first))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _schedule(self, time_us: int, *decided: Any) -> Iterator[str]:
        self.result.steps += 1
        recorded = Decision(*decided)
        self.scheduler.drafts_of = recorded.drafts
        plan = self.scheduler.schedule()
        now = self.scheduler.decision(plan)
        self._plan = plan
        if recorded != now:
            yield from describe(recorded, now)

    def _commit(
        self, time_us: int, counts: list[int] | int, ends: list[Any], seconds_per_token: float | None
    ) -> Iterator[str]:
        plan = self._plan
        if not plan:
            raise RecordingError("a result of a step that was not planned")
        if seconds_per_token is not None:
            self.scheduler.costs.seconds_per_token = _real(seconds_per_token)
        reasons = {i: REASONS[reason] for i, reason in zip(ends[::2], ends[1::2], strict=True)}
        tokens, i = [], 0
        for _, sample in plan.judged_samples:
            is_alive = plan.rows[sample.row].sequence.state is SequenceState.RUNNING
            num_drafted = len(plan.drafts.get(sample.row, ()))
            if not is_alive or sample.sequence.state is SequenceState.FINISHED:
                tokens += [[]] * (1 + num_drafted)
                continue
            count = counts if isinstance(counts, int) else counts[i]
            is_finite = reasons.get(i) is not FinishReason.NOT_FINITE
            count += not is_finite  # what stands for the token that could not be drawn
            check_whole("tokens of a row", count, 1, 1 + num_drafted if num_drafted else MAX_ROUNDS)
            last = (END_OF[reasons[i]] if is_finite else NOT_FINITE) if i in reasons else PLAIN
            if num_drafted:
                last = OTHER if last == PLAIN and count <= num_drafted else last
                tokens += [[PLAIN]] * (count - 1) + [[last]] + [[PLAIN]] * (num_drafted + 1 - count)
            else:
                tokens.append([PLAIN] * (count - 1) + [last])
            self._count_tokens(count if is_finite else count - 1)
            i += 1
        self._plan = None
        events = self.scheduler.commit(plan, StandInResult(tokens, len(plan.scores), len(plan.rows)))
        now = {i: event.finish_reason for i, event in enumerate(events) if event.finish_reason}
        for i in sorted(reasons.keys() | now.keys()):
            if reasons.get(i) != now.get(i):
                name = events[i].sequence.name if i < len(events) else "no such event"
                yield f"end {i} ({name}): {reasons.get(i)} in the recording, {now.get(i)} now"
        if now:
            self._forget_finished([event.sequence for event in events if event.finish_reason])

    def _fail(self) -> None:
        if not self._plan:
            raise RecordingError("a step that was not planned has failed")
        self.scheduler.fail(self._plan)
        self._plan = None
        self._forget_finished()

    def _recompute(self, failed: bool) -> None:
        self._plan = None
        self.scheduler.recompute(failed=bool(failed))
        self._forget_finished()

    # -- who is alive --------------------------------------------------------------------------------------------

    def _sequence(self, arrival: int, index: int) -> Sequence:
        sequence = self._alive.get((arrival, index))
        if sequence is None:
            raise RecordingError(f"there is no sequence {arrival}/{index} alive")
        return sequence

    def _live(self, sequence: Sequence) -> None:
        key = (sequence.arrival, sequence.index)
        if key in self._alive or len(self._alive) >= MAX_LIVE:
            raise RecordingError(f"the sequence {key[0]}/{key[1]} is there twice, or more than {MAX_LIVE:,} are alive")
        self._alive[key] = sequence

    def _count_tokens(self, count: int) -> None:
        self._num_live_tokens += count
        if self._num_live_tokens > MAX_LIVE_TOKENS:
            raise RecordingError(f"sequences that are alive have more than {MAX_LIVE_TOKENS:,} tokens")

    def _forget_finished(self, ended: list[Sequence] | None = None) -> None:
        for sequence in list(self._alive.values()) if ended is None else ended:
            key = (sequence.arrival, sequence.index)
            if sequence.state is SequenceState.FINISHED and self._alive.pop(key, None) is not None:
                self._num_live_tokens -= sequence.num_output
                if self._on_end:
                    self._on_end(sequence)
                if self._names:
                    self._names.forget(key)
                if all(member.state is SequenceState.FINISHED for member in sequence.family):
                    sequence.family.clear()  # members that know each other would wait for the collector


def check_request(time_us: int, arrival: int, prompt_len: int, max_tokens: int, more: dict[str, Any]) -> None:
    """Refuse what no request can be; `SamplingParams` and `Request` check the rest."""
    check_whole("time", time_us, 0, 1 << 62)
    check_whole("arrival", arrival, 0, 1 << 62)
    check_whole("prompt_len", prompt_len, 1, MAX_DIMENSION)
    check_whole("max_tokens", max_tokens, 0, MAX_DIMENSION)
    if not isinstance(more, dict) or not more.keys() <= MORE:
        raise RecordingError(f"a request has the fields {more!r:.100}, of which some are unknown")
    check_whole("n", more.get("n", 1), 1, MAX_SAMPLES_PER_REQUEST)
    check_whole("priority", more.get("priority", 0), -MAX_PRIORITY, MAX_PRIORITY)


def _real(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def replay(
    path: Path, kind: Callable[..., WatchedScheduler] = WatchedScheduler, request_id: str | None = None
) -> ReplayResult:
    """Run a recording through a scheduler, up to the first difference. RecordingError if the file is not whole."""
    header, records = read_records(path)
    one = Replay(read_header(header), kind, request_id=request_id)
    try:
        for record in records:
            difference = one.tell(record)
            if difference is not None:
                one.result.difference = difference
                break
    except RecordingError as error:
        raise RecordingError(f"{error} ({one.result.steps:,} steps before that are the same)") from None
    return one.result
