"""Everything that docs/performance.md says, measured and drawn by one command.

    python bench/report.py MODEL [--peers vllm,llama_cpp,huggingface] [--repeats 3]

Our engine in bfloat16 and int8, the bare loop and each peer take turns on the same prompts, so that the noise of the
machine hits all alike; ratios are of medians within one number of rows. Run it alone: half an hour on two cores.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np

from quire import LLM, SamplingParams, bench
from quire.device import native

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROWS = (1, 8, 32, 64)
CONTEXTS = (256, 1024, 4096)
PROMPT_LEN, NEW_TOKENS = 64, 128
PREFILL_ROWS, PREFILL_LEN = 8, 1024
SLOW = {"huggingface": 1}
"""Peers that are measured fewer times."""

Medians = dict[str, dict[int, list[float]]]


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def measure(args: argparse.Namespace) -> dict:
    """Speeds of everybody in one run, as lists of repeats."""
    knobs = {"max_num_seqs": max(ROWS), "max_model_len": max(CONTEXTS) + NEW_TOKENS, "num_pages": 2048, "quiet": True}
    ready: dict[str, float] = {}
    results: dict = {"ready_s": ready, "throughput": {}, "prefill": {}, "latency": {}}
    start = time.perf_counter()
    ours = LLM(args.model, **knobs)
    ready["quire"] = time.perf_counter() - start
    int8 = LLM(args.model, quantize="int8", **knobs)
    peers = {}
    for name in filter(None, args.peers.split(",")):
        options = " --quantize q8_0" if name == "llama_cpp" else ""
        peers[name] = bench.Peer(f"{ROOT}/bench/peers/run {name} {args.model}{options}")
        ready[name] = peers[name].seconds_to_ready

    def sides(rows: int, prompt_len: int, new_tokens: int) -> dict[str, Callable[[bench.Prompts], float]]:
        bare = bench.bare_side(ours, rows, prompt_len, new_tokens)
        return {
            "quire": bench.our_side(ours, greedy(new_tokens)),
            "quire int8": bench.our_side(int8, greedy(new_tokens)),
            "bare": bare,
        } | {name: lambda prompts, peer=peer: peer.generate(prompts, new_tokens) for name, peer in peers.items()}

    for rows in ROWS:
        results["throughput"][rows] = take_turns(
            sides(rows, PROMPT_LEN, NEW_TOKENS), ours, rows, PROMPT_LEN, rows * NEW_TOKENS, args.repeats
        )
        print(rows, summary(results["throughput"][rows]), flush=True)
    results["prefill"] = take_turns(
        sides(PREFILL_ROWS, PREFILL_LEN, 1), ours, PREFILL_ROWS, PREFILL_LEN, PREFILL_ROWS * PREFILL_LEN, args.repeats
    )
    print("prefill", summary(results["prefill"]), flush=True)
    for peer in peers.values():
        peer.close()
    for name, llm in (("quire", ours), ("quire int8", int8)):
        for line in bench.latency(llm, contexts=CONTEXTS, new_tokens=64, repeats=args.repeats):
            results["latency"].setdefault(name, {})[line["context"]] = line["inter_token_s"]
    return results


def take_turns(
    sides: dict[str, Callable], llm: LLM, rows: int, prompt_len: int, num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Tokens a second of every side: the same prompts, in turn; the first turn is warm-up."""
    rng = np.random.default_rng(0)
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats + 1):
        prompts = bench.random_prompts(rng, llm, rows, prompt_len)
        for name, side in sides.items():
            if i <= SLOW.get(name, repeats):
                seconds = side(prompts)
                if i:
                    speeds[name].append(num_tokens / seconds)
    return speeds


def summary(speeds: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {statistics.median(values):.0f}" for name, values in speeds.items())


def cell(values: list[float], ours: list[float] | None = None) -> str:
    text = f"{statistics.median(values):,.0f} ({min(values):,.0f}..{max(values):,.0f})"
    if ours is not None:
        text += f", **{statistics.median(ours) / statistics.median(values):.2f}x**"
    return text


def write_page(results: dict, args: argparse.Namespace) -> None:
    names = list(results["prefill"])
    machine = f"{platform.machine()}, instruction set {native.instruction_sets()[-1:] or 'plain XLA'}"
    lines = [
        "# Performance",
        "",
        f"Made by `python bench/report.py MODEL` on one two-core machine ({machine}).",
        "SmolLM2-135M, greedy. Everybody takes turns on the same prompts; a cell is the median of",
        f"{args.repeats} with its spread, and in bold how many times faster Quire in bfloat16 was in the same turns.",
        "Quire int8 quantises weights and activations. Bare is the same kernels in one jitted loop without an engine.",
        "llama.cpp runs Q8_0, vLLM and Hugging Face bfloat16.",
        "",
        f"Tokens generated a second, {PROMPT_LEN} prompt tokens and {NEW_TOKENS} new ones each:",
        "",
        "| at once | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for rows, speeds in results["throughput"].items():
        cells = [cell(values, None if name == "quire" else speeds["quire"]) for name, values in speeds.items()]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    lines += ["", "![throughput](throughput.svg)", ""]
    lines += [f"Prompt tokens a second, {PREFILL_ROWS} prompts of {PREFILL_LEN:,}:", ""]
    lines += ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    ours = results["prefill"]["quire"]
    lines.append(
        "| " + " | ".join(cell(v, None if n == "quire" else ours) for n, v in results["prefill"].items()) + " |"
    )
    lines += ["", "Milliseconds between tokens of one stream, by the length of its context:", ""]
    lines += ["| | " + " | ".join(f"{context:,}" for context in CONTEXTS) + " |", "|---" * (len(CONTEXTS) + 1) + "|"]
    for name, times in results["latency"].items():
        lines.append(f"| {name} | " + " | ".join(f"{times[context] * 1e3:.1f}" for context in CONTEXTS) + " |")
    lines += ["", "![inter-token time](latency.svg)", ""]
    ready = ", ".join(f"{name} {seconds:.1f}" for name, seconds in results["ready_s"].items())
    lines += [f"Seconds to ready, compiled programs cached: {ready}.", ""]
    (DOCS / "performance.md").write_text("\n".join(lines))


def draw(results: dict) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in results["prefill"]:
        medians = [statistics.median(results["throughput"][rows][name]) for rows in ROWS]
        style = {"linewidth": 2.5} if name.startswith("quire") else {"linestyle": "--"}
        axes.plot(ROWS, medians, marker="o", label=name, **style)
    axes.set(xlabel="sequences at once", ylabel="tokens a second", xscale="log", yscale="log", xticks=ROWS)
    axes.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.legend()
    figure.savefig(DOCS / "throughput.svg", bbox_inches="tight")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, times in results["latency"].items():
        axes.plot(CONTEXTS, [times[context] * 1e3 for context in CONTEXTS], marker="o", label=name)
    axes.set(xlabel="context", ylabel="ms between tokens, one stream", ylim=0)
    axes.legend()
    figure.savefig(DOCS / "latency.svg", bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peers", default="vllm,llama_cpp,huggingface")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    results = measure(args)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "report.json").write_text(json.dumps(results, indent=1))
    write_page(results, args)
    draw(results)


if __name__ == "__main__":
    main()
