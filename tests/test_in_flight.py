"""What may be called while a step is in flight, and what a caller's error must not lose."""

import pytest

from quire import Request, SamplingParams
from quire.core.stopping import FinishReason
from quire.testing import fake_engine


def engine_with(**params):
    engine = fake_engine(eos_ids=(), num_pages=40)
    request = Request(id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(temperature=0, **params))
    return engine, engine.add(request)[0]


@pytest.mark.parametrize(
    ("name", "args"), [("set_weights", (7, "new")), ("reset", ()), ("zero_cache", ())], ids=lambda x: str(x)
)
def test_what_changes_the_device_is_refused_in_flight_before_anything_changes(name, args):
    """Weights that were replaced under the old version would publish pages of two models under one name."""
    engine, sequence = engine_with(max_tokens=8)
    engine.step()
    before = engine.runner.weights, engine.stats().weight_version, engine.scheduler.tables.weights
    with pytest.raises(RuntimeError, match=f"{name}.*in flight"):
        engine.step(meanwhile=lambda: getattr(engine, name)(*args))
    assert (engine.runner.weights, engine.stats().weight_version, engine.scheduler.tables.weights) == before
    engine.audit()
    while engine.has_work:
        engine.step()
    assert sequence.num_output == 8
    assert set(sequence.weight_versions) == {0}
    engine.set_weights(7, "new")
    assert engine.stats().weight_version == "new"


def test_the_events_of_a_step_whose_caller_failed_come_with_the_next():
    engine, sequence = engine_with(max_tokens=3)
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step(meanwhile=lambda: 1 / 0)
    events = engine.step()
    assert [len(event.token_ids) for event in events] == [1, 1]
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert [t for event in events for t in event.token_ids] == sequence.output_token_ids[1:]


def test_an_end_is_told_even_if_the_caller_failed_in_the_last_step():
    """A server whose delivery failed once would leave the stream open until its timeout."""
    engine, sequence = engine_with(max_tokens=2)
    engine.step()
    with pytest.raises(ZeroDivisionError):
        engine.step(meanwhile=lambda: 1 / 0)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert engine.has_work, "there is something left to tell"
    with pytest.raises(ZeroDivisionError):
        engine.step(meanwhile=lambda: 1 / 0)
    (event,) = engine.step()
    assert event.sequence is sequence
    assert event.finish_reason is FinishReason.LENGTH
    assert not engine.has_work
    assert engine.step() == []


def test_abort_and_fork_are_safe_in_flight():
    engine, sequence = engine_with(max_tokens=8)
    engine.step()
    children = []
    engine.step(meanwhile=lambda: children.append(engine.fork(sequence)))
    assert children[0].num_output == 1, "it goes on from the last committed token"
    engine.step(meanwhile=lambda: engine.abort(sequence))
    engine.audit()
    while engine.has_work:
        engine.step()
    assert children[0].num_output == 8
    assert engine.stats().held_pages == 0


def test_what_was_aborted_or_reset_has_no_event_left():
    """A request id that is used again must not hear of the one before."""
    for end in ("abort", "reset"):
        engine, sequence = engine_with(max_tokens=8)
        engine.step()
        with pytest.raises(ZeroDivisionError):
            engine.step(meanwhile=lambda: 1 / 0)
        engine.abort("a") if end == "abort" else engine.reset()
        assert not engine.has_work
        assert engine.step() == []
        assert sequence.finish_reason is FinishReason.ABORT
