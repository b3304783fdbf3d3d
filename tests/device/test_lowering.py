"""No accelerator is at hand, so that every program lowers for one is what can be checked: nothing here is CPU-only."""

import pytest

from tests.tiny import tiny_config, tiny_llm


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_program_lowers_for_an_accelerator(platform, dtype):
    with tiny_llm(tiny_config(windows=(None, 9)), dtype=dtype, num_pages=16, max_num_seqs=4) as llm:
        runner = llm.engine.runner
        for shape in runner.shapes:
            text = runner.trace(shape).lower(lowering_platforms=(platform,)).as_text()
            assert "stablehlo.while" in text
            assert "cpu" not in text.lower(), "no call that only a CPU knows"
