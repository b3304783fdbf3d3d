"""What stands behind Ray Serve, without Ray: an engine that takes requests as bytes, and what names a prompt has."""

import asyncio
import json

import pytest

from quire.integrations.ray.forwarded import NAME_BYTES, ForwardedRequest, ResponseStart
from quire.integrations.ray.prompt_reader import PromptReader
from quire.integrations.ray.replica import EngineReplica
from quire.server.config import ServerConfig
from quire.server.keys import Caller, Keys

KNOBS = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_pages": 512}
LONG = "a prompt of several pages, which are named by hashes of what is in them, and of all before"
CHAT = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": CHAT, "max_output_tokens": 4},
}
KEY = "a-key-for-these-tests"


async def ask(replica: EngineReplica, path: str, body: object, key: str = KEY) -> tuple[int, dict]:
    headers = [(b"host", b"test"), (b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
    request = ForwardedRequest("POST", path, b"", headers, json.dumps(body).encode())
    start, *pieces = [piece async for piece in replica.handle(request)]
    assert isinstance(start, ResponseStart)
    return start.status, json.loads(b"".join(pieces))


@pytest.mark.slow
def test_a_prompt_has_the_names_that_its_engine_reports(tiny_folder):
    keys = Keys(given=[KEY])
    caller = keys.find(KEY)
    assert caller
    reader = PromptReader(str(tiny_folder), None, "tiny", KNOBS, 0)  # type: ignore[arg-type]

    async def run() -> None:
        replica = EngineReplica.__new__(EngineReplica)
        await replica.__init__(str(tiny_folder), None, "tiny", ServerConfig(), keys, KNOBS)  # type: ignore[misc]
        try:
            for path, fields in BODIES.items():
                body = {"model": "tiny"} | fields
                names, num_tokens = await reader.read(path, json.dumps(body).encode(), caller)
                assert len(names) >= 5
                assert 16 * len(names) + 4 <= num_tokens < 16 * len(names) + 20
                status, _ = await ask(replica, path, body)
                assert status == 200
                stats = await replica.record_routing_stats()
                known = {stats["pages"][i : i + NAME_BYTES] for i in range(0, len(stats["pages"]), NAME_BYTES)}
                # The last page may end where the prompt does: it is computed to draw from, and published later.
                assert set(names[:-1]) <= known
                assert not set((await reader.read(path, json.dumps(body).encode(), Caller("other")))[0]) & known
            assert (stats["queued_tokens"], stats["num_requests"], stats["is_ready"]) == (0, 0, True)
            assert replica.record_autoscaling_stats() == {"queued_tokens": 0.0}
            assert (await ask(replica, "/v1/completions", {}, key="another-key"))[0] == 401
            assert await reader.read("/v1/completions", b'{"prompt": 3}', caller) == ((), 0)
            assert await reader.read("/v1/models", b"", caller) == ((), 0)
        finally:
            await replica._engine.close()

    asyncio.run(run())
