"""Token for token with Hugging Face in float32, run live in its own environment.

The real model greedily, everything in one continuously batched run against the oracle one prompt at a time; random
checkpoints of every architecture by their logits, prefill and decode; scores by their log-probabilities.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.checkpoint.load import load_model
from quire.core.plan import Row, StepPlan
from quire.core.request import Request
from quire.core.sequence import Sequence
from quire.device import kv_cache
from quire.device.attention import get_backend
from quire.device.inputs import StepShape
from quire.device.linear import MatmulKind
from quire.device.mesh import make_mesh
from quire.device.models import get_architecture
from quire.device.models.layers import ModelStatics, decoder, unembed
from quire.device.models.weights import prepare
from quire.engine.packer import Packer
from tests.oracle import harness
from tests.oracle.prompts import LENGTHS_12, LENGTHS_64, cut, texts

pytestmark = pytest.mark.oracle

MAX_TIES = 3
ties: set[str] = set()
"""Places where the oracle itself is undecided, over all runs of this file."""


@pytest.fixture(scope="module")
def oracle_folder(smollm2_gguf: Path) -> Path:
    return harness.smollm2(smollm2_gguf)


def check_greedy(llm: LLM, prompts: list[list[int]], answers: list[dict]) -> None:
    def generate(inputs: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in max_tokens]
        return [out.outputs[0].token_ids for out in llm.generate(inputs, params, progress=False)]

    ties.update(harness.assert_greedy_equal(generate, prompts, answers, MAX_TIES))
    assert len(ties) <= MAX_TIES, ties
    stats = llm.engine.stats()
    assert stats.compiles_after_warmup == 0
    assert stats.held_pages == 0
    llm.engine.audit()


def ask(folder: Path, prompts: list[list[int]], tmp_path: Path) -> list[dict]:
    return harness.hf("greedy", folder, [{"prompt": p, "max_tokens": 64} for p in prompts], tmp_path)


@pytest.mark.slow
def test_64_prompts_in_one_run_equal_hugging_face_one_at_a_time(smollm2_gguf, oracle_folder, tmp_path):
    with LLM(smollm2_gguf, dtype="float32", page_size=16, max_num_batched_tokens=512, quiet=True) as llm:
        prompts = cut(llm.tokenizer.encode(texts()), LENGTHS_64, seed=1)
        assert (len(prompts), min(map(len, prompts)), max(map(len, prompts))) == (64, 1, 1200)
        check_greedy(llm, prompts, ask(oracle_folder, prompts, tmp_path))
        assert llm.engine.stats().steps < 64 * 64 / 8, "the prompts were batched"


@pytest.fixture(scope="module")
def twelve(smollm2_gguf, oracle_folder, tmp_path_factory):
    from gguf import GGUFReader

    from quire.checkpoint.gguf_tokenizer import tokenizer_from_gguf

    ids = tokenizer_from_gguf(GGUFReader(smollm2_gguf)).encode(texts())
    prompts = cut(ids, LENGTHS_12, seed=2)
    return prompts, ask(oracle_folder, prompts, tmp_path_factory.mktemp("twelve"))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 512])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_12_prompts_at_any_page_size_and_budget(smollm2_gguf, twelve, page_size, budget):
    knobs = {"max_num_seqs": 12, "max_model_len": 384, "num_pages": 12 * 384 // page_size}
    with LLM(
        smollm2_gguf, dtype="float32", page_size=page_size, max_num_batched_tokens=budget, quiet=True, **knobs
    ) as llm:
        check_greedy(llm, *twelve)


@pytest.mark.slow
def test_scores_equal_hugging_face(smollm2_gguf, oracle_folder, tmp_path):
    with LLM(smollm2_gguf, dtype="float32", max_num_seqs=4, max_model_len=1024, quiet=True) as llm:
        prompts = cut(llm.tokenizer.encode(texts()), [2, 65, 300, 900], seed=3)
        answers = harness.hf("logprobs", oracle_folder, [{"tokens": p} for p in prompts], tmp_path)
        for prompt, answer in zip(prompts, answers, strict=True):
            np.testing.assert_allclose(llm.score(prompt), answer["logprobs"], atol=1e-3, rtol=0)


CHECKPOINTS = [
    "llama2", "llama3", "llama-linear", "llama3-sharded", "mistral", "mistral-headdim", "qwen2", "qwen2-window",
    "qwen3",
]  # fmt: skip
PREFILL, DECODE = 168, 32


@pytest.fixture(scope="module")
def sequence_tokens() -> list[int]:
    return np.random.default_rng(5).integers(3, 500, size=PREFILL + DECODE).tolist()


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_logits_of_every_architecture(name, backend, sequence_tokens, tmp_path):
    """Prefill in two chunks, then 32 decode steps through the pages, against the oracle's own cache."""
    folder = harness.checkpoints() / name
    request = [{"tokens": sequence_tokens, "prefill": PREFILL}]
    (expected,) = harness.hf("logits", folder, request, tmp_path)
    ours = paged_logits(folder, backend, sequence_tokens)
    scale = np.abs(expected).max()
    worst = np.abs(ours - expected).max() / scale
    print(f"{name}: {worst:.1e} of scale {scale:.1f}")
    assert worst < 1e-4


def paged_logits(folder: Path, backend: str, tokens: list[int], page_size: int = 16) -> np.ndarray:
    """Every position's logits, through the real packing, pages and attention."""
    mesh = make_mesh()
    loaded = load_model(folder, mesh=mesh, dtype="float32")
    ready = prepare(loaded.config, loaded.params, MatmulKind(native=False, int8=False))
    parts = ModelStatics(config=loaded.config, backend=get_backend(backend), mesh=mesh)
    layer = get_architecture(loaded.config.architecture).layer
    num_pages = -(-len(tokens) // page_size) + 3
    cache = kv_cache.create(
        parts.backend, loaded.config, num_pages=num_pages, page_size=page_size, dtype=jnp.dtype("float32"), mesh=mesh
    )
    shapes = [StepShape(4, 4, 4, decode=True), StepShape(128, 4, 4, decode=False)]
    packer = Packer(shapes, page_size=page_size, num_pages=num_pages)

    @jax.jit
    def forward(params, cache, tokens_T, layout):
        hidden_TD, cache = decoder(layer, params, cache, tokens_T, layout, parts)
        return unembed(params, hidden_TD), cache

    request = Request(id="0", prompt_token_ids=tuple(tokens), params=SamplingParams())
    sequence = Sequence(request, index=0, arrival=0, seed=0, max_tokens=1)
    sequence.pages.extend(np.random.default_rng(1).permutation(num_pages).tolist()[: -(-len(tokens) // page_size)])
    chunks = [(0, 100), (100, PREFILL - 100), *((i, 1) for i in range(PREFILL, len(tokens)))]
    logits = []
    for first, count in chunks:
        inputs = packer.pack(StepPlan(rows=[Row(sequence, first, count, 1)], num_tokens=count))
        table_BP = np.zeros((inputs.shape.num_rows, num_pages), np.int32)
        table_BP[0, : len(sequence.pages)] = inputs.page_ids.of(0)
        layout = dataclasses.replace(inputs.layout, page_table_BP=table_BP)
        out, cache = forward(ready, cache, inputs.tokens_T, layout)
        logits.append(np.asarray(out[:count]))
    return np.concatenate(logits)
