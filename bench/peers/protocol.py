"""What the peers share: their command line and the JSON lines they speak. Standard library only.

Each peer runs in an environment of its own and imports this file as its neighbour. Libraries print what they like:
standard output is kept for the protocol, whatever a library writes there goes to standard error.

    peer: {"ready": true, "seconds": 4.2, "version": "...", "settings": {...}}
    us:   {"prompts": [[ids], ...], "new_tokens": 128, "stream": false}
    peer: {"seconds": 1.5, "tokens": [[ids], ...], "times": [[seconds], ...]}         times only for a stream
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NUM_THREADS = 2


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of each prompt, and for a stream when each of them was there, in seconds since the start."""

    tokens: list[list[int]]
    times: list[list[float]] | None = None


class Clock:
    """Collects the tokens of each row, and when they came. Starts when made."""

    def __init__(self, num_rows: int):
        self.start = time.perf_counter()
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.times: list[list[float]] = [[] for _ in range(num_rows)]

    def add(self, row: int, tokens: list[int]) -> None:
        now = time.perf_counter() - self.start
        self.tokens[row] += tokens
        self.times[row] += [now] * len(tokens)

    def answer(self) -> Answer:
        return Answer(self.tokens, self.times)


@dataclass(frozen=True)
class Peer:
    """A loaded model: `generate(prompts, new_tokens, stream)` is the only thing that is timed."""

    generate: Callable[[list[list[int]], int, bool], Answer]
    version: str
    settings: dict


def arguments(description: str | None, options: dict[str, dict]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="a GGUF file, or the folder that run made of it")
    parser.add_argument("--max-rows", type=int, default=64, help="prompts in one request, at most")
    parser.add_argument("--max-len", type=int, default=2048, help="prompt and new tokens of one row, at most")
    parser.add_argument("--started", type=float, default=time.time(), help="when run started Python, in epoch seconds")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def claim_stdout():
    """The real standard output, as a file; from here on descriptor 1 is standard error, for C libraries too."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def check(request: dict, answer: Answer) -> None:
    """A benchmark of fewer tokens than it counts is worse than none."""
    lengths = {len(tokens) for tokens in answer.tokens}
    if len(answer.tokens) != len(request["prompts"]) or lengths != {request["new_tokens"]}:
        raise AssertionError(f"asked for {request['new_tokens']} tokens a row, made {sorted(lengths)}")


def serve(load: Callable[[argparse.Namespace], Peer], description: str | None, **options: dict) -> None:
    """Loads the peer, says so, and answers requests until standard input ends. `options`: of this peer alone."""
    args = arguments(description, options)
    out = claim_stdout()

    def say(line: dict) -> None:
        print(json.dumps(line), file=out, flush=True)

    peer = load(args)
    say({"ready": True, "seconds": time.time() - args.started, "version": peer.version, "settings": peer.settings})
    for line in sys.stdin:
        request = json.loads(line)
        if len(request["prompts"]) > args.max_rows:
            raise ValueError(f"{len(request['prompts'])} prompts, at most {args.max_rows}: raise --max-rows")
        longest = max(len(prompt) for prompt in request["prompts"]) + request["new_tokens"]
        if longest > args.max_len:
            raise ValueError(f"a row of {longest} tokens, at most {args.max_len}: raise --max-len")
        stream = bool(request.get("stream", False))
        start = time.perf_counter()
        answer = peer.generate(request["prompts"], request["new_tokens"], stream)
        seconds = time.perf_counter() - start
        check(request, answer)
        reply: dict = {"seconds": seconds, "tokens": answer.tokens}
        if stream and answer.times is not None:
            reply["times"] = answer.times
        say(reply)
