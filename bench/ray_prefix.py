"""How many prompt tokens are found cached by replicas of Ray Serve: Quire's router against Serve's own.

    .ci/ray-env
    PYTHONPATH=src:. .cache/ray/bin/python bench/ray_prefix.py

Two replicas of a tiny model, whose pools hold the system prompts of about half of the trace each: 20 system prompts of
600 tokens, 400 questions that each follow one of them, 8 clients. Both routers get the same trace, with new replicas.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path

import aiohttp
from tests.ray.cluster import FEW, KNOBS, cluster
from tests.server.tiny_folder import write_tiny_folder

NUM_SYSTEM, SYSTEM_LEN, MAX_TOKENS = 20, 600, 4
KNOBS = KNOBS | {"num_pages": 500, "max_num_batched_tokens": 256, "max_model_len": 1024}


def trace(num_requests: int) -> list[str]:
    """Prompts: one of the system prompts and a question of its own. The tokenizer makes a token of each letter."""
    choose = random.Random(0)
    systems = ["".join(choose.choices("abcdefgh ", k=SYSTEM_LEN)) for _ in range(NUM_SYSTEM)]
    return [f"{choose.choice(systems)} Question {i}?" for i in range(num_requests)]


async def replay(url: str, prompts: list[str], num_clients: int) -> dict:
    """Ask all of it; returns the share of prompt tokens that were cached, and how long it took."""
    left, prompt_tokens, cached_tokens, started = list(reversed(prompts)), 0, 0, time.monotonic()
    async with aiohttp.ClientSession() as session:

        async def client() -> None:
            nonlocal prompt_tokens, cached_tokens
            while left:
                body = {"model": "tiny", "prompt": left.pop(), "max_tokens": MAX_TOKENS, "temperature": 0}
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    usage = (await response.json())["usage"]
                prompt_tokens += usage["prompt_tokens"]
                cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

        await asyncio.gather(*(client() for _ in range(num_clients)))
    return {"hit rate": round(cached_tokens / prompt_tokens, 3), "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    seen = {}
    with tempfile.TemporaryDirectory() as temporary, cluster() as url:
        from ray import serve

        from quire.integrations.ray import build_app

        folder = write_tiny_folder(Path(temporary) / "tiny")
        for name, prefix_routing in (("Serve's router", False), ("Quire's router", True)):
            options = {"num_replicas": 2, "ray_actor_options": FEW, "ingress_actor_options": FEW}
            serve.run(build_app(str(folder), prefix_routing=prefix_routing, **options, **KNOBS))
            seen[name] = asyncio.run(replay(url, trace(args.requests), args.clients))
            serve.delete("default")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
