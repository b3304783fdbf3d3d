"""The budget of a chat template: what one rendering may do, and how large what it makes may become.

The budget counts work, not seconds, so that a busy machine does not change the result.
"""

import re
from typing import Any

MAX_PROMPT_CHARS = 2**23
"""Longest prompt, and longest string on the way to it: two million tokens of English."""
MAX_WORK = 20_000_000
"""Budget of one rendering, a second or two. A chat of a hundred messages costs a few thousand."""
CALL_WORK = 25
"""What a call costs, and one turn of a loop."""

_CHARS_PER_WORK = 16  # copying 16 characters; with MAX_WORK this also bounds the memory a template can hold
_LOOK_WORK = 5  # at one element
_MAX_NUMBER_BITS = 256
_MAX_NUMBER_ARGUMENT = 100_000
_MAX_EXPONENT = 16
_MAX_FORMAT_FIELDS = 32
# A width or precision of five digits, `%*d`, or a format inside a format: a short text that makes a long one.
_HUGE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")


class ChatTemplateError(ValueError):
    """The model's chat template is broken, was refused, or refused the messages."""


class Meter:
    """The budget of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, work: int) -> None:
        """Take work off the budget; ChatTemplateError if there is not enough left."""
        self._left -= work
        if self._left < 0:
            raise ChatTemplateError(f"chat template does too much work: more than {MAX_WORK} steps")

    def made(self, value: Any) -> Any:
        """Pay for a value by its own length, and return it."""
        if isinstance(value, str):
            check_size(len(value))
            self.spend(1 + len(value) // _CHARS_PER_WORK)
        elif isinstance(value, (list, tuple, dict)):
            self.spend(1 + len(value))
        elif isinstance(value, int) and value.bit_length() > _MAX_NUMBER_BITS:
            raise ChatTemplateError(f"chat template makes a number of {value.bit_length()} bits")
        return value

    def read(self, value: Any) -> Any:
        """Pay for a value and all it holds, and return it.

        A list that holds another twice pays for it twice, as printing it would: forty doublings exhaust the budget,
        not the memory.
        """
        pending = [value]
        while pending:
            item = self.made(pending.pop())
            self.spend(_LOOK_WORK)
            if isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, (list, tuple)):
                pending.extend(item)
        return value


def check_size(num_chars: int) -> None:
    """Raise ChatTemplateError for a text of more characters than any prompt has."""
    if num_chars > MAX_PROMPT_CHARS:
        raise ChatTemplateError(f"chat template makes {num_chars} characters, at most {MAX_PROMPT_CHARS} are allowed")


def check_replace(text: str, old: str, new: str) -> None:
    """Raise ChatTemplateError if replacing `old` by `new` makes too long a text."""
    check_size(len(text) + text.count(old) * len(new))


def check_format(text: str) -> None:
    """Raise ChatTemplateError for a format that makes a long text of short values."""
    if _HUGE_FORMAT.search(text) or text.count("{") + text.count("%") > _MAX_FORMAT_FIELDS:
        raise ChatTemplateError(f"chat template uses a format that could grow without bound: {text[:40]!r}")


def check_number_argument(value: Any) -> None:
    """Raise ChatTemplateError for a number that is too large to be an argument."""
    if isinstance(value, int) and abs(value) > _MAX_NUMBER_ARGUMENT:
        raise ChatTemplateError(f"chat template uses {value.bit_length()}-bit number as an argument, too large")


def check_power(base: Any, exponent: Any) -> None:
    """Raise ChatTemplateError for a power of large numbers."""
    if not (abs(base) <= _MAX_NUMBER_ARGUMENT and abs(exponent) <= _MAX_EXPONENT):
        raise ChatTemplateError("chat template makes too large a power")
