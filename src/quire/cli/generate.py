"""`quire generate MODEL [PROMPT ...]`: continue prompts. A single one is streamed, others are printed as they end."""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator

from quire import LLM, EngineConfig, GenerationInterrupted, RequestOutput, SamplingParams
from quire.cli import engine_knobs, find_model_for, sampling_params

INTERRUPTED = "quire: interrupted"


def run(args: argparse.Namespace) -> int:
    """Continue every prompt and print it with its continuation."""
    knobs = engine_knobs(args)
    lines = iter(args.prompt) if args.prompt else _stdin_lines()
    # Fewer rows than the engine's default mean fewer programs to compile: see whether there are fewer prompts.
    first = list(itertools.islice(lines, EngineConfig.max_num_seqs))
    if not first or not all(first):
        raise ValueError("PROMPT is empty: give text as an argument, or lines on standard input")
    knobs["max_num_seqs"] = knobs["max_num_seqs"] or len(first)
    with LLM(find_model_for(args), chat_template=args.chat_template, **knobs) as llm:
        params = sampling_params(args, llm.default_params)
        encode = (lambda text: llm.chat_prompt([{"role": "user", "content": text}])) if args.chat_template else str
        between = "\n" if args.chat_template else ""
        if len(first) == 1 and not args.json:
            return _stream(llm, encode(first[0]), first[0] + between, params)
        printer = _JsonPrinter() if args.json else _OrderedPrinter(between)
        texts = first if len(first) < EngineConfig.max_num_seqs else itertools.chain(first, lines)
        return _generate(llm, texts, encode, params, printer)


def _stream(llm: LLM, prompt: str | list[int], shown: str, params: SamplingParams) -> int:
    """Print one prompt and its continuation as it is generated."""
    try:
        print(shown, end="", flush=True)
        for chunk in llm.stream(prompt, params):
            print(chunk.text, end="", flush=True)
        print()
        return 0
    except KeyboardInterrupt:
        print(f"\n{INTERRUPTED}", file=sys.stderr)
        return 130


def _generate(
    llm: LLM,
    texts: Iterable[str],
    encode: Callable[[str], str | list[int]],
    params: SamplingParams,
    printer: "_JsonPrinter | _OrderedPrinter",
) -> int:
    shown: dict[int, str] = {}  # of prompts that are under way

    def prompts() -> Iterator[str | list[int]]:
        for index, text in enumerate(texts):
            shown[index] = text
            yield encode(text)

    def add(output: RequestOutput) -> None:
        output.prompt = shown.pop(output.index)
        printer.add(output)

    given = list(prompts()) if isinstance(texts, list) else prompts()  # of a list, the progress bar knows the end
    outputs = llm.generate_iter(given, params)
    try:
        for output in outputs:
            add(output)
        return 0
    except KeyboardInterrupt as error:
        finished, partial = _left_of(outputs, error)
        for output in finished:
            add(output)
        num_finished = printer.num_added
        for output in partial:
            add(output)
        printer.finish()
        print(f"\n{INTERRUPTED}; {num_finished} prompts had finished", file=sys.stderr)
        return 130


def _left_of(
    outputs: Iterator[RequestOutput], error: KeyboardInterrupt
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Return the outputs that had finished and those that had begun, wherever Ctrl-C interrupted."""
    if not isinstance(error, GenerationInterrupted) and isinstance(outputs, Generator):
        try:
            outputs.throw(error)  # it came while an output was printed
        except KeyboardInterrupt as its_own:
            error = its_own
    return (error.outputs, error.partial) if isinstance(error, GenerationInterrupted) else ([], [])


def _stdin_lines() -> Iterator[str]:
    return (line.rstrip("\n") for line in sys.stdin if line.strip())


class _JsonPrinter:
    """Prints every output at once, as a line of JSON."""

    def __init__(self) -> None:
        self.num_added = 0

    def add(self, output: RequestOutput) -> None:
        self.num_added += 1  # before it is printed: Ctrl-C may come in between
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

    def __init__(self, between: str) -> None:
        """`between` is printed between a prompt and its continuation."""
        self.num_added = 0
        self._between = between
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

    def _print(self, output: RequestOutput) -> None:
        completion = output.outputs[0]
        end = " [interrupted]" if completion.finish_reason == "abort" else ""
        print(f"{output.prompt}{self._between}{completion.text}{end}\n", flush=True)
