"""The tables and plots of docs/scale.md: a day of 1,000,000,000 requests, by `quire simulate` and a data sheet.

    python bench/scale.py TRACE.csv [--requests 1500] [--efficiency 0.5] [--chip-hour 1]

Nothing here is a measurement of a chip: steps cost what the data sheet allows at best, divided by the efficiency. That,
the price and the peak are inputs. Prints the tables, and draws docs/scale-knee.svg and docs/scale-fleet.svg.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib

from quire.capacity.step_cost import roofline_cost
from quire.capacity.topology import parse_topology
from quire.config import EngineConfig
from quire.core.scheduler_config import SchedulerConfig
from quire.simulate.cost import Cost
from quire.simulate.fleet import run_fleet
from quire.simulate.report import Result, summarise
from quire.simulate.traffic import Traffic, read_trace

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "bench" / "configs" / "Llama-3.1-8B.json"
SLICES = {"v6e:1x1": (2, 3, 4, 5, 6, 7, 8), "v6e:2x2": (16, 24, 32, 40, 48, 56, 64)}
"""Requests a second that each is tried with."""
KNOBS = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "max_model_len": 8192}
FIRST_TOKEN, INTER_TOKEN = 1.0, 0.05
"""Seconds that 95% of requests may take to their first token, and between tokens."""
DAY = 86_400
REQUESTS_A_DAY = 1_000_000_000


def engine(slice_: str, efficiency: float, **knobs) -> tuple[SchedulerConfig, Cost]:
    """What one replica is made of, and what its steps cost."""
    config = EngineConfig(**KNOBS | knobs)
    cost, own = roofline_cost(MODEL, config, parse_topology(slice_), efficiency)
    return (
        SchedulerConfig(
            page_size=config.page_size,
            num_pages=own["num_pages"],
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_samples=config.max_num_samples,
            max_rounds=config.max_rounds,
            preemption="recompute",
        ),
        cost,
    )


def simulate(
    traffic: Traffic, made: tuple[SchedulerConfig, Cost], replicas: int = 1, routing: str = "prefix"
) -> Result:
    return summarise(run_fleet(traffic, *made, replicas=replicas, routing=routing), replicas)


def is_fast(result: Result) -> bool:
    return result["first_token_s_p95"] <= FIRST_TOKEN and result["inter_token_s_p95"] <= INTER_TOKEN


def table(head: list[str], lines: list[list[object]]) -> None:
    for line in (head, ["---"] * len(head), *lines):
        print("| " + " | ".join(map(str, line)) + " |")
    print(flush=True)


def cells(result: Result) -> list[str]:
    names = ("first_token_s_p50", "first_token_s_p95", "inter_token_s_p95", "busy")
    return [f"{result['tokens_per_s']:,.0f}", *(f"{result[name]:.3g}" for name in names), f"{result['preemptions']:,}"]


CELLS = ["tokens/s", "first token p50, s", "p95", "between tokens p95, s", "busy", "preemptions"]


def knee(traffic: Traffic, efficiency: float) -> dict[str, tuple[float, list[Result]]]:
    """For each slice the highest rate that is fast enough, and what was tried."""
    found, lines = {}, []
    for slice_, rates in SLICES.items():
        made = engine(slice_, efficiency)
        results = [simulate(traffic.at_rate(rate), made) for rate in rates]
        fast = [rate for rate, result in zip(rates, results, strict=True) if is_fast(result)]
        found[slice_] = max(fast, default=0.0), results
        lines += [[slice_, rate, *cells(result)] for rate, result in zip(rates, results, strict=True)]
    table(["replica", "requests/s", *CELLS], lines)
    return found


def sweeps(traffic: Traffic, rate: float, efficiency: float) -> None:
    """One knob at a time, on one chip close to its knee."""
    lines, sent = [], traffic.at_rate(rate)
    pages = engine("v6e:1x1", efficiency)[0].num_pages
    tried = {
        "page_size": (16, 64, 256),
        "max_num_batched_tokens": (256, 1024, 4096),
        "max_num_seqs": (32, 64, 256),
        "num_pages": (pages // 2, pages // 4),
        "max_rounds": (1, 4, 16),
    }
    for name, values in tried.items():
        for value in values:
            lines.append([f"{name}={value:,}", *cells(simulate(sent, engine("v6e:1x1", efficiency, **{name: value})))])
    table([f"v6e:1x1 at {rate:g} requests/s", *CELLS], lines)


def routing(traffic: Traffic, rate: float, efficiency: float, replicas: int = 16) -> None:
    """System prompts in common, more of them than one pool keeps: who finds them?"""
    shared = traffic.sharing(2048, groups=64)
    made = engine("v6e:1x1", efficiency)
    lines = []
    for policy in ("turns", "least", "prefix"):
        result = simulate(shared.at_rate(rate * replicas), made, replicas, policy)
        lines.append([policy, f"{result['cached']:.1%}", f"{result['imbalance']:.2f}", *cells(result)])
    table([f"{replicas} x v6e:1x1", "prompt tokens found cached", "imbalance", *CELLS], lines)


def fleets(traffic: Traffic, rate: float, efficiency: float) -> list[Result]:
    """Is a fleet as good as so many engines? The same load on each."""
    made, results, sizes = engine("v6e:1x1", efficiency), [], (1, 2, 4, 8, 16, 32)
    for replicas in sizes:
        arrivals = traffic.arrivals * replicas
        sent = Traffic([one._replace(at=float(i)) for i, one in enumerate(arrivals)])
        results.append(simulate(sent.at_rate(rate * replicas), made, replicas, "least"))
    table(["replicas", *CELLS], [[r["replicas"], *cells(r)] for r in results])
    return results


def plan(found: dict[str, tuple[float, list[Result]]], args: argparse.Namespace) -> None:
    """Chips and money for a day."""
    lines, peak = [], REQUESTS_A_DAY / DAY * args.peak
    for slice_, (rate, _) in found.items():
        chips = parse_topology(slice_).num_chips
        if not rate:
            lines.append([slice_, "too slow at any rate", "", "", ""])
            continue
        replicas = -(-peak // rate)
        cost = replicas * chips * 24 * args.chip_hour
        lines.append([slice_, rate, f"{replicas:,.0f}", f"{replicas * chips:,.0f}", f"{cost:,.0f}"])
    print(f"mean {REQUESTS_A_DAY / DAY:,.0f} requests/s, peak {peak:,.0f}; {args.chip_hour} a chip-hour\n")
    table(["replica", "requests/s at the knee", "replicas", "chips", "a day"], lines)


def draw(found: dict[str, tuple[float, list[Result]]], fleet: list[Result]) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for (slice_, (_, results)), style in zip(found.items(), ("-", "--"), strict=True):
        chips = parse_topology(slice_).num_chips
        rates = [rate / chips for rate in SLICES[slice_]]
        for ax, name in zip(axes, ("first_token_s_p95", "inter_token_s_p95"), strict=True):
            ax.plot(rates, [result[name] for result in results], style, marker="o", label=slice_)
    for ax, name, target in zip(axes, ("first token", "between tokens"), (FIRST_TOKEN, INTER_TOKEN), strict=True):
        ax.axhline(target, color="gray", linewidth=1)
        ax.set(xlabel="requests a second and chip", ylabel=f"{name}, 95th percentile, s", yscale="log")
        ax.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "scale-knee.svg", bbox_inches="tight", metadata={"Date": None})
    figure, ax = pyplot.subplots(figsize=(5, 3.6))
    sizes = [result["replicas"] for result in fleet]
    ax.plot(sizes, [result["first_token_s_p95"] for result in fleet], marker="o", label="first token, p95")
    ax.plot(sizes, [result["first_token_s_p50"] for result in fleet], marker="o", label="first token, p50")
    ax.set(xlabel="replicas, the same load on each", ylabel="s", xscale="log", xticks=sizes, ylim=0)
    ax.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
    ax.minorticks_off()
    ax.legend()
    figure.savefig(ROOT / "docs" / "scale-fleet.svg", bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--efficiency", type=float, default=0.5)
    parser.add_argument("--chip-hour", type=float, default=1.0)
    parser.add_argument("--peak", type=float, default=2.0, help="busiest second against the mean")
    args = parser.parse_args()
    traffic = read_trace(args.trace, requests=args.requests, max_len=KNOBS["max_model_len"])
    found = knee(traffic, args.efficiency)
    rate = found["v6e:1x1"][0] or SLICES["v6e:1x1"][0]
    plan(found, args)
    sweeps(traffic, rate, args.efficiency)
    short = replace(traffic, arrivals=traffic.arrivals[: args.requests // 4])
    routing(traffic, rate, args.efficiency)
    draw(found, fleets(short, rate, args.efficiency))


if __name__ == "__main__":
    main()
