"""Random lives of an engine on the device that catches lies: one history is one seed.

Every rule is a method, so that a seeded driver, a Hypothesis machine and an exhaustive search play by the same ones.
After each, the audit; after each step, every token against what must follow.
"""

import random
from collections import Counter

import numpy as np

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Sequence, SequenceState
from quire.core.stopping import FinishReason
from quire.testing import FakeRunner, InjectedError, fake_engine, hash_step, next_token

VOCAB = 11
ROOTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 4, 5, 2]]
"""Prompts begin like these, so that they meet in the prefix cache."""
PATIENCE = 2
"""Steps in which the first in order must get on, at the latest."""

WEIGHTS = {
    "step": 60, "add": 24, "fork": 4, "abort_one": 4, "abort_request": 2, "abort_in_flight": 2, "preempt": 5,
    "evict": 2, "fail": 2, "set_weights": 0.8, "reset": 0.2, "snapshot": 0.4,
}  # fmt: skip


def toy_allows(seen: tuple[int, ...], token: int) -> bool:
    """Whether a token may follow an output: anything that depends on all of it, and ends in time."""
    return token != 0 and len(seen) < 5 and hash((seen, token)) % 3 != 0


def toy_accepts(seen: tuple[int, ...]) -> bool:
    return len(seen) == 5 or hash(seen) % 2 == 0


class ToyGrammar:
    """A `Grammar` that says what these say, from what it was given to read and nothing else."""

    def __init__(self, seen: tuple[int, ...] = ()) -> None:
        self.seen = seen

    @property
    def accepts(self) -> bool:
        return toy_accepts(self.seen)

    def mask(self) -> np.ndarray:
        return np.array([sum(1 << token for token in range(VOCAB) if toy_allows(self.seen, token))], np.uint32)

    def advance(self, token_ids, start: int) -> bool:
        for token in token_ids[start + len(self.seen) :]:
            if not toy_allows(self.seen, token):
                return False
            self.seen += (token,)
        return True

    def copy(self) -> "ToyGrammar":
        return ToyGrammar(self.seen)


class MismatchError(Exception):
    """The engine did something it must not."""


class History:
    """One engine, and what should be true of it."""

    def __init__(self, seed: int = 0, **knobs) -> None:
        self.random = random.Random(seed)
        knobs = {
            "page_size": 2,
            "num_pages": 12,
            "num_host_pages": 6,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
        } | knobs
        self.engine = fake_engine(vocab_size=VOCAB, seed=seed, max_model_len=24, **knobs)
        self.alive: list[Sequence] = []
        self.states: dict[Sequence, tuple[int, int]] = {}
        """Sequence -> how many of its tokens are hashed, and the hash."""
        self.mixed: set[str] = set()
        """Requests whose KV may come from two versions: their tokens are not foretold, only their pages checked."""
        self.constrained: set[str] = set()
        """Requests with a grammar."""
        self.num_requests = 0
        self.stuck: tuple[Sequence | None, int] = (None, 0)
        self.done: Counter[str] = Counter()

    @property
    def runner(self) -> FakeRunner:
        assert isinstance(self.engine.runner, FakeRunner)
        return self.engine.runner

    def play(self, rule: str) -> None:
        """One operation, and the audit after it."""
        getattr(self, rule)()
        self.done[rule] += 1
        self.check()

    def check(self) -> None:
        """What must hold between any two operations."""
        self.engine.audit()
        if not self.engine.has_work:
            tables = self.engine.scheduler.tables
            if tables.num_available != tables.allocator.num_pages or (
                tables.host and tables.host.num_free < tables.host.num_pages
            ):
                raise MismatchError("nothing is left to do and pages are still held")

        salts: dict[int, str] = {}
        for sequence in self.engine.scheduler.running:
            for page in sequence.pages:
                if salts.setdefault(page, sequence.request.cache_salt) != sequence.request.cache_salt:
                    raise MismatchError(f"page {page} is shared by two tenants")

    # -- rules ---------------------------------------------------------------------------------------------------

    def add(self, length: int | None = None, **params) -> None:
        rng = self.random
        root = rng.choice(ROOTS)
        length = rng.randint(1, 12) if length is None else length
        prompt = [*root[: length - 1], rng.randrange(1, VOCAB)] if rng.random() < 0.3 else root[:length]
        constrained = not params and rng.random() < 0.15
        if not params:
            params = {"max_tokens": rng.randint(1, 8), "n": rng.choice((1, 1, 1, 2, 3))}
            if rng.random() < 0.5:
                params["temperature"] = 0.0
            if rng.random() < 0.1:
                params |= {"prompt_logprobs": True, "max_tokens": rng.randint(0, 3)}
            if rng.random() < 0.1:
                params["min_tokens"] = min(2, params["max_tokens"])
            if rng.random() < 0.1:
                params["stop_token_ids"] = (rng.randrange(1, VOCAB),)
            if rng.random() < 0.1:
                params["stop"] = [[rng.randrange(1, VOCAB)]]  # the host's to find
        self.num_requests += 1
        request = Request(
            id=f"r{self.num_requests}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(seed=self.num_requests, **params),
            priority=rng.choice((0, 0, 0, 1, -1)),
            cache_salt=rng.choice(("", "", "", "tenant")),
            stream=rng.random() < 0.2,
        )
        grammar = ToyGrammar() if constrained else None
        if constrained:
            self.constrained.add(request.id)
            self.done["constrained"] += 1
        self.alive += self.engine.add(request, grammar)

    def step(self) -> None:
        first = min((s for s in self.alive), key=lambda s: s.order, default=None)
        before = first and (first.num_computed, len(first.tokens))
        had_work, runs_before = self.engine.has_work, self.runner.num_runs
        try:
            events = self.engine.step()
        except InjectedError:
            self.forget_finished()
            return
        if had_work and self.runner.num_runs == runs_before:
            raise MismatchError("there is work and nothing runs")
        for sequence, token_ids, reason in events:
            for i in range(len(token_ids)):
                self.expect(sequence, len(sequence.tokens) - len(token_ids) + i)
            if token_ids and sequence.weight_versions[-1] != self.engine.scheduler.tables.weights.version:
                raise MismatchError(f"{sequence.request.id}/{sequence.index}: a token of another version")
            if reason:
                self.expect_whole(sequence)
            if reason is FinishReason.ABORT and not self.forbids_all(sequence):
                raise MismatchError(f"{sequence.name}: its grammar gave up")
        self.forget_finished()
        if first is not None and first.state is not SequenceState.FINISHED:
            self.watch(first, before != (first.num_computed, len(first.tokens)))

    def watch(self, first: Sequence, advanced: bool) -> None:
        """The first in order always advances."""
        before, steps = self.stuck
        steps = 0 if advanced or first is not before else steps + 1
        self.stuck = (first, steps)
        if steps >= PATIENCE:
            raise MismatchError(f"{first.request.id}/{first.index} is first in order and does not advance")

    def expect_whole(self, sequence: Sequence) -> None:
        """Nothing that was asked for is missing from a sequence that has ended by itself."""
        scored = sequence.prompt_len if sequence.params.prompt_logprobs else 1
        if len(sequence.prompt_logprobs) != scored or len(sequence.weight_versions) != sequence.num_output:
            raise MismatchError(
                f"{sequence.request.id}/{sequence.index}: {len(sequence.prompt_logprobs)} tokens scored"
            )

    def expect(self, sequence: Sequence, position: int) -> None:
        """The token at a position follows from those before it."""
        if sequence.request.id in self.mixed:
            return
        hashed, state = self.states.get(sequence, (0, 0))
        for token in sequence.tokens[hashed:position]:
            state = hash_step(state, token, self.runner.weights)
        self.states[sequence] = (position, state)
        params, token = sequence.params, next_token(state, VOCAB)
        if params.temperature:
            token = next_token(state, VOCAB, sequence.seed, sequence.index, position)
        forbidden = self.forbidden(sequence, position)
        while token in forbidden:
            token = (token + 1) % VOCAB
        if token != sequence.tokens[position]:
            raise MismatchError(
                f"{sequence.request.id}/{sequence.index}: {sequence.tokens[position]} at {position}, must be {token}"
            )

    def forbidden(self, sequence: Sequence, position: int) -> set[int]:
        """Tokens that may not be drawn at a position."""
        output = tuple(sequence.tokens[sequence.prompt_len : position])
        forbidden = set(sequence.stop_ids if len(output) < sequence.params.min_tokens else ())
        if sequence.request.id in self.constrained:
            ends = sequence.eos_ids if toy_accepts(output) else frozenset()
            forbidden |= {t for t in range(VOCAB) if not toy_allows(output, t) and t not in ends}
        return forbidden

    def forbids_all(self, sequence: Sequence) -> bool:
        return len(self.forbidden(sequence, len(sequence.tokens))) == VOCAB

    def fork(self) -> None:
        able = [s for s in self.alive if s.num_output and s.state is not SequenceState.FINISHED]
        if able and len(self.alive) < 24:
            self.alive.append(self.engine.fork(self.random.choice(able)))

    def abort_one(self) -> None:
        if self.alive:
            self.engine.abort(self.random.choice(self.alive))
            self.forget_finished()

    def abort_request(self) -> None:
        if self.alive:
            self.engine.abort(self.random.choice(self.alive).request.id)
            self.forget_finished()

    def abort_in_flight(self) -> None:
        if self.alive:
            target = self.random.choice(self.alive)
            self.runner.during_run = lambda: self.engine.abort(target) and None
            self.step()
            self.runner.during_run = None

    def preempt(self, swap: bool | None = None) -> None:
        running = self.engine.scheduler.running
        if running:
            swap = self.random.choice((True, False, None)) if swap is None else swap
            self.engine.scheduler.preempt(self.random.choice(running), swap=swap)

    def evict(self) -> None:
        self.engine.scheduler.tables.evict(self.random.randint(1, 6))

    def fail(self) -> None:
        self.runner.fail_next = self.random.choice(("before", "inside"))
        self.step()
        self.runner.fail_next = None

    def set_weights(self, running: str | None = None) -> None:
        running = running or self.random.choice(("keep", "recompute", "abort"))
        if running == "keep":
            self.mixed |= {s.request.id for s in self.alive if any(m.num_computed for m in s.family)}
        self.engine.set_weights(self.runner.weights + 1, version=self.runner.weights + 1, running=running)  # type: ignore
        self.states.clear()
        self.forget_finished()

    def reset(self) -> None:
        self.engine.reset()
        self.forget_finished()

    def snapshot(self) -> None:
        """Stats and the map agree with each other."""
        stats, pages = self.engine.stats(), self.engine.page_map()
        held = sum(bool(page.owners) for page in pages if page.tier == "device")
        entries = sum(len(page.owners) for page in pages if page.tier == "device")
        if (stats.held_pages, stats.table_pages, stats.expected_table_pages) != (held, entries, entries) or not str(
            pages
        ):
            raise MismatchError(f"{stats} and the page map disagree: {held} held, {entries} entries")

    def forget_finished(self) -> None:
        self.alive = [s for s in self.alive if s.state is not SequenceState.FINISHED]
        for sequence in [s for s in self.states if s.state is SequenceState.FINISHED]:
            del self.states[sequence]

    def drain(self) -> None:
        """Run until nothing is left; what was asked for ends."""
        for _ in range(2000):
            if not self.engine.has_work:
                self.check()
                return
            self.step()
            self.check()
        raise MismatchError("2,000 steps did not end what there was to do")


CONFIGS = [
    {"max_rounds": 3},
    {"preemption": "swap", "num_host_pages": 3},
    {"preemption": "recompute", "page_size": 4, "num_pages": 7, "num_host_pages": 0, "max_rounds": 8},
    {"prefix_cache": False, "page_size": 1, "num_pages": 22, "num_host_pages": 20, "max_rounds": 2},
    {"debug": True, "max_num_seqs": 6, "max_num_batched_tokens": 6, "page_size": 3, "num_pages": 10},
    {"page_size": 2, "num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_rounds": 8},
    {"debug": True, "preemption": "swap", "max_rounds": 5},
]
"""Pools from cramped to ample: a request may need all but a few pages of the smallest; one round or many."""


def play_history(seed: int, num_operations: int) -> Counter[str]:
    """One seeded history from the first request to the last page back; raises where anything is wrong."""
    history = History(seed, **CONFIGS[seed % len(CONFIGS)])
    rules, weights = list(WEIGHTS), list(WEIGHTS.values())
    for rule in history.random.choices(rules, weights, k=num_operations):
        history.play(rule)
    history.drain()
    stats = history.engine.stats()
    history.done.update(
        {
            "steps": stats.steps,
            "rounds": stats.rounds,
            "swaps": stats.swaps,
            "recomputes": stats.recomputes,
            "evictions": stats.evictions,
        }
    )
    history.done.update({"copies": stats.page_copies, "cached tokens": stats.cached_tokens})
    return history.done
