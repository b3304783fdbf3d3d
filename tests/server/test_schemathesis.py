"""Requests made from the server's own OpenAPI document, such as fit it and such as do not: none is an error of ours."""

import json
from typing import Any, cast

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode

from quire.server.config import ServerConfig
from quire.server.http.docs_page import docs_page
from quire.server.http.openapi import ERRORS, openapi, openapi_json
from quire.server.http.routes import Api
from quire.server.keys import Keys
from tests.server.attack import bystander

OPERATIONS = [(method.upper(), path) for path, methods in openapi()["paths"].items() for method in methods]
CASES = [
    pytest.param(method, path, mode, id=f"{mode.value}-{method}-{path}")
    for mode in GenerationMode
    for method, path in OPERATIONS
    # Of a route that is told nothing, nothing can be wrong.
    if mode is GenerationMode.POSITIVE or {"requestBody", "parameters"} & set(openapi()["paths"][path][method.lower()])
]
HOST_ERRORS = {405, 499}
"""Answers that are not about a route, and so not in the document."""


@pytest.fixture(scope="module")
def schema(server):
    document = json.loads(server.get("/openapi.json")[1])
    assert document == json.loads(json.dumps(openapi()))
    return schemathesis.openapi.from_dict(document)


def test_the_document_is_built_before_a_request_asks_for_it():
    for document in (openapi, openapi_json, docs_page):
        document.cache_clear()
    Api(cast(Any, None), ServerConfig(), cast(Any, None)).app(Keys([]))
    num_built = openapi_json.cache_info().misses + docs_page.cache_info().misses
    openapi_json()
    docs_page()
    assert openapi_json.cache_info().misses + docs_page.cache_info().misses == num_built == 2


def test_every_route_is_in_the_document():
    guard = Api(cast(Any, None), ServerConfig(), cast(Any, None)).app(Keys([]))
    routes = {(method, route.path.replace(":path}", "}")) for route in guard._app.routes for method in route.methods}
    left_out = {(method, path) for method, path in routes - set(OPERATIONS) if method != "HEAD"}
    assert left_out <= {("GET", "/openapi.json")}


def test_what_streams_is_said_to_and_nothing_else():
    routes = openapi()["paths"].items()
    streaming = {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
    assert {path for path, route in routes if "text/event-stream" in json.dumps(route)} == streaming
    assert {path for path, route in routes if "`stream`" in json.dumps(route)} == streaming


@pytest.mark.alone  # the bystander's tokens must not come late
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
@pytest.mark.parametrize("max_examples", [20, pytest.param(100, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_request_is_an_error_of_ours(schema, server, offline, method, path, mode, max_examples):
    operation = schema[path][method]
    seen: set[int] = set()

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # else nothing is ever asked of it
            if mode is GenerationMode.POSITIVE and path.startswith("/v1/"):
                case.body["timeout"] = 1.0  # some ask for a hundred long answers
        response = case.call(base_url=server.url)
        seen.add(response.status_code)
        assert response.status_code in {200, *ERRORS, *HOST_ERRORS} - {500, 503}, (case.body, response.text)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, error
            assert error["message"]

    with bystander(server, offline):
        run()
    assert seen
    if mode is GenerationMode.POSITIVE and max_examples > 100 and "{" not in path:
        assert 200 in seen, "nothing that fits the document was ever answered"
