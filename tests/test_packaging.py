"""What PyPI shows and an installer reads: one version, links that work without the repository, floors that agree."""

import re
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
    """README.md after the substitutions that the build makes."""
    text = (ROOT / "README.md").read_text()
    for rule in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    return text


def test_the_readme_on_pypi_has_absolute_links_only():
    links = LINK.findall(readme_on_pypi())
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert not re.search(r"<(?:img|a)\s[^>]*(?:src|href)=[\"'](?!https://|#)", readme_on_pypi())


def test_pictures_of_the_readme_are_fetched_raw():
    rules = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = "[![a](docs/a.png)](docs/a.md) ![b](https://b.example/b.png) [c](#c)"
    for rule in rules:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    source = PYPROJECT["project"]["urls"]["Source"]
    kept = "![b](https://b.example/b.png) [c](#c)"
    assert text == f"[![a]({source}/raw/main/docs/a.png)]({source}/blob/main/docs/a.md) {kept}"


def test_links_of_the_readme_lead_somewhere():
    for link in LINK.findall((ROOT / "README.md").read_text()):
        if not re.match(r"[a-z]+:|#", link):
            assert (ROOT / link.partition("#")[0]).exists(), link


def test_one_repository_address():
    source = PYPROJECT["project"]["urls"]["Source"]
    assert all(url.startswith(source) for url in PYPROJECT["project"]["urls"].values())
    found = re.findall(r"https://github\.[a-z]+/[\w-]+/quire\b", (ROOT / "pyproject.toml").read_text())
    assert set(found) == {source}


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
    wheel = tmp_path / f"quire-1.0-py3-none-{tags}.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("quire/device/_native.so", symbols + b"\0")
        content.writestr("quire-1.0.dist-info/METADATA", "Name: quire")
    done = subprocess.run(
        [sys.executable, ROOT / ".ci/wheel-check", wheel], capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(says), done.stderr
    assert says in done.stderr
