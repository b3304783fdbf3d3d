"""Parquet for `quire batch`: rows as lines of a batch, and answers as columns beside the rows they belong to.

A row has its prompt in a column `prompt`, text or token ids, or its conversation in `messages`, a list of messages or
JSON. A column `custom_id` names it; other columns are kept, and not looked at. Bytes are text in UTF-8: some programs
write text as such.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.server.batches.lines import Line, line_of

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ModuleNotFoundError:
    raise ValueError("pyarrow is missing: Parquet needs `pip install 'quire-llm[parquet]'`") from None

ROWS = 1024
"""That are in memory at once."""
DIGEST_KEY = b"quire.batch"
"""In the metadata of an output."""
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
        kinds = {name: self.file.schema_arrow.field(name).type for name in self._columns}
        for name, kind in kinds.items():
            if pa.types.is_nested(kind) and _has_bytes(kind):
                raise ValueError(f"INPUT {path}: column {name!r} is {kind}, with bytes inside: cast them to strings")
        if any(_has_bytes(kind) for kind in kinds.values()):
            for _ in self.lines(""):  # a row that is no text is told before a model is loaded
                pass

    def lines(self, batch: str) -> Iterator[Line]:
        """One line for each row; one without a `custom_id` is called by its number."""
        number = 0
        for rows in self.file.iter_batches(batch_size=ROWS, columns=self._columns):
            for row in rows.to_pylist():
                number += 1
                yield line_of(self._text(row, number), number, batch)

    def _text(self, row: dict[str, Any], number: int) -> bytes:
        row = {name: _text_of(value, name, number) for name, value in row.items()}
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


def batch_digest(lines: Iterable[Line]) -> bytes:
    """What tells a batch from any other: its lines, and what else their answers depend on."""
    hashed = hashlib.sha256()
    for line in lines:
        hashed.update(line.digest.encode())
    return hashed.hexdigest().encode()


def answered_batch(path: Path) -> bytes | None:
    """The digest of the batch whose answers are in a file; None if it has no such answers."""
    try:
        return (pq.read_schema(path).metadata or {}).get(DIGEST_KEY)
    except (OSError, pa.ArrowException):
        return None


def num_errors(path: Path) -> int:
    """How many answers in a file are errors."""
    errors = pq.read_table(path, columns=["error"]).column("error")
    return len(errors) - errors.null_count


def check_columns(given: Any) -> None:
    """ValueError if the input has a column that answers need."""
    names = given.file.schema_arrow.names if isinstance(given, ParquetInput) else []
    if taken := [name for name in ANSWER.names if name in names]:
        raise ValueError(f"INPUT has a column {taken[0]!r}, which answers are written to: rename it")


def write_parquet(given: Any, answers: Path, output: Path, digest: bytes) -> None:
    """Write the rows of the input with their answers; of lines in JSON, their `custom_id`. All of it, or nothing.

    The digest is that of the batch, for `answered_batch` to find.
    """
    part = output.with_name(output.name + ".part")
    with answers.open("rb") as source:
        tables = _beside_rows(given.file, source) if isinstance(given, ParquetInput) else _alone(source)
        schema = given.file.schema_arrow if isinstance(given, ParquetInput) else pa.schema({"custom_id": pa.string()})
        for field in ANSWER:
            schema = schema.append(field)
        schema = schema.with_metadata({**(schema.metadata or {}), DIGEST_KEY: digest})
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


def _has_bytes(kind: Any) -> bool:
    """Whether values of an Arrow type are bytes, or hold some."""
    if pa.types.is_dictionary(kind):
        return _has_bytes(kind.value_type)
    if pa.types.is_nested(kind):
        return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))
    are_bytes = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view
    return any(is_one(kind) for is_one in are_bytes)


def _text_of(value: Any, column: str, number: int) -> Any:
    """A value, as text if it is bytes."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"INPUT, row {number}, column {column!r} is bytes that are no UTF-8 ({error.reason}): make it a string"
        ) from None


def _messages(value: Any) -> Any:
    """Messages that are JSON as text; what is none is told by the line's answer."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
