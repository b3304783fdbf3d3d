"""Errors become OpenAI's: the field and the code come as data, whatever the message says."""

import pytest

from quire.async_llm.errors import GenerationError
from quire.core.errors import RequestError
from quire.field_error import FieldError
from quire.server.errors import as_api_error


@pytest.mark.parametrize("message", ["top_k=5 is less than it was", "max_model_len", "request a: b has c", ""])
def test_the_field_and_the_code_are_data(message):
    error = as_api_error(FieldError(message, field="logit_bias", code="some_code"))
    assert (error.status, error.message, error.param, error.code) == (400, message, "logit_bias", "some_code")


@pytest.mark.parametrize("message", ["top_k=5 is less than it was", "max_model_len", "messages[0].role must"])
def test_nothing_is_read_from_english(message):
    error = as_api_error(ValueError(message))
    assert (error.status, error.message, error.param, error.code) == (400, message, None, "invalid_value")


def test_a_client_is_not_told_the_id_that_its_request_has_inside():
    error = as_api_error(RequestError("too long", field="prompt", code="context_length_exceeded", request_id="x-1"))
    assert (error.message, error.param, error.code) == ("too long", "prompt", "context_length_exceeded")


def test_a_stream_that_was_refused_says_why():
    error = as_api_error(RequestError("no", field="structured", request_id="r"))
    assert (error.status, error.param, error.code) == (400, "structured", "invalid_value")
    assert as_api_error(GenerationError("no", "deadline")).code == "deadline"
