"""The form that a client wants generated text to have. `compiler.py` turns it into masks over tokens."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from quire.field_error import FieldError, refuse_unknown_fields
from quire.short_repr import short_repr

MAX_LEN = 65_536
"""Characters of a schema, an expression, a grammar or all choices together."""
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class Structured:
    """A form that the generated text must have, from its first character to its last. Exactly one is given."""

    json_schema: Mapping[str, Any] | str | type | None = None
    """JSON that this JSON Schema allows, properties in the schema's order; or a Pydantic model. Kept as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression for the whole text, as Rust writes them: no look-around, no back references."""
    choice: SequenceOf[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in llguidance's variant of Lark, whose rule `start` is the whole text."""
    compact: bool | None = None
    """No whitespace between the parts of JSON. None: so with `json_schema`, and not with `json_object`, where up to 32
    blanks may stand between two parts."""
    name: str = field(default="structured", compare=False, repr=False)
    """The field that errors name, if the form was read from one of another name."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            message = f"{self.name} must have exactly one of {', '.join(KINDS)}; it has {' and '.join(given) or 'none'}"
            raise FieldError(message, field=self.name)
        value, where = getattr(self, given[0]), f"{self.name}.{given[0]}"
        try:
            value = _checked(given[0], where, value)
        except ValueError as error:
            raise FieldError(str(error), field=self.name) from None
        object.__setattr__(self, given[0], value)
        object.__setattr__(self, "compact", self._compact(given[0]))

    def _compact(self, kind: str) -> bool | None:
        """Whether JSON is compact; None of a form that is no JSON."""
        if self.compact is not None and not isinstance(self.compact, bool):
            raise FieldError(f"{self.name}.compact={self.compact!r} must be True, False or None", field=self.name)
        if kind in ("json_schema", "json_object"):
            return kind == "json_schema" if self.compact is None else self.compact
        if self.compact is not None:
            raise FieldError(f"{self.name}.compact is for json_schema and json_object, not for {kind}", field=self.name)
        return None

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))


def _checked(kind: str, where: str, value: Any) -> Any:
    """A form's value as it is kept: immutable, and nothing but text; ValueError otherwise."""
    if kind == "json_object":
        if value is not True:
            raise ValueError(f"{where}={value!r} must be True or False")
        return value
    if kind == "json_schema":
        value = text = _schema_text(where, value)
    elif kind == "choice":
        value = _choices(where, value)
        text = "\n".join(value)
    elif isinstance(value, str):
        text = value
    else:
        raise ValueError(f"{where} must be a string, got {type(value).__name__}")
    _check_text(where, text)
    return value


def _schema_text(where: str, schema: Any) -> str:
    """The schema as JSON, and nothing but JSON: it becomes a part of a larger text."""
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()  # a Pydantic model
    if not isinstance(schema, str | Mapping):
        raise ValueError(f"{where} must be an object, or one as JSON text, got {type(schema).__name__}")
    if isinstance(schema, str):
        _check_text(where, schema)
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=dict)
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, it is {text[:20]}")
    if "x-guidance" in value:
        # Options of llguidance's: with some, what is generated is no JSON.
        raise ValueError(f"{where} must have no 'x-guidance'; `compact` says whether there is whitespace")
    return text


def _choices(where: str, choices: Any) -> tuple[str, ...]:
    if not isinstance(choices, SequenceOf) or isinstance(choices, str | bytes) or not choices:
        raise ValueError(f"{where} must be a list of at least one string")
    for i, one in enumerate(choices):
        if not isinstance(one, str):
            raise ValueError(f"{where}[{i}] must be a string, got {type(one).__name__}")
    return tuple(choices)


def _check_text(where: str, text: str) -> None:
    if len(text) > MAX_LEN:
        raise ValueError(f"{where} has {len(text)} characters, at most {MAX_LEN} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: character {error.start} is a lone surrogate, which is no Unicode text") from None
