"""Embeddings against Hugging Face in float32: the last hidden state, pooled and normalised, within 1e-5."""

import base64
import json
import shutil

import numpy as np
import openai
import pytest

from quire import LLM
from tests.effort import nightly
from tests.oracle import harness
from tests.server.process import SMALL, serving

pytestmark = pytest.mark.oracle

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, 500, size=n).tolist() for n in (1, 2, 16, 33, 150, 300)]
WITHIN = 1e-5


def answers(name: str, pooling: str, tmp_path) -> np.ndarray:
    requests = [{"tokens": prompt, "pooling": pooling} for prompt in PROMPTS]
    found = harness.hf("embed", harness.checkpoints() / name, requests, tmp_path)
    return np.array([answer["embedding"] for answer in found])


@pytest.mark.parametrize(
    ("name", "pooling"),
    [("qwen3", "last"), nightly("qwen2", "mean"), nightly("qwen3", "mean"), nightly("qwen2", "last")],
)
def test_embeddings_equal_hugging_face(name, pooling, tmp_path):
    """In chunks of 64 tokens, all prompts at once."""
    with LLM(
        harness.checkpoints() / name,
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_pages=64,
        quiet=True,
    ) as llm:
        found = llm.embed(PROMPTS, pooling=pooling)
        worst = np.abs(found - answers(name, pooling, tmp_path)).max()
        print(f"{name}, {pooling}: {worst:.1e}")
        assert worst < WITHIN
        assert llm.engine.stats().held_pages == 0


@pytest.mark.parametrize("pooling", ["mean", nightly("last")])
def test_the_openai_client_reads_what_hugging_face_computes(pooling, tmp_path):
    """From a folder as sentence-transformers writes it, which says how the model pools."""
    folder = shutil.copytree(harness.checkpoints() / "qwen3", tmp_path / "qwen3")
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_lasttoken": pooling == "last", "pooling_mode_mean_tokens": pooling == "mean"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    with (
        serving(folder, *SMALL) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        for encoding_format in ("float", "base64", openai.omit):
            response = client.embeddings.create(model="qwen3", input=PROMPTS, encoding_format=encoding_format)
            found = np.array([_numbers(entry.embedding) for entry in response.data])
            assert np.abs(found - answers("qwen3", pooling, tmp_path)).max() < WITHIN


def _numbers(embedding: list[float] | str) -> np.ndarray:
    """The client decodes base64 where it chose that itself."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding)
