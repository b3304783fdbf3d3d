"""What PyPI shows and an installer reads: one version, one name, no link into the repository, floors that agree."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import quire

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")


def readme_on_pypi() -> str:
    """README.md as PyPI shows it."""
    return without_links((ROOT / "README.md").read_text())


def without_links(text: str) -> str:
    """Markdown after the substitutions that the build makes."""
    for rule in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_readme_on_pypi_links_to_no_file_of_the_repository():
    links = LINK.findall(readme_on_pypi())
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert not re.search(r"<(?:img|a)\s[^>]*(?:src|href)=[\"'](?!https://|#)", readme_on_pypi())


def test_a_link_to_a_file_becomes_its_text():
    text = "[![a](docs/a.png)](docs/a.md) ![b](https://b.example/b.png) [c](#c) `x[0]` [d](docs/d.md#e)"
    assert without_links(text) == "a ![b](https://b.example/b.png) [c](#c) `x[0]` d"


def test_links_of_the_readme_lead_somewhere():
    for link in LINK.findall((ROOT / "README.md").read_text()):
        if not re.match(r"[a-z]+:|#", link):
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_what_the_sdist_leaves_out_is_anchored():
    """A pattern without a leading slash matches at any depth: `bench` would leave out src/quire/bench, too."""
    assert [path for path in PYPROJECT["tool"]["scikit-build"]["sdist"]["exclude"] if not path.startswith("/")] == []


def test_every_command_to_install_an_extra_names_the_distribution():
    """On PyPI `quire` is another project."""
    assert PYPROJECT["project"]["name"] == "quire-llm"
    folders = ("src", "docs", "examples", "deploy")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".yaml"}
    ]
    for path in (*files, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "pyproject.toml"):
        text = path.read_text()
        assert not re.search(r"\bquire\[[a-z,]+\]|\binstall (?!-)[^`\n]*\bquire\b(?!-llm)", text), path


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("", ""),
        ('\n[project.urls]\nSource = "https://host.example/owner/quire"\n', ""),
        ('\n[project.urls]\nIssues = "https://host.example/other/issues"\n', "project.urls.Issues"),
    ],
    ids=["none", "here", "elsewhere"],
)
def test_a_release_names_no_other_repository(tmp_path, urls, says):
    for name in (".ci/release-check", "src/quire/__init__.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write(urls)
    (tmp_path / "CHANGELOG.md").write_text(f"## {quire.__version__} (2030-01-01)\n")
    command = [
        sys.executable,
        tmp_path / ".ci/release-check",
        f"v{quire.__version__}",
        "https://host.example/owner/quire",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == bool(says), done.stderr
    assert says in done.stderr


def test_one_version():
    assert "version" in PYPROJECT["project"]["dynamic"]
    assert PYPROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"] == "src/quire/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?", quire.__version__)


def test_the_lock_of_floors_is_of_these_floors():
    text = (ROOT / "requirements.floors.lock").read_text()
    pins = dict(re.findall(r"^([\w-]+)(?:\[[\w,]+\])?==([\d.]+)", text, re.MULTILINE))
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert set(extras["structured"]) <= set(extras["server"]), "a server constrains output, too"
    for need in (*PYPROJECT["project"]["dependencies"], *extras["server"], *extras["otel"]):
        name, _, floor = need.partition(">=")
        assert f"{pins[name]}.0.0".startswith(f"{floor}.0" if floor.count(".") < 2 else floor), need


@pytest.mark.parametrize(
    ("tags", "symbols", "says"),
    [
        ("manylinux_2_39_x86_64", b"\0GLIBC_2.39\0GLIBCXX_3.4.33", ""),
        ("manylinux_2_39_x86_64", b"\0GLIBCXX_3.4.34", "needs GLIBCXX_3.4.34, and its tag promises GLIBCXX_3.4.33"),
        ("manylinux_2_36_x86_64", b"\0GLIBCXX_3.4.31", "needs GLIBCXX_3.4.31, and its tag promises GLIBCXX_3.4.30"),
        ("manylinux_2_27_x86_64.manylinux_2_28_x86_64", b"\0GLIBC_2.27\0GLIBCXX_3.4.24", ""),
        (
            "manylinux_2_27_x86_64.manylinux_2_28_x86_64",
            b"\0GLIBC_2.28",
            "needs GLIBC_2.28, and its tag promises GLIBC_2.27",
        ),
        ("linux_x86_64", b"", "run auditwheel repair"),
    ],
)
def test_a_wheel_needs_no_more_than_its_tag_promises(tmp_path, tags, symbols, says):
    """Whatever system it was built on: the newest are those of developers."""
    wheel = tmp_path / f"quire_llm-1.0-py3-none-{tags}.whl"
    write_wheel(wheel, symbols)
    done = wheel_check(wheel)
    assert done.returncode == bool(says), done.stderr
    assert says in done.stderr


def test_a_wheel_has_every_file(tmp_path):
    wheel = tmp_path / "quire_llm-1.0-py3-none-manylinux_2_28_x86_64.whl"
    write_wheel(wheel, b"", without="quire/bench/steps.py")
    done = wheel_check(wheel)
    assert done.returncode == 1
    assert done.stderr.endswith("not in it: quire/bench/steps.py\n")


def write_wheel(path: Path, symbols: bytes, without: str = "") -> None:
    """Write a wheel of empty files whose library names these symbols."""
    files = (file for file in (ROOT / "src/quire").rglob("*") if file.is_file() and file.suffix not in {".pyc", ".so"})
    names = [file.relative_to(ROOT / "src").as_posix() for file in files]
    with zipfile.ZipFile(path, "w") as content:
        content.writestr("quire/device/_native.so", symbols + b"\0")
        content.writestr("quire_llm-1.0.dist-info/METADATA", "Name: quire-llm")
        for name in names:
            if name != without:
                content.writestr(name, "")


def wheel_check(path: Path) -> subprocess.CompletedProcess[str]:
    """Run `.ci/wheel-check` on one wheel."""
    return subprocess.run([sys.executable, ROOT / ".ci/wheel-check", path], capture_output=True, text=True, check=False)
