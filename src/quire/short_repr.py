"""One or two lines for what a person prints: what differs from the default, and the beginning of what is long."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CHARS = 60
"""Of a text."""
MAX_NUMBERS, MAX_OTHERS = 8, 1
"""Entries of a list of numbers, and of one of anything else."""


def short_repr(self: Any) -> str:
    """A dataclass or a NamedTuple by its fields, without those that have their default. For use as `__repr__`."""
    fields = ", ".join(f"{name}={_short(getattr(self, name))}" for name in _changed(self))
    return f"{type(self).__name__}({fields})"


def _changed(value: Any) -> list[str]:
    """The names of fields that have no default, or another value."""
    if not dataclasses.is_dataclass(value):
        defaults = value._field_defaults
        return [name for name in value._fields if name not in defaults or getattr(value, name) != defaults[name]]
    changed = []
    for field in dataclasses.fields(value):
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default  # pyright: ignore
        if field.repr and (default is dataclasses.MISSING or getattr(value, field.name) != default):
            changed.append(field.name)
    return changed


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_CHARS else f"{value[:MAX_CHARS]!r}... {len(value) - MAX_CHARS} more"
    if isinstance(value, Mapping):
        entries = [f"{_short(key)}: {_short(entry)}" for key, entry in list(value.items())[:MAX_NUMBERS]]
        return "{" + _joined(entries, len(value)) + "}"
    if isinstance(value, list) or type(value) is tuple:
        return _short_list(value)
    return repr(value)


def _short_list(values: Sequence[Any]) -> str:
    left, right = "()" if isinstance(values, tuple) else "[]"
    is_plain = not values or isinstance(values[0], int | float | str)
    if not is_plain and len(values) > 1 and all(value == values[0] for value in values):
        return f"{left}{_short(values[0])}{',' if left == '(' else ''}{right} * {len(values)}"
    shown = [_short(value) for value in values[: MAX_NUMBERS if is_plain else MAX_OTHERS]]
    comma = "," if left == "(" and len(values) == 1 else ""
    return f"{left}{_joined(shown, len(values))}{comma}{right}"


def _joined(shown: list[str], count: int) -> str:
    return ", ".join([*shown, f"... {count - len(shown)} more"] if count > len(shown) else shown)
