"""The simulator beside the engine: the same requests through both, and how far apart they are.

    python bench/simulate.py MODEL TRACE.csv [TRACE.csv ...] [--requests 60] [--scale 0.1] [--clock wall] [--repeats 3]
        [--json FILE]

For each trace, twice: all requests at once, which tells the throughput, and at `--load` of that rate, which tells the
mean time to the first token. Steps are calibrated before, between and after, on work of its own, as `quire bench steps`
does. Traces take turns, each turn is compared with its own calibration, and at the end stand medians and ranges. With
`--clock cpu` a second is a second of this process's CPU time, on both sides: for a machine that others use too.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams
from quire.bench.measure import random_prompts
from quire.bench.steps import fit_steps, timed_steps
from quire.core.request import Request
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.build import scheduler_config
from quire.simulate.cost import PlanSize
from quire.simulate.fleet import run_fleet
from quire.simulate.report import summarise
from quire.simulate.traffic import Traffic, read_trace

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def serve(llm: LLM, traffic: Traffic, clock: Callable[[], float], seed: int) -> tuple[float, float]:
    """Tokens a second and the mean time to the first token of the real engine. Where nothing runs, the clock jumps."""
    engine, rng = llm.engine, np.random.default_rng(seed)
    requests = []
    for i, arrival in enumerate(traffic.arrivals):
        (prompt,) = random_prompts(rng, llm, 1, arrival.prompt_len)
        params = SamplingParams(temperature=0, max_tokens=arrival.new_tokens[0], ignore_eos=True)
        requests.append(Request(id=f"{seed}-{i}", prompt_token_ids=tuple(prompt), params=params))
    first: dict[str, float] = {}
    start, added, tokens, now = clock(), 0, 0, 0.0
    while added < len(requests) or engine.has_work:
        now = clock() - start
        if not engine.has_work and traffic.arrivals[added].at > now:
            start -= traffic.arrivals[added].at - now
            continue
        while added < len(requests) and traffic.arrivals[added].at <= now:
            engine.add(requests[added])
            added += 1
        events = engine.step()
        now = clock() - start
        for event in events:
            first.setdefault(event.sequence.request.id, now)
            tokens += len(event.token_ids)
    waits = [first[request.id] - arrival.at for request, arrival in zip(requests, traffic.arrivals, strict=True)]
    return tokens / now, statistics.mean(waits)


def compare(
    llm: LLM,
    config: SchedulerConfig,
    traffic: Traffic,
    load: float,
    rows: list[int],
    clock: Callable[[], float],
    seed: int,
) -> dict[str, float]:
    """One turn of a trace: what the engine did, what the simulation says, and the ratios."""
    at_once = traffic.at_rate(math.inf)
    prompt_len = statistics.mean(one.prompt_len for one in traffic.arrivals)
    new_tokens = statistics.mean(one.new_tokens[0] for one in traffic.arrivals)

    def steps(seed: int) -> list[tuple[PlanSize, float]]:
        return timed_steps(llm, rows, round(prompt_len), round(new_tokens) + 1, 1, seed, clock)

    measured = steps(seed)
    speed, _ = serve(llm, at_once, clock, seed + 1)
    measured += steps(seed + 1)
    rate = load * speed / new_tokens
    spaced = traffic.at_rate(rate)
    _, wait = serve(llm, spaced, clock, seed + 2)
    measured += steps(seed + 2)
    calibration = fit_steps(llm, measured, "")
    fast = summarise(run_fleet(at_once, config, calibration), 1)
    soon = summarise(run_fleet(spaced, config, calibration), 1)
    return {
        "requests": len(traffic.arrivals),
        "prompt_tokens": prompt_len,
        "new_tokens": new_tokens,
        "tokens_per_s": speed,
        "simulated_tokens_per_s": fast["tokens_per_s"],
        "rate": rate,
        "first_token_s": wait,
        "simulated_first_token_s": soon["first_token_s_mean"],
        "throughput_ratio": fast["tokens_per_s"] / speed,
        "first_token_ratio": soon["first_token_s_mean"] / wait,
        "calibration_error": calibration.error,
    }


def main() -> None:
    """Measure, simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--load", type=float, default=0.6)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    clock, rows = CLOCKS[args.clock], [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= args.max_num_seqs]
    knobs = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": 256, "num_pages": 2048, "max_model_len": 2048}
    llm = LLM(args.model, quiet=True, **knobs)
    config, lines = scheduler_config(llm.engine.config, llm.engine._pool), []
    print(f"{os.cpu_count()} cores, {args.clock} time, load {os.getloadavg()[0]:.1f}; simulated / real")
    traces = [read_trace(path, requests=args.requests, scale=args.scale, max_len=1024) for path in args.traces]
    serve(llm, traces[0].at_rate(math.inf), clock, 1_000_000)  # what a process does first costs more
    for turn in range(args.repeats):
        for number, (path, traffic) in enumerate(zip(args.traces, traces, strict=True)):
            seed = 10 * (turn * len(args.traces) + number)
            line = {"trace": path.stem, **compare(llm, config, traffic, args.load, rows, clock, seed)}
            lines.append(line)
            print(
                "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()), flush=True
            )
    for path in args.traces:
        for name in ("throughput_ratio", "first_token_ratio"):
            ratios = [line[name] for line in lines if line["trace"] == path.stem]
            print(f"{path.stem} {name} {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
    if args.json:
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
