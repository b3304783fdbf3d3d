"""A start says what is being compiled while it compiles."""

import pytest

from quire.config import engine_config
from quire.device.mesh import make_mesh
from quire.device.runner import ModelRunner
from quire.engine.step_shapes import step_shapes
from tests.tiny import tiny_config, tiny_params


@pytest.mark.slow
def test_every_program_is_named_before_it_is_ready():
    config, shapes = tiny_config(), step_shapes(engine_config(max_num_seqs=16, max_num_batched_tokens=16))
    sizes = {"num_pages": 16, "page_size": 4, "pages_per_row": 8, "max_rounds": 2, "num_host_pages": (4,)}
    params = dict(tiny_params(config), layers=[dict(layer) for layer in tiny_params(config)["layers"]])
    runner = ModelRunner(config, params, mesh=make_mesh(), dtype="float32", shapes=shapes, **sizes)
    calls: list[tuple[int, int, str]] = []
    named: dict[str, set[str]] = {}

    def progress(done: int, total: int, what: str) -> None:
        calls.append((done, total, what))
        ready = {str(shape) for shape in runner._compiled}
        for name in what.split("; "):
            named.setdefault(name, set()).update(ready)

    runner.warm_up(progress)
    assert len(shapes) > 2
    for shape in shapes:
        assert str(shape) not in named[str(shape)], "it is named while it is not ready"
    counts = [done for done, _, _ in calls]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert calls[-1] == (runner.num_programs, runner.num_programs, "")
    assert calls[0][2] == "page tables; copy, poison and move pages"
