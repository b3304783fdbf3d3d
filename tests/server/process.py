"""A real server in a process of its own, and what is needed to talk to it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PYTHON = [sys.executable, *["-O"] * sys.flags.optimize]
"""As the tests themselves run."""
READY = re.compile(r"ready on (http://\S+)/v1(?: and grpc://(\S+);)?")
START_TIMEOUT_S = 600
LONGEST_S = 600.0
"""What is waited for comes long before, and at some time even where many other things run: else it never does."""
SMALL = ("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--num-pages", "512")
"""Few and small programs."""


def write_whole(file: Path, text: str) -> None:
    """Write a file that another process looks for: it finds all of it, or nothing."""
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


class Server:
    """One `quire serve`."""

    def __init__(self, model: Path, *flags: str, env: dict[str, str] | None = None, launcher: list[str] | None = None):
        command = launcher or [*PYTHON, "-m", "quire", "serve"]
        self.process = subprocess.Popen(
            [*command, str(model), "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": ""} | (env or {}),
        )
        self.lines: list[str] = []
        self.url = ""
        self.grpc = ""
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := READY.search(line):
                self.url, self.grpc = found[1], found[2] or ""
                self._is_ready.set()
        self._is_ready.set()

    def wait_ready(self) -> "Server":
        if not self._is_ready.wait(START_TIMEOUT_S) or not self.url:
            self.kill()
            raise RuntimeError("the server did not start:\n" + "".join(self.lines[-20:]))
        return self

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def admin_port(self) -> int:
        return int(re.search(r"to look inside, http://127\.0\.0\.1:(\d+)/debug", "".join(self.lines))[1])  # type: ignore[index]

    @property
    def grpc_port(self) -> int:
        return int(self.grpc.rsplit(":", 1)[1])

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        return self.ask("GET", path, None, **headers)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, bytes]:
        return self.ask("POST", path, json.dumps(body).encode(), **headers)

    def ask(self, method: str, path: str, body: bytes | None, **headers: str) -> tuple[int, bytes]:
        named = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        request = urllib.request.Request(self.url + path, body, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LONGEST_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = self.get("/metrics")[1].decode()
        return float(next(line.split()[-1] for line in text.splitlines() if line.split(" ")[0] == name))

    def wait_idle(self) -> None:
        """Until no page is held."""
        deadline = time.monotonic() + LONGEST_S
        while self.metric("quire_pages_held") or self.metric("quire_sequences_running"):
            assert time.monotonic() < deadline, "pages are still held"
            time.sleep(0.05)

    def wait_for_line(self, *parts: str, start: int = 0) -> None:
        """Until a line of its log, from a number on, holds all of these."""
        deadline = time.monotonic() + LONGEST_S
        while not any(all(part in line for part in parts) for line in self.lines[start:]):
            assert time.monotonic() < deadline, f"nothing of {parts} in the log"
            time.sleep(0.01)

    @property
    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def terminate(self, timeout_s: float = LONGEST_S) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()


@contextlib.contextmanager
def serving(model: Path, *flags: str, **how) -> Iterator[Server]:
    server = Server(model, *flags, **how)
    try:
        yield server.wait_ready()
    finally:
        server.kill()
