"""The stream of cached pages: whole, in order, for operators only, and never a burden to the engine."""

import asyncio
import http.client
import json
import threading

import pytest

from quire import AsyncLLM
from quire.async_llm.page_feed import PageBatch
from quire.core.sequence import Weights
from quire.routing import Choice, ReplicaFeed, Router, prompt_hashes
from quire.server.errors import ApiError
from quire.server.http import kv_events
from quire.server.keys import Keys
from quire.server.service import Service
from tests.fake_llm import fake_llm
from tests.server.process import LONGEST_S, SMALL, serving
from tests.test_async_llm import run, tokens, until

CLIENT_KEY, ADMIN_KEY = "a-key-of-a-client", "a-key-of-an-admin"
FLAGS = ("--api-key", CLIENT_KEY, "--admin-key", ADMIN_KEY, "--kv-events")
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def events_in(text: str) -> list[tuple[str, dict]]:
    """The events of a stream, without its comments."""
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event: ")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in blocks]


# -- without a server -------------------------------------------------------------------------------------------------


async def read(llm: AsyncLLM, sent: list[bytes]) -> None:
    async for piece in kv_events.KVEvents(Service(llm, "fake", 0), 10.0).response().events():
        sent.append(piece)


def kinds(sent: list[bytes]) -> list[str]:
    return [kind for kind, _ in events_in(b"".join(sent).decode())]


def test_a_reader_hears_of_every_page_and_a_router_finds_it():
    async def main() -> None:
        async with AsyncLLM.from_factory(fake_llm, fake_llm) as llm:
            await llm.generate(PROMPT, tokens(1), cache_salt="s")
            sent: list[bytes] = []
            reader = asyncio.create_task(read(llm, sent))
            await until(lambda: kinds(sent).count("snapshot") == 2)
            await llm.generate([*PROMPT[:8], 3, 3, 3, 3, 3], tokens(1), cache_salt="s")
            await until(lambda: "pages" in kinds(sent))
            router = Router()
            feed = ReplicaFeed(router, "pod")
            for kind, data in events_in(b"".join(sent).decode()):
                feed.take(kind, data)
            hashes = prompt_hashes([*PROMPT[:8], 3, 3, 3, 3], page_size=4, cache_salt="s")
            choice = router.choose(hashes)
            assert choice.num_pages == 3
            (home,) = [i for i, count in enumerate(await llm.call_all(lambda e: e.stats().cached_pages)) if count]
            assert choice.engine == f"pod/{home}"
            await llm.call_all(lambda engine: engine.clear_prefix_cache())
            await until(lambda: kinds(sent).count("pages") == 2)
            _, last = events_in(b"".join(sent).decode())[-1]
            assert (last["engine"], last["published"], len(last["removed"])) == (home, [], 3)
            await llm.set_weights(5, version="new")
            await llm.generate(PROMPT, tokens(1), cache_salt="s")
            await until(lambda: events_in(b"".join(sent).decode())[-1][1].get("weights", {}).get("version") == "new")
            await llm.drain()
            await reader  # it ends by itself

    run(main)


def test_it_costs_nothing_before_and_after():
    async def main() -> None:
        async with AsyncLLM.from_factory(fake_llm) as llm:

            def changes(engine):
                return engine.scheduler.tables.pool.prefix_cache.changes

            assert await llm.call(changes) is None
            service = kv_events.KVEvents(Service(llm, "fake", 0), 10.0)
            responses = [service.response() for _ in range(kv_events.MAX_READERS)]
            assert await llm.call(changes) == []
            with pytest.raises(ApiError, match="16 read the events already"):
                service.response()
            for response in responses:
                response.close()
            assert await llm.call(changes) is None
            service.response().close()

    run(main)


def test_a_slow_reader_is_cut_off_and_told(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_UNREAD", 10)

    async def main() -> None:
        async with AsyncLLM.from_factory(fake_llm) as llm:
            response = kv_events.KVEvents(Service(llm, "fake", 0), 10.0).response()
            events = response.events()
            assert b"event: load" in await anext(events)
            assert b"event: snapshot" in await anext(events)
            for i in range(12):
                response._unread.put(0, PageBatch(1 + i, [bytes(32)], [], Weights(0, 0)))
            rest = [event async for event in events]
            assert kinds(rest)[-1] == "cut"
            assert len(rest) <= 2
            assert not response._unread._batches
            response.close()

    run(main)


def test_a_snapshot_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(kv_events, "NAMES_PER_EVENT", 2)
    names = [bytes([i] * 32) for i in range(5)]
    whole = PageBatch(3, names, [], Weights(0, 0), is_snapshot=True)
    pieces = events_in(b"".join(kv_events._events_of(0, whole, 16)).decode())
    assert [(len(data["hashes"]), data["more"]) for _, data in pieces] == [(2, True), (2, True), (1, False)]


# -- of a server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_folder):
    with serving(tiny_folder, *SMALL, *FLAGS) as running:
        yield running


class Reader:
    """Reads the stream in a thread."""

    def __init__(self, server) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LONGEST_S)
        self._connection.request("GET", "/v1/kv_events", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        self.response = self._connection.getresponse()
        self.text = ""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while line := self.response.readline():
            with self._changed:
                self.text += line.decode()
                self._changed.notify_all()

    def wait_for(self, condition) -> list[tuple[str, dict]]:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(events_in(self.text)), LONGEST_S)
            return events_in(self.text)

    def join(self) -> None:
        self._thread.join(LONGEST_S)
        self._connection.close()


@pytest.mark.own_server
def test_operators_only(server):
    for headers in ({}, {"authorization": f"Bearer {CLIENT_KEY}"}, {"authorization": "Bearer wrong-key-of-nobody"}):
        assert server.get("/v1/kv_events", **headers)[0] == 401
    assert server.get("/v1/models", authorization=f"Bearer {ADMIN_KEY}")[0] == 401, "it is for nothing else"
    for path in ("/v1/kv_events/", "//v1/kv_events", "/v1//kv_events"):
        assert server.get(path, authorization=f"Bearer {CLIENT_KEY}")[0] == 404


@pytest.mark.own_server
def test_a_router_elsewhere_finds_the_prompt_and_sees_the_server_drain(server):
    reader = Reader(server)
    assert (reader.response.status, reader.response.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    reader.wait_for(lambda events: any(kind == "snapshot" for kind, _ in events))
    secret = "the harbour master's secret, and what follows it"
    body = {"model": "tiny", "prompt": secret, "max_tokens": 2, "cache_salt": "x"}
    assert server.post("/v1/completions", body, authorization=f"Bearer {CLIENT_KEY}")[0] == 200
    events = reader.wait_for(lambda events: any(kind == "pages" for kind, _ in events))
    _, body = server.post("/tokenize", {"prompt": secret}, authorization=f"Bearer {CLIENT_KEY}")
    token_ids, page_size = json.loads(body)["tokens"], events[1][1]["page_size"]
    caller = Keys(given=[CLIENT_KEY]).find(CLIENT_KEY)
    assert caller
    hashes = prompt_hashes(token_ids, page_size=page_size, cache_salt=caller.salt("x"))
    router = Router()
    feed = ReplicaFeed(router, "pod")
    for kind, data in events:
        feed.take(kind, data)
    assert router.choose(hashes) == Choice("pod/0", len(token_ids) // page_size)
    assert router.choose(prompt_hashes(token_ids, page_size=page_size)).num_pages == 0, "a stranger's salt"
    assert "harbour" not in reader.text
    assert "tiny" not in reader.text
    assert server.terminate() == 0, "it does not wait for those who look on"
    reader.join()
