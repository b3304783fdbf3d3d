"""Does each peer run, and on the right weights? Starts them one after another and reads what they say of France.

    python bench/peers/check.py MODEL.gguf [NAME ...] [--speed 1,8,32,64] [--new-tokens 128]

Names are vllm, llama_cpp, llama_cpp:q8_0 and huggingface; without any, all four. --speed adds tokens/s at these many
rows of 64 prompt tokens: one run each, of use only to see that a peer is not broken. Standard library only.
"""

import argparse
import json
import random
import subprocess
import time
from pathlib import Path

RUN = Path(__file__).resolve().parent / "run"
NAMES = ["huggingface", "llama_cpp", "llama_cpp:q8_0", "vllm"]

# "The capital of France is" -> " Paris.", and "1, 2, 3, 4," -> " 5, 6,": two lengths, so that rows are told apart.
KNOWN = [
    ([504, 3575, 282, 4649, 314], [7042, 30]),
    ([33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28], [216, 37, 28, 216, 38, 28]),
]


class Peer:
    """A running peer. `ask` sends one request and waits for its answer."""

    def __init__(self, name: str, model: Path, max_rows: int, max_len: int):
        base, _, quantize = name.partition(":")
        command = [str(RUN), base, str(model), "--max-rows", str(max_rows), "--max-len", str(max_len)]
        if quantize:
            command += ["--quantize", quantize]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def _read(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}: its reason is above, on standard error")
        return json.loads(line)

    def ask(self, prompts: list[list[int]], new_tokens: int, stream: bool = False) -> dict:
        assert self.process.stdin
        request = {"prompts": prompts, "new_tokens": new_tokens, "stream": stream}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends its input, at which it exits by itself; an exit code other than 0 is an error."""
        assert self.process.stdin
        self.process.stdin.close()
        if code := self.process.wait(timeout=60):
            raise RuntimeError(f"{self.name} exited with {code} at the end of its input")


def check_weights(peer: Peer) -> None:
    answer = peer.ask([prompt for prompt, _ in KNOWN], new_tokens=8, stream=True)
    for (prompt, expected), tokens in zip(KNOWN, answer["tokens"], strict=True):
        if tokens[: len(expected)] != expected:
            raise AssertionError(f"{peer.name}: {prompt} goes on {tokens}, not {expected}: not the right weights")
    for times in answer.get("times", []):
        if len(times) != 8 or times != sorted(times):
            raise AssertionError(f"{peer.name}: 8 tokens came at {times}")


def speed(peer: Peer, rows: int, new_tokens: int) -> float:
    rng = random.Random(rows)

    def prompts() -> list[list[int]]:
        return [[rng.randrange(100, 40_000) for _ in range(64)] for _ in range(rows)]

    peer.ask(prompts(), 4)
    return rows * new_tokens / peer.ask(prompts(), new_tokens)["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--speed", default="", help="row counts, with commas")
    parser.add_argument("--new-tokens", type=int, default=128)
    args = parser.parse_args()
    rows = [int(count) for count in args.speed.split(",") if count]

    for name in args.names:
        start = time.perf_counter()
        peer = Peer(name, args.model, max_rows=max(64, *rows, 0), max_len=512)
        seconds = time.perf_counter() - start
        print(f"{name}: {peer.ready['version']}, ready in {peer.ready['seconds']:.1f} s ({seconds:.1f} with run)")
        check_weights(peer)
        for count in rows:
            print(f"  {count} rows: {speed(peer, count, args.new_tokens):.0f} tokens/s", flush=True)
        peer.close()
    print("all good")


if __name__ == "__main__":
    main()
