"""A compile cache that cannot be written: the server starts and serves, says so, and is not misled by what was left."""

import pytest

from tests.server.attack import bystander
from tests.server.process import PYTHON, SMALL, serving

FULL_DISK = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *PYTHON, "-m", "quire", "serve"]
"""No file grows beyond a kilobyte: to whoever writes, a disk that is full."""


def warnings_of(server) -> str:
    return "".join(line for line in server.lines if '"level": "warning"' in line)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_full_disk_for_the_compile_cache_costs_only_time(tiny_folder, tmp_path, offline):
    cache = ("--compile-cache", str(tmp_path / "cache"))
    with serving(tiny_folder, *SMALL, *cache, launcher=FULL_DISK) as server, bystander(server, offline):
        assert "File too large" in warnings_of(server)
        assert server.metric("quire_compiles_after_warmup_total") == 0
    left = [file.stat().st_size for file in (tmp_path / "cache").iterdir()]
    assert left, "nothing was written at all: this test shows nothing"
    # The disk has room again; what was written half is still there.
    with serving(tiny_folder, *SMALL, *cache) as server, bystander(server, offline):
        assert server.get("/health")[0] == 200


@pytest.mark.slow
def test_a_compile_cache_that_cannot_be_a_folder_is_told_of(tiny_folder, tmp_path, offline):
    (tmp_path / "file").write_text("")
    cache = ("--compile-cache", str(tmp_path / "file" / "cache"))
    with serving(tiny_folder, *SMALL, *cache) as server, bystander(server, offline):
        assert "compile_cache cannot be used (Not a directory)" in warnings_of(server)
        assert str(tmp_path) not in "".join(server.lines)
