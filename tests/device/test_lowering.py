"""No accelerator is at hand, so that every program lowers for one is what can be checked: nothing here is CPU-only."""

import numpy as np
import pytest

from quire.device import kv_cache
from tests.tiny import tiny_config, tiny_llm


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "cuda", "rocm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_program_lowers_for_an_accelerator(platform, dtype):
    knobs = {"dtype": dtype, "num_pages": 16, "max_num_seqs": 4, "attention": "xla", "matmul": "xla"}
    with tiny_llm(tiny_config(windows=(None, 9)), **knobs) as llm:
        runner = llm.engine.runner
        for shape in runner.shapes:
            text = runner.trace(shape).lower(lowering_platforms=(platform,)).as_text()
            assert "stablehlo.while" in text
            assert "cpu" not in text.lower(), "no call that only a CPU knows"
            assert "quire_" not in text, "no call of the native library"
        pages, cache = np.zeros(8, np.int32), runner._cache
        content = kv_cache.HostPages(cache, 8).load(pages)
        for program, args in (
            (kv_cache.copy_pages, (pages, pages)),
            (kv_cache.poison_pages, (pages,)),
            (kv_cache.read_pages, (pages,)),
            (kv_cache.write_pages, (pages, content)),
        ):
            text = program.trace(cache, *args).lower(lowering_platforms=(platform,)).as_text()
            assert "cpu" not in text.lower()
