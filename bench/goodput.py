"""Mixed traffic: `quire serve` and vLLM's own server answer the same trace at growing rates.

    python bench/goodput.py MODEL.gguf TRACE.csv... [--rates 1 2 3 4 6] [--seconds 40] [--repeats 2] [--scale 0.25]

A request is good if its first token and, on average, each of the others came within the limits; goodput is how many
good ones there were for each second from the first arrival to the last answer. Both servers run to the end and
take turns: whoever has none is stopped (SIGSTOP), so that it takes no time. Lengths are the trace's times `--scale`, of
random tokens that no cache knows, and the same for both. Prints a table and draws docs/goodput.svg.
"""

import argparse
import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from quire.bench import http_client
from quire.bench.measure import read_trace

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
MAX_LEN, MAX_ROWS = 2048, 64
TOKEN_IDS = (500, 49_000)
"""Those of prompts: text, in any vocabulary of this size."""
START_S = 600
COLORS = {"quire": "#0f766e", "vllm": "#b45309"}


class Server:
    """A server in a process group of its own, stopped while it is not its turn."""

    def __init__(self, name: str, command: list[str], port: int) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}/v1"
        (ROOT / ".cache").mkdir(exist_ok=True)
        self._log = open(ROOT / ".cache" / f"goodput-{name}.log", "w")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    def wait_ready(self) -> str:
        """The name of its model, once it answers."""
        for _ in range(START_S):
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self._process.returncode}: see {self._log.name}")
            try:
                return asyncio.run(http_client.get(self.url, "/models"))["data"][0]["id"]
            except (OSError, ValueError):
                time.sleep(1)
        raise RuntimeError(f"{self.name} did not start in {START_S} s: see {self._log.name}")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run for a while."""
        os.killpg(self._process.pid, signal.SIGCONT)
        yield
        os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            with suppress(ProcessLookupError):  # it ended by itself
                os.killpg(self._process.pid, number)
        self._process.wait()
        self._log.close()


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 2, 3, 4, 6], help="requests a second")
    parser.add_argument("--seconds", type=float, default=40, help="of arrivals")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument(
        "--vllm-dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="float32 where the CPU has no products of bfloat16 (bfloat16)",
    )
    for name, default in (("--first-token", 2.0), ("--inter-token", 0.2)):
        parser.add_argument(
            name, nargs="+", type=float, default=[default], help="limits in seconds, one for each trace"
        )
    args = parser.parse_args()
    seconds = (args.first_token, args.inter_token)
    if any(len(given) not in (1, len(args.traces)) for given in seconds):
        parser.error("--first-token and --inter-token take one limit, or one for each trace")
    of_trace = list(zip(*(given * (len(args.traces) // len(given)) for given in seconds), strict=True))
    ports = free_ports(2)
    limits = ["--max-num-seqs", str(MAX_ROWS), "--max-model-len", str(MAX_LEN)]
    quire = [sys.executable, "-m", "quire", "serve", args.model, "--port", str(ports[0]), *limits]
    vllm = [str(ROOT / "bench/peers/run"), "vllm_server", args.model, "--port", str(ports[1]), *limits]
    vllm += ["--dtype", args.vllm_dtype]
    found: dict[tuple[str, float, str], list[float]] = {}
    with ExitStack() as stack:
        servers, models = [], {}
        for name, command, port in (("quire", quire, ports[0]), ("vllm", vllm, ports[1])):
            server = Server(name, command, port)
            stack.callback(server.close)
            models[name] = server.wait_ready()
            with server.turn():
                play(server, models[name], [(0.0, 64, 16)] * 4, of_trace[0])  # warm-up
            servers.append(server)
        for _ in range(args.repeats):
            for trace, within in zip(args.traces, of_trace, strict=True):
                for rate in args.rates:
                    arrivals = read_trace(trace, round(rate * args.seconds), args.scale, rate, MAX_LEN)
                    for server in servers:
                        with server.turn():
                            result = play(server, models[server.name], arrivals, within)
                        found.setdefault((trace.stem, rate, server.name), []).append(result["goodput"])
                        row = {"trace": trace.stem, "rate": rate, "server": server.name} | result
                        print(" ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
                        sys.stdout.flush()
            servers.reverse()
    report(found, args, of_trace)


def play(
    server: Server, model: str, arrivals: list[tuple[float, int, int]], within: tuple[float, float]
) -> dict[str, Any]:
    """Send requests when their time has come, and judge the answers by the seconds to a first token and between."""
    rng = np.random.default_rng()
    shared = {"model": model, "temperature": 0, "ignore_eos": True}
    bodies = [
        (at, shared | {"prompt": rng.integers(*TOKEN_IDS, size=prompt_len).tolist(), "max_tokens": new_tokens})
        for at, prompt_len, new_tokens in arrivals
    ]
    start = time.perf_counter()
    replies = asyncio.run(http_client.at_times(server.url, bodies))
    took = time.perf_counter() - start
    answered = [reply for reply in replies if reply.is_complete and reply.times]
    good = [
        reply
        for reply in answered
        if reply.seconds_to_first <= within[0] and (reply.seconds_per_token or 0) <= within[1]
    ]
    first = np.array([reply.seconds_to_first for reply in answered] or [np.nan])
    between = np.array([reply.seconds_per_token or 0 for reply in answered] or [np.nan])
    return {
        "goodput": len(good) / took,
        "good": len(good),
        "answered": len(answered),
        "requests": len(bodies),
        "seconds": took,
        "first_p50": float(np.median(first)),
        "first_p95": float(np.quantile(first, 0.95)),
        "inter_p50": float(np.median(between)),
        "inter_p95": float(np.quantile(between, 0.95)),
    }


def report(
    found: dict[tuple[str, float, str], list[float]], args: argparse.Namespace, of_trace: list[tuple[float, float]]
) -> None:
    """A table, and a panel of a picture for each trace."""
    figure, panels = pyplot.subplots(1, len(args.traces), figsize=(4.5 * len(args.traces), 3.2), squeeze=False)
    for trace, (first, between), axes in zip(args.traces, of_trace, panels[0], strict=True):
        print(f"{trace.stem}: first token within {first:g} s, {between:g} s between tokens; good ones a second by rate")
        best = {}
        for name, color in COLORS.items():
            values = [found[trace.stem, rate, name] for rate in args.rates]
            medians = [statistics.median(value) for value in values]
            spread = [[m - min(v), max(v) - m] for m, v in zip(medians, values, strict=True)]
            axes.errorbar(args.rates, medians, np.transpose(spread), color=color, marker="o", capsize=3, label=name)
            best[name] = max(medians)
            points = zip(args.rates, medians, strict=True)
            print(f"{trace.stem} {name}:", *(f"{rate:g}: {median:.2f}" for rate, median in points))
        ratio = f": {best['quire'] / best['vllm']:.2f}x" if best["vllm"] else ""
        print(f"{trace.stem}: at the knee {best['quire']:.2f} and {best['vllm']:.2f}{ratio}")
        axes.set(
            title=f"{trace.stem}: {first:g} s, {between:g} s",
            xlabel="requests sent a second",
            ylabel="good ones a second",
        )
        axes.legend()
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "goodput.svg", metadata={"Date": None})


def free_ports(num: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
