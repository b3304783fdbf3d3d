"""The metrics of batches: lines by state while a batch runs, and the bytes of files and answers."""

import asyncio
import json

from quire import AsyncLLM
from quire.server.batches.store import Store, StoredFile
from quire.server.batches.worker import Batches
from quire.server.keys import Caller
from quire.server.observe.metrics import Metrics
from quire.server.openai import schema
from quire.server.openai.request_body import BodyReader
from quire.server.service import Service
from tests.batch_files import completion
from tests.fake_llm import LONG_S, Gate, fake_llm

CALLERS = Caller("tenant"), Caller("another")
NUM_LINES, NUM_WRONG = 9, 2


async def add_batch(batches: Batches, caller: Caller):
    """Start a batch of good lines, and of some that have no model."""
    lines = [completion(f"{i}") for i in range(NUM_LINES)]
    lines += [completion(f"wrong-{i}", model="another") for i in range(NUM_WRONG)]
    tenant, part = batches.tenant(caller), batches.tenant(caller).new_part()
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = StoredFile(id=f"file-{0:032x}", bytes=part.stat().st_size, created_at=0, filename="a", purpose="batch")
    tenant.take_room(file.bytes)
    await tenant.add_file(file, part)
    request = schema.BatchRequest(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    return await batches.create(caller, request)


async def samples(metrics: Metrics) -> dict[str, float]:
    await asyncio.sleep(0.2)  # requests within a tenth of a second share one reading
    page = (await metrics.read())[0].decode()
    lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith("quire_batch")]
    return {name: float(value) for name, _, value in lines}


def lines_of(found: dict[str, float]) -> dict[str, float]:
    return {state: found[f'quire_batch_lines{{state="{state}"}}'] for state in ("completed", "failed", "left")}


def test_the_lines_and_bytes_of_batches_are_counted(tmp_path):
    async def run() -> None:
        gate, store, metrics = Gate(), Store(tmp_path, 1 << 20), Metrics()
        metrics.watch_batches(store)
        assert (await samples(metrics))["quire_batch_bytes"] == 0
        async with AsyncLLM.from_factory(lambda: fake_llm(gate, max_num_seqs=2)) as engine:
            service = Service(engine, "toy", 0)
            batches = Batches(store, service, BodyReader(strict=False))
            gate.let(12)
            running = [await add_batch(batches, caller) for caller in CALLERS]
            await asyncio.to_thread(gate.wait_until_held)
            while not all(batch.total for batch in running):
                await asyncio.sleep(0.01)
            found, num_done = await samples(metrics), sum(batch.completed for batch in running)
            num_failed = sum(batch.failed for batch in running)
            assert num_done > 0
            assert lines_of(found) == {
                "completed": num_done,
                "failed": num_failed,
                "left": 2 * (NUM_LINES + NUM_WRONG) - num_done - num_failed,
            }
            gate.open()
            while not all(batch.has_ended for batch in running):
                await asyncio.sleep(0.01)
            assert [(batch.completed, batch.failed) for batch in running] == [(NUM_LINES, NUM_WRONG)] * 2
            found = await samples(metrics)
            assert lines_of(found) == {"completed": 0, "failed": 0, "left": 0}, "only batches that have not ended"
            assert found['quire_batches{status="completed"}'] == 2
            files = [file for tenant in store.tenants for file in tenant.files.values()]
            on_disk = sum(
                tenant.path(file).stat().st_size for tenant in store.tenants for file in tenant.files.values()
            )
            assert len(files) == 6, "input, answers and errors of each"
            assert found["quire_batch_bytes"] == on_disk
            tenant = store.tenants[0]
            tenant.remove_file(tenant.file(f"file-{0:032x}"))
            assert (await samples(metrics))["quire_batch_bytes"] < on_disk
            await batches.stop()
            service.close()
        store.close()

    asyncio.run(asyncio.wait_for(run(), LONG_S))
