"""What a person sees who prints something of Quire's, or misspells a field of it."""

from dataclasses import replace

import pytest

from quire import EngineConfig, ModelConfig, Request, SamplingParams, Structured
from quire.config import AttentionConfig, engine_config
from quire.core.sequence import TokenLogprob
from quire.field_error import FieldError
from quire.outputs import CompletionOutput, RequestOutput, TextChunk
from quire.testing import fake_engine
from tests.tiny import tiny_config

ENTRY = TokenLogprob(5, -1.23456789, ((5, -1.2), (6, -3.5)), -0.5, ((5, -0.5),))
COMPLETION = CompletionOutput(0, list(range(120)), "word " * 100, "length", [ENTRY] * 3 + [TokenLogprob(6, -2.0)] * 117)
OUTPUT = RequestOutput(list(range(1000)), [COMPLETION] + [replace(COMPLETION, index=i) for i in range(1, 64)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SamplingParams(), "SamplingParams()"),
        (SamplingParams(temperature=0, max_tokens=3), "SamplingParams(temperature=0, max_tokens=3)"),
        (SamplingParams(logit_bias={5: 1.5}, stop="a"), "SamplingParams(stop=('a',), logit_bias={5: 1.5})"),
        (EngineConfig(page_size=4), "EngineConfig(page_size=4)"),
        (TextChunk(0, "hi", [1, 2]), "TextChunk(index=0, text='hi', token_ids=[1, 2])"),
        (TokenLogprob(5, -1.23456789), "TokenLogprob(token_id=5, logprob=-1.23457)"),
        (
            ENTRY,
            "TokenLogprob(token_id=5, logprob=-1.23457, top=((5, -1.2), ... 1 more), processed_logprob=-0.5, "
            "processed_top=((5, -0.5),))",
        ),
        (
            Request(id="r", prompt_token_ids=tuple(range(100)), params=SamplingParams(n=2)),
            "Request(id='r', prompt_token_ids=(0, 1, 2, 3, 4, 5, 6, 7, ... 92 more), params=SamplingParams(n=2), "
            "tenant='')",
        ),
        (
            tiny_config(),
            "ModelConfig(architecture='llama', vocab_size=97, hidden_size=32, intermediate_size=48, "
            "attention=(AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),) * 2, max_len=256, eos_ids=(0,))",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repr_says_what_differs(value, expected):
    assert repr(value) == expected


@pytest.mark.parametrize(
    "value", [SamplingParams(seed=3, stop=["a", [1, 2]], min_p=0.25), tiny_config(), EngineConfig()]
)
def test_a_short_one_can_be_pasted_back(value):
    assert (
        eval(repr(value), {c.__name__: c for c in (SamplingParams, EngineConfig, ModelConfig, AttentionConfig)})
        == value
    )


def test_long_ones_are_cut_and_counted():
    text = repr(OUTPUT)
    assert "token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 112 more]" in text
    assert "text='word word" in text
    assert "... 440 more" in text
    assert text.endswith(", ... 63 more])")
    assert len(text) < 700
    form = SamplingParams(structured=Structured(json_schema={"enum": ["x" * 1000]}))
    assert len(repr(form)) < 200
    assert len(repr(SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0)))) < 200


def test_an_engine_and_a_sequence_are_one_line():
    engine = fake_engine()
    (sequence,) = engine.add(Request(id="r", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=4)))
    assert repr(sequence) == "<Sequence r/0 waiting, 0 of 4 tokens>"
    assert repr(engine).startswith("<Engine llama, 1 layers, bfloat16: 0 running, 1 waiting; pool 16 pages x 4 tokens")
    assert "\n" not in repr(engine)


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (
            lambda: SamplingParams(max_token=3),
            "max_token",
            r"SamplingParams has no max_token; did you mean max_tokens\?",
        ),
        (lambda: replace(SamplingParams(), topk=3), "topk", r"did you mean top_k\?"),
        (lambda: SamplingParams(zzz=3), "zzz", "there are temperature, top_k"),
        (lambda: EngineConfig(max_num_seq=3), "max_num_seq", r"did you mean max_num_seqs\?"),
        (lambda: engine_config(pagesize=3), "pagesize", r"did you mean page_size\?"),
        (lambda: Request(id="r", prompt_ids=(1,), params=None), "prompt_ids", r"did you mean prompt_token_ids\?"),
        (lambda: AttentionConfig(heads=3), "heads", r"did you mean num_heads\?"),
    ],
)
def test_an_unknown_field_is_told_with_the_nearest(make, field, says):
    with pytest.raises(FieldError, match=says) as error:
        make()
    assert error.value.field == field


def test_a_missing_field_is_still_what_python_says():
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments"):
        Request(id="r")  # pyright: ignore


def test_no_salt_is_none():
    request = Request(id="r", prompt_token_ids=(1,), params=SamplingParams(), cache_salt=None)  # pyright: ignore
    assert request.cache_salt == ""
