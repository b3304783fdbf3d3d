"""A hub on loopback: as much of its protocol as clients use, and the ways in which one can go wrong.

Two servers, as in the real one: the hub, which knows names, commits and small files, and a second host that has the
large files and must never see a token.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Asked:
    """One request that a server got."""

    host: str
    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class StandInHub:
    """What the hub has, what it was asked, and how it misbehaves."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Commit -> path -> contents, of the one repository org/name."""
    refs: dict[str, str] = field(default_factory=dict)
    """Branch or tag -> commit."""
    listed: dict[str, dict] = field(default_factory=dict)
    """Path -> what its entry in a listing says instead."""
    served: dict[str, bytes] = field(default_factory=dict)
    """Path -> what is sent instead of its contents."""
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """Path -> after how many bytes each of the next answers is cut."""
    ignores_ranges: bool = False
    status: int | None = None
    """What every request is answered with, where it is not None."""
    storage_status: int | None = None
    """The same of the second host alone."""
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    storage_url: str = ""

    def paths(self, host: str = "hub") -> list[str]:
        """The paths that a host was asked for."""
        return [asked.path for asked in self.asked if asked.host == host]


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", ".bin"))


def digest(path: str, content: bytes) -> str:
    """The hash under which the hub knows a file."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    hub = StandInHub()
    servers = [
        ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub, "host": host}))
        for host in ("hub", "storage")
    ]
    hub.url, hub.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield hub
    for server in servers:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    host: str

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *args) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = self.headers
        self.hub.asked.append(Asked(self.host, self.command, path, headers["Range"], headers["Authorization"]))
        status = self.hub.storage_status if self.host == "storage" else self.hub.status
        if status is not None:
            self._send(status, b"{}")
        elif self.host == "storage" or path.startswith("/api/resolve-cache/"):
            _, _, commit, name = path.rsplit("@", 1)[1].split("/", 3)
            self._content(commit, name)
        elif found := re.fullmatch(r"/api/models/org/name(?:/revision/(.+))?", path):
            commit = self._commit(found[1] or "main")
            files = [{"rfilename": name} for name in self.hub.files.get(commit or "", ())]
            self._json(commit, {"id": "org/name", "sha": commit, "siblings": files})
        elif found := re.fullmatch(r"/api/models/org/name/tree/([^/]+)", path):
            commit = self._commit(found[1])
            self._json(commit, [self._entry(name, data) for name, data in self.hub.files.get(commit or "", {}).items()])
        elif found := re.fullmatch(r"/org/name/resolve/([^/]+)/(.+)", path):
            self._redirect(self._commit(found[1]), found[2])
        else:
            self._send(401 if "/org/name" not in path else 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _commit(self, revision: str) -> str | None:
        return revision if revision in self.hub.files else self.hub.refs.get(revision)

    def _entry(self, name: str, content: bytes) -> dict:
        entry = {"type": "file", "path": name, "size": len(content), "oid": digest("", content)}
        if is_large(name):
            entry["lfs"] = {"oid": digest(name, content), "size": len(content), "pointerSize": 130}
        return entry | self.hub.listed.get(name, {})

    def _json(self, commit: str | None, answer: object) -> None:
        if commit is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._send(200, json.dumps(answer).encode())

    def _redirect(self, commit: str | None, name: str) -> None:
        content = self.hub.files.get(commit or "", {}).get(name)
        if content is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        tag = digest(name, content)
        headers = {"X-Repo-Commit": str(commit), "X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{tag}"'}
        where = f"{self.hub.storage_url}/signed" if is_large(name) else "/api/resolve-cache/models"
        headers |= {"ETag": f'"{tag}"', "Location": f"{where}@//{commit}/{name}?Signature=secret"}
        self._send(302 if is_large(name) else 307, b"", headers)

    def _content(self, commit: str, name: str) -> None:
        content = self.hub.served.get(name, self.hub.files[commit][name])
        headers = {"ETag": f'"{digest(name, self.hub.files[commit][name])}"', "X-Repo-Commit": commit}
        begin = 0
        if (asked := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")) and not self.hub.ignores_ranges:
            begin = int(asked[1])
            if begin >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._send(206 if begin else 200, content[begin:], headers, cut=(self.hub.cut_after.get(name) or [None]).pop(0))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
