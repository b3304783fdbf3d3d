"""The batches of a server, without one: their time, their limits, and what a crash at an unlucky moment leaves."""

import asyncio
import contextlib
import io
import json
import logging
import threading
import time

import msgspec
import pytest

from quire import AsyncLLM
from quire.async_llm.admission import Admission
from quire.core.request import MAX_PRIORITY
from quire.core.request_id import client_id
from quire.server.batches import store as store_module
from quire.server.batches import worker as worker_module
from quire.server.batches.answer_file import AnswerFile
from quire.server.batches.store import Store, StoredFile
from quire.server.batches.worker import Batches
from quire.server.errors import ApiError
from quire.server.keys import Caller
from quire.server.logs import JsonLines, log_for, read_line
from quire.server.openai import schema
from quire.server.openai.request_body import BodyReader
from quire.server.service import Service
from tests.batch_files import completion, read_answers
from tests.fake_llm import LONG_S, Gate, fake_llm

CALLER = Caller("tenant")


@contextlib.asynccontextmanager
async def batches_in(folder, gate: Gate | None = None, admission: Admission | None = None):
    async with AsyncLLM.from_factory(lambda: fake_llm(gate), admission=admission) as engine:
        service, store = Service(engine, "toy", int(time.time())), Store(folder, 1 << 20)
        batches = Batches(store, service, BodyReader(strict=False))
        try:
            yield batches
        finally:
            if gate:
                gate.open()
            await batches.stop()
            service.close()
            store.close()


async def add_batch(batches: Batches, count: int = 12, caller: Caller = CALLER, **body):
    tenant, part = batches.tenant(caller), batches.tenant(caller).new_part()
    part.write_text("".join(json.dumps(completion(f"{i}", **body)) + "\n" for i in range(count)))
    name = f"file-{len(tenant.files):032x}"
    file = StoredFile(id=name, bytes=part.stat().st_size, created_at=0, filename="a", purpose="batch")
    tenant.num_bytes += file.bytes
    await tenant.add_file(file, part)
    request = schema.BatchRequest(input_file_id=name, endpoint="/v1/completions", completion_window="24h")
    return await batches.create(caller, request)


async def ended(batch):
    async with asyncio.timeout(LONG_S):
        while not batch.has_ended:
            await asyncio.sleep(0.005)
    return batch


def answers_of(batches: Batches, file_id: str | None, caller: Caller = CALLER):
    assert file_id
    tenant = batches.tenant(caller)
    return read_answers(tenant.path(tenant.file(file_id)))


def run(function) -> None:
    asyncio.run(asyncio.wait_for(function(), LONG_S))


def test_lines_that_are_not_done_in_time_are_errors(tmp_path, monkeypatch):
    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.let(7)
            batch = await add_batch(batches)
            await asyncio.to_thread(gate.wait_until_held)
            num_done = batch.completed
            batch.expires_at = 0
            await batches.stop()
            batches.go_on([CALLER])
            gate.open()
            assert (await ended(batch)).status == "expired"
            errors = answers_of(batches, batch.error_file_id)
            done = answers_of(batches, batch.output_file_id) if batch.output_file_id else []
            assert num_done <= len(done) < 12
            assert {error["error"]["code"] for error in errors} == {"batch_expired"}
            assert [one["custom_id"] for one in done + errors] == [str(i) for i in range(12)]
            assert (batch.completed, batch.failed) == (len(done), len(errors))
            assert batch.expired_at

    run(go)


def test_lines_run_at_the_lowest_priority_and_as_many_as_there_are_rows(tmp_path):
    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.let(14)
            both = [await add_batch(batches, 40, caller, max_tokens=8) for caller in (CALLER, Caller("another"))]
            await asyncio.to_thread(gate.wait_until_held)
            salts = {CALLER.salt(""), Caller("another").salt("")}
            async with asyncio.timeout(LONG_S):
                while {stream.request.cache_salt for stream in batches._service.engine.streams} != salts:
                    gate.let(1)  # whoever came first may have every row
                    await asyncio.sleep(0.01)
            streams = batches._service.engine.streams
            assert {stream.request.priority for stream in streams} == {-MAX_PRIORITY}
            num_rows = batches._service.engine.llm.engine.config.max_num_seqs
            for salt in salts:
                assert 0 < sum(stream.request.cache_salt == salt for stream in streams) <= num_rows
            gate.open()
            for batch in both:
                assert (await ended(batch)).completed == 40

    run(go)


def test_lines_have_ids_of_their_own_and_the_key_of_their_batch(tmp_path, monkeypatch):
    """Neither a stream nor a line of the log names the request that made the batch."""
    log, alice = io.StringIO(), Caller("tenant", "alice", request_id="of-the-post")
    handler = logging.StreamHandler(log)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("quire.server")
    logger.addHandler(handler)

    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.close()
            log_for({"caller": alice})
            batch = await add_batch(batches, 2, alice)
            async with asyncio.timeout(LONG_S):
                while len(streams := batches._service.engine.streams) < 2:
                    await asyncio.sleep(0.005)
            origins = {stream.origin for stream in streams}
            assert {origin.key for origin in origins} == {"alice"}
            assert len({origin.request_id for origin in origins}) == 2
            for stream in streams:
                assert stream.origin.request_id.startswith("cmpl-")
                assert client_id(stream.request.id) == stream.origin.request_id
            monkeypatch.setattr(AnswerFile, "write", lambda self, answer: 1 / 0)
            gate.open()
            await ended(batch)

    try:
        run(go)
    finally:
        logger.removeHandler(handler)
    (line,) = [read_line(one) for one in log.getvalue().splitlines()]
    assert (line.event, line.key, line.request_id) == ("batch failed", "alice", msgspec.UNSET)


@pytest.mark.parametrize("where", ["add_file", "save", "become"])
def test_a_crash_while_files_are_made_changes_nothing(tmp_path, monkeypatch, where):
    """Whatever of them was there is made again, under the same names."""

    class Crash(BaseException):
        """As much of an end as a signal."""

    async def go():
        kind = store_module.StoredBatch if where == "become" else store_module.Tenant
        original, at = getattr(kind, where), {"add_file": 1, "save": 2, "become": 3}[where]
        async with batches_in(tmp_path) as batches:
            batch = await add_batch(batches, 6)
            seen = 0

            def crash(self, *how):
                nonlocal seen
                if batch.status == "finalizing" or where == "become":
                    seen += 1
                    if seen == at:
                        raise Crash
                return original(self, *how)

            monkeypatch.setattr(kind, where, crash)
            worker = batches._workers[CALLER.tenant]
            with pytest.raises(Crash):
                await worker
            monkeypatch.undo()
        async with batches_in(tmp_path) as batches:
            batches.go_on([CALLER])
            tenant = batches.tenant(CALLER)
            (batch,) = tenant.batches.values()
            assert (await ended(batch)).status == "completed"
            await asyncio.gather(*batches._workers.values())
            assert [answer["custom_id"] for answer in answers_of(batches, batch.output_file_id)] == list("012345")
            assert len(tenant.files) == 2
            assert tenant.num_bytes == sum(file.bytes for file in tenant.files.values())
            assert not list(tmp_path.rglob("*.part"))
            assert not list(tmp_path.rglob("*.jsonl"))

    run(go)


def test_batches_of_a_key_that_is_gone_wait_until_it_is_back(tmp_path):
    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.close()
            batch = await add_batch(batches)
            await asyncio.to_thread(gate.wait_until_held)
        async with batches_in(tmp_path) as batches:
            batches.go_on([Caller("another")])
            await asyncio.sleep(0.05)
            assert not batches._workers
        async with batches_in(tmp_path) as batches:
            batches.go_on([Caller("another"), CALLER])
            batch = batches.tenant(CALLER).batch(batch.id)
            assert (await ended(batch)).completed == 12

    run(go)


@pytest.mark.parametrize("when", ["before", "running"])
def test_batches_of_a_key_that_is_removed_pause_until_it_is_back(tmp_path, when):
    """While the server runs: before a batch begins, and while its lines do."""

    async def go():
        gate, other = Gate(), Caller("another")
        async with batches_in(tmp_path, gate) as batches:
            batches.go_on([CALLER, other])
            gate.close()
            batch = await add_batch(batches)
            if when == "running":
                await asyncio.to_thread(gate.wait_until_held)
            batches.go_on([other])
            late = await add_batch(batches, 2)  # its request came before the key was removed
            gate.open()
            async with asyncio.timeout(LONG_S):
                while batches._workers or batches._service.engine.num_streams:
                    await asyncio.sleep(0.005)
            num_done = batch.completed
            await asyncio.sleep(0.05)
            assert (batch.has_ended, late.has_ended, batch.completed) == (False, False, num_done)
            assert (await ended(await add_batch(batches, 2, other))).completed == 2
            batches.go_on([CALLER])
            batches.go_on([other])
            batches.go_on([CALLER, other])  # at once: the worker is still on its way out
            assert [(await ended(one)).completed for one in (batch, late)] == [12, 2]
            assert len(answers_of(batches, batch.output_file_id)) == 12

    run(go)


def test_batches_are_bounded_and_the_oldest_that_ended_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_OPEN_BATCHES", 2)
    monkeypatch.setattr(store_module, "MAX_BATCHES", 3)
    monkeypatch.setattr(worker_module, "MAX_LINES", 5)

    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.close()
            made = [await add_batch(batches, 3) for _ in range(2)]
            with pytest.raises(ApiError, match="2 batches have not ended"):
                await add_batch(batches, 3)
            gate.open()
            for batch in made:
                await ended(batch)
            too_long = await ended(await add_batch(batches, 6))
            assert too_long.status == "failed"
            assert too_long.errors
            assert "6 lines" in too_long.errors[0]["message"]
            await ended(await add_batch(batches, 3))
            assert len(batches.tenant(CALLER).batches) == 3
            with pytest.raises(ApiError, match="no batch"):
                batches.tenant(CALLER).batch(made[0].id)

    run(go)


def test_a_batch_is_cancelled_whatever_it_does(tmp_path):
    """At once, while it is read, while it waits behind another and while it runs."""

    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.close()
            running, waiting = [await add_batch(batches) for _ in range(2)]
            at_once = await add_batch(batches)
            await batches.cancel(CALLER, at_once.id)
            await asyncio.to_thread(gate.wait_until_held)
            await batches.cancel(CALLER, waiting.id)
            await batches.cancel(CALLER, running.id)
            gate.open()
            for batch in (running, waiting, at_once):
                assert (await ended(batch)).status == "cancelled"
                assert (batch.completed, batch.output_file_id) == (0, None)

    run(go)


def test_a_cancelled_batch_does_not_wait_for_those_before_it(tmp_path, monkeypatch):
    """It makes room for another at once, and is not run after a restart."""
    monkeypatch.setattr(store_module, "MAX_OPEN_BATCHES", 2)

    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.close()
            running = await add_batch(batches)
            await asyncio.to_thread(gate.wait_until_held)
            cancelled = []
            for _ in range(3):
                waiting = await add_batch(batches)
                assert (await batches.cancel(CALLER, waiting.id)).status == "cancelled"
                assert waiting.cancelling_at
                assert waiting.cancelled_at
                cancelled.append(waiting.id)
            with pytest.raises(ApiError, match="has ended"):
                await batches.cancel(CALLER, waiting.id)
            assert running.status == "in_progress"
        async with batches_in(tmp_path) as batches:
            batches.go_on([CALLER])
            kept = batches.tenant(CALLER).batches
            assert (await ended(kept[running.id])).completed == 12
            await asyncio.gather(*batches._workers.values())
            assert {kept[one].status for one in cancelled} == {"cancelled"}
            assert not list(tmp_path.rglob("*.jsonl"))

    run(go)


@pytest.mark.parametrize("num_waits", range(12))
def test_a_batch_that_is_cancelled_at_any_moment_of_its_start_ends_once(tmp_path, monkeypatch, num_waits):
    """Before it is read, while it is, and when its lines start: which of them a wait hits does not matter."""

    async def go():
        gate = Gate()
        async with batches_in(tmp_path, gate) as batches:
            gate.close()
            ends = []
            become = store_module.StoredBatch.become

            def watched(self, status):
                become(self, status)
                if self.has_ended:
                    ends.append(status)

            monkeypatch.setattr(store_module.StoredBatch, "become", watched)
            batch = await add_batch(batches)
            for _ in range(num_waits):
                await asyncio.sleep(0.001)
            await batches.cancel(CALLER, batch.id)
            gate.open()
            await ended(batch)
            await asyncio.gather(*batches._workers.values())
            assert ends == ["cancelled"]
            assert (batch.output_file_id, batch.completed) == (None, 0)
            assert not list(tmp_path.rglob("*.jsonl"))

    run(go)


@pytest.mark.parametrize("when", ["answers", "files", "record"])
def test_a_full_disk_holds_a_batch_up_and_loses_nothing(tmp_path, monkeypatch, when):
    """While answers are written, while files are made of them, and while one of these is noted."""
    monkeypatch.setattr(worker_module, "RETRY_S", 0.01)
    where = {"answers": (AnswerFile, "write"), "files": (worker_module, "_split"), "record": (store_module, "_replace")}
    owner, name = where[when]
    original, num_failed = getattr(owner, name), 0

    async def go():
        async with batches_in(tmp_path) as batches:
            batch = await add_batch(batches)

            def full(*args):
                nonlocal num_failed
                is_due = batch.completed == 7 if when == "answers" else batch.status == "finalizing"
                if is_due and num_failed < 3:
                    num_failed += 1
                    raise OSError(28, "No space left on device")
                return original(*args)

            monkeypatch.setattr(owner, name, full)
            assert (await ended(batch)).status == "completed"
            await asyncio.gather(*batches._workers.values())
            tenant = batches.tenant(CALLER)
            assert (num_failed, batch.completed, batch.errors) == (3, 12, None)
            assert len(answers_of(batches, batch.output_file_id)) == 12
            assert tenant.num_bytes == sum(file.bytes for file in tenant.files.values())
            assert not [path for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".part")]

    run(go)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_batch_that_cannot_go_on_keeps_what_it_has(tmp_path, monkeypatch, is_lost):
    """Because of a bug of ours, and because its input is gone: then there is nothing to make files of."""

    async def go():
        async with batches_in(tmp_path) as batches:
            write = AnswerFile.write
            batch = await add_batch(batches)
            tenant = batches.tenant(CALLER)

            def fails(self, answer):
                if batch.completed == 7:
                    if is_lost:
                        tenant.path(tenant.file(batch.input_file_id)).unlink()
                    raise KeyError("a bug")
                write(self, answer)

            monkeypatch.setattr(AnswerFile, "write", fails)
            assert (await ended(batch)).status == "failed"
            await asyncio.gather(*batches._workers.values())
            assert batch.errors
            assert batch.errors[0]["code"] == "internal"
            assert batch.completed == 7
            assert (batch.output_file_id is None) == is_lost
            if not is_lost:
                assert len(answers_of(batches, batch.output_file_id)) == 7
            assert not [path for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".part")]

    run(go)


@pytest.mark.parametrize("how", ["fails", "cancelled"])
def test_a_file_whose_record_is_not_written_leaves_no_bytes(tmp_path, monkeypatch, how):
    """Bytes on the disk that nothing counts would fill it beyond the tenant's limit."""
    replace, started, may_end = store_module._replace, threading.Event(), threading.Event()

    def slow(path, content):
        started.set()
        assert may_end.wait(60)
        replace(path, content)

    def fails(path, content):
        replace(path, content)
        raise OSError(28, "No space left on device")

    async def go():
        tenant = store_module.Tenant(tmp_path / "tenant", 1000)
        part = tenant.new_part()
        part.write_bytes(b"content")
        file = store_module.StoredFile(id="file-1", bytes=7, created_at=0, filename="a", purpose="batch")
        monkeypatch.setattr(store_module, "_replace", slow if how == "cancelled" else fails)
        adding = asyncio.create_task(tenant.add_file(file, part))
        if how == "cancelled":
            await asyncio.to_thread(started.wait)
            adding.cancel()
            await asyncio.sleep(0)
            may_end.set()
        with pytest.raises((OSError, asyncio.CancelledError)):
            await adding
        assert tenant.files == {}
        assert list((tmp_path / "tenant").iterdir()) == [part], "the caller's, to count and remove"
        monkeypatch.undo()
        await tenant.add_file(file, part)
        assert list(tenant.files) == ["file-1"]
        assert tenant.path(file).read_bytes() == b"content"

    asyncio.run(go())
