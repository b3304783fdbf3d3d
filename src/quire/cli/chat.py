"""`quire chat MODEL`: a conversation on the terminal, streamed."""

import argparse
import contextlib
import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.cli import engine_knobs, find_model_for, sampling_params
from quire.core.sampling_params import DECLARED
from quire.text.reasoning import Part, ReasoningParser, has_special_marks, is_opened, reasoning_style, text_of

FENCE = '"""'
"""Begins and ends a message of several lines."""
HELP = f"""\
/help                 list these commands
/clear                start a new conversation; the system message stays
/system [TEXT]        show the system message, or set it; "/system off" removes it
/params [NAME=VALUE]  show the sampling parameters, or set some: /params temperature=0.2 max_tokens=500
/save FILE            write the conversation to a new file, as a JSON list of messages
/exit                 leave; so does Ctrl-D
A pasted text of several lines is one message. To type one, begin it with {FENCE} and end it with {FENCE}.
Ctrl-C ends a reply. A message that begins with / needs a space before it."""


def run(args: argparse.Namespace) -> int:
    """Read a message, stream the reply, and so on until the end of input."""
    _edit_lines()
    with LLM(find_model_for(args), chat_template=args.chat_template, **engine_knobs(args)) as llm:
        if not llm.tokenizer.has_chat_template:
            raise ValueError(
                "this model has no chat template: give one with --chat-template FILE, or use quire generate"
            )
        print("Ctrl-C ends a reply, Ctrl-D the chat; /help lists commands.", file=sys.stderr)
        chat = Chat(llm, sampling_params(args, llm.default_params), args.system)
        while (text := read_message(input)) is not None:
            if not chat.take(text):
                break
    return 0


def _edit_lines() -> None:
    """Have `input` edit lines, keep a history, and take a pasted text as one message."""
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def read_message(read_line: Callable[[str], str]) -> str | None:
    """Return the next message; None at the end of input. Ctrl-C at the prompt clears what was typed."""
    while True:
        try:
            text = read_line("> ")
            if not text.startswith(FENCE):
                return text
            text = text.removeprefix(FENCE)
            while not text.rstrip().endswith(FENCE):
                text += "\n" + read_line(". ")
            return text.rstrip().removesuffix(FENCE).strip("\n")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


class Chat:
    """A conversation, its system message and its sampling parameters."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._turns: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/params": self._set_params,
            "/save": self._save,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation so far, with the system message."""
        return [{"role": "system", "content": self._system}, *self._turns] if self._system else self._turns

    def take(self, text: str) -> bool:
        """Answer a message, or run a command; False if that was /exit."""
        if not text.strip():
            return True
        name, _, rest = text.partition(" ")
        if name == "/exit":
            return False
        try:
            if text.startswith("/"):
                self._run(name.rstrip(), rest.strip())
            else:
                self._answer(text)
        except ValueError as error:
            print(f"quire: {error}", file=sys.stderr)
        return True

    def _run(self, name: str, rest: str) -> None:
        command = self._commands.get(name)
        if command is None:
            near = difflib.get_close_matches(name, [*self._commands, "/exit"], n=1)
            meant = f"did you mean {near[0]}?" if near else "/help lists the commands"
            raise ValueError(
                f"there is no command {name}; {meant} (a message that begins with / needs a space before it)"
            )
        command(rest)

    def _clear(self, rest: str) -> None:
        self._turns = []
        print("A new conversation.")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._system = None if rest == "off" else rest
        print(f"System message: {self._system or 'none'}")

    def _set_params(self, rest: str) -> None:
        self._params = replace(self._params, **dict(map(_param, rest.split())))
        print(self._params)

    def _save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save needs the name of a file: /save FILE")
        path = Path(rest).expanduser()
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        except FileExistsError:
            raise ValueError(f"{path} exists: give another name") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        print(f"{len(self.messages)} messages are in {path}.")

    def _answer(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        try:
            reply = self._reply()
        except ValueError:  # most likely the conversation is too long
            self._turns.pop()
            raise
        self._turns.append({"role": "assistant", "content": reply})

    def _reply(self) -> str:
        """Stream one reply; Ctrl-C ends it and keeps what there is. Reasoning is printed, and no part of the reply."""
        llm, params, tokenizer = self._llm, self._params, self._llm.tokenizer
        prompt = llm.chat_prompt(self.messages)
        style, parser = reasoning_style(tokenizer), None
        if style is not None:
            parser = ReasoningParser(style, is_open=is_opened(tokenizer, prompt))
            params = replace(params, skip_special=params.skip_special and not has_special_marks(tokenizer, style))
        reply, reason, num_tokens, show = "", None, 0, _Printer()
        try:
            for chunk in llm.stream(prompt, params):
                reply += show(parser.feed(chunk.text) if parser else [Part("content", chunk.text)])
                reason, num_tokens = chunk.finish_reason, num_tokens + len(chunk.token_ids)
            if parser:
                reply += show(parser.finish())
            print(f" {self._truncated(num_tokens)}" if reason == "length" else "")
        except KeyboardInterrupt:
            print(" [interrupted]")
        return reply

    def _truncated(self, num_tokens: int) -> str:
        if num_tokens == self._params.max_tokens:
            return f"[truncated at max_tokens={num_tokens}; /params max_tokens=N changes it]"
        return (
            f"[truncated: the conversation fills {self._llm.engine.max_request_len:,} tokens; /clear starts a new one]"
        )


def _param(text: str) -> tuple[str, Any]:
    """Return the name and value of a sampling parameter from a text such as `top_p=0.9`."""
    name, equals, value = text.partition("=")
    declared = DECLARED.get(name)
    names = [each for each, one in DECLARED.items() if one.flag is not None]
    if not equals or declared is None or name not in names:
        raise ValueError(
            f"/params takes NAME=VALUE, such as temperature=0.2, got {text!r}; there are {', '.join(names)}"
        )
    try:
        return name, declared.kind(value)
    except ValueError:
        raise ValueError(f"{name}={value} is no {'whole number' if declared.kind is int else 'number'}") from None


class _Printer:
    """Prints thoughts, dimmed where there is a terminal, and the reply behind them."""

    def __init__(self) -> None:
        self._is_thinking = False
        self._dim, self._plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")

    def __call__(self, parts: list[Part]) -> str:
        """Print what is new; returns the reply's part of it."""
        for part in parts:
            if part.kind == "reasoning":
                self._is_thinking = True
                print(f"{self._dim}{part.text}{self._plain}", end="", flush=True)
            elif part.text:
                between = "\n\n" if self._is_thinking else ""
                self._is_thinking = False
                print(between + part.text, end="", flush=True)
        return text_of("content", parts)
