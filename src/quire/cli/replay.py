"""`quire replay FILE`: the scheduler over a recording, and whether it decides the same."""

import argparse
import time
from pathlib import Path

from quire.recording.replay import replay


def run(args: argparse.Namespace) -> int:
    """Print what was replayed; 1 if a decision differs."""
    start = time.perf_counter()
    result = replay(Path(args.file))
    seconds = time.perf_counter() - start
    counts = f"{result.requests:,} requests, {result.forks:,} forks, {result.preemptions:,} preemptions"
    print(f"{result.steps:,} steps in {seconds:.1f} s: {counts}")
    if result.difference is None:
        print("every decision is the same")
        return 0
    print(f"step {result.difference.step:,} differs:")
    for line in result.difference.lines:
        print(f"  {line}")
    return 1
