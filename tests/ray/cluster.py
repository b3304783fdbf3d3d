"""A Ray cluster of this machine, for programs that run in the environment of .ci/ray-env."""

import contextlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

FEW = {"num_cpus": 0.1}
"""Resources of a replica: a machine with two cores has room for all."""
KNOBS = {
    "dtype": "float32",
    "deterministic": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_pages": 512,
    "max_rounds": 4,
}


MAX_STARTS = 6


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """Start Ray, and Serve on a free port; yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"  # else Ray writes one to the home folder
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
        import ray
        from ray import serve

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        _start()
        try:
            serve.start(http_options={"port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def _start() -> None:
    """Start Ray. Its processes have 15 s to find each other, which a busy machine does not always give them."""
    import ray

    os.environ |= {"RAY_raylet_start_wait_time_s": "45"}
    for starts in range(1, MAX_STARTS + 1):
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
            return
        except Exception as error:
            if starts == MAX_STARTS or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def replicas() -> set[str]:
    """The names of the engines' processes."""
    from ray.util import list_named_actors

    named = list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in named if "#QuireEngine#" in actor["name"]}


def num_running() -> int:
    """How many engines take requests."""
    from ray import serve

    return serve.status().applications["default"].deployments["QuireEngine"].replica_states.get("RUNNING", 0)


def kill(name: str) -> None:
    """End a process at once."""
    import ray

    ray.kill(ray.get_actor(name, namespace="serve"))
