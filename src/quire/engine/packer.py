"""Where both columns meet: a plan in host terms becomes padded arrays of a known shape.

rows           | row 0 ......... | row 1 | row 2 .... |
packed tokens  0            cu_q_lens[1]  [2]        [3] = num_tokens   ... padded to the shape
destination    page_table[position // page_size] * page_size + position % page_size

In a pool of layers that see only a window, a row's positions are counted from the first page that it still has.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from quire.config import MAX_EOS_IDS
from quire.core.errors import AuditError
from quire.core.plan import Embed, PageOperations, Row, Sample, Score, StepPlan
from quire.core.sampling_params import DECLARED, DRAWS, PENALTIES, SamplingParams
from quire.core.sequence import Sequence as TokenSequence
from quire.device.inputs import (
    INVALID,
    MAX_BIASES,
    MAX_STOP_IDS,
    BatchLayout,
    PageCommands,
    PageIds,
    RoundInputs,
    SampleInputs,
    StepInputs,
    StepShape,
    WindowInputs,
    WindowLayout,
    default_embed,
)


class Packer:
    """Turns plans into `StepInputs`. Keeps no state between steps: every array is built fresh."""

    def __init__(
        self,
        shapes: Sequence[StepShape],
        *,
        page_size: int,
        num_pages: Sequence[int],
        eos_ids: Collection[int] = (),
        debug: bool = False,
    ) -> None:
        self._shapes = shapes
        self._page_size = page_size
        self._nowhere = [count * page_size for count in num_pages]
        """For each pool, the destination of what is not written."""
        self._eos_ids_E = _padded(sorted(eos_ids), MAX_EOS_IDS, INVALID)
        self._debug = debug

    def pack(self, plan: StepPlan) -> StepInputs:
        """Lay a plan out in the smallest shape that holds it."""
        shape, rows = self._shape(plan), plan.rows
        tokens: list[int] = []
        for i, (sequence, first, count, _) in enumerate(rows):
            tokens += sequence.tokens_between(first, first + count)
            if i in plan.drafts:
                tokens += plan.drafts[i]
        firsts_B = np.array([row.first for row in rows], np.int32)
        counts_B = np.array([row.num_tokens for row in rows], np.int32)
        rows_T, steps_T = _ragged(counts_B)
        positions = firsts_B[rows_T] + steps_T
        page_ids = _pack_page_ids([row.sequence.pages for row in rows], shape.num_rows)
        layout = BatchLayout(
            positions_T=_padded(positions, shape.num_tokens, 0),
            destinations_T=self._destinations(0, page_ids, rows_T, positions, shape.num_tokens),
            page_table_BP=None,
            kv_lens_B=_padded(firsts_B + counts_B, shape.num_rows, 0),
            cu_q_lens_B1=_cumulative(counts_B, shape.num_rows),
            decode=shape.decode,
        )
        windows, layouts = [], []
        for pool in range(1, len(self._nowhere)):
            tables = [row.sequence.windows[pool - 1] for row in rows]
            starts_B = np.array([table.first * self._page_size for table in tables], np.int32)
            ids = _pack_page_ids([table.pages for table in tables], shape.num_rows)
            places = self._destinations(pool, ids, rows_T, positions - starts_B[rows_T], shape.num_tokens)
            kv_lens_B = _padded(firsts_B + counts_B - starts_B, shape.num_rows, 0)
            layouts.append(WindowLayout(places, None, kv_lens_B))
            windows.append(WindowInputs(ids, _pack_operations(plan.operations[pool])))
        return StepInputs(
            tokens_T=_padded(tokens, shape.num_tokens, 0),
            layout=replace(layout, windows=tuple(layouts)),
            page_ids=page_ids,
            samples=pack_samples(plan.samples, shape.num_samples),
            rounds=self._pack_rounds(rows, shape.num_rows),
            pages=_pack_operations(plan.operations[0]),
            windows=tuple(windows),
            scores=_pack_scores(plan.scores, shape.num_tokens) if plan.scores else None,
            embed_first_B=_pack_embeds(plan.embeds, shape.num_rows) if plan.embeds else None,
        )

    def _destinations(
        self, pool: int, page_ids: PageIds, rows_T: np.ndarray, positions_T: np.ndarray, num_tokens: int
    ) -> np.ndarray:
        """Where each token is written, by its position in its row's table; padding goes nowhere."""
        size, nowhere = self._page_size, self._nowhere[pool]
        pages_T = page_ids.ids_X[page_ids.cu_lens_B1[rows_T] + positions_T // size]
        destinations_T = _padded(pages_T * size + positions_T % size, num_tokens, nowhere)
        if self._debug:
            places, counts = np.unique(destinations_T[destinations_T != nowhere], return_counts=True)
            if np.any(counts > 1):
                raise AuditError(f"destination {places[counts > 1][0]} is written twice in one step")
        return destinations_T

    def _pack_rounds(self, rows: Sequence[Row], num_rows: int) -> RoundInputs:
        """How far each row may go on, and the ids that end it; a padded row goes nowhere."""
        stops_at_eos_B = np.zeros(num_rows, np.bool_)
        stop_ids_BE, max_rounds = None, [row.max_rounds for row in rows]
        going_on = [i for i, rounds in enumerate(max_rounds) if rounds > 1]
        stops_at_eos_B[going_on] = [bool(rows[i].sequence.eos_ids) for i in going_on]
        for i in going_on:
            ids = rows[i].sequence.params.stop_token_ids
            if ids:
                if stop_ids_BE is None:
                    stop_ids_BE = np.full((num_rows, MAX_STOP_IDS), INVALID, np.int32)
                stop_ids_BE[i, : len(ids)] = ids
        return RoundInputs(_padded(max_rounds, num_rows, 0), stops_at_eos_B, self._eos_ids_E, stop_ids_BE)

    def _shape(self, plan: StepPlan) -> StepShape:
        num_tokens, num_rows, num_samples = plan.num_tokens, len(plan.rows), len(plan.samples)
        decode = num_tokens == num_rows and not plan.scores and not plan.embeds  # those come from mixed steps only
        for shape in self._shapes:
            if shape.decode and not decode:
                continue
            if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows and shape.num_samples >= num_samples:
                return shape
        raise AuditError(f"no program holds {num_tokens} tokens, {num_rows} rows and {num_samples} samples")


def _pack_page_ids(tables: Sequence[array], num_rows: int) -> PageIds:
    """The page tables of all rows, one after another."""
    return PageIds(np.frombuffer(b"".join(tables), np.int32), _cumulative(list(map(len, tables)), num_rows))


def _pack_operations(operations: PageOperations) -> PageCommands:
    return PageCommands(
        swap_out=_pairs(operations.swap_outs),
        copy=_pairs(operations.copies),
        swap_in=_pairs(operations.swap_ins),
        poison=np.array(operations.poisons, np.int32),
    )


def _pack_embeds(embeds: Sequence[Embed], num_rows: int) -> np.ndarray:
    """From which packed token on each row's hidden states are added up."""
    first_B = default_embed(num_rows)
    first_B[[embed.row for embed in embeds]] = [embed.packed_index for embed in embeds]
    return first_B


NUMBERS = {float: np.float32, int: np.int32}
RECORD = np.dtype(
    [(name, NUMBERS[DECLARED[name].kind]) for name in (*DRAWS, *PENALTIES)]
    + [("seed", np.uint32, 2), ("index", np.int32), ("prompt_len", np.int32), ("asks", np.int32)]
)
"""What sampling needs of a sequence that never changes: made once, and copied into every step."""
IS_RANDOM, HAS_PENALTY, HAS_BIAS, HAS_GRAMMAR, WANTS_LOGPROBS, WANTS_TOP = (1 << i for i in range(6))
"""What a sequence asks for, as bits of `asks`."""
GREEDY = SamplingParams(temperature=0)


def _numbers(params: SamplingParams) -> tuple[float, ...]:
    """The numbers that the sampler gets, in the order of a record; at temperature 0 nothing of a draw counts."""
    draws = params if params.temperature > 0 else GREEDY
    return *(getattr(draws, name) for name in DRAWS), *(getattr(params, name) for name in PENALTIES)


NEUTRAL = np.array((*_numbers(GREEDY), (0, 0), 0, 0, 0), RECORD)


def _record(sequence: TokenSequence) -> bytes:
    if sequence.sampling_record is None:
        params, asks = sequence.params, 0
        for is_asked, bit in (
            (params.temperature > 0, IS_RANDOM),
            (params.has_penalty, HAS_PENALTY),
            (params.logit_bias or params.min_tokens, HAS_BIAS),
            (sequence.grammar is not None, HAS_GRAMMAR),
            (params.logprobs is not None, WANTS_LOGPROBS),
            (params.logprobs, WANTS_TOP),
        ):
            asks |= bit if is_asked else 0
        counter = (0, 0), 0
        if asks & IS_RANDOM:
            counter = (sequence.seed >> 32, sequence.seed & 0xFFFFFFFF), sequence.index
        record = (*_numbers(params), *counter, sequence.prompt_len, asks)
        sequence.sampling_record = np.array(record, RECORD).tobytes()
    return sequence.sampling_record


def pack_samples(samples: Sequence[Sample], num_samples: int) -> SampleInputs:
    """The sampling parameters of a step, as far as any sample asks for them; padding is never read."""
    records = np.frombuffer(b"".join([_record(sample.sequence) for sample in samples]), RECORD)
    asks = int(np.bitwise_or.reduce(records["asks"], initial=0))
    given: dict[str, np.ndarray | None] = {}

    def column(name: str) -> np.ndarray:
        values = records[name]
        array = np.full((num_samples, *values.shape[1:]), NEUTRAL[name], values.dtype)
        array[: len(values)] = values
        return array

    if asks & IS_RANDOM:
        given |= {f"{name}_S": column(name) for name in (*DRAWS, "index")}
        given["seed_S2"] = column("seed")
    if asks & HAS_PENALTY:
        given |= {f"{name}_S": column(name) for name in (*PENALTIES, "prompt_len")}
        given["row_S"] = _padded([sample.row for sample in samples], num_samples, 0)
    if asks & HAS_BIAS:
        given["bias_ids_SE"], given["bias_SE"] = _pack_biases(samples, num_samples)
    if asks & HAS_GRAMMAR:
        given["has_mask_S"], given["mask_SW"] = _pack_masks(samples, num_samples)
    for name, bit in (("want_logprobs_S", WANTS_LOGPROBS), ("want_top_S", WANTS_TOP)):
        if asks & bit:
            given[name] = column("asks") & bit != 0
    return SampleInputs(
        packed_index_S=_padded([sample.packed_index for sample in samples], num_samples, INVALID),
        position_S=_padded([sample.position for sample in samples], num_samples, 0),
        **given,
    )


def _pack_scores(scores: Sequence[Score], num_tokens: int) -> SampleInputs:
    """The tokens to score, and how one would draw them where that is asked for."""
    ids = [score.token_id for score in scores]
    given: dict[str, np.ndarray] = {"target_S": _padded(ids, num_tokens, INVALID)}
    given["want_logprobs_S"] = given["target_S"] != INVALID
    requests = [score.sequence.request for score in scores]
    if any(request.scores_draws for request in requests):
        params = [request.params if request.scores_draws else GREEDY for request in requests]
        for name in DRAWS:
            column = given[f"{name}_S"] = np.full(num_tokens, NEUTRAL[name])
            column[: len(params)] = [getattr(one, name) for one in params]
    wants_top = [bool(score.sequence.params.logprobs) for score in scores]
    if any(wants_top):
        given["want_top_S"] = _padded(wants_top, num_tokens, 0) != 0
    return SampleInputs(
        packed_index_S=_padded([score.packed_index for score in scores], num_tokens, INVALID), position_S=None, **given
    )


def _pack_biases(samples: Sequence[Sample], num_samples: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The ids whose logit changes and by how much, a row for each sample; None and None where there are none now."""
    ids_SE = bias_SE = None
    for i, (sequence, _, _, _) in enumerate(samples):
        if not (sequence.params.logit_bias or sequence.params.min_tokens):
            continue
        biases = dict(sequence.params.logit_bias) | dict.fromkeys(sequence.forbidden_ids, -np.inf)
        if not biases:
            continue
        if ids_SE is None or bias_SE is None:
            ids_SE = np.full((num_samples, MAX_BIASES), INVALID, np.int32)
            bias_SE = np.zeros((num_samples, MAX_BIASES), np.float32)
        ids_SE[i, : len(biases)] = list(biases)
        bias_SE[i, : len(biases)] = list(biases.values())
    return ids_SE, bias_SE


def _pack_masks(samples: Sequence[Sample], num_samples: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Which samples have a mask, and a row of bits for each sample; None and None where no sample has one now."""
    masks = {i: sample.sequence.mask for i, sample in enumerate(samples) if sample.sequence.mask is not None}
    if not masks:
        return None, None
    has_mask_S = np.zeros(num_samples, np.bool_)
    has_mask_S[list(masks)] = True
    mask_SW = np.zeros((num_samples, len(next(iter(masks.values())))), np.uint32)
    for i, mask in masks.items():
        mask_SW[i] = mask
    return has_mask_S, mask_SW


def _cumulative(counts: Sequence[int] | np.ndarray, num_rows: int) -> np.ndarray:
    """Where each row begins in a ragged array, and where the last one ends; padded rows have nothing."""
    return np.cumsum(_padded([0, *counts], num_rows + 1, 0), dtype=np.int32)


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
