"""`quire chat MODEL`: a conversation on the terminal, streamed."""

import argparse
import contextlib
import sys

from quire import LLM, SamplingParams
from quire.cli import engine_knobs, sampling_knobs


def run(args: argparse.Namespace) -> int:
    """Read a line, stream the reply, and so on until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history in input())
    params = SamplingParams(**sampling_knobs(args))
    with LLM(args.model, **engine_knobs(args)) as llm:
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
    """Stream one reply; Ctrl-C ends it and keeps what there is."""
    reply = ""
    try:
        for chunk in llm.stream(llm.chat_prompt(messages), params):
            reply += chunk.text
            print(chunk.text, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [interrupted]")
    return reply
