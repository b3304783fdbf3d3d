"""The Pallas kernel, as the real TPU compiler takes it: head sizes, types and batches; the pool stays in place."""

import json

import pytest

from tests.compiled.kernel import cases_of
from tests.compiled.topology import reports_of
from tests.effort import nightly

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("topology", ["v5e:1x1", nightly("v6e:1x1"), nightly("tpu7x:2x2x1")])
def test_it_compiles_and_copies_no_pool(topology):
    reports = reports_of("kernel", topology)
    assert [report["case"] for report in reports] == json.loads(json.dumps(cases_of(topology)))
    for report in reports:
        assert report["kernel"], report
        assert report["aliased"] == (2 if report["case"]["dtype"] == "int8" else 1), report
        assert not report["copies"], report
        assert report["temporaries"] < 16e6, report
