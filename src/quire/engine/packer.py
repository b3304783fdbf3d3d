"""The only bridge between the columns: a plan in host terms becomes padded arrays of a known shape.

rows           | row 0 ......... | row 1 | row 2 .... |
packed tokens  0            cu_q_lens[1]  [2]        [3] = num_tokens   ... padded to the shape
destination    page_table[position // page_size] * page_size + position % page_size
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from quire.config import EngineConfig
from quire.core.errors import AuditError
from quire.core.plan import Row, Sample, StepPlan
from quire.device.inputs import (
    INVALID,
    MAX_BIASES,
    MAX_STOP_IDS,
    BatchLayout,
    PageCommands,
    RoundInputs,
    SampleInputs,
    StepInputs,
    StepShape,
)

MIN_ROWS = 4
"""On a CPU a matmul with fewer rows is several times slower than one with four."""
MIN_HALFWAY_ROWS = 16
"""From here on a step that is padded to twice its rows costs enough to have a program for halfway."""
MIN_MIXED_TOKENS = 32
MAX_DECODE_SHAPES, MAX_MIXED_SHAPES = 8, 4


def step_shapes(config: EngineConfig) -> list[StepShape]:
    """The few shapes that every step is padded to: decoding by the number of rows, mixed by the number of tokens."""
    most_rows, most_tokens = max(config.max_num_seqs, MIN_ROWS), max(config.max_num_batched_tokens, MIN_ROWS)
    most_samples = max(config.max_num_samples, MIN_ROWS)
    rows = _ladder(MIN_ROWS, most_rows, factor=2, most=MAX_DECODE_SHAPES)
    halfway = [low + (high - low) // 2 for low, high in pairwise(rows) if low >= MIN_HALFWAY_ROWS]
    if len(rows) + len(halfway) <= MAX_DECODE_SHAPES:
        rows = sorted(rows + halfway)
    tokens = _ladder(min(MIN_MIXED_TOKENS, most_tokens), most_tokens, factor=4, most=MAX_MIXED_SHAPES)
    decode = [StepShape(n, n, n, decode=True) for n in rows]
    return decode + [StepShape(n, min(n, most_rows), min(n, most_samples), decode=False) for n in tokens]


def _ladder(low: int, high: int, *, factor: int, most: int) -> list[int]:
    """From low to high by a factor, which is widened until there are few enough steps."""
    steps = [low]
    while steps[-1] < high:
        steps.append(min(steps[-1] * factor, high))
    return steps if len(steps) <= most else _ladder(low, high, factor=factor * 2, most=most)


class Packer:
    """Turns plans into `StepInputs`. Keeps no state between steps: every array is built fresh."""

    def __init__(
        self, shapes: Sequence[StepShape], *, page_size: int, num_pages: int, pages_per_row: int, debug: bool = False
    ) -> None:
        self._shapes = shapes
        self._page_size = page_size
        self._nowhere = num_pages * page_size
        self._pages_per_row = pages_per_row
        self._debug = debug

    def pack(self, plan: StepPlan) -> StepInputs:
        """Lay a plan out in the smallest shape that holds it."""
        shape, rows, page_size = self._shape(plan), plan.rows, self._page_size
        page_table_BP = np.zeros((shape.num_rows, self._pages_per_row), np.int32)
        page_table_BP[_ragged([len(row.sequence.pages) for row in rows])] = np.frombuffer(
            b"".join(row.sequence.pages for row in rows), np.int32
        )
        tokens: list[int] = []
        for sequence, first, count, _ in rows:
            tokens += sequence.tokens_between(first, first + count)
        firsts_B = np.array([row.first for row in rows], np.int32)
        counts_B = np.array([row.num_tokens for row in rows], np.int32)
        rows_T, steps_T = _ragged(counts_B)
        positions = firsts_B[rows_T] + steps_T
        places = page_table_BP[rows_T, positions // page_size] * page_size + positions % page_size

        tokens_T = _padded(tokens, shape.num_tokens, 0)
        positions_T = _padded(positions, shape.num_tokens, 0)
        destinations_T = _padded(places, shape.num_tokens, self._nowhere)
        kv_lens_B = _padded(firsts_B + counts_B, shape.num_rows, 0)
        cu_q_lens_B1 = np.cumsum(_padded([0, *counts_B], shape.num_rows + 1, 0), dtype=np.int32)
        if self._debug:
            self._check_destinations(destinations_T)
        layout = BatchLayout(
            positions_T=positions_T,
            destinations_T=destinations_T,
            page_table_BP=page_table_BP,
            kv_lens_B=kv_lens_B,
            cu_q_lens_B1=cu_q_lens_B1,
            decode=shape.decode,
        )
        return StepInputs(
            tokens_T=tokens_T,
            layout=layout,
            samples=pack_samples(plan.samples, shape.num_samples),
            rounds=_pack_rounds(rows, shape.num_rows),
            pages=PageCommands(
                swap_out=_pairs(plan.operations.swap_outs),
                copy=_pairs(plan.operations.copies),
                swap_in=_pairs(plan.operations.swap_ins),
                poison=np.array(plan.operations.poisons, np.int32),
            ),
        )

    def _check_destinations(self, destinations_T: np.ndarray) -> None:
        """No two tokens of a step may be written to one place."""
        places, counts = np.unique(destinations_T[destinations_T != self._nowhere], return_counts=True)
        if np.any(counts > 1):
            raise AuditError(f"destination {places[counts > 1][0]} is written twice in one step")

    def _shape(self, plan: StepPlan) -> StepShape:
        num_tokens, num_rows, num_samples = plan.num_tokens, len(plan.rows), len(plan.samples)
        decode = num_tokens == num_rows
        for shape in self._shapes:
            if shape.decode and not decode:
                continue
            if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows and shape.num_samples >= num_samples:
                return shape
        raise AuditError(f"no program holds {num_tokens} tokens, {num_rows} rows and {num_samples} samples")


def _pack_rounds(rows: Sequence[Row], num_rows: int) -> RoundInputs:
    """How far each row may go on, and the ids that end it; a padded row goes nowhere."""
    stop_ids_BE = np.full((num_rows, MAX_STOP_IDS), INVALID, np.int32)
    for i, row in enumerate(rows):
        if row.max_rounds > 1:
            ids = row.sequence.stop_ids
            stop_ids_BE[i, : len(ids)] = ids
    return RoundInputs(max_rounds_B=_padded([row.max_rounds for row in rows], num_rows, 0), stop_ids_BE=stop_ids_BE)


def pack_samples(samples: Sequence[Sample], num_samples: int) -> SampleInputs:
    """The sampling parameters of a step; padding draws greedily from token 0 and is never read."""
    mask_SW = _pack_masks(samples, num_samples)
    inputs = SampleInputs(
        packed_index_S=np.zeros(num_samples, np.int32),
        row_S=np.zeros(num_samples, np.int32),
        prompt_len_S=np.zeros(num_samples, np.int32),
        temperature_S=np.zeros(num_samples, np.float32),
        top_k_S=np.zeros(num_samples, np.int32),
        top_p_S=np.ones(num_samples, np.float32),
        min_p_S=np.zeros(num_samples, np.float32),
        seed_S2=np.zeros((num_samples, 2), np.uint32),
        index_S=np.zeros(num_samples, np.int32),
        position_S=np.zeros(num_samples, np.int32),
        target_S=np.full(num_samples, INVALID, np.int32),
        repetition_S=np.ones(num_samples, np.float32),
        presence_S=np.zeros(num_samples, np.float32),
        frequency_S=np.zeros(num_samples, np.float32),
        bias_ids_SE=np.full((num_samples, MAX_BIASES), INVALID, np.int32),
        bias_SE=np.zeros((num_samples, MAX_BIASES), np.float32),
        mask_SW=mask_SW,
        has_mask=np.array(mask_SW is not None),
        want_logprobs=np.array(any(s.target is not None or s.sequence.params.logprobs is not None for s in samples)),
        want_top=np.array(any(s.sequence.params.logprobs for s in samples)),
    )
    inputs.packed_index_S[: len(samples)] = [sample.packed_index for sample in samples]
    for i, (sequence, row, _, position, target) in enumerate(samples):
        params = sequence.params
        if target is not None:
            inputs.target_S[i] = target
            continue
        if params.temperature > 0:
            inputs.temperature_S[i] = params.temperature
            inputs.top_k_S[i] = params.top_k
            inputs.top_p_S[i] = params.top_p
            inputs.min_p_S[i] = params.min_p
            inputs.seed_S2[i] = sequence.seed >> 32, sequence.seed & 0xFFFFFFFF
            inputs.index_S[i] = sequence.index
            inputs.position_S[i] = position
        if params.has_penalty:
            inputs.row_S[i] = row
            inputs.position_S[i] = position
            inputs.prompt_len_S[i] = sequence.prompt_len
            inputs.repetition_S[i] = params.repetition_penalty
            inputs.presence_S[i] = params.presence_penalty
            inputs.frequency_S[i] = params.frequency_penalty
        if params.logit_bias or params.min_tokens:
            biases = dict(params.logit_bias) | dict.fromkeys(sequence.forbidden_ids, -np.inf)
            inputs.bias_ids_SE[i, : len(biases)] = list(biases)
            inputs.bias_SE[i, : len(biases)] = list(biases.values())
    return inputs


def _pack_masks(samples: Sequence[Sample], num_samples: int) -> np.ndarray | None:
    """A row of bits for each sample, all of them set where no grammar says otherwise; None where none does at all."""
    masks = [None if sample.target is not None else sample.sequence.mask for sample in samples]
    width = next((len(mask) for mask in masks if mask is not None), None)
    if width is None:
        return None
    mask_SW = np.full((num_samples, width), 0xFFFFFFFF, np.uint32)
    for i, mask in enumerate(masks):
        if mask is not None:
            mask_SW[i] = mask
    return mask_SW


def _ragged(counts: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of every element of a ragged array: its row, and its place in the row."""
    counts = np.asarray(counts, np.int32)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    starts = np.cumsum(counts, dtype=np.int32) - counts
    return rows, np.arange(len(rows), dtype=np.int32) - starts[rows]


def _pairs(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def _padded(values: Sequence[int] | np.ndarray, length: int, fill: int) -> np.ndarray:
    padded = np.full(length, fill, np.int32)
    padded[: len(values)] = values
    return padded
