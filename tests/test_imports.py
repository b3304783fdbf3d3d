"""The columns stay apart: read from the source, and tried in a process where jax cannot be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"


def imports(path: Path) -> set[str]:
    """Every module a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(part: str) -> list[Path]:
    found = sorted((SRC / "quire" / part).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize(
    "path",
    [*files("core"), SRC / "quire/structured/form.py", SRC / "quire/config.py", SRC / "quire/field_error.py"],
    ids=lambda p: p.stem,
)
def test_the_host_column_knows_no_jax_and_no_device(path):
    bad = [n for n in imports(path) if n.split(".")[0] in ("jax", "jaxlib") or n.startswith("quire.device")]
    assert not bad


@pytest.mark.parametrize("path", files("device"), ids=lambda p: f"{p.parent.name}.{p.stem}")
def test_the_device_column_knows_no_request_and_no_policy(path):
    allowed = ("quire.device", "quire.config")
    bad = [n for n in imports(path) if n.split(".")[0] == "quire" and not n.startswith(allowed)]
    assert not bad


def test_only_the_bridge_and_what_stands_above_it_sees_both():
    both = {
        path.relative_to(SRC / "quire").as_posix()
        for path in (SRC / "quire").rglob("*.py")
        if any(n.startswith("quire.core") for n in imports(path))
        and any(n.startswith("quire.device") for n in imports(path))
    }
    assert both <= {"engine/packer.py", "engine/engine.py", "llm.py", "testing.py"}


def test_no_relative_imports_hide_from_the_rule():
    for path in (SRC / "quire").rglob("*.py"):
        assert not [n for n in imports(path) if n.startswith(".")], path


WITHOUT_JAX = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise ImportError("jax is not installed here")
sys.meta_path.insert(0, Refuse())
import quire, quire.core.scheduler, quire.core.pages, quire.core.plan
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
