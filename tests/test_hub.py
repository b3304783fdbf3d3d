"""A hub id fetches every file from the one commit it is pinned to, and no code: against a hub on loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"not really weights",
    "tokenizer.json": b"{}",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"a pickle",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a snapshot needs."""

    asked: list[str]

    def _answer(self, with_body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.rsplit("/", 1)[-1].split("?")[0]
        if self.path.startswith("/api/models/org/name"):
            tree = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in FILES.items()
            ]
            info = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": file} for file in FILES]}
            body = json.dumps(tree if "/tree/" in self.path else info).encode()
        elif name in FILES:
            body = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def hub():
    handler = type("OwnHub", (Hub,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked
    server.shutdown()
    server.server_close()


def test_every_file_comes_from_the_pinned_commit_and_no_code_does(hub, tmp_path):
    endpoint, asked = hub
    model = f"org/name@{COMMIT}"
    code = (
        f"from quire.checkpoint.load import find_model; print(*sorted(p.name for p in find_model({model!r}).iterdir()))"
    )
    env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert out.stdout.strip() == "config.json model.safetensors tokenizer.json", out.stderr[-2000:]
    assert asked
    assert all(COMMIT in path for path in asked), asked
