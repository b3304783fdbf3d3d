"""The pages that lead through a change name files and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = re.findall(r"\((docs/add[\w-]+\.md)\)", (ROOT / "CONTRIBUTING.md").read_text())
FILE = re.compile(r"`((?:src|tests|native|bench|docs)/[\w/.-]+\.\w+)(?:::(\w+))?`|\]\((\.\./[^)#]+|[\w-]+\.md)[^)]*\)")
LATER = {"src/quire/device/attention/NAME.py"}
"""Files that the reader of a page makes."""


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_test_that_a_page_names_exists(page):
    found = FILE.findall((ROOT / page).read_text())
    assert len(found) > 5
    for path, test, link in found:
        full = ROOT / path if path else ROOT / "docs" / link
        assert path in LATER or full.exists(), path or link
        assert not test or test in functions(full), f"{path}::{test}"


def test_every_page_of_this_kind_is_linked_from_contributing_and_the_index():
    pages = {path.name for path in (ROOT / "docs").glob("add*.md")}
    index = (ROOT / "docs/README.md").read_text()
    assert pages == {Path(page).name for page in PAGES}
    assert {page for page in pages if f"]({page})" in index} == pages
