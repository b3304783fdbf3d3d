"""A model's chat template: it turns the messages of a conversation into a prompt. Knows nothing of tokens."""

import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from quire.field_error import FieldError
from quire.text.template_budget import ChatTemplateError
from quire.text.template_sandbox import TemplateSandbox

FILENAME = "<template>"
"""File name that Jinja gives to a template in a traceback."""
MAX_TEMPLATE_CHARS = 2**17
"""The largest known template has about 2**15 characters."""


class ChatTemplate:
    """A compiled chat template. Threads may share it; they take turns."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, name: str = "chat template"):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"{name} has {len(source)} characters, at most {MAX_TEMPLATE_CHARS}")
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._sandbox = TemplateSandbox()
        self._turn = threading.Lock()  # the sandbox holds the budget of the one rendering under way
        try:
            self._template = self._sandbox.from_string(source)
        except Exception as error:  # a hostile template also finds RecursionError, MemoryError, ...
            raise ChatTemplateError(f"{name} does not compile: {_describe(error)}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **template_kwargs: Any
    ) -> str:
        """The prompt for `messages`. `template_kwargs` are variables for the template, such as `tools`."""
        for name in self._special_tokens:
            if name in template_kwargs:
                raise ValueError(f"{name} is the model's own and cannot be set for its chat template")
        variables = {
            "tools": None,  # templates ask `tools is not none`, which an undefined variable would pass
            "documents": None,
            **template_kwargs,
            **self._special_tokens,
            "messages": _checked_messages(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._turn:
            self._sandbox.refill()
            try:
                return self._sandbox.concat(self._template.generate(variables))
            except ChatTemplateError:
                raise
            except Exception as error:  # the template is a stranger's program: whatever it raises is its error
                raise ChatTemplateError(f"{self._name} failed: {_describe(error)}") from error


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:
        raise FieldError("messages is empty; a chat needs at least one message", field="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            got = type(message).__name__
            raise FieldError(f"messages[{i}] must be an object with role and content, got {got}", field="messages")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                got = type(message[field]).__name__ if field in message else "nothing"
                raise FieldError(f"messages[{i}].{field} must be a string, got {got}", field="messages")
    return [dict(message) for message in messages]


def _describe(error: Exception) -> str:
    line = _line_of(error)
    return f"{'' if line is None else f'line {line}: '}{type(error).__name__}: {error}"[:500]


def _line_of(error: Exception) -> int | None:
    """Return the line of the template that an error comes from; None if it comes from none."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    frames = traceback.walk_tb(error.__traceback__)  # Jinja has put the template's own lines into it
    lines = [line for frame, line in frames if frame.f_code.co_filename == FILENAME]
    return lines[-1] if lines else None
