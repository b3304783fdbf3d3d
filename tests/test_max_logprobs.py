"""More alternatives than 20: `max_logprobs` decides how many the compiled sampler returns."""

import msgspec
import numpy as np
import pytest

from quire import EngineConfig, SamplingParams
from quire.core.errors import RequestError
from quire.core.request import Request
from quire.server.openai.schema import ChatRequest, CompletionRequest
from quire.testing import fake_engine
from quire.train import logprobs
from tests.tiny import tiny_config, tiny_llm

CONFIG = tiny_config(vocab_size=150)
PROMPT = [5, 17, 140, 2]


@pytest.fixture(scope="module")
def llm():
    with tiny_llm(CONFIG, max_logprobs=100) as llm:
        yield llm


def all_logprobs(llm, tokens: list[int]) -> np.ndarray:
    """The log-softmax of the model's scores behind `tokens`, by the function that training steps use."""
    continued = np.array([[*tokens, token] for token in range(CONFIG.vocab_size)], np.int32)
    return np.asarray(logprobs(llm.params, continued, CONFIG, dtype="float32", start=len(tokens)))[:, 0]


def test_a_hundred_alternatives_are_the_log_softmax_of_the_models_scores(llm):
    params = SamplingParams(temperature=0.7, top_k=30, seed=1, max_tokens=2, ignore_eos=True, logprobs=100)
    output = llm.generate([PROMPT], params)[0].outputs[0]
    ids, values = output.top_logprobs
    assert ids.shape == values.shape == (2, 100)
    for step in range(2):
        expected = all_logprobs(llm, [*PROMPT, *output.token_ids[:step]])
        assert len(set(ids[step].tolist())) == 100
        np.testing.assert_allclose(values[step], np.sort(expected)[::-1][:100], atol=1e-4)
        np.testing.assert_allclose(values[step], expected[ids[step]], atol=1e-4)
        assert len(output.logprobs[step].processed_top) == 30


def test_what_a_given_token_could_have_been_drawn_from_has_up_to_max_logprobs_ids(llm):
    scores = llm.score_drawn(PROMPT, SamplingParams(top_k=60, logprobs=100))
    assert (scores.kept_ids >= 0).sum(axis=1).tolist() == [60, 60, 60]


@pytest.mark.parametrize(("max_logprobs", "count"), [(20, 21), (5, 6), (100, 1024)])
def test_a_request_for_more_than_the_engine_returns_is_refused_with_the_knob(max_logprobs, count):
    engine = fake_engine(max_logprobs=max_logprobs)
    request = Request(id="a", prompt_token_ids=(1, 2), params=SamplingParams(logprobs=count))
    with pytest.raises(RequestError, match=f"logprobs={count} .* max_logprobs={max_logprobs}") as caught:
        engine.add(request)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize("value", [0, 1025, 2.0, True])
def test_the_knob_is_checked(value):
    with pytest.raises(ValueError, match="max_logprobs"):
        EngineConfig(max_logprobs=value)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (CompletionRequest, {"prompt": "x", "logprobs": 21}),
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21}),
    ],
)
def test_over_http_the_limit_is_20_whatever_the_engine_returns(kind, asked):
    name = "top_logprobs" if "top_logprobs" in asked else "logprobs"
    msgspec.convert({"model": "m", **asked, name: 20}, kind)
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.convert({"model": "m", **asked}, kind)
