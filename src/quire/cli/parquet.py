"""Parquet for `quire batch`: rows as lines of a batch, and answers as columns beside the rows they belong to.

A row has its prompt in a column `prompt`, text or token ids, or its conversation in `messages`, a list of messages or
JSON. A column `custom_id` names it; other columns are kept, and not looked at.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.server.batches.lines import Line, line_of

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:
    raise ValueError("pyarrow is missing: Parquet needs `pip install 'quire[parquet]'`") from None

ROWS = 1024
"""That are in memory at once."""
ENDPOINTS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
ANSWER = pa.schema(
    {
        "generated_text": pa.string(),
        "finish_reason": pa.string(),
        "prompt_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "error": pa.string(),
        "response": pa.string(),
    }
)
"""What is added to a row. The text is that of the first choice; `response` has all of the response, as JSON."""


class ParquetInput:
    """The rows of a Parquet file as lines."""

    def __init__(self, path: Path) -> None:
        try:
            self.file = pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(f"INPUT {path} is no Parquet file: {error}") from None
        self.num_lines = self.file.metadata.num_rows
        names = self.file.schema_arrow.names
        columns = [name for name in ENDPOINTS if name in names]
        if len(columns) != 1:
            found = ", ".join(names)
            raise ValueError(f"INPUT {path} needs a column 'prompt' or one 'messages', and not both: it has {found}")
        self._column = columns[0]
        self._columns = [*columns, *(["custom_id"] if "custom_id" in names else [])]

    def lines(self, batch: str) -> Iterator[Line]:
        """One line for each row; one without a `custom_id` is called by its number."""
        number = 0
        for rows in self.file.iter_batches(batch_size=ROWS, columns=self._columns):
            for row in rows.to_pylist():
                number += 1
                yield line_of(self._text(row, number), number, batch)

    def _text(self, row: dict[str, Any], number: int) -> bytes:
        value = row[self._column]
        if self._column == "messages":
            value = _messages(value)
        custom_id = row.get("custom_id")
        return msgspec.json.encode(
            {
                "custom_id": f"row-{number}" if custom_id is None else str(custom_id),
                "method": "POST",
                "url": ENDPOINTS[self._column],
                "body": {self._column: value},
            }
        )


def num_rows(path: Path) -> int | None:
    """The rows of a file; None if it is no Parquet."""
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, pa.ArrowException):
        return None


def check_columns(given: Any) -> None:
    """ValueError if the input has a column that answers need."""
    names = given.file.schema_arrow.names if isinstance(given, ParquetInput) else []
    if taken := [name for name in ANSWER.names if name in names]:
        raise ValueError(f"INPUT has a column {taken[0]!r}, which answers are written to: rename it")


def write_parquet(given: Any, answers: Path, output: Path) -> None:
    """Write the rows of the input with their answers; of lines in JSON, their `custom_id`. All of it, or nothing."""
    part = output.with_name(output.name + ".part")
    with answers.open("rb") as source:
        tables = _beside_rows(given.file, source) if isinstance(given, ParquetInput) else _alone(source)
        schema = given.file.schema_arrow if isinstance(given, ParquetInput) else pa.schema({"custom_id": pa.string()})
        for field in ANSWER:
            schema = schema.append(field)
        with pq.ParquetWriter(part, schema) as writer:
            for table in tables:
                writer.write_table(table)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, output)


def _beside_rows(file: Any, answers: Any) -> Iterator[Any]:
    for rows in file.iter_batches(batch_size=ROWS):
        table = pa.Table.from_batches([rows], schema=file.schema_arrow)
        added = pa.Table.from_pylist([_columns(answers.readline()) for _ in range(len(rows))], schema=ANSWER)
        for name in ANSWER.names:
            table = table.append_column(ANSWER.field(name), added.column(name))
        yield table


def _alone(answers: Any) -> Iterator[Any]:
    schema = pa.schema([pa.field("custom_id", pa.string()), *ANSWER])
    while lines := [line for _ in range(ROWS) if (line := answers.readline())]:
        named = [{"custom_id": json.loads(line)["custom_id"]} | _columns(line) for line in lines]
        yield pa.Table.from_pylist(named, schema=schema)


def _columns(line: bytes) -> dict[str, Any]:
    """What an answer adds to its row."""
    answer = json.loads(line)
    if answer["error"] is not None:
        return {"error": answer["error"]["message"]}
    body = answer["response"]["body"]
    choice = body.get("choices", [{}])[0]
    return {
        "generated_text": choice.get("text", choice.get("message", {}).get("content")),
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": body["usage"]["prompt_tokens"],
        "completion_tokens": body["usage"].get("completion_tokens"),
        "response": json.dumps(body, ensure_ascii=False),
    }


def _messages(value: Any) -> Any:
    """Messages that are JSON as text; what is none is told by the line's answer."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
