"""The table in docs/security.md names tests that exist, and a test for every attack."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "security.md").read_text()


def test_every_attack_has_a_row_and_every_row_a_test():
    rows = [line.split("|")[1:-1] for line in TABLE.partition("## Attacks")[2].splitlines() if line.startswith("|")]
    named = {row[0].strip(): row[2] for row in rows}
    for number in range(1, 25):
        assert "`tests/" in named[f"T{number}"] or number == 7, number
    for row in rows[2:]:
        assert "`" in row[2], row


def test_every_test_that_is_named_exists():
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    assert len(names) > 40
    for path, name in names:
        functions = [
            node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, f"{path}::{name}"


def test_the_tests_run_without_assertions_too():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^without_assertions\(\) \{ \$bin/python -O -m pytest ", script, re.MULTILINE)
    command = "\n".join(re.findall(r"^(?:once_more )?without_assertions .*", script, re.MULTILINE))
    for path in ("tests/test_chat_template.py", "tests/test_hostile_files.py", "tests/server/test_security_*.py"):
        assert path in command
