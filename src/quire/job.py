"""A job: prompts on their way through an engine, read as rows come free, whose results are taken as they end.

However many prompts there are, a job holds few of them: those that run, as many again that wait for their row, and
results that nobody has taken yet. It steps the engine only when it is asked for a result.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire.core.errors import RequestError
from quire.core.request import Request
from quire.core.sequence import Sequence as TokenSequence
from quire.engine.engine import Engine
from quire.interrupts import Interrupts
from quire.outputs import RequestOutput, request_output
from quire.progress import JobProgress


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C while prompts were running. They are aborted; this exception has every output there is."""

    def __init__(self, outputs: Sequence[RequestOutput], partial: Sequence[RequestOutput] = ()) -> None:
        self.outputs = list(outputs)
        """Outputs of prompts that had finished, in the order of the prompts; `index` is the prompt's."""
        self.partial = list(partial)
        """Outputs of prompts that were running, as far as they had come: `finish_reason` of an unfinished sequence is
        "abort". A prompt without a generated token is left out."""
        begun = f", and {len(self.partial)} had begun: they are in its `partial`" if self.partial else ""
        super().__init__(
            f"{len(self.outputs)} prompts had finished: they are in the `outputs` of this exception{begun}"
        )


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """One prompt, ready to be admitted."""

    index: int
    """Which of the caller's prompts it is."""
    request: Request
    text: str | None
    """What the caller gave, if that was text."""


@dataclass(slots=True)
class _Running:
    prompt: ReadyPrompt
    sequences: list[TokenSequence]
    alive: list[TokenSequence]


class Job:
    """Runs prompts and keeps what has finished until it is taken. It belongs to the engine's thread."""

    def __init__(self, prompts: Iterator[ReadyPrompt], progress: JobProgress) -> None:
        self.finished: deque[RequestOutput] = deque()
        """What has ended and has not been taken."""
        self.partial: list[RequestOutput] = []
        """Outputs of prompts that `abort` ended after their first token."""
        self._prompts: Iterator[ReadyPrompt] | None = prompts
        """None when there are no more to read."""
        self._error: Exception | None = None
        """What ended the reading; raised once all that was read before has finished."""
        self._running: dict[int, _Running] = {}
        self._progress = progress
        self._num_done = self._prompt_tokens = self._generated_tokens = 0
        """Of what has finished: sequences and tokens."""

    def advance(self, engine: Engine, interrupts: Interrupts) -> bool:
        """Step until something has finished; False if nothing is left. Interrupts are held back but between steps."""
        self._progress.start()
        while True:
            self.collect()
            if self.finished:
                return True
            self._admit(engine, interrupts)
            if not self._running:
                break
            engine.step()
            self._progress.update(self._num_done, self._count_tokens)
            interrupts.deliver()
        if self._error:
            raise self._error
        return False

    def collect(self) -> None:
        """Move what has ended to `finished`; other callers of the engine may have stepped it, too."""
        for index, running in list(self._running.items()):
            running.alive = [sequence for sequence in running.alive if sequence.finish_reason is None]
            if not running.alive:
                self.finished.append(_output(running))
                del self._running[index]
                self._num_done += len(running.sequences)
                self._prompt_tokens += running.sequences[0].prompt_len
                self._generated_tokens += sum(sequence.num_output for sequence in running.sequences)

    def abort(self, engine: Engine | None) -> None:
        """End what runs, and read no more prompts. It may be called from any thread, and twice."""
        self._prompts = None
        while self._running:
            _, running = self._running.popitem()
            if engine is not None:  # if it was closed, everything has ended
                engine.abort_now_or_soon(running.prompt.request.id)
            has_ended = all(sequence.finish_reason for sequence in running.sequences)
            if has_ended and any(sequence.num_output for sequence in running.sequences):
                self.partial.append(_output(running))
        self._progress.close(self._num_done)

    def _admit(self, engine: Engine, interrupts: Interrupts) -> None:
        """Read prompts until every row is taken and as many sequences wait: more could not start in a step."""
        num_alive = sum(len(running.alive) for running in self._running.values())
        while self._prompts is not None and num_alive < 2 * engine.config.max_num_seqs:
            try:
                prompt = interrupts.let_through(self._prompts.__next__)
                with naming_prompt(prompt.index):
                    sequences = engine.add(prompt.request)
            except StopIteration:
                self._prompts = None
            except Exception as error:
                self._prompts, self._error = None, error
            else:
                self._running[prompt.index] = _Running(prompt, sequences, sequences)
                num_alive += len(sequences)

    def _count_tokens(self) -> tuple[int, int]:
        """Prompt tokens computed and tokens generated, in all."""
        prompt, generated = self._prompt_tokens, self._generated_tokens
        for running in self._running.values():
            first = running.sequences[0]
            is_computed = first.num_output or first.finish_reason  # and was, though its pages may be gone
            prompt += first.prompt_len if is_computed else min(first.num_computed, first.prompt_len)
            generated += sum(sequence.num_output for sequence in running.sequences)
        return prompt, generated


def _output(running: _Running) -> RequestOutput:
    return request_output(running.sequences, index=running.prompt.index, prompt=running.prompt.text)


@contextmanager
def naming_prompt(index: int, of: str = "prompts") -> Iterator[None]:
    """Errors of a prompt say which it is."""
    try:
        yield
    except ValueError as error:
        message = error.message if isinstance(error, RequestError) else str(error)
        field, code = getattr(error, "field", None), getattr(error, "code", "invalid_value")
        raise RequestError(f"{of}[{index}]: {message}", field=field, code=code) from None
