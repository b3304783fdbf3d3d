"""The programs of a slice that is not here, through the real compiler: what they take of a device's memory.

`compile_programs` starts one process for each program, since compilers want environment variables before they are
loaded, and may abort. Run as a module this file is such a process: a request as JSON on stdin, the answer as JSON in
the last line of stdout.
"""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.capacity.topology import Topology, parse_topology
from quire.config import EngineConfig, WindowPoolSize

TIMEOUT_S = 1800
MAX_REASON = 400
COMMAND = ("-m", "quire.capacity.compiled")
MODULES = {"tpu": "libtpu", "gpu": "jax_cuda13_plugin"}
INSTALL = {"tpu": "libtpu (pip install libtpu)", "gpu": "jax-cuda13-plugin and jax-cuda13-pjrt"}
VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
XLA_FLAG = "--xla_gpu_deviceless_cub_mode=DEVICELESS_CUB_DISABLED"
"""Without it sorts for a GPU look for one."""
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
COLLECTIVE = re.compile(rf"= \(?[a-z0-9]+\[([0-9,]*)\][^=\n]*? ({COLLECTIVES})(?:-start)?\(")


@dataclass(frozen=True)
class CompiledProgram:
    """What the compiler says of one program, on one device."""

    name: str
    argument_bytes: int
    """Weights, pool and the step's inputs."""
    temp_bytes: int
    code_bytes: int
    """Of the program itself, which is in the device's memory too."""
    collectives: dict[str, int]
    """How often each kind of collective sums or moves a vector of the model's width, or more, for each token."""
    seconds: float
    """To compile."""


@dataclass(frozen=True)
class CompilerError:
    """A program that did not compile, in one line."""

    name: str
    reason: str
    refused: bool
    """Whether the compiler refused it; else it did not get to an answer: it was stopped, killed or never started."""


def unavailable_reason(topology: Topology) -> str | None:
    """Why programs for such chips cannot be compiled here; None if they can."""
    platform = topology.chip.platform
    if platform == "cpu":
        return "an engine on a CPU compiles its programs when it starts"
    if importlib.util.find_spec(MODULES[platform]) is None:
        return f"the compiler for {topology.chip.name} is not installed: {INSTALL[platform]}"
    if platform == "gpu" and topology.chip.name not in GPU_DESCRIPTIONS:
        return f"there is no description of {topology.chip.name} for the GPU compiler"
    return None


def compile_programs(
    path: Path, config: EngineConfig, topology: Topology, *, num_pages: int, windows: Sequence[WindowPoolSize] = ()
) -> list[CompiledProgram | CompilerError]:
    """Compile the largest decode and the largest mixed step, each in a process of its own, both at once."""
    request = {
        "path": str(path),
        "topology": topology.name,
        "config": dataclasses.asdict(config),
        "num_pages": num_pages,
        "windows": list(map(dataclasses.asdict, windows)),
    }
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda kind: _ask(request | {"kind": kind}), ("decode", "mixed")))


def environment(topology: Topology) -> dict[str, str]:
    """The variables of a process that compiles for a slice; they must be there before JAX is imported."""
    variables = {**os.environ, **VARIABLES}
    if topology.chip.platform == "gpu":  # XLA aborts on a flag that it does not know
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {XLA_FLAG}".strip()
    return variables


def _ask(request: dict[str, Any]) -> CompiledProgram | CompilerError:
    kind = request["kind"]
    command = [sys.executable, *COMMAND]
    try:
        out = subprocess.run(
            command,
            input=json.dumps(request),
            env=environment(parse_topology(request["topology"])),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CompilerError(kind, f"the compiler was stopped after {TIMEOUT_S} s", refused=False)
    lines = out.stdout.splitlines()
    if out.returncode == 0 and lines:
        answer = json.loads(lines[-1])
        return CompilerError(**answer) if "refused" in answer else CompiledProgram(**answer)
    return _died(kind, out.returncode, out.stderr)


def _died(kind: str, returncode: int, errors: str) -> CompilerError:
    """A process that gave no answer, with the line of its output that says why. A failed check is a refusal."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    checks = [line for line in lines if "Check failed" in line]
    reason = (checks[:1] or lines[-1:] or [f"it ended with code {returncode}"])[0]
    return CompilerError(kind, reason[:MAX_REASON], refused=bool(checks))


# -- in the process of its own ---------------------------------------------------------------------------------------


def main() -> None:
    """Compile the program that stdin asks for."""
    request = json.load(sys.stdin)
    print(json.dumps(dataclasses.asdict(_compile(request))))


def _compile(request: dict[str, Any]) -> CompiledProgram | CompilerError:
    from quire.capacity.footprint import programs_on
    from quire.capacity.model_file import read_model_config
    from quire.device.mesh import make_mesh
    from quire.engine.step_shapes import step_shapes
    from quire.engine.validation import max_model_len

    topology, config = parse_topology(request["topology"]), EngineConfig(**request["config"])
    model = read_model_config(Path(request["path"]))
    length = max_model_len(config.max_model_len, model)
    mesh = make_mesh(described_devices(topology))
    windows = tuple(WindowPoolSize(**size) for size in request["windows"])
    programs = programs_on(mesh, config, model, num_pages=request["num_pages"], windows=windows, max_model_len=length)
    shapes = [shape for shape in step_shapes(config) if shape.decode == (request["kind"] == "decode")]
    shape = max(shapes, key=lambda shape: shape.num_tokens)
    start = time.perf_counter()
    platform = "tpu" if topology.chip.platform == "tpu" else "cuda"
    try:
        compiled = programs.trace(shape).lower(lowering_platforms=(platform,)).compile()
    except Exception as error:  # each compiler raises its own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return CompilerError(request["kind"], reason[:MAX_REASON], refused=True)
    memory = compiled.memory_analysis()
    assert memory is not None, "the compilers of TPUs and GPUs both say"
    return CompiledProgram(
        name=str(shape),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        collectives=count_collectives(compiled.as_text() or "", shape.num_tokens * model.hidden_size),
        seconds=round(time.perf_counter() - start, 1),
    )


def described_devices(topology: Topology) -> list[Any]:
    """The devices of a slice, as its compiler describes them; only in its `environment`."""
    from jax.experimental import topologies

    chip = topology.chip
    if chip.platform == "tpu":
        name = f"{chip.compiler_name or chip.name}:{'x'.join(map(str, topology.shape))}"
        return list(topologies.get_topology_desc(name, "tpu").devices)
    hosts = f"1x1x{topology.num_devices}"
    return list(
        topologies.get_topology_desc("", "cuda", topology=hosts, target_config=GPU_DESCRIPTIONS[chip.name]).devices
    )


def count_collectives(program: str, num_elements: int) -> dict[str, int]:
    """Collectives of arrays with so many numbers or more, by kind."""
    counts: dict[str, int] = {}
    for shape, kind in COLLECTIVE.findall(program):
        size = 1
        for length in filter(None, shape.split(",")):
            size *= int(length)
        if size >= num_elements:
            counts[kind] = counts.get(kind, 0) + 1
    return counts


GPU_DESCRIPTIONS = {
    "h100": """gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
""",
}
"""What the GPU compiler asks a GPU for, where there is none."""

if __name__ == "__main__":
    main()
