"""A device that catches lies: for tests of schedulers, caches and servers, without a model and without a compiler.

`fake_engine` is the real engine (scheduler, allocator, packing) over a `FakeRunner`, thousands of steps a second.

The "KV" of a position is a hash of every token up to it and of the weights that computed each; it is kept in pages
exactly as the real cache keeps its own, with the token and the weights beside it. "Attention" reads a row's pages from
the first position and computes the hashes again: a stale, aliased, unwritten or overwritten place does not fit the one
before it, and raises. The next token is made from the last hash, so that a page which is consistent and somebody
else's changes it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from quire.config import DEFAULT_MAX_LOGPROBS, AttentionConfig, ModelConfig, WindowPoolSize, engine_config
from quire.device.inputs import (
    INVALID,
    BatchLayout,
    PageCommands,
    PageIds,
    RoundInputs,
    SampleInputs,
    StepInputs,
    StepOutput,
    WindowLayout,
)
from quire.device.mesh import mesh_of
from quire.engine.build import PoolSizes, choose_pool
from quire.engine.draft_model import DraftModel
from quire.engine.drafting_runner import DraftingRunner
from quire.engine.engine import Engine
from quire.text.tokenizer import Tokenizer

HIDDEN_SIZE = 8
Place = tuple[int, int, int]
"""Token, weights, hash of everything up to here."""


Page = list[Place | None]


class KVError(Exception):
    """A page did not hold what its reader had to find there."""


class InjectedError(RuntimeError):
    """A failure that a test asked for."""


def hash_step(before: int, token: int, weights: int) -> int:
    """The hash up to a token from the one before it. (Python does not salt the hashes of numbers.)"""
    return hash((before, token, weights))


def next_token(state: int, vocab_size: int, seed: int = 0, index: int = 0, position: int = 0) -> int:
    """The token drawn after a state: the greedy one, or one by counter."""
    return hash((state, seed, index, position)) % vocab_size


def hidden_state(state: int) -> np.ndarray:
    """The "hidden state" of a token: its hash as small whole numbers, which float32 adds up exactly."""
    return np.array([state >> 8 * i & 255 for i in range(HIDDEN_SIZE)], np.float32)


def bits(mask: np.ndarray) -> int:
    """The words of a mask as one number: bit t is token t's."""
    return int.from_bytes(mask.astype("<u4").tobytes(), "little")


@dataclass(frozen=True)
class FakeHandle:
    """A step that is done already."""

    output: StepOutput

    def result(self) -> StepOutput:
        """Nothing to wait for."""
        return self.output


class FakeRunner:
    """A `Runner` without a model: StepInputs in, StepOutput out, pages in between."""

    def __init__(
        self, pool: PoolSizes, *, page_size: int, vocab_size: int, max_logprobs: int = DEFAULT_MAX_LOGPROBS
    ) -> None:
        self.num_pages = pool.num_pages
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.max_logprobs = max_logprobs
        self.seconds_per_move, self.pages_per_move, self.failure = 5e-4, 4, None
        self.num_compiles = 0
        self.num_programs = 0
        self.growth_bytes = 0
        self.notes: tuple[str, ...] = ()
        self.num_runs = 0
        self.weights = 0
        self.during_run: Callable[[], None] | None = None
        """Called once, while the next step is in flight."""
        self.fail_next: str | None = None
        """"before" or "inside": where the next step fails; inside, the pages are lost with it."""
        self._survived = True
        self._empty: list[Place | None] = [None] * page_size
        self._pages = [self._empty[:] for _ in range(pool.num_pages)]
        on_host = pool.all_host_pages or (0,) * (len(pool.windows) + 1)
        self._host = [self._empty[:] for _ in range(on_host[0])]
        sizes = zip(pool.windows, on_host[1:], strict=True)
        self._windows = [FakeWindow(size, num_host_pages, page_size) for size, num_host_pages in sizes]

    def run(self, inputs: StepInputs) -> FakeHandle:
        """Page commands, writes, attention, draws: in the order of the real thing."""
        self.num_runs += 1
        failure, self.fail_next = self.fail_next, None
        if failure:
            self._survived = failure == "before"
            raise InjectedError(failure)
        _run_page_commands(inputs.pages, self._pages, self._host)
        for window, its_inputs in zip(self._windows, inputs.windows, strict=True):
            _run_page_commands(its_inputs.pages, window.pages, window.host)
        output = self._rounds(inputs)
        interruption, self.during_run = self.during_run, None
        if interruption:
            interruption()
        return FakeHandle(output)

    def recover(self) -> bool:
        """Whether the pages survived; if not, they are empty now."""
        survived, self._survived = self._survived, True
        if not survived:
            self.zero()
        return survived

    def set_weights(self, params: int, *, copy: bool = True) -> None:
        """Weights are a number: part of every hash from here on."""
        self.weights = params

    def get_weights(self) -> int:
        """That number."""
        return self.weights

    def sleep(self) -> None:
        """Forget all pages, those on the host too."""
        self.zero()
        for host in (self._host, *(window.host for window in self._windows)):
            host[:] = [self._empty[:] for _ in host]

    def wake(self) -> None:
        """There is nothing to make."""

    def zero(self) -> None:
        """Empty every page."""
        self._pages = [self._empty[:] for _ in range(self.num_pages)]
        for window in self._windows:
            window.pages = [self._empty[:] for _ in window.pages]

    def close(self) -> None:
        """Nothing to give back."""

    def _rounds(self, inputs: StepInputs) -> StepOutput:
        """The first round; then rows go on by themselves, as far as they may and until they draw a stop id."""
        tables = [page_ids for page_ids, _ in inputs.pools]
        first_states = self._forward(inputs.tokens_T, inputs.layout, tables)
        outputs = [self._draw(first_states, inputs.samples)]
        limits, layout = inputs.rounds.max_rounds_B, inputs.layout
        is_active = limits > 1
        while is_active.any():
            round_, last_B = len(outputs), outputs[-1].tokens_SR[:, 0]
            is_active = is_active & (round_ < limits) & ~self._is_stop(last_B, inputs.rounds)
            if not is_active.any():
                break
            rows = np.flatnonzero(is_active)
            states = [0] * len(is_active)
            lens = [np.where(is_active, one.kv_lens_B + round_, 0) for one in (layout, *layout.windows)]
            places = [self._places(table, kv_lens, rows) for table, kv_lens in zip(tables, lens, strict=True)]
            going_on = replace(
                layout,
                positions_T=layout.positions_T[rows] + round_,
                destinations_T=places[0],
                kv_lens_B=lens[0],
                cu_q_lens_B1=np.concatenate([[0], np.cumsum(is_active)]),
                windows=tuple(map(WindowLayout, places[1:], tables[1:], lens[1:])),
            )
            for row, state in zip(rows, self._forward(last_B[rows], going_on, tables), strict=True):
                states[row] = state
            drawn = self._draw(states, replace(inputs.samples, position_S=inputs.samples.position_S + round_))
            drawn.tokens_SR[~is_active] = INVALID
            outputs.append(drawn)
        whole = jax.tree.map(lambda *columns: np.concatenate(columns, axis=1), *outputs)
        scores = None if inputs.scores is None else self._score(first_states, inputs.scores)
        return replace(whole, scores=scores, pooled_BD=self._pool(first_states, inputs))

    @staticmethod
    def _pool(states: list[int], inputs: StepInputs) -> np.ndarray | None:
        if inputs.embed_first_B is None:
            return None
        ends = inputs.layout.cu_q_lens_B1[1:]
        pooled = np.zeros((len(ends), HIDDEN_SIZE), np.float32)
        for row, (first, end) in enumerate(zip(inputs.embed_first_B, ends, strict=True)):
            if first != INVALID:
                pooled[row] = sum(map(hidden_state, states[first:end]))
        return pooled

    def _places(self, table: PageIds, kv_lens_B: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Where the last token of each row goes in one pool."""
        last = kv_lens_B[rows] - 1
        return table.ids_X[table.cu_lens_B1[rows] + last // self.page_size] * self.page_size + last % self.page_size

    @staticmethod
    def _is_stop(tokens_B: np.ndarray, rounds: RoundInputs) -> np.ndarray:
        is_stop = np.isin(tokens_B, rounds.eos_ids_E) & rounds.stops_at_eos_B
        if rounds.stop_ids_BE is not None:
            is_stop |= (tokens_B[:, None] == rounds.stop_ids_BE).any(axis=1)
        return is_stop | (tokens_B < 0)

    def _forward(self, tokens_T: np.ndarray, layout: BatchLayout, tables: list[PageIds]) -> list[int]:
        """Write every token's place, then read each row from its beginning. Returns the state at each token."""
        page_ids = tables[0]
        size, pages = self.page_size, self._pages
        starts, kv_lens = layout.cu_q_lens_B1.tolist(), layout.kv_lens_B.tolist()
        tokens, positions = tokens_T.tolist(), layout.positions_T.tolist()
        destinations = layout.destinations_T.tolist()
        states = [0] * len(tokens)
        written: set[int] = set()
        for row, kv_len in enumerate(kv_lens):
            first, end = starts[row], starts[row + 1]
            if first == end:
                continue
            table = page_ids.of(row).tolist()
            position = positions[first]
            if (
                positions[first:end] != list(range(position, position + end - first))
                or kv_len != position + end - first
            ):
                raise KVError(f"row {row}: positions {positions[first:end]} do not end at its length {kv_len}")
            state = self._attend(table, position, row)
            for i in range(first, end):
                state = states[i] = hash_step(state, tokens[i], self.weights)
                page, offset = divmod(destinations[i], size)
                if page != table[positions[i] // size] or offset != positions[i] % size or destinations[i] in written:
                    raise KVError(f"row {row}: position {positions[i]} is written to page {page}, offset {offset}")
                written.add(destinations[i])
                pages[page][offset] = (tokens[i], self.weights, state)
                for window, its_layout in zip(self._windows, layout.windows, strict=True):
                    window.write(int(its_layout.destinations_T[i]), (tokens[i], self.weights, state))
        for row, kv_len in enumerate(kv_lens):  # once everybody has written: nobody may have written over another
            if starts[row] != starts[row + 1]:
                state = self._attend(page_ids.of(row).tolist(), kv_len, row)
                if state != states[starts[row + 1] - 1]:
                    raise KVError(f"row {row}: what it wrote in this step is not there")
                self._attend_windows(row, kv_len, starts[row + 1] - starts[row], layout, tables)
        return states

    def _attend_windows(self, row: int, kv_len: int, num_new: int, layout: BatchLayout, tables: list[PageIds]) -> None:
        """Read what a row sees in each window; it must be what the pool of every position has there."""
        table, size = tables[0].of(row).tolist(), self.page_size
        expected = [self._pages[table[i // size]][i % size] for i in range(kv_len)] if self._windows else []
        for window, its_layout, its_table in zip(self._windows, layout.windows, tables[1:], strict=True):
            its_len = int(its_layout.kv_lens_B[row])
            window.attend(its_table.of(row).tolist(), its_len, expected, num_new, row)

    def _attend(self, table: list[int], kv_len: int, row: int) -> int:
        """Read a row's pages up to its length, hashing again; returns the last state."""
        state, size, pages = 0, self.page_size, self._pages
        for i in range(0, kv_len, size):
            page = pages[table[i // size]]
            for offset in range(min(size, kv_len - i)):
                place = page[offset]
                if place is None:
                    raise KVError(f"row {row}: page {table[i // size]}, offset {offset} was never written")
                state = hash_step(state, place[0], place[1])
                if state != place[2]:
                    raise KVError(f"row {row}: page {table[i // size]}, offset {offset} is not of this sequence")
        return state

    def _draw(self, states: list[int], samples: SampleInputs) -> StepOutput:
        num_samples = len(samples.packed_index_S)
        tokens = np.zeros((num_samples, 1), np.int32)
        columns = (samples.packed_index_S.tolist(), samples.position_S.tolist())
        for i, (at, position) in enumerate(zip(*columns, strict=True)):
            if at == INVALID:
                continue
            token = next_token(states[at], self.vocab_size)
            if samples.temperature_S is not None and samples.temperature_S[i]:
                high, low = samples.seed_S2[i].tolist()
                index = int(samples.index_S[i])
                token = next_token(states[at], self.vocab_size, high << 32 | low, index, position)
            if samples.bias_SE is not None or samples.mask_SW is not None:
                token = self._first_allowed(token, i, samples)
            tokens[i, 0] = token
        return self._say(tokens, samples)

    def _score(self, states: list[int], scores: SampleInputs) -> StepOutput:
        del states
        return self._say(scores.target_S[:, None], scores)

    def _say(self, tokens_SR: np.ndarray, samples: SampleInputs) -> StepOutput:
        """What a step says of tokens: nothing of how likely they are."""
        shape = tokens_SR.shape
        logprobs: Any = np.zeros(shape, np.float32) if samples.want_logprobs_S is not None else None
        width = (*shape, self.max_logprobs)
        top_ids, top = None, None
        if samples.want_top_S is not None:
            top_ids, top = np.zeros(width, np.int32), np.zeros(width, np.float32)
        return StepOutput(tokens_SR, logprobs, top_ids, top, logprobs, logprobs, top_ids, top)

    def _first_allowed(self, token: int, sample: int, samples: SampleInputs) -> int:
        """The first token from this one on that no bias and no mask forbids."""
        forbidden: set[int] = set()
        if samples.bias_SE is not None:
            forbidden = set(samples.bias_ids_SE[sample][samples.bias_SE[sample] == -np.inf].tolist())
        has_mask = samples.has_mask_S is not None and samples.has_mask_S[sample]
        allowed = bits(samples.mask_SW[sample]) if has_mask else -1
        while token in forbidden or not allowed >> token & 1:
            token = (token + 1) % self.vocab_size
        return token


def _run_page_commands(commands: PageCommands, pages: list[Page], host: list[Page]) -> None:
    for page, host_page in commands.swap_out.tolist():
        host[host_page] = pages[page][:]
    sources = [pages[source][:] for source, _ in commands.copy.tolist()]  # all are read before one is written
    for (_, target), content in zip(commands.copy.tolist(), sources, strict=True):
        pages[target] = content
    for host_page, page in commands.swap_in.tolist():
        pages[page] = host[host_page][:]
    for page in commands.poison.tolist():
        pages[page] = [None] * len(pages[page])


class FakeWindow:
    """The pages of layers that see a window: what a token sees there is what the pool of every position has."""

    def __init__(self, pool: WindowPoolSize, num_host_pages: int, page_size: int) -> None:
        self.window, self.size = pool.window, page_size
        self.pages: list[Page] = [[None] * page_size for _ in range(pool.num_pages)]
        self.host: list[Page] = [[None] * page_size for _ in range(num_host_pages)]

    def write(self, destination: int, place: Place) -> None:
        """Keep what a token computed."""
        page, offset = divmod(destination, self.size)
        self.pages[page][offset] = place

    def attend(self, table: list[int], kv_len: int, expected: list[Place | None], num_new: int, row: int) -> None:
        """Read what the first of a row's new tokens, and all after it, see; `expected` has every position."""
        first_seen = max(len(expected) - num_new - self.window + 1, 0)
        start = len(expected) - kv_len
        if start % self.size or start > first_seen or kv_len > len(table) * self.size:
            raise KVError(
                f"row {row}: a window of {self.window} sees from {first_seen} on, its pages are from {start} on"
            )
        for position in range(first_seen, len(expected)):
            index, offset = divmod(position - start, self.size)
            if self.pages[table[index]][offset] != expected[position]:
                raise KVError(f"row {row}: page {table[index]} of window {self.window} has not position {position}")


class FakeClock:
    """A clock that goes forward by seeded steps, each time it is looked at."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._random.expovariate(1000)
        return self._now


def fake_engine(
    *,
    vocab_size: int = 11,
    eos_ids: tuple[int, ...] = (0,),
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    windows: tuple[int | None, ...] = (None,),
    window_pages: tuple[int, ...] = (),
    runner: type[FakeRunner] = FakeRunner,
    draft_len: int = 0,
    draft_weights: int = 0,
    **knobs: Any,
) -> Engine:
    """An engine without a model; `knobs` are those of `EngineConfig`, with small defaults.

    `windows` are what the layers see: one that sequences outgrow has a pool of its own, of as many pages as it can use,
    or of `window_pages`. With `draft_len` another fake guesses so far; with other `draft_weights` it is mistaken.
    """
    defaults = {"page_size": 4, "num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_rounds": 1}
    knobs = defaults | {name: value for name, value in knobs.items() if value is not None}
    if knobs.get("preemption") != "recompute":
        knobs.setdefault("num_host_pages", knobs["num_pages"] // 2)
    config = engine_config(**knobs)
    model = ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=8,
        attention=tuple(AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, window=window) for window in windows),
        max_len=config.max_model_len or 64,
        eos_ids=eos_ids,
    )
    pool = choose_pool(config, model, model.max_len, mesh_of(None))
    if window_pages:
        sizes = zip(pool.windows, window_pages, strict=True)
        pool = pool._replace(windows=tuple(replace(size, num_pages=count) for size, count in sizes))
    device = runner(pool, page_size=config.page_size, vocab_size=vocab_size, max_logprobs=config.max_logprobs)
    draft = None
    if draft_len:
        draft = DraftModel("fake", replace(model, max_len=draft_len), None, lambda: draft_weights)
        guessing = runner(pool._replace(windows=()), page_size=config.page_size, vocab_size=vocab_size)
        guessing.set_weights(draft_weights)
        device = DraftingRunner(device, guessing, draft.load, vocab_size)
    return Engine(
        model, None, config, tokenizer=tokenizer, runner=device, pool=pool, clock=FakeClock(seed), draft=draft
    )
