"""Files and batches on disk, each tenant's in a folder of its own: no name leads from one to another's.

    FOLDER/lock                           held by the one server that uses the folder
    FOLDER/TENANT/file-HEX, .json         a file that was uploaded or made, and what is known of it
    FOLDER/TENANT/batch_HEX.json, .jsonl  a batch, and its answers while it runs

What is known of them is in memory, too, and bounded by counts. A record is replaced whole: a crash leaves the old one
or the new one.
"""

import asyncio
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from quire.server.errors import ApiError

MAX_FILES = 1000
MAX_BATCHES = 1000
"""Of one tenant. The oldest batch that has ended is forgotten for a new one; files are the client's to delete."""
MAX_OPEN_BATCHES = 32
"""Of one tenant, that have not ended."""
WINDOW_S = 24 * 3600
"""In which a batch is to be done."""
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
NO_TENANT = "everybody"
"""The folder where there are no keys."""

_log = logging.getLogger("quire.server")


class StoredFile(msgspec.Struct, kw_only=True):
    """What is known of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        """As clients read it."""
        return msgspec.structs.asdict(self) | {"object": "file", "status": "processed"}


class StoredBatch(msgspec.Struct, kw_only=True):
    """What is known of a batch."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: str = "validating"
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    end: str = "completed"
    """The status that it has once its files are made."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing happens to it any more."""
        return self.status in ENDED

    def become(self, status: str) -> None:
        """Change the status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def shown(self) -> dict[str, Any]:
        """As clients read it."""
        fields = msgspec.structs.asdict(self)
        counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
        del fields["end"]
        errors = None if self.errors is None else {"object": "list", "data": self.errors}
        return fields | {"object": "batch", "errors": errors, "request_counts": counts}


class Tenant:
    """The files and batches of one tenant. For the event loop's thread."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Read what is there; what a crash left half done is removed."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._saving = asyncio.Lock()
        files, batches = _read(folder, "file-*.json", StoredFile), _read(folder, "batch_*.json", StoredBatch)
        self.files: dict[str, StoredFile] = {file.id: file for file in files}
        self.batches: dict[str, StoredBatch] = {batch.id: batch for batch in batches}
        """Both with the oldest first."""
        self.num_bytes = sum(file.bytes for file in files)
        """Of files, and of the answers of batches that run."""
        kept = {file.id for file in files} | {f"{batch.id}.jsonl" for batch in batches if not batch.has_ended}
        for path in folder.iterdir():
            if path.name not in kept and path.suffix != ".json":
                path.unlink()

    def file(self, file_id: str) -> StoredFile:
        """A file of this tenant; ApiError if there is none."""
        if file_id not in self.files:
            raise ApiError(404, f"there is no file {file_id!r}", param="file_id", code="file_not_found")
        return self.files[file_id]

    def batch(self, batch_id: str) -> StoredBatch:
        """A batch of this tenant; ApiError if there is none."""
        if batch_id not in self.batches:
            raise ApiError(404, f"there is no batch {batch_id!r}", param="batch_id", code="batch_not_found")
        return self.batches[batch_id]

    def path(self, file: StoredFile) -> Path:
        """Where the content of a file is."""
        return self._folder / file.id

    def answers_path(self, batch: StoredBatch) -> Path:
        """Where the answers of a batch are while it runs."""
        return self._folder / f"{batch.id}.jsonl"

    def take_room(self, num_bytes: int) -> None:
        """Count bytes that are about to be written; ApiError if there are too many."""
        if self.num_bytes + num_bytes > self._max_bytes:
            message = f"your files come to more than {self._max_bytes:,} bytes (--max-batch-bytes): delete some of them"
            raise ApiError(413, message, code="storage_full")
        self.num_bytes += num_bytes

    # -- changes ------------------------------------------------------------------------------------------------------

    async def add_file(self, file: StoredFile, content: Path) -> None:
        """Take a file whose bytes have been counted, and are on the disk. If that fails, `content` is there again."""
        os.replace(content, self.path(file))
        try:
            await self.save(file)
        except BaseException:
            if file.id not in self.files:
                os.replace(self.path(file), content)
                self._record_path(file).unlink(missing_ok=True)
            raise
        self.files[file.id] = file

    def remove_file(self, file: StoredFile) -> None:
        """Forget a file; ApiError if a batch still reads it."""
        if any(batch.input_file_id == file.id and not batch.has_ended for batch in self.batches.values()):
            message = f"the file {file.id!r} is the input of a batch that has not ended: cancel the batch first"
            raise ApiError(400, message, param="file_id", code="file_in_use")
        del self.files[file.id]
        self.num_bytes -= file.bytes
        self._record_path(file).unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)

    async def add_batch(self, batch: StoredBatch) -> None:
        """Take a new batch; ApiError if there are too many."""
        if sum(not one.has_ended for one in self.batches.values()) >= MAX_OPEN_BATCHES:
            message = f"{MAX_OPEN_BATCHES} batches have not ended: wait for one of them, or cancel it"
            raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"})
        if len(self.batches) >= MAX_BATCHES:
            oldest = next(one for one in self.batches.values() if one.has_ended)
            self._record_path(oldest).unlink(missing_ok=True)
            del self.batches[oldest.id]
        self.batches[batch.id] = batch
        try:
            await self.save(batch)
        except OSError:
            del self.batches[batch.id]
            raise

    async def save(self, record: StoredFile | StoredBatch) -> None:
        """Have the record of a file or a batch on the disk."""
        async with self._saving:  # so that a later state of it is not overwritten by an earlier one
            content = msgspec.json.encode(record)
            writing = asyncio.create_task(asyncio.to_thread(_replace, self._record_path(record), content))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:  # its thread goes on, and must not write later than what follows
                await asyncio.wait([writing])
                raise

    def _record_path(self, record: StoredFile | StoredBatch) -> Path:
        return self._folder / f"{record.id}.json"

    def new_part(self) -> Path:
        """A name for a file that is still being written; what a crash leaves of it is removed."""
        return self._folder / f"{uuid.uuid4().hex}.part"


class Store:
    """The folder of one server."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Take a folder, made if it is not there; ValueError if another server has it."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("wb")
        except OSError as error:
            raise ValueError(f"--batch-folder {folder} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"--batch-folder {folder} is in use by another server: give each its own") from None
        self._folder = folder
        self._max_bytes = max_bytes
        self._tenants: dict[str, Tenant] = {}

    def tenant(self, name: str) -> Tenant:
        """The files and batches of a tenant that has a key."""
        if name not in self._tenants:
            self._tenants[name] = Tenant(self._folder / (name or NO_TENANT), self._max_bytes)
        return self._tenants[name]

    @property
    def tenants(self) -> list[Tenant]:
        """Tenants whose files and batches have been read since the start."""
        return list(self._tenants.values())

    def close(self) -> None:
        """Let another server have the folder."""
        self._lock.close()


def write_synced(file: BinaryIO, content: bytes = b"") -> None:
    """Write bytes, and have all of the file on the disk."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            write_synced(file, content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def page_of[T: StoredFile | StoredBatch](
    records: Sequence[T], *, after: str | None, limit: int, newest_first: bool = True
) -> dict[str, Any]:
    """A page of a list, as clients read it; `after` is the last id of the page before."""
    ordered = list(reversed(records)) if newest_first else list(records)
    if after is not None:
        ids = [record.id for record in ordered]
        if after not in ids:
            raise ApiError(400, f"after: there is no {after!r}", param="after", code="invalid_value")
        ordered = ordered[ids.index(after) + 1 :]
    data = [record.shown() for record in ordered[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    more = len(ordered) > limit
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def _read[T: StoredFile | StoredBatch](folder: Path, pattern: str, kind: type[T]) -> list[T]:
    """Records of a folder, the oldest first; what is none is left alone."""
    records: list[T] = []
    for path in folder.glob(pattern):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError:
            record = None
        if record is None or record.id != path.stem:
            _log.warning("no record of a file or batch", extra={"file": path.name})
        else:
            records.append(record)
    return sorted(records, key=lambda record: (record.created_at, record.id))
