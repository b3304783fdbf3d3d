"""States move along the table only, and sampling parameters are checked where they are made."""

import math

import pytest

from quire.config import EngineConfig
from quire.core.errors import RequestError, StateError
from quire.core.request import Request
from quire.core.sampling_params import DECLARED, SamplingParams
from quire.core.sequence import TRANSITIONS, SequenceState
from quire.core.stopping import FinishReason
from quire.field_error import FieldError
from quire.structured.form import Structured
from tests.core.fake import Arrivals

W, R, S, F = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.SWAPPED, SequenceState.FINISHED


def test_the_transition_table_is_the_seeds_and_abort_from_anywhere():
    assert {W: {R, F}, R: {W, S, F}, S: {R, W, F}, F: set()} == TRANSITIONS


@pytest.mark.parametrize("start", list(SequenceState))
@pytest.mark.parametrize("end", list(SequenceState))
def test_a_sequence_moves_only_along_the_table(start, end):
    sequence = Arrivals()(3)
    sequence.state = start
    if end in TRANSITIONS[start]:
        sequence.move_to(end)
        assert sequence.state is end
    else:
        with pytest.raises(StateError, match=f"from {start} to {end}"):
            sequence.move_to(end)


def test_finish_reasons_are_the_words_users_read():
    assert [str(reason) for reason in FinishReason] == ["eos", "length", "stop", "abort", "not_finite"]


HOSTILE = [-1, 1 << 63, 1 << 64, 10**400, math.nan, math.inf, -math.inf, True, "1", None, [], b"x", 0.5]


@pytest.mark.parametrize("field", DECLARED)
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_hostile_number_is_refused_by_name_or_is_legal(field, value):
    legal = {
        "seed": [1 << 63, None],
        "max_tokens": [None],
        "logprobs": [None],
        "max_rounds": [None],
        "presence_penalty": [-1, 0.5],
        "frequency_penalty": [-1, 0.5],
    }.get(field, {float: [0.5], int: [], bool: [True]}[DECLARED[field].kind])
    if any(value is ok or (type(value) is type(ok) and value == ok) for ok in legal):
        assert getattr(SamplingParams(**{field: value}), field) == value
    else:
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "stop",
    ["", [""], [()], [3], 3, None, ["x"] * 65, ["x" * 3000, "y" * 1097], [(1, -1)], [(True,)], [b"x"], [[1.5]]],
    ids=repr,
)
def test_a_bad_stop_is_refused_by_name(stop):
    with pytest.raises(ValueError, match="stop"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("ids", [5, None, "12", [True], [-1], [1 << 31], [1.0], list(range(65))], ids=repr)
def test_bad_stop_ids_are_refused_by_name(ids):
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=ids)


def test_stops_are_strings_and_sequences_of_ids():
    params = SamplingParams(stop=["END", [1, 2]])
    assert params.stop_strings == ("END",)
    assert params.stop_sequences == ((1, 2),)
    assert SamplingParams(stop="END").stop_strings == ("END",)


def test_zero_new_tokens_must_ask_for_something():
    with pytest.raises(ValueError, match="prompt_logprobs"):
        SamplingParams(max_tokens=0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=True).max_tokens == 0


def test_min_tokens_above_max_tokens_is_refused_with_both():
    with pytest.raises(ValueError, match=r"min_tokens=5 .* max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(min_tokens=3, max_tokens=2), "min_tokens"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens"),
        (lambda: SamplingParams(ignore_eos=1), "ignore_eos"),  # pyright: ignore
        (lambda: SamplingParams(logit_bias={-1: 0.0}), "logit_bias"),
        (lambda: SamplingParams(logit_bias={1: math.nan}), "logit_bias"),
        (lambda: SamplingParams(stop=[""]), "stop"),
        (lambda: SamplingParams(stop=[[1 << 40]]), "stop"),
        (lambda: SamplingParams(stop_token_ids=[0] * 65), "stop_token_ids"),
        (lambda: SamplingParams(stop_token_ids="1"), "stop_token_ids"),  # pyright: ignore
        (lambda: SamplingParams(structured="a"), "structured"),  # pyright: ignore
        (lambda: Structured(), "structured"),
        (lambda: Structured(regex="\ud800"), "structured"),
        (lambda: Structured(json_schema="{", name="response_format"), "response_format"),
        (lambda: Request(id="a", prompt_token_ids=(1,), params=SamplingParams(), priority=1 << 40), "priority"),
        (lambda: Request(id="a", prompt_token_ids=(1,), params=SamplingParams(), cache_salt="a" * 2000), "cache_salt"),
        (lambda: EngineConfig(page_size=0), "page_size"),
        (lambda: EngineConfig(dtype="float8"), "dtype"),
    ],
)
def test_an_error_carries_its_field_and_code_as_data(make, field):
    with pytest.raises(FieldError) as caught:
        make()
    assert (caught.value.field, caught.value.code) == (field, "invalid_value")


def test_an_error_of_a_request_carries_its_field_its_code_and_its_id():
    error = RequestError("the prompt is too long", field="prompt", code="context_length_exceeded", request_id="a")
    assert isinstance(error, FieldError)
    assert (error.field, error.code, error.request_id) == ("prompt", "context_length_exceeded", "a")
    assert (str(error), error.message) == ("request a: the prompt is too long", "the prompt is too long")
    assert (str(RequestError("no")), RequestError("no").field, RequestError("no").code) == ("no", None, "invalid_value")


def test_a_request_without_a_tenant_belongs_to_its_salt():
    params = SamplingParams()
    assert Request(id="a", prompt_token_ids=(1,), params=params, cache_salt="x").tenant == "x"
    assert Request(id="a", prompt_token_ids=(1,), params=params, cache_salt="x", tenant="").tenant == ""
    for wrong in (3, "x" * 1025):
        with pytest.raises(FieldError, match=r"tenant=.* must be a string of at most 1024 characters"):
            Request(id="a", prompt_token_ids=(1,), params=params, tenant=wrong)  # pyright: ignore
