"""Random lives of an engine on the device that catches lies: one history is one seed.

Every rule is a method, so that a seeded driver, a Hypothesis machine and an exhaustive search play by the same ones.
After each, the audit; after each step, every token and log-probability against what must follow; after each sequence
its end and its text against `tests.reference`. Requests draw every field of `SamplingParams` at random.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from quire import Engine
from quire.core.drafts import Drafter
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.sampling_params import DECLARED, DRAWS, PENALTIES, SamplingParams
from quire.core.sequence import Sequence, SequenceState, TokenEvent, TokenLogprob
from quire.core.stopping import FinishReason, Grammar
from quire.engine.drafting_runner import DraftingRunner
from quire.llm import new_text
from quire.structured.compiler import GrammarCompiler
from quire.structured.form import Structured
from quire.testing import FakeRunner, InjectedError, KVError, fake_engine, hash_step, next_token
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer
from tests.fake_sampler import SamplingRunner, drawn_from, kept_mass, logprob, top
from tests.reference import allowed_tokens, expected_end
from tests.words import TOY_EOS, TOY_PIECES, toy_tokenizer

VOCAB = len(TOY_PIECES)
EOS_IDS = frozenset({TOY_EOS})
TOKENIZER = toy_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER, VOCAB, EOS_IDS)
FORMS = [
    Structured(regex="[ab]{2,6}"),
    Structured(regex="a(b|\u00e9)+ a"),
    Structured(choice=["ab", "aba", "\u00e9", "ba\u00e9", ""]),
    Structured(grammar='start: "a" start "b" | "ba"'),
]
STOPS = ["a", "ab", "ba", "bb", "aa", " a", "b a", "\u00e9", "a\u00e9", "aba", "<special>", "\U0001f44d"]
FIELDS = tuple(field.name for field in fields(SamplingParams))
DEFAULTS = SamplingParams()
EVERY_TOKEN = frozenset(range(VOCAB))
REPLAYED = 6
"""Requests of a history that are run once more, alone."""
ROOTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 4, 5, 2]]
"""Prompts begin like these, so that they meet in the prefix cache."""
MAX_END = 9
"""Tokens of a request that another goes on from, at most: both must fit into the smallest pool."""
PATIENCE = 2
"""Steps in which the first in order must get on, at the latest."""

WEIGHTS = {
    "step": 40, "add": 24, "fork": 4, "abort_one": 4, "abort_request": 2, "abort_in_flight": 2, "preempt": 8,
    "evict": 2, "fail": 2, "set_weights": 3, "reset": 0.4, "snapshot": 0.4,
}  # fmt: skip


def random_number(rng: random.Random, name: str) -> float:
    """A value for a number that the sampler gets, anywhere in the range that requests over HTTP have."""
    declared = DECLARED[name]
    assert declared.wire is not None
    low, high, _ = declared.wire
    if declared.kind is int:
        return rng.randint(max(int(low), 0), min(int(high), VOCAB))
    return float(np.float32(low + (high - low) * rng.randint(1, 8) / 8))


def random_params(rng: random.Random, has_text: bool) -> dict[str, Any]:
    """Values for any fields of `SamplingParams`, each often left as it is; float32 holds them exactly."""
    most = rng.randint(1, 8)
    some_ids = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 3))]
    params = {
        **{name: random_number(rng, name) for name in (*DRAWS, *PENALTIES)},
        **{name: not declared.default for name, declared in DECLARED.items() if declared.kind is bool},
        "temperature": rng.choice((0.0, 0.0, 0.25, 1.0, 1.5)),
        "seed": rng.getrandbits(64),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "max_tokens": most,
        "min_tokens": rng.randint(1, most),
        "stop": [some_ids],
        "stop_token_ids": [rng.randrange(1, VOCAB)],
        "logit_bias": {token: rng.choice((-1.5, 0.5, 4.0)) for token in some_ids},
        "logprobs": rng.choice((0, 1, 3, 20)),
        "structured": rng.choice(FORMS) if has_text else None,
        "max_rounds": rng.choice((1, 2, 2, 3)),
    }
    if has_text and rng.random() < 0.7:
        params["stop"] = rng.sample(STOPS, rng.randint(1, 2)) + ([some_ids] if rng.random() < 0.3 else [])
    always = {"temperature", "n", "seed", "max_tokens"}
    chosen = {name: value for name, value in params.items() if name in always or rng.random() < 0.15}
    if chosen["temperature"] == 0.0 and rng.random() < 0.5:
        del chosen["seed"]  # another one each time, and of no influence: a history must be repeatable
    if "prompt_logprobs" in chosen:
        chosen["prompt_logprobs_start"] = rng.choice((1, 2, 3, 5, 9))
        chosen["max_tokens"] = rng.randint(chosen.get("min_tokens", 0), max(3, chosen.get("min_tokens", 0)))
    if rng.random() < 0.03:
        del chosen["max_tokens"]
    return chosen


def can_score_draws(params: SamplingParams) -> bool:
    try:
        params.check_scores_draws()
    except ValueError:
        return False
    return True


def said_of(token: int, state: int, mixed: int | None, num_top: int) -> TokenLogprob:
    """What a step says of a token: by the state before it, and by what it is drawn from, if anything is."""
    raw = TokenLogprob(token, logprob(state, token), tuple(top(state)[:num_top]))
    if mixed is None:
        return raw
    processed = logprob(mixed, token), tuple(top(mixed)[:num_top]), kept_mass(mixed)
    return TokenLogprob(*raw[:3], *processed)


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

    def advance(self, output_token_ids) -> bool:
        for token in output_token_ids[len(self.seen) :]:
            if not toy_allows(self.seen, token):
                return False
            self.seen += (token,)
        return True

    def num_allowed(self, token_ids) -> int:
        other = self.copy()
        return next((i for i, token in enumerate(token_ids) if not other.advance((*other.seen, token))), len(token_ids))

    def copy(self) -> "ToyGrammar":
        return ToyGrammar(self.seen)


def toy_engine(*, seed: int = 0, tokenizer: Tokenizer | None = TOKENIZER, **knobs) -> Engine:
    """An engine without a model whose tokens depend on every sampling parameter."""
    longest = min(24, knobs["num_pages"] * knobs.get("page_size", 4) + 1)  # the last token needs no place in the pool
    return fake_engine(
        vocab_size=VOCAB, seed=seed, tokenizer=tokenizer, runner=SamplingRunner, max_model_len=longest, **knobs
    )


class MismatchError(Exception):
    """The engine did something it must not."""


class History:
    """One engine, and what should be true of it."""

    def __init__(self, seed: int = 0, *, tokenizer: Tokenizer | None = TOKENIZER, **knobs) -> None:
        self.random = random.Random(seed)
        self.has_tenants = seed % 2 == 1
        """Whether requests with a salt are of another tenant than those without."""
        knobs = {
            "page_size": 2,
            "num_pages": 12,
            "num_host_pages": 6,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
        } | knobs
        self.engine = toy_engine(seed=seed, tokenizer=tokenizer, **knobs)
        self.is_draft_good = not knobs.get("draft_weights")
        if isinstance(self.engine.runner, DraftingRunner):
            self.engine.runner._lose_kv = loud(self.engine.runner._lose_kv)
        self.tokenizer = tokenizer
        self.guesses, self.look_up = random.Random(seed), self.engine.scheduler._look_up
        self.engine.scheduler._look_up = self.guess
        self.alive: list[Sequence] = []
        self.requests: dict[str, tuple[Request, type[ToyGrammar] | None]] = {}
        """What was asked for, by id; the engine's own record is not trusted."""
        self.states: dict[Sequence, tuple[int, int]] = {}
        """Sequence -> how many of its tokens are hashed, and the hash."""
        self.grammars: dict[Sequence, Grammar] = {}
        """Readers of the outputs of constrained sequences, apart from the engine's own."""
        self.read: dict[Sequence, str] = {}
        """Sequence -> its text so far, of those that somebody reads as it comes."""
        self.mixed: set[str] = set()
        """Requests whose KV may come from two versions: their tokens are not foretold, only their pages checked."""
        self.forks: dict[Sequence, tuple[Request, type[ToyGrammar] | None]] = {}
        """What was asked for of forks with parameters of their own, and of their forks."""
        self.unscored: dict[Sequence, int] = {}
        """Sequence -> the first of its tokens that it began with and whose log-probability it asked for in vain."""
        self.rescored: set[Sequence] = set()
        """Those of them that were scored under two versions: whatever the numbers are, they are not foretold."""
        self.scored_before: set[str] = set()
        """Requests some of whose prompt was scored by weights that are gone, and kept."""
        self.ends: list[tuple[list[int], str]] = []
        """Tokens of requests that kept their ends, for others to go on from, and their salts."""
        self.num_requests = 0
        self.stuck: tuple[Sequence | None, int] = (None, 0)
        self.done: Counter[str] = Counter()
        self.met: Counter[tuple[str, str]] = Counter()
        """(What happened, field of `SamplingParams`) -> sequences it happened to for which the field was set."""
        self.undisturbed: dict[str, tuple[list[Sequence], int]] = {}
        """Families that nobody forks, ends or changes weights under, and their weights: run once more, alone."""

    @property
    def runner(self) -> SamplingRunner:
        runner = self.engine.runner
        runner = runner.target if isinstance(runner, DraftingRunner) else runner
        assert isinstance(runner, SamplingRunner)
        return runner

    def play(self, rule: str) -> None:
        """One operation, and the audit after it."""
        getattr(self, rule)()
        self.done[rule] += 1
        self.check()

    def check(self) -> None:
        """What must hold between any two operations."""
        self.engine.audit()
        if not self.engine.has_work:
            for pool in self.engine.scheduler.tables.pools:
                if pool.num_available != pool.allocator.num_pages or (
                    pool.host and pool.host.num_free < pool.host.num_pages
                ):
                    raise MismatchError("nothing is left to do and pages are still held")

        salts: dict[int, str] = {}
        for sequence in self.engine.scheduler.running:
            for page in sequence.pages:
                if salts.setdefault(page, sequence.request.cache_salt) != sequence.request.cache_salt:
                    raise MismatchError(f"page {page} is shared by two tenants")

    # -- rules ---------------------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.random
        root, length = rng.choice(ROOTS), rng.randint(1, 12)
        prompt = [*root[: length - 1], rng.randrange(1, VOCAB)] if rng.random() < 0.3 else root[:length]
        salt = rng.choice(("", "", "", "tenant"))
        keeps_end = rng.random() < 0.3
        if self.ends and rng.random() < 0.2:
            tokens, salt = rng.choice(self.ends[-4:])
            prompt, keeps_end = [*tokens, *rng.sample(range(1, VOCAB), rng.randint(1, 3))], True
        params = SamplingParams(**random_params(rng, self.tokenizer is not None))
        request = Request(
            id=f"r{self.num_requests + 1}",
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=rng.choice((0, 0, 0, 1, -1)),
            cache_salt=salt,
            tenant=salt if self.has_tenants else "",
            keeps_end=keeps_end,
            scores_draws=params.max_tokens == 0 and can_score_draws(params),
            stream=rng.random() < 0.2,
        )
        self.admit(request, ToyGrammar if params.structured is None and rng.random() < 0.1 else None)

    def admit(self, request: Request, toy: type["ToyGrammar"] | None = None) -> None:
        """Add a request; one that its grammar leaves nothing to draw for must be refused."""
        self.num_requests += 1
        self.requests[request.id] = request, toy
        grammar = self.fresh_grammar(request.id)
        if grammar is not None:
            self.done["constrained"] += 1
        eos_ids = frozenset() if request.params.ignore_eos else EOS_IDS
        has_beginning = grammar is None or allowed_tokens(grammar, request.params, eos_ids, 0)
        try:
            sequences = self.engine.add(request, self.fresh_grammar(request.id))
        except RequestError:
            del self.requests[request.id]
            if has_beginning:
                raise
            return
        if len(sequences) != request.params.n or not has_beginning:
            raise MismatchError(f"{request.id}: {len(sequences)} sequences of {request.params.n}")
        self.alive += sequences
        self.undisturbed[request.id] = sequences, self.runner.weights
        if request.stream:
            self.read.update(dict.fromkeys(sequences, ""))
        self.meet("add", sequences)

    def asked(self, sequence: Sequence) -> tuple[Request, type[ToyGrammar] | None]:
        return self.forks.get(sequence) or self.requests[sequence.request.id]

    def params(self, sequence: Sequence) -> SamplingParams:
        return self.asked(sequence)[0].params

    def eos_ids(self, sequence: Sequence) -> frozenset[int]:
        return frozenset() if self.params(sequence).ignore_eos else EOS_IDS

    def max_tokens(self, sequence: Sequence) -> int:
        most = self.params(sequence).max_tokens
        return self.most_that_fits(sequence) if most is None else most

    def most_that_fits(self, sequence: Sequence) -> int:
        config = self.engine.config
        assert config.num_pages is not None
        return min(self.engine.max_model_len, config.num_pages * config.page_size + 1) - sequence.prompt_len

    def fresh_grammar(self, asked: str | Sequence) -> Grammar | None:
        request, toy = self.requests[asked] if isinstance(asked, str) else self.asked(asked)
        if request.params.structured is not None:
            return GRAMMARS.compile(request.params.structured, trusted=True)
        return toy and toy()

    def meet(self, what: str, sequences: list[Sequence]) -> None:
        """Take note of what happened to sequences with which parameters."""
        for sequence in sequences:
            params = self.params(sequence)
            self.met.update((what, name) for name in FIELDS if getattr(params, name) != getattr(DEFAULTS, name))

    def step(self) -> None:
        is_one_tenant = len({s.request.tenant for s in self.alive}) == 1  # among several, clocks decide
        first = min(self.alive, key=lambda s: s.order) if is_one_tenant else None
        before = first and (first.num_computed, len(first.tokens))
        had_work, runs_before = self.engine.has_work, self.runner.num_runs
        drafted_before = self.engine.stats().drafted_tokens
        try:
            events = self.engine.step()
        except InjectedError:
            self.forget_finished()
            return
        if had_work and self.runner.num_runs == runs_before:
            raise MismatchError("there is work and nothing runs")
        is_drafted = self.engine.stats().drafted_tokens > drafted_before
        least = min((self.params(e.sequence).max_rounds or 1024 for e in events if e.token_ids), default=0)
        for event in events:
            request, toy = self.asked(event.sequence)
            own = is_drafted or toy or request.params.structured  # drafts, and what a grammar forces, are its own
            most = (self.params(event.sequence).max_rounds or 1024) if own else least
            if len(event.token_ids) > most:
                raise MismatchError(
                    f"{event.sequence.name}: {len(event.token_ids)} tokens, {most} rounds were asked for"
                )
            self.expect_event(event)
        self.forget_finished()
        if first is not None and first.state is not SequenceState.FINISHED:
            self.watch(first, before != (first.num_computed, len(first.tokens)))

    def expect_event(self, event: TokenEvent) -> None:
        sequence, token_ids, reason = event
        self.expect_scores(sequence, len(sequence.tokens) - len(token_ids))
        for i in range(len(token_ids)):
            self.expect(sequence, len(sequence.tokens) - len(token_ids) + i)
        if token_ids and sequence.weight_versions[-1] != self.engine.scheduler.tables.weights.version:
            raise MismatchError(f"{sequence.name}: a token of another version")
        if len(token_ids) > 1:
            self.meet("rounds", [sequence])
        if sequence in self.read and not reason:
            self.read[sequence] += new_text(sequence)
        if reason:
            self.expect_end(sequence, reason)
            self.alive.remove(sequence)

    def expect_scores(self, sequence: Sequence, end: int) -> None:
        """What a fork began with is scored before it draws: forced tokens, and those of a parent that was not asked."""
        k = self.params(sequence).logprobs
        for position in range(self.unscored.pop(sequence, end), end):
            token, entry = sequence.tokens[position], sequence.logprobs[position - sequence.prompt_len]
            if entry.token_id != token or entry.processed_logprob is not None or entry.processed_top:
                raise MismatchError(f"{sequence.name}: {entry} at {position}, where {token} was not drawn")
            if sequence.request.id not in self.mixed and sequence not in self.rescored:
                state = self.state(sequence, position)
                if entry != TokenLogprob(token, logprob(state, token), tuple(top(state)[:k])):
                    raise MismatchError(f"{sequence.name}: {entry} at {position}")

    def expect_prompt_scores(self, sequence: Sequence) -> None:
        """Where nothing is drawn, prompt tokens are scored under what would be drawn from, too."""
        params, state = self.params(sequence), 0
        prompt = sequence.request.prompt_token_ids
        unpenalised = {name: DECLARED[name].default for name in PENALTIES}
        draws = replace(params, **unpenalised, logit_bias={}, min_tokens=0)
        for token, entry in zip(prompt, sequence.prompt_logprobs, strict=False):
            mixed = drawn_from(state, draws, [], 0, set()) if sequence.request.scores_draws else None
            if entry and entry != said_of(token, state, mixed, params.logprobs or 0):
                raise MismatchError(f"{sequence.name}: {entry} of {sequence.prompt_logprobs}")
            state = hash_step(state, token, self.runner.weights)

    def watch(self, first: Sequence, advanced: bool) -> None:
        """The first in order always advances."""
        before, steps = self.stuck
        steps = 0 if advanced or first is not before else steps + 1
        self.stuck = (first, steps)
        if steps >= PATIENCE:
            raise MismatchError(f"{first.request.id}/{first.index} is first in order and does not advance")

    def expect(self, sequence: Sequence, position: int) -> None:
        """The token at a position follows from those before it, and its log-probabilities are its own."""
        params, token = self.params(sequence), sequence.tokens[position]
        at = position - sequence.prompt_len
        if params.logprobs is not None and sequence.logprobs[at].token_id != token:
            raise MismatchError(f"{sequence.name}: log-probabilities of another token at {position}")
        if sequence.request.id in self.mixed:
            return
        state = self.state(sequence, position)
        stop_ids = {*self.eos_ids(sequence), *params.stop_token_ids}
        mixed = drawn_from(state, params, sequence.tokens[:position], sequence.prompt_len, stop_ids)
        draws = (params.seed, sequence.index, position) if params.temperature else ()
        must = next_token(mixed, VOCAB, *draws)  # pyright: ignore[reportArgumentType]
        allowed = self.allowed(sequence, position)
        while must not in allowed:
            must = (must + 1) % VOCAB
        if token != must:
            raise MismatchError(f"{sequence.name}: {token} at {position}, must be {must}")
        if params.logprobs is not None:
            k = params.logprobs
            if sequence.logprobs[at] != said_of(token, state, mixed, k):
                raise MismatchError(f"{sequence.name}: {sequence.logprobs[at]} at {position}")

    def guess(self, sequence: Sequence, drafter: Drafter, most: int) -> list[int]:
        """Drafts of all kinds: what is found in the sequence, or what it would draw up to the first mistake."""
        if self.guesses.random() < 0.3:
            return self.look_up(sequence, drafter, most)
        params, tokens, state = self.params(sequence), list(sequence.tokens), 0
        stop_ids = {*self.eos_ids(sequence), *params.stop_token_ids}
        for token in tokens:
            state = hash_step(state, token, self.runner.weights)
        for _ in range(most):
            mixed = drawn_from(state, params, tokens, sequence.prompt_len, stop_ids)
            draws = (sequence.seed, sequence.index, len(tokens)) if params.temperature else ()
            token = next_token(mixed, VOCAB, *draws)
            tokens.append(token if self.guesses.random() < 0.8 else self.guesses.randrange(VOCAB))
            state = hash_step(state, tokens[-1], self.runner.weights)
        return tokens[-most:]

    def state(self, sequence: Sequence, position: int) -> int:
        """The hash of all tokens before a position, under the weights of now."""
        hashed, state = self.states.get(sequence, (0, 0))
        for token in sequence.tokens[hashed:position]:
            state = hash_step(state, token, self.runner.weights)
        self.states[sequence] = (position, state)
        return state

    def allowed(self, sequence: Sequence, position: int) -> set[int] | frozenset[int]:
        """Tokens that may be drawn at a position."""
        params, eos_ids = self.params(sequence), self.eos_ids(sequence)
        num_output = position - sequence.prompt_len
        grammar = self.grammars.get(sequence) or self.fresh_grammar(sequence)
        if grammar is not None:
            self.grammars[sequence] = grammar
            grammar.advance(sequence.tokens[sequence.prompt_len : position])
            return allowed_tokens(grammar, params, eos_ids, num_output)
        return EVERY_TOKEN - eos_ids - set(params.stop_token_ids) if num_output < params.min_tokens else EVERY_TOKEN

    def expect_end(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """A sequence ended where its tokens say; without a reason it was ended from outside, at any place before.

        Nothing that was asked for is missing, and its text is that of its tokens.
        """
        params, output = self.params(sequence), sequence.output_token_ids
        end = expected_end(
            params,
            output,
            max_tokens=self.max_tokens(sequence),
            eos_ids=EOS_IDS,
            tokenizer=self.tokenizer,
            grammar=self.fresh_grammar(sequence),
        )
        text = self.read.pop(sequence, "") + new_text(sequence)
        if text != end.text or end.num_output != len(output):
            raise MismatchError(f"{sequence.name}: {text!r} of {output}, must be {end}")
        if reason != end.reason and (reason or output):
            raise MismatchError(f"{sequence.name}: ended with {reason} after {output}, must be {end}")
        num_logprobs = 0 if params.logprobs is None else len(output)
        if self.unscored.pop(sequence, None) is not None:  # ended from outside before it drew
            num_logprobs = min(len(sequence.logprobs), num_logprobs)
        if (len(sequence.logprobs), len(sequence.weight_versions)) != (num_logprobs, len(output)):
            raise MismatchError(f"{sequence.name}: {len(sequence.logprobs)} log-probabilities, must be {num_logprobs}")
        scored, prompt = sequence.prompt_logprobs, sequence.request.prompt_token_ids
        start = min(params.prompt_logprobs_start, len(prompt))
        is_left_out = [i < start for i in range(len(prompt))]
        if reason and params.prompt_logprobs and [entry is None for entry in scored] != is_left_out:
            raise MismatchError(f"{sequence.name}: prompt tokens from {start} on were to be scored, and not {scored}")
        if any(entry and entry.token_id != token for entry, token in zip(scored, prompt, strict=False)):
            raise MismatchError(f"{sequence.name}: {scored} are not of the prompt")
        if reason and params.max_tokens == 0 and sequence.request.id not in self.mixed | self.scored_before:
            self.expect_prompt_scores(sequence)
        if sequence.num_cached_tokens:
            self.meet("prefix", [sequence])
        if reason and sequence.request.keeps_end and len(sequence.tokens) <= MAX_END:
            self.ends.append((sequence.tokens, sequence.request.cache_salt))
        if sequence.num_cached_tokens % self.engine.config.page_size and not sequence.index:
            self.done["ends found"] += 1
        if reason is None:
            self.undisturbed.pop(sequence.request.id, None)
        self.grammars.pop(sequence, None)
        self.states.pop(sequence, None)
        self.forks.pop(sequence, None)
        self.rescored.discard(sequence)

    def fork(self) -> None:
        able = [s for s in self.alive if s.num_output]
        if able and len(self.alive) < 24:
            rng, parent = self.random, self.random.choice(able)
            forced = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))] if rng.random() < 0.4 else []
            params = self.other_params(parent, len(forced)) if rng.random() < 0.5 else None
            child = self.fork_one(parent, params, forced)
            if child and rng.random() < 0.3:
                self.read[child] = ""

    def other_params(self, parent: Sequence, num_forced: int) -> SamplingParams:
        """Parameters for a fork: any, with room for what it begins with."""
        params = random_params(self.random, self.tokenizer is not None)
        begun, most = parent.num_output + num_forced, self.most_that_fits(parent)
        if "max_tokens" in params:
            most = params["max_tokens"] = min(params["max_tokens"] + begun, most)
        if "min_tokens" in params:
            params["min_tokens"] = min(params["min_tokens"] + self.random.choice((0, begun)), most)
        if self.random.random() < 0.3:
            params["logprobs"] = self.random.choice((0, 2))
        if self.params(parent).seed is not None and self.random.random() < 0.3:
            params.pop("seed", None)  # it draws by its parent's
        params["n"] = 1
        return SamplingParams(**params)

    def fork_one(
        self, parent: Sequence, params: SamplingParams | None = None, forced: list[int] | None = None
    ) -> Sequence | None:
        """Fork, or be refused where a token that the child would begin with ends it or may not be there."""
        forced, asked = forced or [], self.asked(parent)
        if params is not None:
            seed = asked[0].params.seed if params.seed is None else params.seed
            asked = replace(asked[0], params=replace(params, seed=seed)), None
        before = (list(parent.family), parent.family[0].next_index)
        try:
            child = self.engine.fork(parent, params, forced)
        except RequestError:
            child = None
        if (child is not None) != self.is_fork_allowed(parent, asked, forced):
            raise MismatchError(f"{parent.name}: {child} with {params} and {forced} behind {parent.output_token_ids}")
        if child is None:
            self.done["refused forks"] += 1
            if before != (parent.family, parent.family[0].next_index):
                raise MismatchError(f"{parent.name}: a fork that was refused left something behind")
            return None
        self.expect_beginning(child, parent, asked, forced)
        self.undisturbed.pop(parent.request.id, None)
        self.alive.append(child)
        self.meet("fork", [child])
        return child

    def is_fork_allowed(self, parent: Sequence, asked: tuple, forced: list[int]) -> bool:
        request, toy = asked
        grammar, form, output = toy and toy(), request.params.structured, [*parent.output_token_ids, *forced]
        if form is not None:
            grammar = GRAMMARS.compile(form, trusted=True)
            if grammar.num_allowed(output) < len(output):
                return False
        end = expected_end(
            request.params,
            output,
            max_tokens=self.most_that_fits(parent) if request.params.max_tokens is None else request.params.max_tokens,
            eos_ids=EOS_IDS,
            tokenizer=self.tokenizer,
            grammar=grammar,
        )
        return end.reason is None

    def expect_beginning(self, child: Sequence, parent: Sequence, asked: tuple, forced: list[int]) -> None:
        if asked != self.requests[child.request.id]:
            self.forks[child] = asked
        wants_scores = asked[0].params.logprobs is not None
        versions = [*parent.weight_versions, *[self.engine.scheduler.tables.weights.version] * len(forced)]
        begun = ([*parent.tokens, *forced], parent.logprobs if wants_scores else [], versions)
        if (child.tokens, child.logprobs, child.weight_versions) != begun:
            raise MismatchError(f"{child.name} does not begin as {parent.name}")
        if wants_scores and len(child.logprobs) < child.num_output:
            scored = child.prompt_len + len(child.logprobs)
            if parent in self.unscored:  # what its parent scored has the alternatives that its parent asked for
                self.expect_scores(parent, scored)
                self.unscored[parent] = scored
            self.unscored[child] = scored
            self.done["unscored forks"] += 1
            if parent in self.rescored:
                self.rescored.add(child)
        self.done["forced tokens"] += len(forced)
        self.done["forks with params"] += child in self.forks

    def abort_one(self, target: Sequence | None = None) -> None:
        if self.alive:
            target = target or self.random.choice(self.alive)
            self.meet("abort", [target])
            self.engine.abort(target)
            self.forget_finished()

    def abort_request(self) -> None:
        if self.alive:
            target = self.random.choice(self.alive)
            self.meet("abort", [target])
            self.engine.abort(target.request.id)
            self.forget_finished()

    def abort_in_flight(self) -> None:
        if self.alive:
            target = self.random.choice(self.alive)
            self.meet("abort in flight", [target])
            self.runner.during_run = lambda: self.engine.abort(target) and None
            self.step()
            self.runner.during_run = None

    def preempt(self, swap: bool | None = None) -> None:
        running = self.engine.scheduler.running
        if running:
            swap = self.random.choice((True, True, False, None)) if swap is None else swap
            target = self.random.choice(running)
            self.engine.scheduler.preempt(target, swap=swap)
            self.meet("swap" if target.state is SequenceState.SWAPPED else "recompute", [target])

    def evict(self) -> None:
        self.random.choice(self.engine.scheduler.tables.pools).evict(self.random.randint(1, 6))

    def fail(self) -> None:
        self.meet("failing step", self.engine.scheduler.running)
        both = self.engine.runner
        runner = self.random.choice((both.target, both.draft)) if isinstance(both, DraftingRunner) else both
        assert isinstance(runner, FakeRunner)
        runner.fail_next = self.random.choice(("before", "inside"))
        self.step()
        runner.fail_next = None

    def set_weights(self, running: str | None = None) -> None:
        running = running or self.random.choice(("keep", "keep", "recompute", "abort"))
        begun = [s for s in self.alive if any(m.num_computed for m in s.family)]
        self.meet(f"weights, {running}", begun)
        for sequence in self.alive:
            self.undisturbed.pop(sequence.request.id, None)
        if running == "keep":
            self.mixed |= {s.request.id for s in begun}
            self.scored_before |= {s.request.id for s in self.alive if any(s.prompt_logprobs)}
        self.rescored.update(self.unscored)
        new = self.runner.weights + 1
        if running == "recompute" and new % 2:
            self.engine.sleep()
            self.check()
            self.engine.wake(new, new)
        else:
            self.engine.set_weights(new, version=new, running=running)  # type: ignore
        if isinstance(self.engine.runner, DraftingRunner) and self.is_draft_good:
            self.engine.runner.draft.set_weights(new)  # else it would never be right again
        self.states.clear()
        self.forget_finished()

    def reset(self) -> None:
        self.meet("reset", self.alive)
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
        """Who was ended from outside is checked for the last time."""
        ended = [s for s in self.alive if s.state is SequenceState.FINISHED]
        if ended:
            self.alive = [s for s in self.alive if s.state is not SequenceState.FINISHED]
        for sequence in ended:
            self.expect_end(sequence, None)

    def drain(self) -> None:
        """Run until nothing is left; what was asked for ends."""
        for _ in range(2000):
            if not self.engine.has_work:
                self.check()
                return
            self.step()
            self.check()
        raise MismatchError("2,000 steps did not end what there was to do")

    def replay(self) -> None:
        """Run some requests once more, each alone in a fresh engine: all that a client sees must be the same."""
        ids = self.random.sample(sorted(self.undisturbed), min(REPLAYED, len(self.undisturbed)))
        engine = toy_engine(num_pages=64, prefix_cache=False, tokenizer=self.tokenizer)
        for request_id in ids:
            sequences, weights = self.undisturbed[request_id]
            engine.set_weights(weights, version=weights)
            request, _ = self.requests[request_id]
            params = replace(request.params, max_tokens=self.max_tokens(sequences[0]))
            again = engine.add(replace(request, params=params, priority=0), self.fresh_grammar(request_id))
            while engine.has_work:
                engine.step()
            for sequence, alone in zip(sequences, again, strict=True):
                if visible(sequence) != visible(alone):
                    raise MismatchError(f"{sequence.name}: {visible(sequence)}, alone it is {visible(alone)}")
            self.done["replayed"] += 1


def visible(sequence: Sequence) -> tuple:
    """All that a client sees of a sequence that has ended and been read."""
    assert sequence.detokenizer is None or isinstance(sequence.detokenizer, Detokenizer)
    new_text(sequence)
    text = sequence.detokenizer and sequence.detokenizer.text
    seen = (sequence.finish_reason, sequence.output_token_ids, text, sequence.logprobs, sequence.weight_versions)
    return (*seen, sequence.prompt_logprobs)


CONFIGS = [
    {"max_rounds": 3},
    {"preemption": "swap", "num_host_pages": 3},
    {"preemption": "recompute", "page_size": 4, "num_pages": 7, "num_host_pages": 0, "max_rounds": 8},
    {"prefix_cache": False, "page_size": 1, "num_pages": 22, "num_host_pages": 20, "max_rounds": 2},
    {"debug": True, "max_num_seqs": 6, "max_num_batched_tokens": 6, "page_size": 3, "num_pages": 10},
    {"page_size": 2, "num_pages": 40, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_rounds": 8},
    {"debug": True, "preemption": "swap", "max_rounds": 5},
    {"windows": (None, 3), "max_rounds": 3},
    {"windows": (5, None, 2), "debug": True, "preemption": "swap", "max_rounds": 2, "max_num_batched_tokens": 5},
    {"windows": (1, 7), "page_size": 4, "num_pages": 7, "num_host_pages": 4, "debug": True},
    {"windows": (4, None, 9), "page_size": 1, "num_pages": 22, "num_host_pages": 20, "prefix_cache": False},
    {"windows": (None, 3), "window_pages": (6,), "num_pages": 24, "max_rounds": 3},
    {"windows": (5, 2), "window_pages": (6, 5), "debug": True, "num_pages": 30, "max_num_batched_tokens": 5},
    {
        **{"windows": (4, None, 9), "window_pages": (14, 17), "page_size": 1, "num_pages": 40, "num_host_pages": 20},
        **{"preemption": "swap", "max_rounds": 2},
    },
    {"drafts": 8, "max_rounds": 4, "num_pages": 16},
    {"drafts": 8, "debug": True, "preemption": "swap", "page_size": 3},
    {"drafts": 6, "windows": (5, None, 2), "page_size": 1, "num_pages": 24, "num_host_pages": 20, "max_rounds": 2},
    {"drafts": 16, "max_num_batched_tokens": 24, "num_pages": 40, "num_host_pages": 0, "preemption": "recompute"},
]
"""Pools from cramped to ample: a request may need all but a few pages of the smallest; one round or many.

With windows smaller and larger than a page, a prompt and a step, and layers that all have one. With `window_pages`
those of the windows run out first: they hold hardly more than one sequence may need."""


DRAFT_MODELS = [
    {"drafts": 8, "draft_len": 64, "max_rounds": 4, "num_pages": 16},
    {"drafts": 8, "draft_len": 64, "draft_weights": 7, "preemption": "swap", "page_size": 3, "debug": True},
    {"drafts": 8, "draft_len": 64, "windows": (5, None, 2), "page_size": 1, "num_pages": 24, "num_host_pages": 20},
    {"drafts": 16, "draft_len": 9, "max_num_batched_tokens": 24, "num_pages": 40, "max_rounds": 3},
    {"drafts": 4, "draft_len": 64, "max_num_batched_tokens": 5, "num_pages": 12, "max_rounds": 2},
    {"drafts": 8, "draft_len": 64, "prefix_cache": False, "num_host_pages": 0, "preemption": "recompute"},
]
"""Of engines with a draft model: one that is right, one that is wrong, one that ends early; steps too short for it to
catch up."""


def loud(lose_kv: Callable[[Exception], None]):
    """Of a draft model that goes on whatever happens: not when it has read what is not there."""

    def lose(error: Exception) -> None:
        if isinstance(error, KVError):
            raise error
        lose_kv(error)

    return lose


def play_history(seed: int, num_operations: int, configs: list = CONFIGS) -> Counter:
    """One seeded history from the first request to the last page back; raises where anything is wrong.

    Returns how often what happened, and how often it met a request with which of its parameters set.
    """
    history = History(seed, **configs[seed % len(configs)])
    rules, weights = list(WEIGHTS), list(WEIGHTS.values())
    for rule in history.random.choices(rules, weights, k=num_operations):
        history.play(rule)
    history.drain()
    history.replay()
    stats = history.engine.stats()
    history.done.update(
        {
            "steps": stats.steps,
            "rounds": stats.rounds,
            "drafted": stats.drafted_tokens,
            "accepted drafts": stats.accepted_drafts,
            "swaps": stats.swaps,
            "recomputes": stats.recomputes,
            "evictions": stats.evictions,
        }
    )
    history.done.update({"copies": stats.page_copies, "cached tokens": stats.cached_tokens})
    return history.done + history.met
