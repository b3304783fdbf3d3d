"""Compiles a form for the first time where it can do no harm: in a process of its own, which may take only so much.

llguidance limits what it spends, but not everywhere. A few kilobytes of Lark or JSON Schema can make it ask for
gigabytes (an intersection of many expressions), recurse through the end of the stack (a thousand rules in a row) or
compute for minutes (many `patternProperties`); in the engine's process each of these would end or stop everybody.

    the engine's process    python -m quire.structured.sandbox         a child for each form
    GrammarTrial.run   -->  knows the vocabulary, and forks  -->  compiles and draws some texts, under limits
                       <--  what the child said, or its end  <--

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
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import llguidance

    from quire.structured.compiler import Vocabulary

MAX_SECONDS = 1
"""Of computing, for one form."""
MAX_BYTES = 64 << 20
"""That one form may take."""
MAX_STEP_SECONDS = 0.05
"""For one mask: that long everybody waits."""
NUM_TEXTS, NUM_STEPS = 3, 24
"""Texts that are drawn from a form, and their tokens."""

_STACK_BYTES = 2 << 20  # a thread of the engine has four times as much
_PATIENCE = 5  # seconds by the clock, on a machine that is busy


class GrammarTrial:
    """The process that tries forms; it is started when there is one. Threads may share it, and wait for each other."""

    def __init__(self, vocabulary: "Vocabulary") -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, text: str) -> str | None:
        """Why a form, in llguidance's words, is refused; None if it is not."""
        with self._lock:
            for _ in range(2):  # somebody may have ended the process since the last time
                process = self._process or self._start()
                try:
                    _send(process, text)
                    return json.loads(process.stdout.readline())  # pyright: ignore
                except (OSError, ValueError):
                    _stop(process)
                    self._process = None
        return "it could not be tried: the process that does so ends"

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}  # one thread, one heap
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.structured.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is not for it
        )
        weakref.finalize(self, _stop, process)
        vocabulary = self._vocabulary
        tokens = [token.decode("latin-1") for token in vocabulary.tokens]
        with contextlib.suppress(OSError):
            _send(process, [tokens, vocabulary.special_token_ids, vocabulary.eos_ids])
        return process


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # pyright: ignore
    process.wait()


# -- in the process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer forms until nobody asks any more."""
    from quire.structured.compiler import Vocabulary

    tokens, special_ids, eos_ids = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary([token.encode("latin-1") for token in tokens], special_ids, eos_ids)
    library = vocabulary.as_library()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_try_in_child(library, json.loads(line))) + "\n")
        sys.stdout.flush()


def _try_in_child(library: "llguidance.LLTokenizer", text: str) -> str | None:
    end, childs_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _limit_myself()
            os.write(childs_end, json.dumps(_try(library, text)).encode())
        os._exit(0)
    os.close(childs_end)
    answer, deadline = b"", time.monotonic() + _PATIENCE
    while select.select([end], [], [], max(deadline - time.monotonic(), 0))[0]:
        part = os.read(end, 1 << 16)
        answer += part
        if not part:
            break
    os.close(end)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if answer:
        return json.loads(answer)
    return f"it takes more than {MAX_SECONDS} s or {MAX_BYTES >> 20} MiB to compile, or is nested too deeply"


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
    """Compile a form and draw some texts from it: what is wrong with it, or None."""
    import numpy as np

    from quire.structured.compiler import is_dead_end, reason, start

    first = start(library, text)
    if first.is_error():
        return reason(first)
    for seed in range(NUM_TEXTS):
        matcher, choose = first.deep_copy(), random.Random(seed)
        for _ in range(NUM_STEPS):
            begin = time.process_time()
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if matcher.is_stopped() or not matcher.consume_token(int(allowed[choose.randrange(len(allowed))])):
                break
            if time.process_time() - begin > MAX_STEP_SECONDS:
                return f"one of its masks takes more than {1000 * MAX_STEP_SECONDS:.0f} ms"
        if matcher.is_error() and not is_dead_end(matcher):
            return reason(matcher)
    return None


if __name__ == "__main__":
    main()
