"""No accelerator is at hand, so that every program lowers for one is what can be checked: nothing here is CPU-only."""

import pytest

from tests.effort import nightly
from tests.tiny import tiny_config, tiny_llm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "dtype"),
    [
        ("rocm", "bfloat16"), nightly("rocm", "float32"),
        *(nightly(platform, dtype) for platform in ("tpu", "cuda") for dtype in ("bfloat16", "float32")),
    ],
)  # fmt: skip
def test_every_program_lowers_for_an_accelerator(platform, dtype):
    knobs = {"dtype": dtype, "num_pages": 16, "max_num_seqs": 4, "attention": "xla", "matmul": "xla"}
    with tiny_llm(tiny_config(windows=(None, 9)), **knobs) as llm:
        runner = llm.engine.runner
        for shape in runner.shapes:
            text = runner.programs.trace(shape).lower(lowering_platforms=(platform,)).as_text()
            assert "stablehlo.while" in text
            assert "cpu" not in text.lower(), "no call that only a CPU knows"
            assert "quire_" not in text, "no call of the native library"
        for traced in runner.programs.trace_page_programs().values():
            assert "cpu" not in traced.lower(lowering_platforms=(platform,)).as_text().lower()
