"""Calls of tools in a model's text, as the templates of the supported models have them written.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Qwen 2.5 and 3, Hermes
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama    {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>; the whole text
    json     {"name": ..., "arguments": {...}}; the whole text, because a grammar forced it
    harmony  messages to=functions.NAME, which `quire.text.reasoning` reads              gpt-oss

The text is a stranger's: it is searched for fixed marks and read as JSON, nothing else. What looks like a call and is
none stays text.
"""

import json
from collections.abc import Collection

from quire.text.reasoning import MAX_CALLS, Part, is_harmony, merged

OPENINGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
CLOSING = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


def tool_style(template: str) -> str | None:
    """How a chat template wants calls written; None if it takes no tools."""
    if "tools" not in template:
        return None
    if is_harmony(template):
        return "harmony"
    for style, mark in OPENINGS.items():
        if mark in template:
            return style
    return "llama" if '"parameters"' in template or "ipython" in template else None


class ToolParser:
    """Separates the text of a sequence, as it is generated, into content and calls of functions, in order.

    A call of what is not among `functions` stays text. Every character is looked at a bounded number of times, however
    long a call stays open.
    """

    def __init__(self, style: str, functions: Collection[str]) -> None:
        self._style = style
        self._functions = frozenset(functions)
        self._held: list[str] = []
        """What follows the mark of a call that may be under way."""
        self._tail = ""
        """The end of the text that may be the beginning of a mark."""
        self._is_open = style == "json"
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Take more text; returns the content that is certain, and the calls that are complete."""
        if self._style in OPENINGS:
            return self._feed_marked(text)
        if self._style == "text":
            return _content(text)
        self._held.append(text)
        if not self._is_open:
            self._tail += text if self._tail else text.lstrip()
            if self._tail.startswith(("{", PYTHON_TAG)):
                self._is_open, self._tail = True, ""
            elif not PYTHON_TAG.startswith(self._tail):
                self._style, self._tail = "text", ""
                return _content(self._take_held())
        return []

    def finish(self) -> list[Part]:
        """End the text; returns what was held back, as content or as calls."""
        held = self._take_held()
        if self._style not in OPENINGS:
            calls = self._read(held.strip().removeprefix(PYTHON_TAG)) if self._is_open else []
            return calls or _content(held)
        calls = self._read(held) if self._is_open and self._style == "mistral" else []
        return calls or _content((OPENINGS[self._style] if self._is_open else "") + held + self._tail)

    def _feed_marked(self, text: str) -> list[Part]:
        """Take more text of a style in which calls stand between two marks, or behind one."""
        text, at = self._tail + text, 0
        parts: list[Part] = []
        while mark := self._next_mark:
            found = text.find(mark, at)
            if found < 0:
                break
            part, at = text[at:found], found + len(mark)
            if self._is_open:
                body = self._take_held() + part
                parts += self._read(body) or _content(OPENINGS[self._style] + body + mark)
            else:
                parts += _content(part)
            self._is_open = not self._is_open
        most = min(len(mark) - 1, len(text) - at)
        kept = next((length for length in range(most, 0, -1) if text.endswith(mark[:length])), 0)
        end = len(text) - kept
        if self._is_open:
            self._held.append(text[at:end])
        else:
            parts += _content(text[at:end])
        self._tail = text[end:]
        return merged(parts)

    @property
    def _next_mark(self) -> str:
        """The mark that opens the next call, or closes the one that is open; nothing closes Mistral's."""
        if not self._is_open:
            return OPENINGS[self._style]
        return CLOSING if self._style == "hermes" else ""

    def _take_held(self) -> str:
        held = "".join(self._held)
        self._held.clear()
        return held

    def _read(self, text: str) -> list[Part]:
        """The calls that a JSON text holds; none if it is anything else, or cannot be sent as UTF-8."""
        calls = []
        try:
            value = json.loads(text)
            for entry in value if isinstance(value, list) else [value]:
                arguments = entry.get("arguments", entry.get("parameters")) if isinstance(entry, dict) else None
                if arguments is None or not isinstance(name := entry.get("name"), str) or name not in self._functions:
                    return []
                shown = arguments
                if not isinstance(arguments, str):
                    shown = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                shown.encode()  # raises for half of a surrogate pair
                calls.append(Part("call", shown, name))
        except (ValueError, RecursionError):
            return []
        if self.num_calls + len(calls) > MAX_CALLS:
            return []
        self.num_calls += len(calls)
        return calls


def _content(text: str) -> list[Part]:
    return [Part("content", text)] if text else []
