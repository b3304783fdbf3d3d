"""Reads the small files of a model folder: text and JSON, of bounded size. Errors name the file, not where it is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 16 << 20


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Mapping[str, Any]:
    """The object in a JSON file; ValueError if it is none, too large, or there is no such file."""
    return _read(path, max_bytes, dict, "object")


def read_json_list(path: Path) -> list[Any]:
    """The list in a JSON file; ValueError if it is none, too large, or there is no such file."""
    return _read(path, MAX_JSON_BYTES, list, "list")


def _read[T](path: Path, max_bytes: int, kind: type[T], called: str) -> T:
    text = read_text(path, max_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits are plain ValueErrors
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{path.name} must hold a JSON {called}, got {type(value).__name__}")
    return value


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a file of a model folder; ValueError if it is no UTF-8, too large, or there is no such file."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes} bytes, which is no sane size for it")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8: {error.reason} at byte {error.start}") from None
