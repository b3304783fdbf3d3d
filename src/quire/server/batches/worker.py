"""The batches of a server: each tenant's one after another, beside and behind everything that clients wait for.

    validating   its lines are counted, and their ids compared
    in_progress  its lines are answered, a bounded number at once and at the lowest priority
    finalizing   its answers become two files: those that are there, and errors
    completed, expired, cancelled, failed

Every change of status goes to the disk. A server that starts again goes on from what it finds there, and whatever it
does twice comes to the same.
"""

import asyncio
import contextlib
import contextvars
import hashlib
import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.async_llm.errors import UnavailableError, described
from quire.core.request import MAX_PRIORITY
from quire.server.batches.answer import Answer, Answerer, not_run
from quire.server.batches.answer_file import AnswerFile
from quire.server.batches.lines import DuplicateIdError, Line, check_ids, count_lines, read_lines
from quire.server.batches.run import LineRunner
from quire.server.batches.store import WINDOW_S, Store, StoredBatch, StoredFile, Tenant, write_synced
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.logs import log_for
from quire.server.openai import schema
from quire.server.service import Service

if TYPE_CHECKING:
    from quire.server.openai.request_body import BodyReader

MAX_LINES = 50_000
RETRY_S = 5.0
"""Until a batch goes on after the engine took nothing, or the disk."""
EXPIRED = f"the batch was not done after {WINDOW_S // 3600} hours, and this line was not run"

_log = logging.getLogger("quire.server")


class _Failed(msgspec.Struct):
    """What tells an error from an answer."""

    error: dict | None


class Batches:
    """Runs batches. All methods are for the event loop's thread."""

    def __init__(self, store: Store, service: Service, bodies: "BodyReader") -> None:
        self._store = store
        self._service = service
        self._bodies = bodies
        self._workers: dict[str, asyncio.Task[None]] = {}
        """Of tenants with batches that have not ended."""
        self._callers: dict[str, Caller] | None = None
        """Callers whose batches may run, by tenant; None before `go_on` states them, for any."""
        self._runs: dict[str, asyncio.Task[None]] = {}
        """What answers the lines of a batch, by its id."""

    def tenant(self, caller: Caller) -> Tenant:
        """The files and batches that a caller may see."""
        return self._store.tenant(caller.tenant)

    def go_on(self, callers: Iterable[Caller]) -> None:
        """Run the batches of these callers, also those that an earlier server left, and pause those of all others.

        The others have no key any more. Their batches go on from where they are when the key is back.
        """
        self._callers = {caller.tenant: caller for caller in callers}
        for tenant, worker in self._workers.items():
            if tenant not in self._callers:
                worker.cancel()
        for caller in self._callers.values():
            self._start(caller)

    async def create(self, caller: Caller, body: schema.BatchRequest) -> StoredBatch:
        """Take a batch, which runs from now on."""
        tenant, now = self.tenant(caller), int(time.time())
        file = tenant.file(body.input_file_id)
        if file.purpose != "batch":
            message = f"input_file_id: the purpose of {file.id!r} is {file.purpose!r}, and not 'batch'"
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            created_at=now,
            expires_at=now + WINDOW_S,
        )
        await tenant.add_batch(batch)
        self._start(caller)
        return batch

    async def cancel(self, caller: Caller, batch_id: str) -> StoredBatch:
        """End a batch; what it has answered so far stays."""
        tenant = self.tenant(caller)
        batch = tenant.batch(batch_id)
        if batch.has_ended:
            message = f"the batch {batch_id!r} has ended: its status is {batch.status!r}"
            raise ApiError(400, message, param="batch_id", code="batch_ended")
        if batch.status in ("validating", "in_progress"):
            batch.end = "cancelled"
            batch.become("cancelling")
            if batch.id in self._runs:
                self._runs[batch.id].cancel()
            elif not tenant.answers_path(batch).exists():  # there is nothing to make files of, nor to wait for
                batch.become("cancelled")
            await tenant.save(batch)
        return batch

    async def stop(self) -> None:
        """Leave everything as it is, for the next server to go on with."""
        workers, self._callers = list(self._workers.values()), {}
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def _start(self, caller: Caller) -> None:
        if self._callers is not None and caller.tenant not in self._callers:
            return
        if caller.tenant not in self._workers and any(
            not batch.has_ended for batch in self.tenant(caller).batches.values()
        ):
            # Neither the request that made the batch nor its id is of the lines: they have ids of their own.
            work = self._work(replace(caller, request_id=""))
            worker = asyncio.create_task(work, context=contextvars.Context())
            worker.add_done_callback(partial(self._on_end, caller.tenant))
            self._workers[caller.tenant] = worker

    def _on_end(self, tenant: str, worker: asyncio.Task[None]) -> None:
        """Start a worker again whose tenant's key came back while it was being cancelled."""
        if self._workers.get(tenant) is worker:  # it was cancelled before its first step
            del self._workers[tenant]
        if worker.cancelled() and self._callers and tenant in self._callers:
            self._start(self._callers[tenant])

    async def _work(self, caller: Caller) -> None:
        """Run the batches of one caller, the oldest first, until all have ended."""
        log_for({"caller": caller})
        tenant = self.tenant(caller)
        try:
            while batch := next((one for one in tenant.batches.values() if not one.has_ended), None):
                try:
                    await self._run(tenant, caller, batch)
                except UnavailableError:
                    await asyncio.sleep(RETRY_S)
                except Exception as error:  # such as a disk that is full, or a file that somebody removed
                    _log.error("batch failed", extra=described(error))
                    if _may_pass(error) and time.time() < batch.expires_at:
                        await asyncio.sleep(RETRY_S)
                    elif not batch.has_ended:  # else its end is only not on the disk: the next server ends it again
                        await self._give_up(tenant, batch)
        finally:
            del self._workers[caller.tenant]

    async def _run(self, tenant: Tenant, caller: Caller, batch: StoredBatch) -> None:
        """Take a batch from its status to its end."""
        path = tenant.path(tenant.file(batch.input_file_id))
        if batch.status == "validating":
            total, duplicate = await asyncio.to_thread(_validate, path)
            if batch.status == "validating":  # and was not cancelled meanwhile
                batch.total = total
                if not 0 < total <= MAX_LINES:
                    _fail(batch, "invalid_file", f"the input has {total:,} lines; 1 to {MAX_LINES:,} are allowed")
                elif duplicate:
                    _fail(batch, "duplicate_custom_id", str(duplicate), param="custom_id", line=duplicate.line)
                else:
                    batch.become("in_progress")
                await tenant.save(batch)
        if batch.status == "in_progress":
            await self._answer(tenant, caller, batch, path)
            if batch.status == "in_progress":
                batch.become("finalizing")
                await tenant.save(batch)
        if not batch.has_ended:
            await self._finalize(tenant, batch)

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _answer(self, tenant: Tenant, caller: Caller, batch: StoredBatch, path: Path) -> None:
        """Answer the lines of a batch until all are, its time is over or somebody cancels it."""
        answers = AnswerFile(tenant.answers_path(batch))
        with contextlib.closing(answers), path.open("rb") as file:
            lines = read_lines(file, batch.id)
            await asyncio.to_thread(answers.skip_answered, lines, is_own=True)
            if batch.status != "in_progress":  # cancelled meanwhile
                return
            batch.failed, batch.completed = answers.num_failed, answers.num_answered - answers.num_failed
            tenant.num_bytes += answers.num_bytes

            def write(answer: Answer) -> None:
                tenant.take_room(len(answer.content))
                try:
                    answers.write(answer)
                except OSError:
                    tenant.num_bytes -= len(answer.content)
                    raise
                batch.failed += answer.is_error
                batch.completed += not answer.is_error

            answerer = Answerer(self._service, self._bodies, caller, endpoint=batch.endpoint, priority=-MAX_PRIORITY)
            # As many lines as there are rows, for each tenant: one at its limits keeps no other tenant's lines waiting.
            turns = asyncio.Semaphore(self._service.engine.llm.engine.config.max_num_seqs)
            run = asyncio.create_task(LineRunner(answerer, write, turns).run(lines))
            self._runs[batch.id] = run
            try:
                await asyncio.wait([run], timeout=max(batch.expires_at - time.time(), 0))
                if not run.done():
                    batch.end = "expired"
                elif not run.cancelled():
                    run.result()
            except ApiError as error:  # no room is left
                batch.end = "failed"
                batch.errors = [_error(error.code or "", error.message)]
            finally:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
                del self._runs[batch.id]
                tenant.num_bytes -= answers.num_bytes
                answers.sync()

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _finalize(self, tenant: Tenant, batch: StoredBatch) -> None:
        """Make files of the answers of a batch, and end it."""
        parts = tenant.new_part(), tenant.new_part()
        try:
            await self._make_files(tenant, batch, *parts)
        finally:
            for part in parts:
                part.unlink(missing_ok=True)
        batch.become(batch.end)
        await tenant.save(batch)
        tenant.answers_path(batch).unlink(missing_ok=True)

    async def _give_up(self, tenant: Tenant, batch: StoredBatch) -> None:
        """End a batch that cannot go on; what it has answered so far stays, if files can be made of it."""
        batch.end, batch.errors = "failed", [_error("internal", "the server could not go on with this batch")]
        try:
            await self._finalize(tenant, batch)
        except Exception:
            batch.become("failed")
            with contextlib.suppress(OSError):
                await tenant.save(batch)
            tenant.answers_path(batch).unlink(missing_ok=True)

    async def _make_files(self, tenant: Tenant, batch: StoredBatch, *parts: Path) -> None:
        path = tenant.path(tenant.file(batch.input_file_id))
        sizes = await asyncio.to_thread(_split, batch, path, tenant.answers_path(batch), *parts)
        for kind, part, num_bytes in zip(("output", "error"), parts, sizes, strict=True):
            if not num_bytes:
                continue
            file = StoredFile(
                id=f"file-{hashlib.sha256(f'{batch.id} {kind}'.encode()).hexdigest()[:32]}",
                bytes=num_bytes,
                created_at=int(time.time()),
                filename=f"{batch.id}_{kind}.jsonl",
                purpose="batch_output",
            )
            is_new = file.id not in tenant.files  # else a crash came between this and the end
            await tenant.add_file(file, part)
            tenant.num_bytes += num_bytes * is_new
            setattr(batch, f"{kind}_file_id", file.id)


def _validate(path: Path) -> tuple[int, DuplicateIdError | None]:
    """Return the number of lines, and the error if two of them have the same id."""

    def lines() -> Iterator[Line]:
        file.seek(0)
        return read_lines(file, "")

    with path.open("rb") as file:
        total = count_lines(file)
        try:
            if total <= MAX_LINES:
                check_ids(lines)
        except DuplicateIdError as error:
            return total, error
        return total, None


def _split(batch: StoredBatch, given: Path, answers: Path, output: Path, errors: Path) -> tuple[int, int]:
    """Write the answers of a batch to two files; returns their sizes. Lines that expired are errors, too."""
    with contextlib.closing(AnswerFile(answers)) as file, given.open("rb") as source:
        lines = read_lines(source, batch.id)
        file.skip_answered(lines, is_own=True)
        for line in lines if batch.end == "expired" else ():
            file.write(not_run(line, "batch_expired", EXPIRED))
        batch.failed, batch.completed = file.num_failed, file.num_answered - file.num_failed
    with answers.open("rb") as source, output.open("wb") as good, errors.open("wb") as bad:
        for raw in source:
            (good if msgspec.json.decode(raw, type=_Failed).error is None else bad).write(raw)
        write_synced(good)
        write_synced(bad)
        return good.tell(), bad.tell()


def _may_pass(error: Exception) -> bool:
    """Whether waiting may help: a disk that is full may have room again, a file that is gone stays so."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)


def _fail(batch: StoredBatch, code: str, message: str, **where: str | int) -> None:
    batch.errors = [_error(code, message) | where]
    batch.become("failed")


def _error(code: str, message: str) -> dict[str, str | int | None]:
    return {"code": code, "message": message, "param": None, "line": None}
