"""What the processes of a group agree on before any of them loads a model: address, key, version, config, devices."""

import dataclasses
import hashlib
import inspect
import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from quire import __version__
from quire.config import EngineConfig, ModelConfig, parse_mesh
from quire.device.mesh import make_mesh, mesh_of
from quire.distributed.channel import Facts
from quire.distributed.errors import GroupError
from quire.field_error import FieldError
from quire.machine import limit_threads

KEY_VARIABLE = "QUIRE_GROUP_KEY"
MIN_KEY_LEN = 16
OWN_FIELDS = ("process_id", "group_key_file", "join_timeout_s", "compile_cache", "log_timing")
"""Of EngineConfig: what may differ between the processes of a group."""
NEVER_S = 10**6
"""For jax's own watch over its processes, which ends them without a word: ours is faster, and says why."""
LEAVE_S = 10
"""How long a process that ends waits for the others to end, too."""


def read_key(file: str | None) -> bytes:
    """The key that all processes share: from a file, or from the environment."""
    where = f"group_key_file={file!r}" if file else KEY_VARIABLE
    try:
        text = Path(file).read_text() if file else os.environ.get(KEY_VARIABLE, "")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(f"{where} cannot be read: {error}", field="group_key_file") from None
    key = text.strip()
    if len(key) < MIN_KEY_LEN:
        raise FieldError(
            f"{where}: the processes of a group need a key of at least {MIN_KEY_LEN} characters, the same for all: put "
            f"one into {KEY_VARIABLE} or into a file, such as `python -c 'import secrets; print(secrets.token_hex())'` "
            "makes it",
            field="group_key_file",
        )
    return key.encode()


def facts_of(config: EngineConfig, model: ModelConfig, path: Path) -> Facts:
    """What must be the same in every process: versions, and a digest of the config and of the model's files."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    knobs = {name: value for name, value in dataclasses.asdict(config).items() if name not in OWN_FIELDS}
    described = json.dumps([knobs, repr(dataclasses.astuple(model)), [file.stat().st_size for file in files]])
    return {
        "version of quire": __version__,
        "version of jax": jax.__version__,
        "config or model": hashlib.sha256(described.encode()).hexdigest()[:16],
    }


def differences(ours: Facts, theirs: Facts) -> str | None:
    """Why a process does not belong here, if so."""
    other = [name for name in ours if theirs.get(name) != ours[name]]
    if not other:
        return None
    listed = "; ".join(f"another {name}, {theirs.get(name)!r} where the leader has {ours[name]!r}" for name in other)
    return f"{listed}: start all processes with the same Quire, model and flags"


def address_of(coordinator: str) -> tuple[str, int]:
    """Host and port, as `EngineConfig` has checked them."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), int(port)


def free_port(host: str) -> int:
    """A port of this machine that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def prepare_jax(config: EngineConfig) -> None:
    """Before jax has looked for devices: how many a CPU has, and how processes on CPUs reach each other."""
    limit_threads()
    if jax.distributed.is_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _update("jax_enable_preemption_service", False)  # it would take SIGTERM, by which a server is told to finish
    if config.mesh and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        num_devices = math.prod(parse_mesh(config.mesh).values())
        jax.config.update("jax_num_cpu_devices", num_devices // config.num_processes)


def connect_jax(config: EngineConfig, address: str) -> None:
    """Make one jax of all processes; each then sees all devices. Every process calls this at the same time."""
    if not jax.distributed.is_initialized():
        known = inspect.signature(jax.distributed.initialize).parameters
        timeouts: dict[str, Any] = {"heartbeat_timeout_seconds": NEVER_S, "shutdown_timeout_seconds": LEAVE_S}
        try:
            jax.distributed.initialize(
                address,
                config.num_processes,
                config.process_id,
                cluster_detection_method="deactivate",
                initialization_timeout=config.join_timeout_s,
                coordinator_bind_address=address,
                **{name: value for name, value in timeouts.items() if name in known},
            )
        except RuntimeError as error:
            raise GroupError(f"jax.distributed could not start: {error}") from error
    if (jax.process_count(), jax.process_index()) != (config.num_processes, config.process_id):
        raise FieldError(
            f"num_processes={config.num_processes} and process_id={config.process_id}, but jax.distributed was started "
            f"with {jax.process_count()} and {jax.process_index()}: give the same",
            field="num_processes",
        )


def group_mesh(config: EngineConfig) -> Mesh:
    """The mesh that a group computes on, by default all devices of all processes.

    FieldError unless every process has a device in it: one without could not take part in a step.
    """
    mesh = mesh_of(config.mesh) if config.mesh else make_mesh(jax.devices())
    there = {device.process_index for device in mesh.devices.flat}
    if len(there) < config.num_processes:
        raise FieldError(
            f"mesh={config.mesh!r} has devices of {len(there)} processes, and num_processes={config.num_processes}: "
            f"together they have {len(jax.devices())}; give mesh='model={len(jax.devices())}'",
            field="mesh",
        )
    return mesh


def _update(name: str, value: Any) -> None:
    if name in jax.config.values:  # jax before 0.7 has fewer of them
        jax.config.update(name, value)
