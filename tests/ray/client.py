"""Clients that check every answer against what one engine alone generates."""

import asyncio
import collections
import itertools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from quire import LLM, SamplingParams
from tests.ray.cluster import KNOBS

SYSTEM = [
    f"You are assistant number {i}, and these are your many rules: be brief, be kind, be right. " for i in range(4)
]
CASES = [(f"{SYSTEM[i % 4]}Question {i}?", i) for i in range(32)]
"""Prompts with their seeds."""
MAX_TOKENS = 48


def expected_tokens(folder: Path) -> list[list[int]]:
    """What an engine alone generates for each case."""
    with LLM(folder, quiet=True, **KNOBS) as llm:
        params = [SamplingParams(seed=seed, max_tokens=MAX_TOKENS) for _, seed in CASES]
        outputs = llm.generate([prompt for prompt, _ in CASES], params, progress=False)
        return [output.outputs[0].token_ids for output in outputs]


@dataclass
class Clients:
    """Asks one case after another, streamed or whole, and counts how each ended."""

    url: str
    expected: list[list[int]]
    key: str = ""
    ends: collections.Counter = field(default_factory=collections.Counter)
    """complete; error: as a client understands it; unanswered: the connection broke; mixed: a token of another."""
    notes: list[str] = field(default_factory=list)

    async def run(self, num_clients: int, stopped: asyncio.Event) -> None:
        """So many clients at once, until told to stop; each finishes its request."""
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
            await asyncio.gather(*(self._client(session, i, stopped) for i in range(num_clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int, stopped: asyncio.Event) -> None:
        cases = random.Random(number)
        for turn in itertools.count():
            if stopped.is_set():
                return
            case = cases.randrange(len(CASES))
            try:
                end, tokens = await self._ask(session, case, stream=(number + turn) % 2 == 0)
            except (aiohttp.ClientError, ValueError, TimeoutError) as error:
                end, tokens = "unanswered", []
                self.notes.append(repr(error))
            wanted = self.expected[case]
            if tokens != (wanted if end == "complete" else wanted[: len(tokens)]):
                end = "mixed"
            self.ends[end] += 1
            if end == "error":
                await asyncio.sleep(0.5)

    async def _ask(self, session: aiohttp.ClientSession, case: int, *, stream: bool) -> tuple[str, list[int]]:
        prompt, seed = CASES[case]
        body = {"model": "tiny", "prompt": prompt, "seed": seed, "max_tokens": MAX_TOKENS, "temperature": 1}
        body |= {"return_token_ids": True, "stream": stream}
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            if response.status != 200:
                error = (await response.json())["error"]
                self.notes.append(f"{response.status} {error['message']}")
                return "error", []
            if not stream:
                return "complete", (await response.json())["choices"][0]["token_ids"]
            return self._end_of([json.loads(line[6:]) async for line in response.content if _is_event(line)])

    def _end_of(self, events: list[dict[str, Any]]) -> tuple[str, list[int]]:
        tokens = [token for event in events for choice in event.get("choices", ()) for token in choice["token_ids"]]
        if "error" in events[-1]:
            self.notes.append(f"event: {events[-1]['error']['message']}")
            return "error", tokens
        return ("complete" if events[-1]["choices"][0]["finish_reason"] else "unanswered"), tokens


def _is_event(line: bytes) -> bool:
    return line.startswith(b"data: {")
