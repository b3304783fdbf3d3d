"""One small server for the tests that leave it as they found it."""

import pytest

from tests.server.process import SMALL, serving
from tests.server.tiny_folder import write_tiny_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_folder):
    with serving(tiny_folder, *SMALL) as running:
        yield running


@pytest.fixture(scope="session")
def offline(tiny_folder):
    """The same model, without a server."""
    from quire import LLM

    with LLM(tiny_folder, dtype="float32", max_num_seqs=8, max_num_batched_tokens=64, num_pages=512, quiet=True) as llm:
        yield llm
