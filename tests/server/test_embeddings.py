"""`/v1/embeddings` with the real `openai` client: what it reads is what `LLM.embed` says offline."""

import asyncio
import base64
import contextlib
import json
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quire.embedding import EmbeddingConfig
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.openai import schema
from quire.server.openai.embeddings import as_digits, parse_embeddings
from quire.server.service import Service
from tests.server.attack import connect, post
from tests.server.test_metrics import samples
from tests.tiny import tiny_config

TEXTS = ["The old harbour was quiet", "a", "What is a quire? " * 20]
IDS = [list(range(20, 60)), [7]]
HIDDEN_SIZE = tiny_config().hidden_size


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(response) -> np.ndarray:
    return np.array([entry.embedding for entry in response.data])


@pytest.mark.parametrize("given", [TEXTS[0], TEXTS, IDS[0], IDS], ids=["text", "texts", "ids", "lists of ids"])
def test_embeddings_are_what_they_are_offline(client, offline, given):
    prompts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    response = client.embeddings.create(model="tiny", input=given)
    assert (response.object, response.model) == ("list", "tiny")
    assert [(entry.object, entry.index) for entry in response.data] == [("embedding", i) for i in range(len(prompts))]
    np.testing.assert_allclose(vectors(response), offline.embed(prompts), atol=1e-5)
    num_tokens = sum(len(offline.tokenizer.encode(one)) if isinstance(one, str) else len(one) for one in prompts)
    assert response.usage.prompt_tokens == response.usage.total_tokens == num_tokens


def test_numbers_and_base64_are_the_same(server, offline):
    body = {"model": "tiny", "input": TEXTS[0]}
    for more in ({}, {"encoding_format": "float"}):
        status, answer = server.post("/v1/embeddings", body | more)
        assert status == 200
        plain = json.loads(answer)
        np.testing.assert_allclose(plain["data"][0]["embedding"], offline.embed(TEXTS[0]), atol=1e-5)
    status, answer = server.post("/v1/embeddings", body | {"encoding_format": "base64"})
    assert status == 200
    decoded = np.frombuffer(base64.b64decode(json.loads(answer)["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, plain["data"][0]["embedding"], atol=1e-6)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(arrays(np.float32, 40, elements=st.floats(-1, 1, width=32) | st.floats(-(2.0**100), 2.0**100, width=32)))
def test_numbers_are_those_of_float32_in_few_digits(values):
    text = bytes(as_digits(values)).decode()
    assert np.array_equal(np.array(json.loads(text), np.float32), values)
    for shown, value in zip(text.strip("[]").split(","), values, strict=True):
        if value == 0 or 1e-12 < abs(value) < 1e5:
            assert len(digits(shown)) <= len(digits(str(value))), (shown, str(value))


def digits(number: str) -> str:
    """The significant ones."""
    return number.lower().split("e")[0].lstrip("-").replace(".", "").lstrip("0").rstrip("0")


def test_a_response_has_few_bytes_for_each_number(server):
    status, answer = server.post("/v1/embeddings", {"model": "tiny", "input": [[i % 200] for i in range(300)]})
    assert status == 200
    assert len(answer) < 300 * (HIDDEN_SIZE * 14 + 60) + 300


def test_dimensions_are_cut_and_normalised_again(client, offline):
    response = client.embeddings.create(model="tiny", input=TEXTS, dimensions=5)
    found = vectors(response)
    assert found.shape == (3, 5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(found, offline.embed(TEXTS, dimensions=5), atol=1e-5)


def test_a_stream_goes_on_beside_embeddings(client, offline):
    """Both in the same steps, and neither changes the other."""
    texts, found = [], []
    alone = client.completions.create(model="tiny", prompt="Once ", max_tokens=100, temperature=0).choices[0].text

    def embed() -> None:
        found.append(vectors(client.embeddings.create(model="tiny", input=TEXTS * 8)))

    stream = client.completions.create(model="tiny", prompt="Once ", max_tokens=100, temperature=0, stream=True)
    threads = [threading.Thread(target=embed) for _ in range(3)]
    for i, event in enumerate(stream):
        if i < len(threads):
            threads[i].start()
        texts.append(event.choices[0].text)
    for thread in threads:
        thread.join()
    assert "".join(texts) == alone
    for one in found:
        np.testing.assert_allclose(one, offline.embed(TEXTS * 8), atol=1e-5)


def test_a_long_list_leaves_the_queue_to_others(server, client):
    """More inputs than may wait: they come in turns, and nobody else is refused meanwhile."""
    inputs, found = [[i % 200, i % 7] for i in range(1000)], []
    thread = threading.Thread(target=lambda: found.append(client.embeddings.create(model="tiny", input=inputs)))
    thread.start()
    while thread.is_alive():
        assert server.metric("quire_requests_waiting") <= 256
        client.completions.create(model="tiny", prompt="a", max_tokens=1)  # a 429, if all of them waited
    thread.join()
    assert len(found[0].data) == 1000
    few = client.embeddings.create(model="tiny", input=inputs[:3])
    np.testing.assert_allclose(vectors(found[0])[:3], vectors(few), atol=1e-5)


def test_a_client_that_goes_takes_its_list_with_it(server):
    body = {"model": "tiny", "input": [[i % 200] * 900 for i in range(500)]}
    before = server.metric("quire_prompt_tokens_total")
    with connect(server) as connection:
        connection.sendall(post("/v1/embeddings", json.dumps(body).encode()))
        while server.metric("quire_sequences_running") == 0:
            pass
    server.wait_idle()
    assert server.metric("quire_prompt_tokens_total") - before < 500 * 900


@pytest.mark.parametrize(
    ("num_inputs", "fields", "message"),
    [
        (2048, {}, None),
        (2048, {"hidden_size": 1025}, "2,048 inputs with 1,025 dimensions come to 2,099,200 numbers, at most 2,097,1"),
        (2046, {"hidden_size": 1025}, None),
        (2048, {"hidden_size": 4096, "dimensions": 1024}, None),
        (1024, {"hidden_size": 4096}, "send 512 inputs at once, or set dimensions; encoding_format='base64' allows"),
        (1024, {"hidden_size": 4096, "encoding_format": "base64"}, None),
        (1025, {"hidden_size": 4096, "encoding_format": "base64"}, "at most 4,194,304 are allowed; send 1,024 inputs"),
    ],
    ids=str,
)  # fmt: skip
def test_the_size_of_a_response_is_bounded(num_inputs, fields, message):
    hidden_size = fields.pop("hidden_size", 1024)
    body = msgspec.convert({"model": "m", "input": [[1]] * num_inputs} | fields, schema.EmbeddingsRequest)
    config = SimpleNamespace(hidden_size=hidden_size)
    llm = SimpleNamespace(model_config=config, embedding_config=EmbeddingConfig(), engine=SimpleNamespace())
    llm.engine.max_request_len = 10
    engine = SimpleNamespace(llm=llm, admission=SimpleNamespace(check_room=lambda tenant: None))
    with contextlib.closing(Service(cast(Any, engine), "m", 0)) as service:
        if message is None:
            assert len(asyncio.run(parse_embeddings(service, body, Caller())).requests) == num_inputs
        else:
            with pytest.raises(ApiError) as caught:
                asyncio.run(parse_embeddings(service, body, Caller()))
            assert (caught.value.status, caught.value.param) == (400, "input")
            assert message in caught.value.message


def test_they_are_counted_and_leave_no_page_behind(client, server):
    before = samples(server)
    client.embeddings.create(model="tiny", input=IDS)
    after = samples(server)
    (prompt_tokens,) = [key for key in after if key[0] == "quire_prompt_tokens_total"]
    (ended,) = [
        key for key in after if key[0] == "quire_sequences_ended_total" and ("finish_reason", "length") in key[1]
    ]
    assert after[prompt_tokens] - before[prompt_tokens] == 41
    assert after[ended] - before.get(ended, 0) == 2
    (held,) = [key for key in after if key[0] == "quire_pages_held"]
    assert after[held] == 0


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"input": []}, 400, "input", "length >= 1"),
        ({"input": ""}, 400, "input", "the prompt is empty"),
        ({"input": [[1], []]}, 400, "input", "the prompt is empty"),
        ({"input": ["a", 1]}, 400, "input", "cannot be mixed"),
        ({"input": [[1], "a"]}, 400, "input", "cannot be mixed"),
        ({"input": [100_000]}, 400, "input", "is no token id"),
        ({"input": ["a"] * 2049}, 400, "input", "2049 prompts, at most 2048"),
        ({"input": [1] * 5000}, 400, "input", "max_model_len=4096"),
        ({"input": "a" * 5000}, 400, "input", "max_model_len=4096"),
        ({"dimensions": 0}, 400, "dimensions", ">= 1"),
        ({"dimensions": HIDDEN_SIZE + 1}, 400, "dimensions", f"from 1 to {HIDDEN_SIZE}"),
        ({"encoding_format": "int8"}, 400, "encoding_format", "int8"),
        ({"priority": 1}, 400, "priority", "--max-priority"),
        ({"model": "other"}, 404, "model", "does not exist"),
        ({"input": ["a"] * 2048, "timeout": 1e-9}, 408, None, "time"),  # more than run at once
    ],
)  # fmt: skip
def test_an_error_names_the_field(server, fields, status, param, message):
    found, answer = server.post("/v1/embeddings", {"model": "tiny", "input": "a"} | fields)
    error = json.loads(answer)["error"]
    assert (found, error["param"]) == (status, param), error
    assert message in error["message"]


def test_a_field_that_is_not_known_is_named(client):
    response = client.embeddings.with_raw_response.create(model="tiny", input="a", extra_body={"colour": 1})
    assert response.headers["x-quire-ignored-fields"] == "colour"
