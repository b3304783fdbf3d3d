"""`quire batch MODEL INPUT -o OUTPUT`: answer every line of a file; the same command again goes on where it stopped."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire.cli import engine_knobs, find_model_for, given_sampling
from quire.cli.serve import model_name
from quire.config import EngineConfig, check_whole
from quire.progress import JobProgress

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.batches.answer import Answer
    from quire.server.batches.answer_file import AnswerFile
    from quire.server.batches.lines import Line

FAILED = 1
"""Exit status when at least one line has an error, or when the engine failed before the last line."""
STOPPED_BY_COST = 3
"""Exit status when `--max-cost` ended the run before the last line."""
SYNC_EVERY_S = 1.0
MAX_COST = 1 << 60


class Input(Protocol):
    """What is to be answered."""

    num_lines: int

    def lines(self, batch: str) -> Iterator["Line"]:
        """One line for each request."""
        ...


def run(args: argparse.Namespace) -> int:
    """Answer every line of the input that the output has no answer to."""
    try:
        from quire.server.batches.answer_file import AnswerFile
        from quire.server.batches.lines import DuplicateIdError, check_ids
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing: batches need `pip install 'quire-llm[server]'`") from None
    if args.max_cost is not None:
        check_whole("--max-cost", args.max_cost, 1, MAX_COST)
    is_parquet = args.output.suffix == ".parquet"
    answers = args.output.with_name(args.output.name + ".jsonl") if is_parquet else args.output
    for path in {args.output, answers}:
        if path.exists() and args.input.exists() and path.samefile(args.input):
            raise ValueError(f"-o {args.output}: {path} would be written, and is the input: give another name")
    knobs, name = engine_knobs(args), args.served_model_name or model_name(args.model, args.revision)
    defaults = {"model": name} | given_sampling(args)
    batch = json.dumps(defaults, sort_keys=True)
    defaults.pop("seed", None)  # it is in the name of the batch: every line draws by a seed of its own
    given = _open_input(args.input)
    try:
        check_ids(lambda: given.lines(""))
    except DuplicateIdError as error:
        raise ValueError(f"INPUT {args.input}: {error}") from None
    if is_parquet:
        from quire.cli.parquet import answered_batch, batch_digest, check_columns, num_errors

        check_columns(given)
        if args.output.exists():
            if answered_batch(args.output) != batch_digest(given.lines(batch)):
                raise ValueError(
                    f"{args.output} is not made from {args.input} with this model and these flags: give another name, "
                    "or remove it"
                )
            if not answers.exists():
                return _say_end(given.num_lines, num_errors(args.output), args.output)
    # Not of what is left: a run that goes on computes in the same shapes.
    knobs["max_num_seqs"] = knobs["max_num_seqs"] or min(max(given.num_lines, 1), EngineConfig.max_num_seqs)
    with contextlib.closing(AnswerFile(answers)) as output:
        lines = given.lines(batch)
        output.skip_answered(lines)
        if output.num_answered:
            _say(f"{output.num_answered:,} of {given.num_lines:,} lines have been answered before")
        if output.num_answered < given.num_lines:
            status = _Run(args, knobs, defaults, output, given.num_lines).run(lines)
            if status:
                return status
        if is_parquet:
            from quire.cli.parquet import batch_digest, write_parquet

            write_parquet(given, answers, args.output, batch_digest(given.lines(batch)))
            answers.unlink()
    return _say_end(given.num_lines, output.num_failed, args.output)


def _say_end(num_lines: int, num_failed: int, output: Path) -> int:
    failed = f", {num_failed:,} of them with an error" if num_failed else ""
    _say(f"all {num_lines:,} lines are answered{failed}: {output}")
    return FAILED if num_failed else 0


def _open_input(path: Path) -> Input:
    if not path.is_file():
        raise ValueError(f"INPUT {path} is no file")
    if path.suffix == ".parquet":
        from quire.cli.parquet import ParquetInput

        return ParquetInput(path)
    return _JsonlInput(path)


class _JsonlInput:
    """A file in OpenAI's batch format."""

    def __init__(self, path: Path) -> None:
        from quire.server.batches.lines import count_lines

        self._path = path
        with path.open("rb") as file:
            self.num_lines = count_lines(file)

    def lines(self, batch: str) -> Iterator["Line"]:
        """Its lines that are not empty."""
        from quire.server.batches.lines import read_lines

        with self._path.open("rb") as file:
            yield from read_lines(file, batch)


class _Run:
    """One run: it loads the model, answers what is left, and says how far it is."""

    def __init__(
        self,
        args: argparse.Namespace,
        knobs: dict[str, Any],
        defaults: dict[str, Any],
        output: "AnswerFile",
        num_lines: int,
    ) -> None:
        self._args = args
        self._knobs = knobs
        self._defaults = defaults
        self._output = output
        self._num_lines = num_lines
        self._num_before = output.num_answered
        self._prompt_tokens = self._generated_tokens = 0

    def run(self, lines: Iterator["Line"]) -> int:
        """Answer the lines; returns the exit status."""
        from quire.async_llm.errors import UnavailableError
        from quire.server.batches.run import CostLimitError

        path = find_model_for(self._args)
        try:
            asyncio.run(self._answer(path, lines))
        except CostLimitError as error:
            spent = self._prompt_tokens + self._generated_tokens
            most = self._args.max_cost
            # A next run has all of it again: only a line that needs more than that never runs.
            hint = f" with --max-cost {error.cost} or more" if error.cost > most else ""
            _say(f"--max-cost {most:,}: stopped after {spent:,} tokens, because {error}; {self._state}{hint}")
            return STOPPED_BY_COST
        except KeyboardInterrupt:
            _say(f"interrupted; {self._state}")
            return 130
        except UnavailableError as error:
            _say(f"{error}; {self._state}")
            return FAILED
        except OSError as error:
            raise ValueError(f"{self._args.output} cannot be written: {error.strerror}; {self._state}") from None
        return 0

    @property
    def _state(self) -> str:
        return f"{self._output.num_answered:,} of {self._num_lines:,} lines are answered; the same command goes on"

    async def _answer(self, path: Path, lines: Iterator["Line"]) -> None:
        from quire.async_llm import AsyncLLM

        async with AsyncLLM(path, **self._knobs) as engine:
            try:
                async with self._watched(engine):
                    await answer_lines(
                        engine, lines, self._write, defaults=self._defaults, max_cost=self._args.max_cost
                    )
            finally:
                self._output.sync()

    def _write(self, answer: "Answer") -> None:
        self._output.write(answer)
        self._prompt_tokens += answer.num_prompt_tokens
        self._generated_tokens += answer.num_generated_tokens

    @contextlib.asynccontextmanager
    async def _watched(self, engine: "AsyncLLM") -> AsyncIterator[None]:
        """Show how far the lines are, and have what is written on the disk, every now and then."""
        progress = JobProgress(self._num_lines - self._num_before, unit="line")
        progress.start()

        def count_tokens() -> tuple[int, int]:
            streams = [stream for stream in engine.streams if stream.num_output_tokens]
            prompt = sum(len(stream.request.prompt_token_ids) for stream in streams)
            generated = sum(stream.num_output_tokens for stream in streams)
            return self._prompt_tokens + prompt, self._generated_tokens + generated

        async def watch() -> None:
            while True:
                await asyncio.sleep(SYNC_EVERY_S)
                progress.update(self._output.num_answered - self._num_before, count_tokens)
                await asyncio.to_thread(self._output.sync)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            progress.close(self._output.num_answered - self._num_before)


async def answer_lines(
    engine: "AsyncLLM",
    lines: Iterable["Line"],
    write: Callable[["Answer"], None],
    *,
    defaults: Mapping[str, Any],
    max_cost: int | None = None,
) -> None:
    """Answer lines, as many at once as keep every row busy; `defaults` are fields that they leave out, and `model`."""
    from quire.server.batches.answer import Answerer
    from quire.server.batches.run import LineRunner
    from quire.server.keys import Caller
    from quire.server.openai.request_body import BodyReader
    from quire.server.service import Service

    service = Service(engine, defaults["model"], int(time.time()))
    bodies, counts_cost = BodyReader(strict=False), max_cost is not None
    answerer = Answerer(service, bodies, Caller(), defaults=defaults, counts_cost=counts_cost)
    # Twice the rows: what a step has ended is known here only while the next one runs.
    turns = asyncio.Semaphore(2 * engine.llm.engine.config.max_num_seqs)
    try:
        await LineRunner(answerer, write, turns, max_cost=max_cost).run(lines)
    finally:
        service.close()


def _say(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr, flush=True)
