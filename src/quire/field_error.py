"""The error of a value that a caller gave: its message is for people, its field and code are for programs."""


class FieldError(ValueError):
    """A value that is refused: which field it came in, a code for the kind of mistake, and a message that says both."""

    def __init__(self, message: str, *, field: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        """The name of the parameter or knob that has to change; None if it is not a single one."""
        self.code = code
        """The kind of mistake: "invalid_value" or "context_length_exceeded"."""
