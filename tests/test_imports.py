"""What importing costs and needs. The layers themselves are contracts in pyproject.toml, checked by `lint-imports`."""

import subprocess
import sys

import pytest

WITHOUT_JAX = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise ImportError("jax is not installed here")
sys.meta_path.insert(0, Refuse())
import quire, quire.core.scheduler, quire.core.pages, quire.core.plan, quire.routing
from quire import SamplingParams, EngineConfig
SamplingParams(); EngineConfig()
assert "jax" not in sys.modules and "tokenizers" not in sys.modules
try:
    quire.LLM
except ImportError:
    print("ok")
"""


def test_core_imports_where_jax_is_not_installed():
    out = subprocess.run([sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, check=False)
    assert out.stdout == "ok\n", out.stderr


def test_import_quire_is_lazy():
    code = "import sys, quire; print(sorted({'jax', 'numpy', 'gguf', 'tokenizers'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_every_public_name_is_there():
    import quire

    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = quire.nonsense
