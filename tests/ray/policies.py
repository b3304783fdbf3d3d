"""Runs in the environment of .ci/ray-env: the router and the autoscaling policy, given what replicas report.

Prints one JSON object of what they choose, and of what an application refuses. No cluster is started.
"""

import asyncio
import itertools
import json
from types import SimpleNamespace

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.request_router.common import PendingRequest

from quire.integrations.ray import build_app
from quire.integrations.ray.autoscaling import QueuedTokens
from quire.integrations.ray.forwarded import NAME_BYTES, ForwardedRequest
from quire.integrations.ray.request_router import PrefixRouter
from quire.server.config import ServerConfig

ENGINES = DeploymentID("QuireEngine", "default")


class Replica:
    """What Serve's router knows of one."""

    max_ongoing_requests = 1000

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, ENGINES)
        self.routing_stats: dict = {}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def pages(prompt: str) -> tuple[bytes, ...]:
    return tuple(f"{prompt}{i}".encode().ljust(NAME_BYTES, b".") for i in range(4))


async def routing() -> dict:
    router = PrefixRouter(ENGINES, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state()
    numbers = itertools.count()
    a, b = Replica("a"), Replica("b")
    router.update_replicas([a, b])

    async def ask(prompt: str) -> str:
        """Where a request goes, by Serve's own loop."""
        request = ForwardedRequest("POST", "/v1/completions", b"", [], b"", pages(prompt), 100)
        metadata = SimpleNamespace(internal_request_id=f"{next(numbers)}", request_id="", multiplexed_model_id="")
        pending = PendingRequest([request], {}, metadata)  # type: ignore[arg-type]
        replica = await router._choose_replica_for_request(pending)
        router.on_request_routed(pending, replica.replica_id, None)
        return replica.replica_id.unique_id

    first = [await ask(prompt) for prompt in "xyzxyz"]
    seen = {"same prefix, same replica": first[:3] == first[3:] and len(set(first)) == 2}
    report = {"queued_tokens": 0, "num_requests": 0}
    a.routing_stats = report | {"pages": b""}
    b.routing_stats = report | {"pages": b"".join(pages("w"))}
    seen["reported pages"] = await ask("w")
    many = await asyncio.gather(*(ask(str(i)) for i in range(64)))
    seen["all are placed"] = len(many)
    router.on_replica_actor_died(a.replica_id)
    seen["after a death"] = await ask(next(prompt for prompt, name in zip("xyz", first, strict=False) if name == "a"))
    return seen


def autoscaling() -> dict:
    policy = QueuedTokens(target_queued_tokens=1000)

    def replicas(**reported: float) -> int:
        metrics = {"queued_tokens": reported} if reported else {}
        return policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=2))[0]  # type: ignore[arg-type]

    return {
        "nothing reported": replicas(),
        "nothing queued": replicas(a=0, b=0),
        "three times the target": replicas(a=2000, b=999),
    }


def refusals(**fields) -> dict:
    """What is said to each of these fields of ServerConfig, given alone."""
    said = {}
    for name, value in fields.items():
        try:
            build_app("model", server=ServerConfig(**{name: value}))
        except ValueError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    seen = asyncio.run(routing()) | {"replicas": autoscaling()}
    seen["refused"] = refusals(port=8001, batch_folder="batches", max_batch_bytes=1, max_queued_requests=7)
    print(json.dumps(seen))
