"""Devices that are not there: meshes to compile for, and the environment in which their compilers run.

`tests/compiled` starts a process for each slice, with its `environment`; `devices` works only inside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.capacity import compiled
from quire.capacity.topology import Topology, parse_topology

COMPILERS = Path(__file__).parents[2] / ".cache" / "compilers"
"""Made by `.ci/compilers-env`."""


def environment(topology: str) -> dict[str, str]:
    """The variables of a process that compiles for a slice, with the compilers on its path."""
    if not COMPILERS.exists():
        raise RuntimeError(f"{COMPILERS} is missing: .ci/compilers-env makes it")
    path = os.pathsep.join(filter(None, [str(COMPILERS), os.environ.get("PYTHONPATH", "")]))
    return {**compiled.environment(_parse(topology)), "PYTHONPATH": path}


def reports_of(module: str, topology: str, *args: str) -> list[dict]:
    """What a module of this folder prints, a JSON line for each program; a compiler that aborts ends the process."""
    command = [sys.executable, "-m", f"tests.compiled.{module}", topology, *args]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment(topology), cwd=root, capture_output=True, text=True, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (f"after {len(reports)} programs", done.stderr[-3000:])
    return reports


def devices(topology: str) -> list[Any]:
    """The devices of a slice: "v5e:2x2", "v6e:1x1", "tpu7x:2x2x1", or "h100"."""
    return compiled.described_devices(_parse(topology))


def _parse(topology: str) -> Topology:
    return parse_topology("h100:1" if topology == "h100" else topology)
