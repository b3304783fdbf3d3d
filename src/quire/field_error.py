"""The error of a value that a caller gave: its message is for people, its field and code are for programs."""

import difflib
import functools
from dataclasses import fields
from typing import Any


class FieldError(ValueError):
    """A value that is refused: which field it came in, a code for the kind of mistake, and a message that says both."""

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        """The name of the parameter or knob that has to change; None if it is not a single one."""
        self.code = code
        """The kind of mistake: "invalid_value" or "context_length_exceeded"."""


def refuse_unknown_fields[T](cls: type[T]) -> type[T]:
    """Decorates a dataclass: a field that it does not have is a FieldError that names the nearest one it has."""
    create = cls.__init__

    @functools.wraps(create)
    def checked(self: T, *args: Any, **given: Any) -> None:
        try:
            create(self, *args, **given)
        except TypeError:
            names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType]
            for name in given:
                if name not in names:
                    raise FieldError(f"{cls.__name__} has no {name}; {_nearest(name, names)}", field=name) from None
            raise

    cls.__init__ = checked
    return cls


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
