"""Weights in int8 and int4, as the real TPU compiler multiplies with them: never as a dequantised copy in memory."""

import pytest

from tests.compiled.quantized import CASES, INNER, OUTER
from tests.compiled.topology import reports_of
from tests.effort import nightly

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("topology", ["v5e:1x1", nightly("v6e:1x1")])
def test_weights_are_read_as_they_are_kept(topology):
    reports = reports_of("quantized", topology)
    assert [report["case"] for report in reports] == CASES
    for report in reports:
        case = report["case"]
        is_int4 = case["quantize"] == "int4-weights" and case["contracted_axis"] == 0
        weights = INNER * OUTER // 2 + INNER // 128 * OUTER * 4 if is_int4 else INNER * OUTER + OUTER * 4
        activations = case["num_tokens"] * INNER * 2
        assert weights + activations <= report["arguments"] <= 1.01 * weights + activations, report
        assert report["temporaries"] < 1e6, report
        assert not report["copies"], report
