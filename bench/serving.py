"""A server beside the same engine without one: what HTTP, streaming and a process of its own cost.

    python bench/serving.py MODEL [--rows 64] [--repeats 3]

Starts `quire serve MODEL` and, in this process, an LLM with the same knobs; they take turns on the same prompts. The
client is `quire.bench.http_client`; its CPU time is told, since it takes from the server's two cores.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import threading
import time

from quire import LLM, SamplingParams
from quire.bench import http_client, measure

PROMPT_LEN, NEW_TOKENS = 64, 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    knobs = {"max_num_seqs": args.rows, "max_model_len": 512}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in knobs.items()]
    command = [sys.executable, "-m", "quire", "serve", args.model, "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = wait_ready(server)
        name = asyncio.run(http_client.get(url, "/models"))["data"][0]["id"]
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        client_s: list[float] = []

        def served(prompts: list[list[int]]) -> float:
            bodies = [
                {"model": name, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
                for prompt in prompts
            ]
            start, cpu = time.perf_counter(), time.process_time()
            replies = asyncio.run(http_client.at_once(url, bodies, len(bodies)))
            took = time.perf_counter() - start
            client_s.append(time.process_time() - cpu)
            if not all(reply.is_complete and reply.num_tokens == NEW_TOKENS for reply in replies):
                raise RuntimeError("a stream was not answered in full")
            return took

        with LLM(args.model, quiet=True, **knobs) as llm:
            sides = {"offline": measure.our_side(llm, params), "served": served}
            seconds = measure.take_turns(sides, llm, args.rows, PROMPT_LEN, args.repeats)
        tokens = args.rows * NEW_TOKENS
        for side, values in seconds.items():
            print(f"{side}: {tokens / statistics.median(values):,.0f} tokens/s ({[round(tokens / s) for s in values]})")
        ratios = [a / b for a, b in zip(seconds["offline"], seconds["served"], strict=True)]
        print(f"served / offline: {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
        print(f"the client's CPU: {statistics.median(client_s):.2f} s a turn")
    finally:
        server.terminate()
        server.wait()


def wait_ready(server: subprocess.Popen) -> str:
    """Where it listens, once it does."""
    for line in server.stderr:
        if "ready on " in line:
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
            return line.split("ready on ")[1].split()[0].rstrip(";")
    raise RuntimeError("the server did not start")


if __name__ == "__main__":
    main()
