"""Calls of tools in a model's text, as the templates of the supported models have them written.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Qwen 2.5 and 3, Hermes
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama    {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>; the whole answer
    json     {"name": ..., "arguments": {...}}; the whole answer, because a grammar forced it

The text is a stranger's: it is searched for fixed marks and read as JSON, nothing else. What looks like a call and is
none stays text.
"""

import json
from typing import Any

OPENINGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}
CLOSING = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MAX_CALLS = 128


def tool_style(template: str) -> str | None:
    """How a chat template wants calls written; None if it takes no tools."""
    if "tools" not in template:
        return None
    for style, mark in OPENINGS.items():
        if mark in template:
            return style
    return "llama" if '"parameters"' in template or "ipython" in template else None


class ToolParser:
    """Takes a sequence's text as it comes; gives back what is content and what are calls."""

    def __init__(self, style: str) -> None:
        self._style = style
        self._held = ""
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """More text: the content that is certain, and calls that are complete."""
        self._held += text
        if self._style == "hermes":
            return self._feed_hermes()
        if self._style == "mistral":
            return self._release(OPENINGS["mistral"]), []
        if self._style == "llama":
            start = self._held.lstrip()
            if start and not start.startswith("{") and not PYTHON_TAG.startswith(start[: len(PYTHON_TAG)]):
                content, self._held = self._held, ""
                self._style = "text"
                return content, []
        if self._style == "text":
            content, self._held = self._held, ""
            return content, []
        return "", []

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The text has ended: what was held back, as what it turned out to be."""
        held, self._held = self._held, ""
        body = held.strip()
        if self._style == "mistral" and body.startswith(OPENINGS["mistral"]):
            body = body[len(OPENINGS["mistral"]) :]
        elif self._style == "llama":
            body = body.removeprefix(PYTHON_TAG)
        elif self._style != "json":
            return held, []
        calls = self._read(body)
        return ("", calls) if calls else (held, [])

    def _feed_hermes(self) -> tuple[str, list[dict[str, Any]]]:
        content, calls, opening = "", [], OPENINGS["hermes"]
        while True:
            content += self._release(opening)
            if not self._held.startswith(opening):
                return content, calls
            body, closing, rest = self._held.partition(CLOSING)
            if not closing:
                return content, calls
            found = self._read(body[len(opening) :])
            calls += found
            content += "" if found else body + closing
            self._held = rest

    def _release(self, mark: str) -> str:
        """Text up to the mark, or up to what may be its beginning."""
        at = self._held.find(mark)
        if at < 0:
            at = len(self._held)
            for length in range(min(len(mark) - 1, len(self._held)), 0, -1):
                if self._held.endswith(mark[:length]):
                    at -= length
                    break
        content, self._held = self._held[:at], self._held[at:]
        return content

    def _read(self, text: str) -> list[dict[str, Any]]:
        """The calls that a JSON text is; none if it is anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = []
        for entry in value if isinstance(value, list) else [value]:
            arguments = entry.get("arguments", entry.get("parameters")) if isinstance(entry, dict) else None
            if arguments is None or not isinstance(entry.get("name"), str):
                return []
            shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({"name": entry["name"], "arguments": shown})
        if self.num_calls + len(calls) > MAX_CALLS:
            return []
        self.num_calls += len(calls)
        return calls
