"""Compiles a form for the first time where it can do no harm: in a process of its own, which may take only so much.

llguidance limits what it spends, but not everywhere. A few kilobytes of Lark or JSON Schema can make it ask for
gigabytes (an intersection of many expressions), recurse through the end of the stack (a thousand rules in a row) or
compute for minutes (many `patternProperties`); in the engine's process each of these would end or stop everybody.

    the engine's process    python -m quire.structured.sandbox         a child for each form
    GrammarTrial.run   -->  has the vocabulary, and forks    -->  compiles and draws some texts, under limits
                       <--  what the child wrote, or its end <--

What has passed is compiled again where it is needed, and takes there what it took here.
"""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import llguidance

    from quire.structured.matcher import Vocabulary

MAX_SECONDS = 1
"""Seconds of computing for one form."""
MAX_BYTES = 64 << 20
"""Bytes of memory for one form."""
MAX_STEP_SECONDS = 0.05
"""Seconds of computing for one mask: every sequence of a step waits for it. One of a form may take longer, once: on a
busy machine any may."""
NUM_TEXTS, NUM_STEPS = 3, 24
"""Texts that are drawn from a form, and their tokens."""

PATIENCE_SECONDS = 5
"""Seconds by the clock for one form: the machine may be busy."""
ANSWER_SECONDS = 2 * PATIENCE_SECONDS
"""Seconds by the clock until the process that tries forms is taken to hang."""
START_SECONDS = 30
"""By the clock, until a process that has to start first is taken to hang."""

_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Environment variables that a process may need to import Quire."""
_STACK_BYTES = 2 << 20  # a thread of the engine has four times as much


class Verdict(NamedTuple):
    """What trying a form came to."""

    problem: str | None
    """Why the form is refused; None if it is not."""
    is_final: bool
    """Whether trying it again would come to the same: not where the machine was busy, or the process was ended."""


class GrammarTrial:
    """The processes that try forms: one for each thread that tries one at the same time, started when there is one."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        self._vocabulary = vocabulary
        self._idle: list[_TrialProcess] = []
        """Processes that nobody waits for; appending and popping are atomic."""

    def run(self, text: str) -> Verdict:
        """Try a form in llguidance's language. It takes a bounded time, whatever the process does."""
        for _ in range(2):  # somebody may have ended the process since the last time
            process = self._take_idle() or _TrialProcess(self._vocabulary)
            try:
                problem, is_final = process.run(text)
            except TimeoutError:
                process.stop()
                return Verdict("it could not be tried in time", is_final=False)
            except (OSError, ValueError):
                process.stop()
            else:
                self._idle.append(process)
                return Verdict(problem, is_final)
        return Verdict("it could not be tried: the process that does so ends", is_final=False)

    def _take_idle(self) -> "_TrialProcess | None":
        try:
            return self._idle.pop()
        except IndexError:  # another thread may take the last one at any moment
            return None


class _TrialProcess:
    """One process that tries forms, seen from outside."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        # Nothing else of the environment: it may hold API keys.
        environment = {name: os.environ[name] for name in _PYTHON_VARIABLES if name in os.environ}
        environment |= {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}  # one thread, one heap
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.structured.sandbox"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is not for it
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)  # a process that does not read must not hold us up either
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        self._first = _line([tokens, vocabulary.special_token_ids, vocabulary.eos_ids])
        """What is sent before the first form: the vocabulary."""
        self.stop = weakref.finalize(self, _stop, self._process)

    def run(self, text: str) -> tuple[str | None, bool]:
        """Try a form; returns the fields of a Verdict. TimeoutError if it takes too long, OSError if it has ended."""
        first, self._first = self._first, b""
        deadline = time.monotonic() + (START_SECONDS if first else ANSWER_SECONDS)
        left = memoryview(first + _line(text))
        while left:
            _wait(self._in, select.POLLOUT, deadline)
            left = left[os.write(self._in, left[: 1 << 16]) :]
        line = b""
        while not line.endswith(b"\n"):
            _wait(self._out, select.POLLIN, deadline)
            part = os.read(self._out, 1 << 16)
            if not part:
                raise BrokenPipeError("the process has ended")
            line += part
        return json.loads(line)


def _wait(pipe: int, event: int, deadline: float) -> None:
    """Until a pipe can be read from or written to, or has been closed; TimeoutError if not by the deadline."""
    poll = select.poll()  # select takes no number above 1023, and a server has many connections
    poll.register(pipe, event)
    if not poll.poll(1000 * max(deadline - time.monotonic(), 0)):
        raise TimeoutError


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # the child that it may have, too
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # pyright: ignore
    process.wait()


# -- in the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Try the forms that come on standard input; one line of JSON for each on standard output."""
    from quire.structured.matcher import Vocabulary

    tokens, special_ids, eos_ids = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary([token.encode("latin-1") for token in tokens], special_ids, eos_ids)
    library = vocabulary.as_library()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_try_in_child(library, json.loads(line))) + "\n")
        sys.stdout.flush()


def _try_in_child(library: "llguidance.LLTokenizer", text: str) -> Verdict:
    end, childs_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _limit_myself()
            os.write(childs_end, json.dumps(_try(library, text)).encode())
        os._exit(0)
    os.close(childs_end)
    result, deadline, is_over = b"", time.monotonic() + PATIENCE_SECONDS, False
    while not is_over and select.select([end], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(end, 1 << 16)
        result += part
        is_over = not part
    os.close(end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not is_over:
        return Verdict(f"it has not been compiled within {PATIENCE_SECONDS} s on a busy machine", is_final=False)
    if result:
        return Verdict(json.loads(result), is_final=True)
    too_much = f"it takes more than {MAX_SECONDS} s or {MAX_BYTES >> 20} MiB to compile, or is nested too deeply"
    return Verdict(too_much, is_final=True)


def _limit_myself() -> None:
    import resource

    limits = {resource.RLIMIT_CPU: MAX_SECONDS, resource.RLIMIT_STACK: _STACK_BYTES, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MAX_BYTES
    for limit, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (value, value))


def _try(library: "llguidance.LLTokenizer", text: str) -> str | None:
    """Compile a form and draw some texts from it; returns what is wrong with it, or None."""
    import numpy as np

    from quire.structured.matcher import is_dead_end, reason, start

    first = start(library, text)
    if first.is_error():
        return reason(first)
    num_slow = 0
    for seed in range(NUM_TEXTS):
        matcher, choose = first.deep_copy(), random.Random(seed)
        for _ in range(NUM_STEPS):
            begin = time.process_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if matcher.is_stopped() or not matcher.consume_token(int(allowed[choose.randrange(len(allowed))])):
                break
            num_slow += time.process_time() - begin > MAX_STEP_SECONDS
            if num_slow > 1:
                return f"some of its masks take more than {1000 * MAX_STEP_SECONDS:.0f} ms"
        if matcher.is_error() and not is_dead_end(matcher):
            return reason(matcher)
    return None


if __name__ == "__main__":
    main()
