"""docs/benchmarks.md and its plots, measured, written and drawn by one command.

    python bench/report.py MODEL [--peers vllm,llama_cpp,huggingface] [--repeats 3]

Our engine in bfloat16 and int8, the bare loop and each peer take turns on the same prompts, so that the noise of the
machine hits all alike; ratios are of medians within one number of rows. Run it alone: half an hour on two cores.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

from quire import LLM, SamplingParams
from quire.bench import measure
from quire.device import native

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ROWS = (1, 8, 32, 64)
CONTEXTS = (256, 1024, 4096)
PROMPT_LEN, NEW_TOKENS = 64, 128
PREFILL_ROWS, PREFILL_LEN = 8, 1024
Speeds = dict[str, list[float]]
"""Tokens a second of each side, one for each turn."""


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


def measure_everybody(args: argparse.Namespace) -> dict:
    """Speeds of everybody in one run."""
    knobs = {"max_num_seqs": max(ROWS), "max_model_len": max(CONTEXTS) + NEW_TOKENS, "num_pages": 2048, "quiet": True}
    results: dict = {"throughput": {}, "latency": {}}
    ours, int8 = LLM(args.model, **knobs), LLM(args.model, quantize="int8", **knobs)
    results["ready_s"] = ready = {"quire": seconds_to_ready(args.model, knobs)}
    peers = {}
    for name in filter(None, args.peers.split(",")):
        options = " --quantize q8_0" if name == "llama_cpp" else ""
        peers[name] = measure.Peer(f"{ROOT}/bench/peers/run {name} {args.model}{options}")
        ready[name] = peers[name].seconds_to_ready

    def speeds(sides: dict[str, measure.Side], rows: int, prompt_len: int, num_tokens: int) -> Speeds:
        seconds = measure.take_turns(sides, ours, rows, prompt_len, args.repeats)
        found = {name: [num_tokens / took for took in own] for name, own in seconds.items()}
        print(rows, ", ".join(f"{name} {statistics.median(own):.0f}" for name, own in found.items()), flush=True)
        return found

    def everybody(rows: int, prompt_len: int, new_tokens: int) -> dict[str, measure.Side]:
        return {
            "quire": measure.our_side(ours, greedy(new_tokens)),
            "quire int8": measure.our_side(int8, greedy(new_tokens)),
            "bare": measure.bare_side(ours, rows, prompt_len, new_tokens),
        } | {name: lambda prompts, peer=peer: peer.generate(prompts, new_tokens) for name, peer in peers.items()}

    for rows in ROWS:
        sides = everybody(rows, PROMPT_LEN, NEW_TOKENS)
        results["throughput"][rows] = speeds(sides, rows, PROMPT_LEN, rows * NEW_TOKENS)
    sides = everybody(PREFILL_ROWS, PREFILL_LEN, 1)
    results["prefill"] = speeds(sides, PREFILL_ROWS, PREFILL_LEN, PREFILL_ROWS * PREFILL_LEN)
    for peer in peers.values():
        peer.close()
    nucleus = SamplingParams(temperature=1, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True, seed=0)
    sides = {"greedy": measure.our_side(ours, greedy(NEW_TOKENS)), "top_p": measure.our_side(ours, nucleus)}
    results["sampled"] = speeds(sides, max(ROWS), PROMPT_LEN, max(ROWS) * NEW_TOKENS)
    for name, llm in (("quire", ours), ("quire int8", int8)):
        for line in measure.latency(llm, contexts=CONTEXTS, new_tokens=64, repeats=args.repeats):
            results["latency"].setdefault(name, {})[line["context"]] = line["inter_token_s"]
    results["host"] = list(measure.host(ours, rows=ROWS, prompt_len=PROMPT_LEN, new_tokens=NEW_TOKENS, repeats=1))
    return results


def seconds_to_ready(model: str, knobs: dict) -> float:
    """Of a process of its own, from the start of Python to its end; programs have been compiled before."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"from quire import LLM; LLM({model!r}, **{knobs!r})"], check=True)
    return time.perf_counter() - start


def cell(values: list[float], ours: list[float] | None = None) -> str:
    text = f"{statistics.median(values):,.0f} ({min(values):,.0f}..{max(values):,.0f})"
    if ours is not None:
        text += f", **{statistics.median(ours) / statistics.median(values):.2f}x**"
    return text


def write_page(results: dict, args: argparse.Namespace) -> None:
    names = list(results["prefill"])
    machine = ", ".join([platform.machine(), *native.instruction_sets()[-1:]])
    lines = [
        "# Benchmarks",
        "",
        f"Written by `python bench/report.py MODEL` on a machine of {os.cpu_count()} cores ({machine});",
        "what the words mean, and what limits these numbers, is in [performance.md](performance.md).",
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
    sampled = {name: statistics.median(values) for name, values in results["sampled"].items()}
    lines += [
        f"At {max(ROWS)} rows drawing at temperature 1 and top_p 0.95 runs at "
        f"{sampled['top_p'] / sampled['greedy']:.2f}x of greedy: {sampled['top_p']:,.0f} of {sampled['greedy']:,.0f}.",
        "",
    ]
    shares = ", ".join(f"{line['ratio']:.1%} at {line['rows']}" for line in results["host"])
    lines += [f"The host's time for a token, as a share of the device's, by rows: {shares}.", ""]
    (DOCS / "benchmarks.md").write_text("\n".join(lines))


def draw(results: dict) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in results["prefill"]:
        medians = [statistics.median(results["throughput"][rows][name]) for rows in ROWS]
        style = {"linewidth": 2.5} if name.startswith("quire") else {"linestyle": "--"}
        axes.plot(ROWS, medians, marker="o", label=name, **style)
    axes.set(xlabel="sequences at once", ylabel="tokens a second", xscale="log", yscale="log", xticks=ROWS)
    axes.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
    axes.legend()
    figure.savefig(DOCS / "throughput.svg", bbox_inches="tight", metadata={"Date": None})
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, times in results["latency"].items():
        axes.plot(CONTEXTS, [times[context] * 1e3 for context in CONTEXTS], marker="o", label=name)
    axes.set(xlabel="context", ylabel="ms between tokens, one stream", ylim=0)
    axes.legend()
    figure.savefig(DOCS / "latency.svg", bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peers", default="vllm,llama_cpp,huggingface")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    results = measure_everybody(args)
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "report.json").write_text(json.dumps(results, indent=1))
    write_page(results, args)
    draw(results)


if __name__ == "__main__":
    main()
