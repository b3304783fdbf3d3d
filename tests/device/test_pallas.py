"""The Pallas kernel for TPUs, in the TPU interpreter: equal to dense attention over a poisoned pool, without a race.

The interpreter runs DMAs and semaphores, starts scratch memory as NaN, and raises on a race or a read out of bounds.
A case takes seconds, most of them to compile; those that share a shape share a program.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire import Request, SamplingParams
from quire.device.attention import LayerKV, choose_backend, get_backend, paged_attention
from quire.device.attention.pallas_blocks import (
    CHUNK,
    PIECE,
    VMEM_BYTES,
    Blocks,
    Sizes,
    choose_blocks,
    vmem_budget,
    vmem_bytes,
)
from quire.device.attention.pallas_tpu import PallasBackend
from quire.device.mesh import make_mesh
from tests.device.test_attention import (
    HALF,
    HALF_ERROR,
    MIXES,
    NUM_KV_HEADS,
    Case,
    attention,
    attention_config,
    from_pages,
)
from tests.effort import examples, nightly, slow
from tests.tiny import tiny_config, tiny_llm

WITHIN = {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mix", "window"),
    [
        nightly("decode", None),
        ("decode", 5),
        nightly("prompts", None),
        ("prompts", 5),
        ("chunk of a longer prompt", 100),
        ("mixed", None),
        nightly("mixed", 5),
    ],
)
def test_equals_dense_attention_over_a_poisoned_pool(mix, window):
    rows, decode = MIXES[mix]
    pads = {"pad_tokens": 2, "pad_rows": 2} if decode else {}
    Case(rows, num_pages=128, decode=decode, **pads).run("pallas", window=window, **WITHIN)


ragged = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4)


@pytest.mark.slow
@examples(6, daily=2)
@given(rows=ragged, window=st.sampled_from([None, 20]), poison=st.sampled_from([np.nan, np.inf]))
@example(rows=[(60, 1), (60, 60), (1, 1), (60, 33)], window=20, poison=np.nan)
def test_random_ragged_batches(rows, window, poison):
    rows = [(max(a, b), min(a, b)) for a, b in rows]
    pads = {"pad_tokens": 240 - sum(q_len for _, q_len in rows), "pad_rows": 5 - len(rows), "width": 8}
    Case(rows, page_size=8, num_pages=40, poison=poison, **pads).run("pallas", window=window, **WITHIN)


@examples(6, daily=2)
@given(lens=st.lists(st.integers(0, 60), min_size=1, max_size=5), window=st.sampled_from([None, 20]))
@example(lens=[0, 60, 0, 0, 7], window=None)
def test_random_decoding_rows_of_which_some_have_ended(lens, window):
    pads = {"pad_tokens": 5 - len(lens), "pad_rows": 5 - len(lens), "width": 8}
    case = Case([(max(n, 1), 1) for n in lens], page_size=8, num_pages=48, decode=True, **pads)
    is_over = np.array([n == 0 for n in lens] + [True] * (5 - len(lens)))
    layout = dataclasses.replace(
        case.layout,
        kv_lens_B=np.where(is_over, 0, case.layout.kv_lens_B).astype(np.int32),
        destinations_T=np.where(is_over, 48 * 8, case.layout.destinations_T).astype(np.int32),
    )
    backend, call = attention("pallas", window, case.head_dim**-0.5, None, case.head_dim, case.group)
    out = np.asarray(call(case.pool(backend), case.q, case.new_k, case.new_v, layout)[0])
    is_running = ~is_over[: len(lens)]
    expected = case.expected(case.head_dim**-0.5, window)[is_running]
    np.testing.assert_allclose(out[: len(lens)][is_running], expected, **WITHIN)
    assert not out[is_over].any(), "a row without KV gives zeros"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"),
    [
        (64, 3, HALF),
        nightly(128, 1, np.dtype("float32")),
        (256, 4, HALF),
        nightly(96, 2, np.dtype("float32")),
        (64, 70, HALF),
    ],
)
def test_any_head_size_and_group(head_dim, group, dtype):
    error = HALF_ERROR if dtype == HALF else WITHIN
    rows = [(40, 1), (90, 50), (33, 33)]
    Case(rows, page_size=16, num_pages=32, head_dim=head_dim, group=group, dtype=dtype).run(
        "pallas", window=20, **error
    )


@pytest.mark.parametrize("page_size", [nightly(1), slow(3), nightly(128)])
def test_any_page_size(page_size):
    Case([(150, 1), (90, 70), (17, 17)], page_size=page_size, num_pages=300 // page_size + 8).run("pallas", **WITHIN)


@pytest.mark.slow
def test_only_the_destinations_are_written():
    case = Case([(6, 3), (9, 1), (70, 65)])
    backend, kv = case.run("pallas", **WITHIN)
    written = case.layout.destinations_T[: case.num_tokens]
    for after, before, new in zip(
        from_pages(backend, kv, case.page_size), (case.keys, case.values), (case.new_k, case.new_v), strict=True
    ):
        after, before = (x.reshape(-1, *x.shape[2:]) for x in (after, case.dense(before)))
        np.testing.assert_array_equal(after[written], new[: case.num_tokens])
        others = np.setdiff1d(np.arange(len(after)), written)
        np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.slow
def test_each_device_has_its_own_heads():
    Case([(40, 1), (90, 50), (33, 33)], page_size=16, num_pages=32).run("pallas", num_devices=2, **WITHIN)


@pytest.mark.slow
def test_the_blocks_that_a_chip_would_choose():
    """Nothing forced: 3 chunks of 512, tiles of 128."""
    case = Case([(1300, 1), (700, 300)], page_size=16, num_pages=160, head_dim=64)
    backend = get_backend("pallas")
    config = attention_config(64, case.q.shape[1], window=900)
    call = jax.jit(lambda *args: paged_attention(backend, make_mesh(), *args, config))
    out, _ = call(case.pool(backend), case.q, case.new_k, case.new_v, case.layout)
    np.testing.assert_allclose(out[: case.num_tokens], case.expected(64**-0.5, 900), **WITHIN)


# -- KV in int8 --------------------------------------------------------------------------------------------------------


def quantize(x):
    """Whole numbers to 127 and a scale for each token and head, as the backend does it."""
    scale = np.maximum(np.abs(x).max(axis=-1) / np.float32(127), np.float32(1e-30))
    return np.round(x / scale[..., None]), scale


class Int8Case(Case):
    """Numbers that int8 holds exactly, so that only the kernel's own error is left."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        rng = np.random.default_rng(7)
        for data in (*self.keys, *self.values):
            data[:] = rng.integers(-127, 128, data.shape)
            data[..., 0] = 127
            data *= rng.uniform(0.001, 0.02, (*data.shape[:2], 1)).astype(np.float32)
        start = 0
        for i, (kv_len, q_len) in enumerate(self.rows):
            span = slice(start, start + q_len)
            self.new_k[span], self.new_v[span] = self.keys[i][kv_len - q_len :], self.values[i][kv_len - q_len :]
            start += q_len

    def pool(self, backend):
        config = attention_config(self.head_dim, self.q.shape[1])
        specs = backend.arrays(config, self.num_pages, self.page_size, jnp.dtype("float32"))
        values, scales = [], []
        for which in (self.keys, self.values):
            value, scale = quantize(self.dense(which))
            values.append(np.nan_to_num(np.pad(value, ((0, 0), (0, 0), (0, 0), (0, 64 - self.head_dim))), nan=-1))
            scales.append(scale)
        pages = np.concatenate(values, axis=-1).swapaxes(1, 2).astype(np.int8)
        scales = np.stack(scales, axis=1).transpose(0, 3, 1, 2).reshape(specs[1].shape)  # [M, 2, Z, K] -> [M, 1, K 2 Z]
        assert (pages.shape, scales.shape) == (specs[0].shape, specs[1].shape)
        return LayerKV((jnp.asarray(pages), jnp.asarray(scales)), tuple(spec.axes for spec in specs))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("decode", [True, False])
def test_int8_kv_with_scales(page_size, decode):
    rows = [(40, 1), (90, 1), (5, 1)] if decode else [(40, 1), (90, 50), (33, 33)]
    pads = {"pad_tokens": 1, "pad_rows": 1}
    case = Int8Case(rows, page_size=page_size, num_pages=200 // page_size + 8, decode=decode, **pads)
    case.run("pallas-int8", window=30, **WITHIN)


def test_int8_needs_pages_that_are_not_copied():
    with pytest.raises(ValueError, match=r"page_size=32 .*\(8, 16\)"):
        PallasBackend(int8=True).arrays(attention_config(64, 4), 8, 32, jnp.dtype("bfloat16"))


# -- in an engine ------------------------------------------------------------------------------------------------------


def test_auto_is_pallas_on_a_tpu_that_the_table_has():
    for kind in ("TPU v5 lite", "TPU v6 lite", "TPU7x"):
        assert choose_backend("auto", tiny_config(), "tpu", kind) == ("pallas", None)
    name, reason = choose_backend("auto", tiny_config(), "tpu", "TPU v3")
    assert name == "xla"
    assert "TPU v3" in str(reason)
    with pytest.raises(ValueError, match=r"attention='pallas'.*TPU v3.*attention='auto'"):
        choose_backend("pallas", tiny_config(), "tpu", "TPU v3")
    with pytest.raises(ValueError, match=r"attention='pallas'.* not on a gpu"):
        choose_backend("pallas", tiny_config(), "gpu", "NVIDIA H100")


@pytest.mark.slow
def test_an_engine_gives_the_tokens_of_the_reference():
    """Chunked prompts beside decoding rows, and rounds of them; freed pages are poisoned."""
    knobs = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_rounds": 2, "num_pages": 24, "debug": True}
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [30, 31, 32]]
    tokens = []
    for name in ("pallas", "reference"):
        with tiny_llm(tiny_config(windows=(None, 9)), attention=name, **knobs) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=5))
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_an_engine_with_kv_in_int8_says_alone_what_it_says_disturbed():
    """Rounded where it is written: close to exact, and the same for a page that was shared or swapped."""
    prompts = [[5, 10, 15, 20, 25, 30, 35, 40, 45, last] for last in (50, 51, 52)]
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    sizes = {"page_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_rounds": 1, "max_model_len": 24}
    with tiny_llm(attention="xla", **sizes) as llm:
        exact = np.array(llm.score(prompts[0]))
    with tiny_llm(attention="pallas-int8", debug=True, num_pages=8, num_host_pages=8, **sizes) as llm:
        layer = llm.engine.runner._caches[0].layers[0]
        assert [array.dtype for array in layer.arrays] == [np.int8, np.float32]
        rounded = np.array(llm.score(prompts[0]))
        assert (rounded != exact).all()
        np.testing.assert_allclose(rounded, exact, rtol=0.03)
        alone = [llm.generate([prompt], greedy, progress=False)[0].outputs[0].token_ids for prompt in prompts]
        engine = llm.engine
        requests = [
            Request(id=str(i), prompt_token_ids=tuple(prompt), params=greedy) for i, prompt in enumerate(prompts)
        ]
        sequences = [sequence for request in requests for sequence in engine.add(request)]
        while engine.has_work:
            engine.step()
            for sequence in list(engine.scheduler.running):
                if sequence.num_output == 2 and not sequence.preemptions:
                    engine.scheduler.preempt(sequence, swap=True)
        assert engine.stats().swaps == 3
        assert [sequence.output_token_ids for sequence in sequences] == alone


# -- how the work is cut -----------------------------------------------------------------------------------------------


@given(
    num_kv_heads=st.integers(1, 32),
    group=st.integers(1, 16),
    page_size=st.sampled_from([1, 3, 16, 48, 128]),
    head_lanes=st.sampled_from([64, 128, 256]),
    dtypes=st.sampled_from([("bfloat16", "bfloat16"), ("float32", "float32"), ("int8", "bfloat16")]),
    pages_per_row=st.integers(1, 8192),
    num_tokens=st.integers(1, 2048),
    decode=st.booleans(),
    device_kind=st.sampled_from([*VMEM_BYTES]),
)
def test_blocks_fit_the_chip(
    num_kv_heads, group, page_size, head_lanes, dtypes, pages_per_row, num_tokens, decode, device_kind
):
    sizes = Sizes(num_kv_heads, group, page_size, head_lanes, *map(jnp.dtype, dtypes))
    budget = vmem_budget(device_kind)
    cut = {"pages_per_row": pages_per_row, "num_tokens": num_tokens, "decode": decode}
    try:
        blocks = choose_blocks(sizes, **cut, budget=budget)
    except ValueError:
        assert vmem_bytes(sizes, Blocks(1, 1, 1) if decode else Blocks(1, 16, 16)) > budget
        return
    assert vmem_bytes(sizes, blocks) <= budget
    assert PIECE % blocks.chunk_pages == 0
    assert blocks.chunk_pages == 1 or blocks.chunk_pages * page_size <= CHUNK
    assert blocks.tile_tokens % blocks.part_tokens == 0
    assert blocks.is_decode == decode
    assert decode or blocks.part_tokens % 16 == 0


def test_blocks_of_llama_8b():
    """What is large enough to be worth a DMA, and small enough for any chip."""
    sizes = Sizes(8, 4, 16, 128, HALF, HALF)
    cut = {"pages_per_row": 8192, "num_tokens": 512}
    assert choose_blocks(sizes, **cut, decode=True, budget=64 << 20) == Blocks(32, 1, 1)
    assert choose_blocks(sizes, **cut, decode=False, budget=64 << 20) == Blocks(32, 128, 32)
    small = choose_blocks(sizes, **cut, decode=False, budget=8 << 20)
    assert small.chunk_pages < 32 or small.tile_tokens < 128


def test_a_page_that_does_not_fit_names_the_knob():
    sizes = Sizes(NUM_KV_HEADS, 4, 4096, 256, jnp.dtype("float32"), jnp.dtype("float32"))
    with pytest.raises(ValueError, match=r"page_size=4096.*lower page_size"):
        choose_blocks(sizes, pages_per_row=4, num_tokens=16, decode=True, budget=8 << 20)
