"""What generation_config.json says of sampling is followed; what makes no sense in it is left out, with a note."""

import json

import pytest

from quire.core.default_params import default_params, describe
from quire.core.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05, "repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.2},
            {"temperature": 0, "repetition_penalty": 1.2},
        ),
        ({"temperature": None, "do_sample": None, "max_new_tokens": 5, "eos_token_id": 2}, {}),
    ],
    ids=str,
)
def test_what_a_model_states_is_followed(config, expected):
    assert default_params(config) == (SamplingParams(**expected), [])


@pytest.mark.parametrize(
    "garbage",
    [
        '{"temperature": "hot"}', '{"temperature": NaN}', '{"temperature": -1}', '{"temperature": Infinity}',
        '{"top_k": -1}', '{"top_k": 1.5}', '{"top_p": 0}', '{"top_p": 2}', '{"min_p": [1]}', '{"top_p": true}',
        '{"repetition_penalty": 0}', '{"repetition_penalty": {}}', '{"do_sample": "no"}',
    ],
)  # fmt: skip
def test_garbage_is_left_out_with_a_note(garbage):
    config = json.loads(garbage)
    params, (note,) = default_params(config | {"top_k": 7} if "top_k" not in config else config)
    assert params == (SamplingParams(top_k=7) if "top_k" not in config else SamplingParams())
    assert f"{next(iter(config))}=" in note
    assert len(note) < 300


def test_a_description_names_what_differs():
    assert describe(SamplingParams()) == ""
    assert describe(SamplingParams(temperature=0, top_p=0.9)) == "temperature 0, top_p 0.9"
