"""Our side of the Hugging Face oracle: runs `hf.py` in its own environment and judges greedy tokens against it.

Imports nothing of quire, so it also works while quire is broken. Answers are kept in `.cache/oracle/` so that a
repeated local run is instant; with CI=true the oracle always runs.
"""

import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".oracle/bin/python"
SCRIPT = ROOT / "tests/oracle/hf.py"
REQUIREMENTS = ROOT / "tests/oracle/requirements.txt"
CACHE = ROOT / ".cache/oracle"
WRITTEN = CACHE / os.environ.get("PYTEST_XDIST_WORKER", "main")
"""Models that the oracle writes: each worker has its own, since one could read what another is writing."""

TIMEOUT_SECONDS = 1800
STDERR_TAIL_LINES = 30
HASHED_WHOLE_BYTES = 16 << 20

# Below this gap between the oracle's two best logits, float32 rounding may rightly choose the other token.
TIE_GAP = 1e-3


def in_ci() -> bool:
    return os.environ.get("CI") == "true"


def run(*arguments: str | Path, timeout: float = TIMEOUT_SECONDS) -> None:
    """Runs `hf.py` with these arguments; a failure or a timeout raises with the end of its stderr."""
    if not PYTHON.exists():
        raise RuntimeError(f"the oracle needs {PYTHON.relative_to(ROOT)}: run .ci/oracle-env first")
    command = [str(PYTHON), str(SCRIPT), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        stderr = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else ""
        raise RuntimeError(f"hf.py {arguments[0]} took over {timeout:g} s:\n{_tail(stderr)}") from error
    if done.returncode:
        raise RuntimeError(f"hf.py {arguments[0]} exited with {done.returncode}:\n{_tail(done.stderr)}")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-STDERR_TAIL_LINES:])


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with np.load(path) as arrays:
        return [arrays[str(i)] for i in range(len(arrays.files))]


def _key(command: str, model_dir: Path, requests_json: str) -> str:
    """Names an answer by all that decides it. Big weight files count by name and size: reading them is slow."""
    digest = hashlib.sha256()
    parts = [command.encode(), SCRIPT.read_bytes(), REQUIREMENTS.read_bytes(), requests_json.encode()]
    for path in sorted(path for path in model_dir.rglob("*") if path.is_file()):
        size = path.stat().st_size
        parts += [str(path.relative_to(model_dir)).encode(), str(size).encode()]
        if size <= HASHED_WHOLE_BYTES:
            parts.append(path.read_bytes())
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def hf(command: str, model_dir: Path, requests: list[dict], tmp_path: Path, timeout: float = TIMEOUT_SECONDS) -> Any:
    """The oracle's answers to `requests`, in order; the commands are those of `hf.py`, which describes them.

    Logits come as a list of float32 arrays [tokens, vocabulary].
    """
    requests_json = json.dumps(requests, sort_keys=True)
    suffix = ".npz" if command == "logits" else ".json"
    kept = CACHE / "answers" / (_key(command, model_dir, requests_json) + suffix)
    if kept.exists() and not in_ci():
        return _read(kept)

    requests_path, out = tmp_path / f"{command}.requests.json", tmp_path / f"{command}.answers{suffix}"
    requests_path.write_text(requests_json)
    run(command, model_dir, requests_path, out, timeout=timeout)
    if not in_ci():
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that an interrupted or a parallel run never leaves half a file.
        partial = kept.with_name(f"{os.getpid()}.{kept.name}")
        shutil.copyfile(out, partial)
        partial.replace(kept)
    return _read(out)


def smollm2(gguf: Path) -> Path:
    """The folder of the real model, converted to float32 by transformers; converted once."""
    folder = WRITTEN / "smollm2"
    run("smollm2", gguf, folder)
    return folder


@functools.cache
def checkpoints() -> Path:
    """The folder of the random checkpoints, one folder each, named as in `hf.CHECKPOINTS`."""
    pins = hashlib.sha256(SCRIPT.read_bytes() + REQUIREMENTS.read_bytes()).hexdigest()
    folder = WRITTEN / "checkpoints"
    written_by = folder / "written-by"
    if in_ci() or not written_by.exists() or written_by.read_text() != pins:
        run("checkpoints", folder)
        written_by.write_text(pins)
    return folder


class TieRule:
    """Says where two greedy sequences part, and whether they may.

    They may where the oracle's two best logits are less than `TIE_GAP` apart. Every such tie is printed and kept in
    `ties`; any other difference is an AssertionError.
    """

    def __init__(self) -> None:
        self.ties: list[str] = []

    def compare(self, ours: list[int], theirs: dict, label: str = "sequence", start: int = 0) -> int | None:
        """The first step where `ours` is not theirs["tokens"][start:], counted from `start`; None if none is."""
        tokens, gaps = theirs["tokens"][start:], theirs["gaps"][start:]
        if len(ours) != len(tokens):
            raise AssertionError(f"{label}: {len(ours)} tokens from step {start}, the oracle has {len(tokens)}")
        for i, (our, their) in enumerate(zip(ours, tokens, strict=True)):
            if our != their:
                what = f"{label}, step {start + i}: ours {our}, oracle {their}, gap {gaps[i]:.2e}"
                if not gaps[i] < TIE_GAP:
                    raise AssertionError(f"{what}: a wrong token")
                print(f"tie: {what}")
                self.ties.append(what)
                return i
        return None


def assert_greedy_equal(
    generate: Callable[[list[list[int]], list[int]], Sequence[list[int]]],
    prompts: list[list[int]],
    oracle_results: list[dict],
    max_ties: int,
) -> list[str]:
    """Every token of `generate(prompts, max_tokens)` is the oracle's, but for at most `max_ties` allowed ties.

    After a tie the two texts differ for good, so the rest is judged teacher-forced: the prompt with the oracle's
    tokens up to and including that step is generated from again, all such continuations in one batch, until nothing
    is left. Returns the ties.

        theirs    t t t T t t t      T: a tie at step 3
        ours      t t t U . . .      steps 0..2 judged, 3 allowed
        again     prompt + t t t T -> steps 4.. judged
    """
    if len(prompts) != len(oracle_results):
        raise ValueError(f"{len(prompts)} prompts, but {len(oracle_results)} oracle results")
    rule = TieRule()
    # (index of the prompt, first step to judge)
    pending = [(index, 0) for index in range(len(prompts))]
    while pending:
        inputs = [prompts[index] + oracle_results[index]["tokens"][:start] for index, start in pending]
        max_tokens = [len(oracle_results[index]["tokens"]) - start for index, start in pending]
        outputs = generate(inputs, max_tokens)
        rest = []
        for (index, start), ours in zip(pending, outputs, strict=True):
            theirs = oracle_results[index]
            label = f"prompt {index} ({len(prompts[index])} tokens)"
            tied = rule.compare(list(ours), theirs, label, start)
            if tied is not None and start + tied + 1 < len(theirs["tokens"]):
                rest.append((index, start + tied + 1))
        pending = rest
    if len(rule.ties) > max_ties:
        listed = "\n".join(rule.ties)
        raise AssertionError(f"{len(rule.ties)} ties, at most {max_ties} allowed:\n{listed}")
    return rule.ties
