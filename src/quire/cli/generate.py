"""`quire generate MODEL [PROMPT ...]`: continue prompts, each printed as soon as it can be."""

import argparse
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator

from quire import LLM, EngineConfig, GenerationInterrupted, RequestOutput, SamplingParams
from quire.cli import engine_knobs, find_model_for, sampling_params


def run(args: argparse.Namespace) -> int:
    """Continue every prompt and print it with its continuation."""
    knobs = engine_knobs(args)
    lines = iter(args.prompt) if args.prompt else _stdin_lines()
    # Fewer rows than the engine's default mean fewer programs to compile: see whether there are fewer prompts.
    first = list(itertools.islice(lines, EngineConfig.max_num_seqs))
    if not first or not all(first):
        raise ValueError("PROMPT is empty: give text as an argument, or lines on standard input")
    knobs["max_num_seqs"] = knobs["max_num_seqs"] or len(first)
    printer = _JsonPrinter() if args.json else _OrderedPrinter()
    try:
        with LLM(find_model_for(args), **knobs) as llm:
            params = sampling_params(args, llm.default_params)
            prompts = first if len(first) < EngineConfig.max_num_seqs else itertools.chain(first, lines)
            return _generate(llm, prompts, params, printer)
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere at exit
        return 128 + signal.SIGPIPE


def _generate(llm: LLM, prompts, params: SamplingParams, printer: "_JsonPrinter | _OrderedPrinter") -> int:
    try:
        for output in llm.generate_iter(prompts, params):
            printer.add(output)
        return 0
    except KeyboardInterrupt as error:
        for output in error.outputs if isinstance(error, GenerationInterrupted) else ():
            printer.add(output)
        printer.finish()
        print(f"\nquire: interrupted; {printer.num_added} prompts had finished", file=sys.stderr)
        return 130


def _stdin_lines() -> Iterator[str]:
    return (line.rstrip("\n") for line in sys.stdin if line.strip())


class _JsonPrinter:
    """Prints every output at once, as a line of JSON."""

    def __init__(self) -> None:
        self.num_added = 0

    def add(self, output: RequestOutput) -> None:
        self.num_added += 1  # before anybody sees it, who may then press Ctrl-C
        completion = output.outputs[0]
        shown = {
            "index": output.index,
            "prompt": output.prompt,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "token_ids": completion.token_ids,
        }
        print(json.dumps(shown, ensure_ascii=False), flush=True)

    def finish(self) -> None:
        """Nothing is held back."""


class _OrderedPrinter:
    """Prints outputs as text in the order of their prompts; one that ends early waits for those before it."""

    def __init__(self) -> None:
        self.num_added = 0
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def add(self, output: RequestOutput) -> None:
        self.num_added += 1
        self._waiting[output.index] = output
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._print(ready)

    def finish(self) -> None:
        """Print what waits for a prompt that will not come."""
        for _, output in sorted(self._waiting.items()):
            self._print(output)

    @staticmethod
    def _print(output: RequestOutput) -> None:
        print(f"{output.prompt}{output.outputs[0].text}\n", flush=True)
