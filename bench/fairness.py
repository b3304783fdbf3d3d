"""A key beside the streams of another: its time to the first token, and what fairness costs in throughput.

    python bench/fairness.py MODEL [--streams 30 250] [--rows 8] [--requests 12] [--seconds 60]

Starts `quire serve MODEL` with two keys. Key A keeps streams open; key B sends one short request after another. Prints
B's time to the first token alone and beside A, then the generated tokens per second of both together: with B's requests
under key B (fair), and under key A (one queue, first in first out), in turns on the same server. For these, requests of
B come at fixed times and a turn begins when the first of them has been answered, so that the same mix is served.
"""

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from serving import wait_ready

from quire.bench import http_client

KEYS = {"A": "key-of-the-crowd", "B": "key-of-the-other"}
PROMPT_LEN, SHORT_TOKENS = 16, 16
CROWD_TOKENS = (32, 96)
"""Each stream has another length: of equal ones, eight would begin and end in the same steps."""
TOKEN_IDS = (500, 5_000)
PAUSE_S = 0.2
"""Between two requests of B that follow each other."""
PERIOD_S = 0.8
"""Between two requests of B that come at fixed times."""
TURNS = 3


class Crowd:
    """Streams of key A: as soon as one ends, the next is sent."""

    def __init__(self, url: str, model: str, num_streams: int) -> None:
        self.num_tokens = 0
        self._url, self._model = url, model
        self._tasks = [asyncio.create_task(self._stream(i)) for i in range(num_streams)]

    async def _stream(self, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            reply = await http_client.complete(
                self._url, body(self._model, rng, rng.randint(*CROWD_TOKENS)), key=KEYS["A"]
            )
            if not reply.is_complete:
                raise RuntimeError(f"a stream of the crowd was answered with {reply.status}: {reply.error}")
            self.num_tokens += reply.num_tokens

    async def settle(self) -> None:
        """Wait until one has ended: then all rows are busy, at different positions."""
        while not self.num_tokens:
            self.check()
            await asyncio.sleep(0.1)

    def check(self) -> None:
        """Raise what a stream has raised."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Abort all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def body(model: str, rng: random.Random, num_tokens: int) -> dict:
    """A completion of random tokens that no cache knows."""
    prompt = [rng.randrange(*TOKEN_IDS) for _ in range(PROMPT_LEN)]
    return {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


async def short_request(url: str, model: str, key: str, rng: random.Random) -> http_client.Reply:
    """Send one short request."""
    reply = await http_client.complete(url, body(model, rng, SHORT_TOKENS), key=key)
    if not reply.is_complete:
        raise RuntimeError(f"a short request was answered with {reply.status}: {reply.error}")
    return reply


async def short_requests(url: str, model: str, rng: random.Random, count: int) -> list[http_client.Reply]:
    """Send short requests of key B one after another; their replies."""
    replies = []
    for _ in range(count):
        replies.append(await short_request(url, model, KEYS["B"], rng))
        await asyncio.sleep(PAUSE_S)
    return replies


def describe(replies: list[http_client.Reply]) -> str:
    """Median and worst time to the first token."""
    seconds = [reply.seconds_to_first for reply in replies]
    return f"median {statistics.median(seconds):.3f} s, worst {max(seconds):.3f} s"


async def throughput(url: str, model: str, num_streams: int, key: str, rng: random.Random, seconds: float) -> float:
    """Tokens per second of a crowd and of short requests under a key."""
    crowd, sent = Crowd(url, model, num_streams), []

    async def send() -> None:
        while True:
            sent.append(asyncio.create_task(short_request(url, model, key, rng)))
            await asyncio.sleep(PERIOD_S)

    sender = asyncio.create_task(send())
    try:
        await crowd.settle()
        await sent[0]
        start, before = time.perf_counter(), await generated_tokens(url)
        await asyncio.sleep(seconds)
        crowd.check()
        num_tokens, took = await generated_tokens(url) - before, time.perf_counter() - start
        return num_tokens / took
    finally:
        for task in (sender, *sent):
            task.cancel()
        await asyncio.gather(sender, *sent, return_exceptions=True)
        await crowd.close()


async def generated_tokens(url: str) -> float:
    """Tokens that the server has generated so far."""
    with await asyncio.to_thread(urllib.request.urlopen, url.removesuffix("/v1") + "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("quire_generated_tokens_total"))


async def measure(url: str, args: argparse.Namespace) -> None:
    """Measure and print."""
    model = (await http_client.get(url, "/models", key=KEYS["B"]))["data"][0]["id"]
    rng = random.Random(0)
    alone = await short_requests(url, model, rng, args.requests)
    print(f"B alone: {describe(alone)}")
    for num_streams in args.streams:
        crowd = Crowd(url, model, num_streams)
        try:
            await crowd.settle()
            beside = await short_requests(url, model, rng, args.requests)
        finally:
            await crowd.close()
        ratio = statistics.median(one.seconds_to_first for one in beside) / statistics.median(
            one.seconds_to_first for one in alone
        )
        print(f"B beside {num_streams} streams of A: {describe(beside)}; {ratio:.1f} times alone", flush=True)
        speeds: dict[str, list[float]] = {"fair": [], "FIFO": []}
        for _ in range(TURNS):
            for name, key in (("fair", KEYS["B"]), ("FIFO", KEYS["A"])):
                speeds[name].append(await throughput(url, model, num_streams, key, rng, args.seconds))
        fair, fifo = (statistics.median(values) for values in speeds.values())
        print(f"throughput: {fair:,.1f} tokens/s fair, {fifo:,.1f} FIFO: {fair / fifo:.3f}", flush=True)


def main() -> None:
    """Start the server and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[30, 250], help="open streams of A (30 250)")
    parser.add_argument("--rows", type=int, default=8, help="rows of the server (8)")
    parser.add_argument("--requests", type=int, default=12, help="requests of B (12)")
    parser.add_argument("--seconds", type=float, default=60, help="length of each turn for throughput (60)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.touch(0o600)
        keys.write_text("".join(f"{key} name={name}\n" for name, key in KEYS.items()))
        flags = [f"--max-num-seqs={args.rows}", "--max-model-len=512", f"--api-key-file={keys}", "--port=0"]
        flags += [f"--max-queued-requests={2 * max(args.streams)}", "--max-connections=1024"]
        command = [sys.executable, "-m", "quire", "serve", args.model, *flags]
        environment = {name: value for name, value in os.environ.items() if name != "QUIRE_API_KEY"}
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            asyncio.run(measure(wait_ready(server), args))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
