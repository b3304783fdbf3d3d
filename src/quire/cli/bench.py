"""`quire bench KIND MODEL`: one line for each result, for people or as JSON."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from quire import LLM
from quire.bench import measure
from quire.bench.http_client import UnreachableError
from quire.bench.measure import Result
from quire.bench.steps import calibrate
from quire.cli import engine_knobs


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    for name, low in (("repeats", 1), ("prompt_len", 1), ("new_tokens", 2 if args.kind == "latency" else 1)):
        if getattr(args, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least {low}")
    if args.url is not None and args.kind != "serve":
        raise ValueError(f"--url is for serve, not for {args.kind}")
    if args.url is not None:
        try:
            return _print(args, _measure_url(args))
        except UnreachableError as error:
            print(f"quire: {error}", file=sys.stderr)
            return 1
    if args.model is None:
        raise ValueError(f"{args.kind} needs MODEL, a folder, a GGUF file or a name on the hub (org/name)")
    if args.kind == "serve" and args.trace is None:
        raise ValueError("serve needs --trace FILE, a CSV of arrivals such as bench/traces/azure_conv_2023.csv")
    if args.kind == "steps" and args.json in (None, "-"):
        raise ValueError("steps needs --json FILE: quire simulate --calibration FILE reads it")
    with LLM(args.model, revision=args.revision, quiet=args.json == "-", **knobs(args)) as llm:
        if args.kind == "steps":
            return _calibrate(args, llm)
        return _print(args, _measure(args, llm))


def _print(args: argparse.Namespace, results: Iterator[Result]) -> int:
    if args.json in (None, "-"):
        _write(results, sys.stdout, as_json=args.json is not None)
    else:
        with open(args.json, "w") as file:
            _write(results, file, as_json=True)
    return 0


def _calibrate(args: argparse.Namespace, llm: LLM) -> int:
    sizes = {"rows": args.rows, "prompt_len": args.prompt_len, "new_tokens": args.new_tokens, "repeats": args.repeats}
    calibration = calibrate(llm, model=Path(args.model).name, **sizes)
    calibration.save(Path(args.json))
    print(f"{args.json}: half of the steps measured are within {calibration.error:.1%} of what it says")
    return 0


def _measure_url(args: argparse.Namespace) -> Iterator[Result]:
    return measure.serve_url(
        args.url,
        key=args.api_key or os.environ.get("QUIRE_API_KEY"),
        rows=args.rows,
        prompt_len=args.prompt_len,
        new_tokens=args.new_tokens,
        requests=args.requests,
        trace=None if args.trace is None else Path(args.trace),
        scale=args.scale,
        rate=args.rate,
    )


def _measure(args: argparse.Namespace, llm: LLM) -> Iterator[Result]:
    batch = {"rows": args.rows, "prompt_len": args.prompt_len, "repeats": args.repeats}
    if args.kind == "throughput":
        draw = {"temperature": args.temperature, "top_p": args.top_p}
        return measure.throughput(llm, **batch, new_tokens=args.new_tokens, against=args.against, **draw)
    if args.kind == "prefill":
        return measure.prefill(llm, **batch, against=args.against)
    if args.kind == "latency":
        return measure.latency(llm, contexts=args.contexts, new_tokens=args.new_tokens, repeats=args.repeats)
    if args.kind == "prefix":
        return measure.prefix(llm, prompt_len=args.prompt_len, repeats=args.repeats)
    if args.kind == "serve":
        return measure.serve(llm, trace=Path(args.trace), requests=args.requests, scale=args.scale, rate=args.rate)
    return {"fork": measure.fork, "host": measure.host}[args.kind](llm, **batch, new_tokens=args.new_tokens)


def knobs(args: argparse.Namespace) -> Result:
    """The engine's, as small as the measurement allows: what is not used is not compiled."""
    knobs = engine_knobs(args)
    most_rows = {"latency": 1, "prefix": 1, "serve": 64}.get(args.kind, max(args.rows))
    longest = max(args.contexts) if args.kind == "latency" else args.prompt_len
    knobs["max_num_seqs"] = knobs["max_num_seqs"] or most_rows
    knobs["max_num_batched_tokens"] = max(knobs["max_num_batched_tokens"], knobs["max_num_seqs"])
    if args.kind not in ("serve", "steps"):
        knobs["max_model_len"] = knobs["max_model_len"] or longest + args.new_tokens
    return knobs


def _write(results: Iterator[Result], file: TextIO, *, as_json: bool) -> None:
    for result in results:
        shown = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in result.items()
        )
        print(json.dumps(result) if as_json else "  ".join(shown), file=file, flush=True)
