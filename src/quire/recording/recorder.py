"""A scheduler that writes down what it is told and what it decides.

No text, no token id, no name of a tenant or a version is written: a request is the number of its arrival, with a hash
of its id, and pages that hold the same tokens are known by hashes under a key that is forgotten with the process.
"""

import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import quire
from quire.core.page_tables import PageTables
from quire.core.plan import StepPlan, StepResult
from quire.core.prefix_cache import PrefixCache
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence, SequenceState, TokenEvent, Version, Weights
from quire.recording.decisions import WatchedScheduler
from quire.recording.fields import DEFAULTS, FIELDS, hashed_id
from quire.recording.recording_file import FORMAT, VERSION, Record, RecordingWriter

NAME_BYTES = 8
FLUSH_US = 1_000_000


class RecordingScheduler(WatchedScheduler):
    """Decides as `Scheduler` does."""

    def __init__(
        self,
        tables: PageTables,
        *,
        path: str,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.perf_counter,
        **limits: Any,
    ) -> None:
        super().__init__(tables, **limits)
        self._writer = writer = RecordingWriter(path)
        self._clock, self._started, self._flushed = clock, clock(), 0
        self._header: dict[str, Any] | None = {"format": FORMAT, "version": VERSION, "quire": quire.__version__}
        self._header |= {"scheduler": asdict(config)}
        self._key = secrets.token_bytes(16)
        self._is_nested = self._is_committing = False
        self._seconds_per_token: float | None = None
        self._names: Record = []
        pool = tables.pool
        if pool.prefix_cache is not None:
            pool.prefix_cache = NamingCache(pool.prefix_cache, self._note_names, self._note_ends)
        weakref.finalize(self, writer.close)

    def close(self) -> None:
        """End the file."""
        self._writer.close()

    # -- what it is told -----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """See `Scheduler`."""
        super().add(sequence)
        more = self._more(sequence) | {"request": hashed_id(sequence.request.id)}
        self._write(["add", self._now(), sequence.arrival, sequence.prompt_len, sequence.max_tokens, more])

    def fork(self, sequence: Sequence, changed: Sequence | None = None, token_ids: SequenceOf[int] = ()) -> Sequence:
        """See `Scheduler`."""
        child = super().fork(sequence, changed, token_ids)
        other = None if changed is None else [child.max_tokens, self._more(child)]
        self._write(["fork", self._now(), sequence.arrival, sequence.index, child.index, len(token_ids), other])
        return child

    def abort(self, sequence: Sequence) -> bool:
        """See `Scheduler`."""
        if sequence.state is SequenceState.FINISHED:
            return False
        with self._told(["abort", sequence.arrival, sequence.index]):
            return super().abort(sequence)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """See `Scheduler`."""
        super().set_tenant_weights(weights)
        self._write(["tenants", {name and self._name(name.encode()): weight for name, weight in weights.items()}])

    def reset(self) -> int:
        """See `Scheduler`."""
        with self._told(["reset"]):
            return super().reset()

    def preempt(self, sequence: Sequence, *, swap: bool | None = None) -> None:
        """See `Scheduler`."""
        with self._told(["preempt", sequence.arrival, sequence.index, swap]):
            super().preempt(sequence, swap=swap)

    def set_version(self, version: Version, running: str) -> list[Sequence]:
        """See `Scheduler`."""
        with self._told(["weights", running]):
            return super().set_version(version, running)

    def fail(self, plan: StepPlan) -> None:
        """See `Scheduler`."""
        with self._told(["fail"]):
            super().fail(plan)

    def recompute(self, *, failed: bool) -> None:
        """See `Scheduler`."""
        with self._told(["recompute", failed]):
            super().recompute(failed=failed)

    def lose_pages(self) -> None:
        """See `Scheduler`."""
        with self._told(["lose_pages"]):
            super().lose_pages()

    def lose_pending_swaps(self) -> None:
        """See `Scheduler`."""
        with self._told(["lose_pending_swaps"]):
            super().lose_pending_swaps()

    def clear_prefix_cache(self) -> int:
        """See `Scheduler`."""
        with self._told(["clear_prefix_cache"]):
            return super().clear_prefix_cache()

    @contextmanager
    def _told(self, record: Record) -> Iterator[None]:
        """A call from outside is written down once it is done; those that it makes itself are not."""
        was_nested, self._is_nested = self._is_nested, True
        if self._is_committing:  # a commit was interrupted: nobody knows what it had accepted by then
            self._write(["broken"])
            self._writer.close()
        try:
            yield
        finally:
            self._is_nested = was_nested
        if not was_nested:
            self._write(record)

    # -- what it decides -----------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """See `Scheduler`."""
        plan = super().schedule()
        if plan:
            self._write(["plan", self._now(), *self.decision(plan)])
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """See `Scheduler`."""
        self._is_committing = True
        events = super().commit(plan, result)
        counts: list[int] | int = [len(event[1]) for event in events]
        if counts and counts.count(counts[0]) == len(counts):
            counts = counts[0]
        ends = [x for i, event in enumerate(events) if event[2] for x in (i, str(event[2]))]
        learned, self._seconds_per_token = self._seconds_per_token, self.costs.seconds_per_token
        cost = None if learned == self._seconds_per_token else self._seconds_per_token
        now = self._now()
        self._write(["result", now, counts, ends, cost])
        self._is_committing = False
        if now - self._flushed > FLUSH_US:
            self._flushed = now
            self._writer.flush()
        return events

    # -- names ---------------------------------------------------------------------------------------------------

    def _note_names(self, sequence: Sequence, first: int, hashes: SequenceOf[bytes]) -> None:
        self._note(sequence, first, hashes)

    def _note_ends(self, sequence: Sequence, num_full: int, hashes: SequenceOf[bytes]) -> None:
        self._note(sequence, num_full, hashes, 1)

    def _note(self, sequence: Sequence, first: int, hashes: SequenceOf[bytes], *is_end: int) -> None:
        """Keep names for the next record. Once the recording has ended there is none, and the engine goes on."""
        if self._writer.is_open:
            names = "".join(map(self._name, hashes))
            self._names.append([sequence.arrival, sequence.index, first, names, *is_end])

    def _name(self, secret: bytes) -> str:
        """What stands for something in the file: the same for the same, and nothing can be learned from it."""
        return blake2b(secret, digest_size=NAME_BYTES, key=self._key).hexdigest()

    def _more(self, sequence: Sequence) -> dict[str, Any]:
        """What of a request decides, where it is not the default."""
        request, params = sequence.request, sequence.params
        more: dict[str, Any] = {name: value for name in FIELDS if (value := getattr(params, name)) != DEFAULTS[name]}
        if params.logprobs is not None:
            more["logprobs"] = 0  # how many alternatives is no matter
        for name in ("priority", "stream", "keeps_end"):
            if value := getattr(request, name):
                more[name] = value
        if request.cache_salt:
            more["salt"] = self._name(request.cache_salt.encode())
        if request.tenant:
            more["tenant"] = self._name(request.tenant.encode())
        if sequence.grammar is not None:
            more["grammar"] = True
        return more

    def _now(self) -> int:
        return int((self._clock() - self._started) * 1e6)

    def _write(self, record: Record) -> None:
        if not self._writer.is_open:
            return
        if self._header is not None:  # only now: the engine has told what moving pages costs
            self._header["costs"] = [self.costs.seconds_per_move, self.costs.pages_per_move]
            self._writer.write(self._header)
            self._header = None
        if self._names:
            self._writer.write(["names", *self._names])
            self._names = []
        self._writer.write(record)


class NamingCache(PrefixCache):
    """A prefix cache that tells the names of pages when it first has them."""

    def __init__(
        self,
        empty: PrefixCache,
        note_names: Callable[[Sequence, int, SequenceOf[bytes]], None],
        note_ends: Callable[[Sequence, int, SequenceOf[bytes]], None],
    ) -> None:
        super().__init__(empty._allocator, empty._page_size)
        self._note_names, self._note_ends = note_names, note_ends
        self._last_ends: tuple[int | bytes, ...] = ()

    def hashes(self, sequence: Sequence, weights: Weights, count: int) -> list[bytes]:
        """See `PrefixCache`."""
        root, num_known = sequence.hash_root, len(sequence.page_hashes)
        hashes = super().hashes(sequence, weights, count)
        if sequence.hash_root != root:
            num_known = 0
        if len(hashes) > num_known:
            self._note_names(sequence, num_known, hashes[num_known:])
        return hashes

    def end_hashes(self, sequence: Sequence, weights: Weights, num_full: int, end: int) -> list[bytes]:
        """See `PrefixCache`."""
        names = super().end_hashes(sequence, weights, num_full, end)
        asked = (sequence.arrival, sequence.index, sequence.hash_root, num_full, end)
        if asked != self._last_ends:  # a request that waits for pages asks in every step
            self._last_ends = asked
            self._note_ends(sequence, num_full, names)
        return names
