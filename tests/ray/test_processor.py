"""A row that fails keeps none of its batch from running. Without Ray: the processor is a class like any other."""

import pytest

from quire import Rollouts, SamplingParams
from quire.async_llm import UnavailableError
from quire.integrations.ray import processor
from quire.integrations.ray.processor import QuireProcessor
from quire.testing import InjectedError
from tests.fake_llm import fake_llm

BATCH = {"prompt": [[1, 2, 3], [5, 6], [7, 8, 9]], "id": [0, 1, 2]}


@pytest.fixture
def rows(monkeypatch):
    """A processor that runs one row after the other."""
    monkeypatch.setattr(processor, "Rollouts", lambda *_, **__: Rollouts.from_factory(lambda: fake_llm(max_num_seqs=1)))
    made = QuireProcessor("fake", SamplingParams(max_tokens=20, ignore_eos=True))
    yield made
    made._engine.close()


def before_row(rows: QuireProcessor, prompt: list[int], call) -> None:
    """Have something done on the engine's thread before each step of the row with this prompt."""
    packer = rows._engine.llm.engine._packer
    pack = packer.pack

    def watched(plan):
        if plan.rows[0].sequence.request.prompt_token_ids == tuple(prompt):
            call()
        return pack(plan)

    packer.pack = watched


def test_a_row_that_fails_has_its_error_and_the_others_their_answers(rows):
    def fail() -> None:
        raise InjectedError("does not fit")

    before_row(rows, BATCH["prompt"][1], fail)
    done = rows(BATCH)
    assert [done["id"], done["prompt"]] == [BATCH["id"], BATCH["prompt"]]
    assert [error is None for error in done["error"]] == [True, False, True]
    assert "failed" in done["error"][1]
    assert [ids and len(ids) for ids in done["generated_token_ids"]] == [20, None, 20]
    assert done["finish_reason"] == ["length", None, "length"]


def test_an_engine_that_stops_fails_the_batch(rows):
    """No row would ever run here again: Ray is to start the worker anew."""
    before_row(rows, BATCH["prompt"][1], lambda: rows._engine._thread.ask_to_stop())
    with pytest.raises(UnavailableError):
        rows(BATCH)
