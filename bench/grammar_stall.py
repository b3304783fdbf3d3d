"""What one key's expensive grammars cost everybody else on a server.

    python bench/grammar_stall.py MODEL [--rounds 5] [--seconds 6]

Starts `quire serve MODEL` with two keys. One key's four connections send forms that are expensive to compile and all
different, half of them too expensive to be taken; the other key encodes texts and asks for short completions, one at a
time. Quiet and loud spells take turns; the medians of each, their ratio and the longest wait are printed.
"""

import argparse
import http.client
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

ATTACKER, BYSTANDER = "the-key-that-attacks", "the-key-that-stands-by"
NUM_CONNECTIONS = 4
NEW_TOKENS = 16
TEXT = "The bystander speaks of other things. " * 20

_numbers = itertools.count()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    keys = [f"--api-key={key}" for key in (ATTACKER, BYSTANDER)]
    knobs = ["--max-num-seqs=8", "--max-model-len=1024", "--num-pages=1024"]
    command = [sys.executable, "-m", "quire", "serve", args.model, "--port", "0", *keys, *knobs]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = wait_ready(server)
        name = ask(address, BYSTANDER, "GET", "/v1/models")[1]["data"][0]["id"]
        send_form(address, name)  # starts the process that tries forms
        measure(address, name, 1.0)
        quiet, loud, statuses = {}, {}, []
        for _ in range(args.rounds):
            add(quiet, measure(address, name, args.seconds))
            with Attack(address, name) as attack:
                add(loud, measure(address, name, args.seconds))
            statuses += attack.statuses
        report(quiet, loud, statuses)
    finally:
        server.terminate()
        server.wait()


def measure(address: str, name: str, seconds: float) -> dict[str, list[float]]:
    """The bystander's waits, by what it asked for."""
    completion = {"model": name, "prompt": "Once upon a time", "max_tokens": NEW_TOKENS, "ignore_eos": True}
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    jobs = {
        "tokenize": ("/tokenize", {"prompt": TEXT}),
        "completion": ("/v1/completions", completion),
        "completion with a known form": ("/v1/completions", completion | {"ignore_eos": False} | form),
    }
    waits: dict[str, list[float]] = {job: [] for job in jobs}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for job, (path, body) in jobs.items():
            begin = time.perf_counter()
            status, answer = ask(address, BYSTANDER, "POST", path, body)
            waits[job].append(time.perf_counter() - begin)
            if status != 200:
                raise RuntimeError(f"the bystander was told {status}: {answer}")
    return waits


class Attack:
    """Four connections that send one expensive form after another, while it is entered."""

    def __init__(self, address: str, name: str) -> None:
        self.statuses: list[int] = []
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(address, name)) for _ in range(NUM_CONNECTIONS)]

    def _run(self, address: str, name: str) -> None:
        while not self._is_over.is_set():
            status = send_form(address, name)
            self.statuses.append(status)
            if status == 429:
                time.sleep(0.05)

    def __enter__(self) -> "Attack":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def send_form(address: str, name: str) -> int:
    """Ask for a form that nobody has asked for before; the status."""
    number = next(_numbers)
    # The cost grows with the square of the patterns: the larger one is beyond the limit, the smaller one is not.
    patterns = {f"^p{number}x{i}[a-z]*$": {"type": "string"} for i in range(400 if number % 2 else 100)}
    form = {"json": {"type": "object", "patternProperties": patterns}}
    body = {"model": name, "prompt": "x", "max_tokens": 1, "structured_outputs": form}
    return ask(address, ATTACKER, "POST", "/v1/completions", body)[0]


def ask(address: str, key: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=120)
    try:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def add(total: dict[str, list[float]], new: dict[str, list[float]]) -> None:
    """Put the waits of one spell to those of the others."""
    for job, waits in new.items():
        total.setdefault(job, []).extend(waits)


def report(quiet: dict[str, list[float]], loud: dict[str, list[float]], statuses: list[int]) -> None:
    """Print medians, ratios and the longest waits."""
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    print(f"the attacker sent {len(statuses)} forms: {counts}")
    for job, waits in quiet.items():
        before, now = statistics.median(waits), statistics.median(loud[job])
        print(
            f"{job}: {1e3 * before:.1f} ms quiet, {1e3 * now:.1f} ms loud, ratio {now / before:.2f}; "
            f"longest {1e3 * max(waits):.0f} and {1e3 * max(loud[job]):.0f} ms "
            f"({len(waits)} and {len(loud[job])} times)"
        )


def wait_ready(server: subprocess.Popen) -> str:
    """Host and port, once it listens."""
    for line in server.stderr:
        if "ready on " in line:
            threading.Thread(target=server.stderr.read, daemon=True).start()  # a full pipe would stop it
            return line.split("ready on http://")[1].split("/")[0]
    raise RuntimeError("the server did not start")


if __name__ == "__main__":
    main()
