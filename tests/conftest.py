"""The strict runtime every test runs in, and what tests share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


settings.register_profile("thorough")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model: SmolLM2-135M-Instruct, fetched once by `.ci/model`."""
    lines = subprocess.run(
        ["bash", str(ROOT / ".ci" / "model")], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    return Path(lines[-1])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=60.0, help="how long the streams of test_soak run")


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    return request.config.getoption("--soak-seconds")
