"""`quire chat MODEL`: a conversation on the terminal, streamed."""

import argparse
import contextlib
import sys
from dataclasses import replace

from quire import LLM, SamplingParams
from quire.cli import engine_knobs, find_model_for, sampling_params
from quire.text.reasoning import Part, ReasoningParser, has_special_marks, is_opened, reasoning_style, text_of


def run(args: argparse.Namespace) -> int:
    """Read a line, stream the reply, and so on until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    with LLM(find_model_for(args), **engine_knobs(args)) as llm:
        params = sampling_params(args, llm.default_params)
        if not llm.tokenizer.has_chat_template:
            raise ValueError("this model has no chat template; use quire generate")
        messages = [{"role": "system", "content": args.system}] if args.system else []
        print("Ctrl-C ends a reply, Ctrl-D the chat.", file=sys.stderr)
        while (text := _read()) is not None:
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _reply(llm, messages, params)})
            except ValueError as error:  # the conversation has become too long, most likely
                messages.pop()
                print(f"quire: {error}", file=sys.stderr)
    return 0


def _read() -> str | None:
    """The next line; None at the end of input. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


def _reply(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one reply; Ctrl-C ends it and keeps what there is. Thoughts are shown, and not a part of it."""
    reply, tokenizer, prompt = "", llm.tokenizer, llm.chat_prompt(messages)
    style = reasoning_style(tokenizer)
    if style is None:
        parser = None
    else:
        parser = ReasoningParser(style, is_open=is_opened(tokenizer, prompt))
        params = replace(params, skip_special=params.skip_special and not has_special_marks(tokenizer, style))
    show = _Printer()
    try:
        for chunk in llm.stream(prompt, params):
            reply += show(parser.feed(chunk.text) if parser else [Part("content", chunk.text)])
        if parser:
            reply += show(parser.finish())
        print()
    except KeyboardInterrupt:
        print(" [interrupted]")
    return reply


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
