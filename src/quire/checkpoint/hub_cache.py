"""The hub's cache folder on this disk: where a file of a commit lies, and whether it is what the commit says.

The layout is the one of `huggingface_hub` (HF_HOME, HF_HUB_CACHE), so that what other tools fetched is found, and they
find what was fetched here:

    models--org--name/
      blobs/<hash>                 contents, under the hash that the hub states for them
      snapshots/<commit>/<path>    links to them
      refs/<branch or tag>         the commit it last meant
      .quire/<commit>.json         ours: the files of the commit, and which were found to have their hash

A file is hashed once. After that its size and its time of change are compared with those it had then.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quire.checkpoint.json_file import read_json

SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf")
"""Of the files that are ever fetched or read; code and pickles are not."""
COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """One file of a commit, as the hub lists it."""

    path: str
    size: int | None
    """Bytes; None where it was never said, offline."""
    digest: str
    """SHA-256 of a large file, git's SHA-1 of a small one; empty where it was never said, offline."""

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        plain = self.path.isprintable() and "\\" not in self.path and ":" not in self.path
        if not plain or not parts or "/".join(parts) != self.path or set(parts) & {"..", "/"}:
            raise ValueError(f"file name {self.path!r} is refused: it must be a path below the model's folder")
        if self.digest and not _HASH.fullmatch(self.digest):
            raise ValueError(f"{self.path}: hash {self.digest!r} must be 40 or 64 hex digits")
        if self.size is not None and (type(self.size) is not int or self.size < 0):
            raise ValueError(f"{self.path}: size {self.size!r} must be a whole number")


class WrongFileError(ValueError):
    """A file that is not what the commit says; it has been deleted."""


class RepoCache:
    """The folder of one repository in the cache."""

    def __init__(self, repo: str, root: Path) -> None:
        self.repo = repo
        self.root = root
        self.folder = root / f"models--{repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def blob(self, file: HubFile) -> Path:
        """Where a file's contents lie."""
        return self.folder / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        """Where what has come of a file lies, until it is whole."""
        return self.folder / "blobs" / f"{file.digest}.incomplete"

    def lock(self, file: HubFile) -> Path:
        """The file to lock while a blob is written; `huggingface_hub` locks the same one."""
        return self.root / ".locks" / self.folder.name / f"{file.digest}.lock"

    def ref(self, revision: str) -> str | None:
        """The commit that a branch or tag meant when it was last asked for."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            commit = (self.folder / "refs" / revision).read_text().strip()
            return commit if COMMIT.fullmatch(commit) else None
        return None

    def refs(self, commit: str) -> list[str]:
        """The branches and tags that last meant a commit."""
        folder = self.folder / "refs"
        names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        return [name for name in names if self.ref(name) == commit]

    def write_ref(self, revision: str, commit: str) -> None:
        """Remember the commit of a branch or tag."""
        if self.ref(revision) != commit:
            with contextlib.suppress(OSError):  # a cache that cannot be written is still read
                _write(self.folder / "refs" / revision, commit)

    def files_on_disk(self, commit: str) -> list[HubFile]:
        """The files of a commit that are there and could be a model's; a blob's name is its hash."""
        snapshot = self.snapshot(commit)
        return [
            HubFile(path.relative_to(snapshot).as_posix(), None, _blob_name(path))
            for path in sorted(snapshot.rglob("*"))
            if path.suffix in SUFFIXES and path.is_file()
        ]

    def delete(self, path: Path) -> None:
        """Delete a file of a snapshot and its contents, if these are in the cache."""
        content = path.resolve()
        path.unlink(missing_ok=True)
        if content.is_relative_to(self.root.resolve()):
            content.unlink(missing_ok=True)

    def link(self, file: HubFile, commit: str) -> Path:
        """Make a blob visible under its name in a commit, where there is no file yet."""
        path, blob = self.snapshot(commit) / file.path, self.blob(file)
        if path.is_file():  # since the last look: somebody may be reading it
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link to a blob that is gone
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # a file system without links: the file itself, as huggingface_hub does
            blob.rename(path)
        return path


class Record:
    """What is known of one commit: its files, and which of them were found to have their hash."""

    def __init__(self, cache: RepoCache, commit: str) -> None:
        self._cache, self._commit = cache, commit
        self._path = cache.folder / ".quire" / f"{commit}.json"
        self.files: list[HubFile] = []
        """As the hub listed them; empty until it did."""
        self._verified: dict[str, object] = {}
        self._known: Mapping[str, object] = {"files": {}, "verified": {}}  # what is in the file
        with contextlib.suppress(
            ValueError, TypeError, KeyError, AttributeError
        ):  # none, or broken: as if nothing were known
            self._known = known = read_json(self._path)
            self.files = [HubFile(path, size, digest) for path, (size, digest) in known["files"].items()]
            self._verified = dict(known["verified"])

    def has(self, file: HubFile) -> bool:
        """Whether the file is there and right. Hashes it unless that was done, and deletes a wrong one."""
        path = self._cache.snapshot(self._commit) / file.path
        if not path.is_file():
            return False
        if self._verified.get(file.path) != self._state(file):
            try:
                verify(path, file)
            except WrongFileError:
                self._cache.delete(path)
                raise
            self.remember(file)
        return True

    def remember(self, file: HubFile) -> None:
        """The file, as it is now, was verified."""
        self._verified[file.path] = self._state(file)

    def _state(self, file: HubFile) -> list[object]:
        state = (self._cache.snapshot(self._commit) / file.path).stat()
        return [file.digest, state.st_size, state.st_mtime_ns]

    def write(self) -> None:
        """Keep what is known for the next start."""
        known = {
            "files": {file.path: [file.size, file.digest] for file in self.files},
            "verified": dict(self._verified),
        }
        if known == self._known:
            return
        self._known = known
        with contextlib.suppress(OSError):  # a cache that cannot be written: hashed again at the next start
            _write(self._path, json.dumps(known))


def verify(path: Path, file: HubFile) -> None:
    """Raise WrongFileError unless the contents have the size and the hash that the commit states."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise WrongFileError(f"{file.path} has {size:,} bytes, the commit says {file.size:,}: deleted")
    if not file.digest:
        return
    git_blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # how git names small files
    hasher = hashlib.sha256() if len(file.digest) == 64 else git_blob
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            hasher.update(chunk)
    if hasher.hexdigest() != file.digest:
        raise WrongFileError(f"{file.path} has the hash {hasher.hexdigest()}, the commit says {file.digest}: deleted")


def cache_root() -> Path:
    """The hub's cache folder, as HF_HOME and HF_HUB_CACHE say."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repositories(root: Path) -> Iterator[tuple[RepoCache, str]]:
    """Every commit of every model that has files in the cache."""
    for folder in sorted(root.glob("models--*--*")):
        cache = RepoCache(folder.name.removeprefix("models--").replace("--", "/", 1), root)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            if COMMIT.fullmatch(snapshot.name):
                yield cache, snapshot.name


def _blob_name(path: Path) -> str:
    """The hash in the name of the blob that a file of a snapshot links to; empty where it is no link."""
    name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
    return name if _HASH.fullmatch(name) else ""


def _write(path: Path, text: str) -> None:
    """Write a small file in one go: a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
