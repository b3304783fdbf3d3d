"""Runs in the environment of .ci/ray-env: clients ask two replicas while one is killed and both are replaced.

    python -m tests.ray.serving SECONDS CLIENTS

Prints one JSON object: how requests ended, in each phase, and what Serve did meanwhile.
"""

import asyncio
import collections
import json
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.ray.client import Clients, expected_tokens
from tests.ray.cluster import FEW, KNOBS, cluster, kill, num_running, replicas
from tests.server.tiny_folder import write_tiny_folder

KEY = "a-key-for-these-tests"
SCALING = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0, "look_back_period_s": 11}
LONGEST_S = 300


def main(seconds: float, num_clients: int) -> dict:
    from ray import serve

    from quire.integrations.ray import build_app

    with tempfile.TemporaryDirectory() as temporary, cluster() as url:
        folder = write_tiny_folder(Path(temporary) / "tiny")
        expected = expected_tokens(folder)

        def deploy(**changes) -> None:
            options = {"num_replicas": 2, "ray_actor_options": FEW, "ingress_actor_options": FEW} | KNOBS | changes
            serve.run(build_app(str(folder), **options))

        deploy()
        seen = {"hits": hits(url)} | asyncio.run(churn(Clients(url, expected), deploy, seconds, num_clients))
        deploy(api_keys=[KEY], num_replicas=None, autoscaling_config=SCALING, target_queued_tokens=100)
        seen |= {"keys": keys(url), "open after its client is gone": leave(url)}
        return seen | {"scaled": asyncio.run(scale(Clients(url, expected, KEY)))}


def hits(url: str) -> int:
    """Four prompts, four times each, one after another; returns how many requests found their prompt cached."""
    prompts = [
        f"{i}, which is the first token of a prompt of a few pages, whose names the router knows." for i in "abcd"
    ]
    return sum(cached_tokens(url, prompt) > 0 for _ in range(4) for prompt in prompts)


def cached_tokens(url: str, prompt: str) -> int:
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["usage"]["prompt_tokens_details"]["cached_tokens"]


async def churn(clients: Clients, deploy, seconds: float, num_clients: int) -> dict:
    """Ask all the time: a third of it quietly, a third from when a replica is killed on, a third while upgrading."""
    stopped, seen = asyncio.Event(), {}
    running = asyncio.create_task(clients.run(num_clients, stopped))

    async def phase(name: str, done) -> None:
        clients.ends, started = collections.Counter(), time.monotonic()
        while time.monotonic() - started < seconds / 3 or not await asyncio.to_thread(done):
            await asyncio.sleep(0.5)
        seen[name] = dict(clients.ends)

    await phase("quiet", lambda: clients.ends["complete"] >= num_clients)
    before = await asyncio.to_thread(replicas)
    await asyncio.to_thread(kill, min(before))
    await phase("killed", lambda: min(before) not in replicas() and num_running() == 2)
    before = await asyncio.to_thread(replicas)
    upgrading = asyncio.create_task(asyncio.to_thread(deploy, max_imbalance_tokens=4096, num_pages=500))
    await phase("upgraded", lambda: upgrading.done() and not replicas() & before and num_running() == 2)
    await upgrading
    clients.ends = collections.Counter()
    stopped.set()
    await running
    seen["last"] = dict(clients.ends)
    return seen | {"notes": collections.Counter(clients.notes).most_common(5)}


def keys(url: str) -> dict:
    """What a request is told with the right key, a wrong one and none."""

    def ask(**headers: str) -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers)) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    return {
        "right": ask(Authorization=f"Bearer {KEY}"),
        "wrong": ask(Authorization="Bearer another-key"),
        "none": ask(),
    }


def leave(url: str) -> int:
    """Read the beginning of a long stream and go; returns how many requests the engine has then, once it has none."""
    body = {"model": "tiny", "prompt": "Tell me", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        assert response.readline().startswith(b"data: {")
    end = time.monotonic() + LONGEST_S
    while True:
        with urllib.request.urlopen(f"{url}/metrics") as response:
            num_open = int(float(re.search(rb"^quire_requests_open (\S+)$", response.read(), re.MULTILINE)[1]))  # type: ignore[index]
        if not num_open or time.monotonic() > end:
            return num_open
        time.sleep(0.5)


async def scale(clients: Clients) -> int:
    """Ask until there is another replica; returns how many there are."""
    stopped, end = asyncio.Event(), time.monotonic() + LONGEST_S
    running = asyncio.create_task(clients.run(16, stopped))
    while await asyncio.to_thread(num_running) < 2 and time.monotonic() < end:
        await asyncio.sleep(0.5)
    stopped.set()
    await running
    assert clients.ends.keys() == {"complete"}, clients.notes
    return num_running()


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), int(sys.argv[2]))))
