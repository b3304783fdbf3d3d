"""`quire replay FILE`: the scheduler over a recording, and whether it decides the same."""

import argparse
import time
from pathlib import Path

from quire.recording.replay import ReplayResult, replay


def run(args: argparse.Namespace) -> int:
    """Print what was replayed; 1 if a decision differs."""
    start = time.perf_counter()
    result = replay(Path(args.file), request_id=args.request)
    seconds = time.perf_counter() - start
    counts = f"{result.requests:,} requests, {result.forks:,} forks, {result.preemptions:,} preemptions"
    print(f"{result.steps:,} steps in {seconds:.1f} s: {counts}")
    if args.request is not None:
        _print_found(args.request, result)
    if result.difference is None:
        print("every decision is the same")
        return 0
    print(f"step {result.difference.step:,} differs:")
    for line in result.difference.lines:
        print(f"  {line}")
    return 1


def _print_found(request_id: str, result: ReplayResult) -> None:
    for found in result.found:
        lengths = f"{found.prompt_len:,} prompt tokens, max_tokens={found.max_tokens}"
        print(f"request {request_id}: arrival {found.arrival}, added after {found.added_s:.3f} s, {lengths}")
    if not result.found:
        print(f"request {request_id}: not among the {result.requests:,} requests that were replayed")
