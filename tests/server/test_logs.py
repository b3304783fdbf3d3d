"""The log: every line has the schema, its own time, and nothing of a request but names."""

import errno
import json
import logging
import re
import sys
import time
from pathlib import Path

import msgspec
import pytest

from quire.async_llm.errors import described
from quire.server.logs import JsonLines, LogLine, read_line
from tests.server.process import SMALL, serving

DOCS = Path(__file__).parents[2] / "docs"


def formatted(text: str, severity: int = logging.INFO, exc_info=None, **extra) -> str:
    record = logging.getLogger("quire.test").makeRecord("quire.test", severity, "", 0, text, (), exc_info, extra=extra)
    return JsonLines().format(record)


@pytest.mark.own_server
def test_every_line_of_a_server_is_json_from_the_first_one_on(tiny_folder, tmp_path):
    file = tmp_path / "keys"
    file.write_text("a-key-for-the-tests\n")
    file.chmod(0o644)
    with serving(tiny_folder, *SMALL, "--api-key-file", str(file)) as server:
        lines = [read_line(line) for line in server.lines]
    assert any("can be read by every user" in line.event for line in lines)


def test_an_error_keeps_its_time_and_has_its_type_place_and_errno():
    with pytest.raises(FileNotFoundError) as raised:
        Path("/nonexistent/secret-place").read_text()
    found = read_line(formatted("batch failed", logging.ERROR, **described(raised.value)))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.time)
    assert found.time[:4] == time.strftime("%Y", time.gmtime())
    assert (found.level, found.error, found.errno) == ("error", "FileNotFoundError", errno.errorcode[errno.ENOENT])
    assert found.location
    assert "secret-place" not in json.dumps(msgspec.to_builtins(found))


def test_exc_info_is_described_without_its_message():
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "/secret-place")
    except OSError:
        line = formatted("loop", logging.ERROR, exc_info=sys.exc_info())
    assert read_line(line).errno == "ENOSPC"
    assert "secret-place" not in line


def test_no_extra_field_replaces_the_base_or_breaks_the_schema():
    """Libraries log extra fields of their own, such as uvicorn's `color_message`."""
    line = formatted("hello", at="a.py:1", event="other", level="x", logger="y", time="z", color_message="\x1b[1m")
    assert set(json.loads(line)) == {"time", "level", "logger", "event"}
    assert (read_line(line).event, read_line(line).logger) == ("hello", "quire.test")


def test_the_schema_refuses_what_it_does_not_have():
    good = json.loads(formatted("hello"))
    for wrong in ({"at": "a.py:1"}, {"time": "now"}, {"level": "bad"}, {"pages": -1}, {"event": "request"}):
        with pytest.raises(msgspec.ValidationError):
            read_line(json.dumps(good | wrong))
    good.pop("time")
    with pytest.raises(msgspec.ValidationError):
        read_line(json.dumps(good))


def test_the_documented_table_is_the_schema():
    properties = next(iter(msgspec.json.schema(LogLine)["$defs"].values()))["properties"]
    table = (DOCS / "logs.md").read_text().partition("| field | content |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.fullmatch(r"\| `(\w+)` \| (.+) \|", row) for row in table.splitlines()]
    written = {row[1]: row[2] for row in rows if row}

    def text(shown: dict) -> str:
        return shown.get("description") or next(one["description"] for one in shown["anyOf"] if "description" in one)

    assert written == {name: text(shown) for name, shown in properties.items()}
