"""Runs in the environment of .ci/ray-env: clients ask two replicas while one is killed and both are replaced.

    python -m tests.ray.serving SECONDS CLIENTS

Prints one JSON object: how requests ended, in each phase, and what Serve did meanwhile.
"""

import asyncio
import collections
import json
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
        seen = asyncio.run(churn(Clients(url, expected), deploy, seconds, num_clients))
        deploy(api_keys=[KEY], num_replicas=1)
        return seen | {"keys": keys(url)}


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


if __name__ == "__main__":
    print(json.dumps(main(float(sys.argv[1]), int(sys.argv[2]))))
