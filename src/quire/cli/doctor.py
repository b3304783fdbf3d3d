"""`quire doctor`: what this machine has, whether Quire runs on it, and whether a device does what was planned."""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("quire-llm", "jax", "jaxlib", "numpy", "tokenizers", "safetensors", "gguf", "huggingface-hub")
MEMORY_TOLERANCE = 0.02
"""By how much the memory that a device says it has may differ from the table of chips."""
LOW_SHARE = 0.5
"""Of what was planned: below it something is wrong with the device, the program or the plan."""
REPORT_IT = ", report it"
"""End of the verdict of a comparison that failed."""
DOES_NOT_LOAD = "does not load"


def run(args: argparse.Namespace) -> int:
    """Print what this machine has and what was measured. Return 0 if Quire runs and no check failed, else 1.

    `--json` writes the same as a report.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
    }
    print(f"python       {report['python']} on {report['system']}")
    for name, version in report["packages"].items():
        print(f"{name:<12} {version}")
    try:
        _devices(report)
        _try_it(report)
        _kernels(report)
        _measure(report)
    except Exception as error:  # whatever is broken here is what the doctor is for
        report["error"] = type(error).__name__  # its text may name paths, and the report is made to be shared
        print(f"\nquire does not run here: {report['error']}: {error}", file=sys.stderr)
    else:
        print("\nquire runs here.")
    report["runs"] = "error" not in report
    report["failed"] = failed_checks(report)
    if report["runs"] and report["failed"]:
        print(f"quire: failed checks: {'; '.join(report['failed'])}", file=sys.stderr)
    if args.json == "-":
        print(json.dumps(report))
    elif args.json is not None:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["runs"] and not report["failed"] else 1


def failed_checks(report: dict[str, Any]) -> list[str]:
    """Return a sentence for each check of a report that failed although the engine runs."""
    failed = [verdict for verdict in report.get("verdicts", ()) if verdict.endswith(REPORT_IT)]
    if report.get("native") == DOES_NOT_LOAD:
        failed.append(f"native: the library {DOES_NOT_LOAD}")
    return failed


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices(report: dict[str, Any]) -> None:
    import jax

    from quire.device import memory, native
    from quire.device.mesh import make_mesh
    from quire.engine.pool_size import default_pool_bytes
    from quire.machine import num_processors, num_scheduled_processors, read_memory

    host, count, scheduled = read_memory(), num_processors(), num_scheduled_processors()
    report["memory"] = {"limit": host.limit, "available": host.available, "is_limited": host.limit_path is not None}
    report["processors"] = {"usable": count, "scheduled": scheduled}
    print(f"memory       {host.available / 2**30:.1f} GiB free of {host.limit / 2**30:.1f} GiB ({host.source})")
    print(f"processors   {count}{f' of {scheduled}, by a CPU quota' if count < scheduled else ''}")
    report["devices"] = [{"kind": device.device_kind, "platform": device.platform} for device in jax.local_devices()]
    for device in report["devices"]:
        print(f"device       {device['kind']} ({device['platform']})")
    mesh = make_mesh()
    num_bytes = default_pool_bytes(memory.available_bytes(mesh), is_host_memory=memory.is_host_memory(mesh))
    print(f"KV pool      {num_bytes / 2**30:.1f} GiB by default")
    reason = native.unavailable_reason()
    if reason is None:
        report["native"] = f"built; uses {native.instruction_sets()[-1]}"
    else:  # which may name the library's path
        report["native"] = DOES_NOT_LOAD if native.LIBRARY.exists() else "not built"
    print(f"native       {reason or report['native']}")


def _try_it(report: dict[str, Any]) -> None:
    """Two sequences of a random model through the whole engine, audited."""
    import numpy as np

    from quire import LLM, AttentionConfig, ModelConfig, SamplingParams
    from quire.device.mesh import make_mesh
    from quire.device.models.weight_specs import TensorSpec
    from quire.device.models.weights import load_params

    config = ModelConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        attention=(AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),),
        max_len=64,
        tie_embeddings=True,
    )
    rng = np.random.default_rng(0)

    def random_tensor(tensor: TensorSpec) -> np.ndarray:
        return rng.standard_normal(tensor.shape).astype(np.float32)

    mesh = make_mesh()
    params = load_params(config, random_tensor, mesh=mesh, dtype="float32")
    knobs = {"num_pages": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16, "compile_cache": ""}
    with LLM.from_params(config, params, mesh=mesh, quiet=True, dtype="float32", debug=True, **knobs) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_tokens=8), progress=False)
        if [len(output.outputs[0].token_ids) for output in outputs] != [8, 8]:
            raise RuntimeError("a tiny model did not generate as many tokens as it should")
        stats = llm.engine.stats()
        if stats.held_pages or stats.compiles_after_warmup:
            raise RuntimeError(f"pages held: {stats.held_pages}, late compiles: {stats.compiles_after_warmup}")
    report["self_test"] = f"16 tokens of a tiny model, {stats.programs} programs, no page held, nothing compiled late"
    print(f"self-test    {report['self_test']}")


def _kernels(report: dict[str, Any]) -> None:
    """Every attention backend of this platform against the reference."""
    from quire.capacity.measure import TOLERANCES, check_kernels
    from quire.device.mesh import make_mesh

    checks = check_kernels(make_mesh())
    report["attention"] = [
        {**dataclasses.asdict(check), "error": f"{check.error:.3g}", "right": check.is_right} for check in checks
    ]
    for check in checks:
        allowed = f"{TOLERANCES[check.dtype]:g} allowed"
        print(f"attention    {check}: off by {check.error:.1e} at most ({allowed})")
    wrong = [str(check) for check in checks if not check.is_right]
    if wrong:
        raise RuntimeError(f"attention is wrong: {', '.join(wrong)}; another backend can be chosen with --attention")


def _measure(report: dict[str, Any]) -> None:
    """Memory, its bandwidth and one decode step, beside the table of chips and the roofline."""
    import jax

    from quire.capacity import measure
    from quire.capacity.chips import chip_of_device
    from quire.capacity.topology import Topology
    from quire.device.mesh import make_mesh

    device, mesh = jax.local_devices()[0], make_mesh()
    chip = chip_of_device(device.device_kind)
    size, num_bytes = (measure.SMALL, 1 << 26) if device.platform == "cpu" else (measure.LARGE, 1 << 30)
    step = measure.decode_seconds(size, mesh)
    measured = {"bandwidth": measure.memory_bandwidth(device, num_bytes), "decode_step_s": step}
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        measured["memory"] = stats["bytes_limit"]
    report["measured"] = measured
    print(f"bandwidth    {measured['bandwidth'] / 1e9:,.0f} GB/s of memory, read and written")
    print(f"decode step  {step * 1e3:.3f} ms for {size.rows} rows of {size.context} positions")
    if chip is None:
        print(f"plan         none: {device.device_kind} is not in the table of chips")
        return
    planned = measure.planned_decode(size, mesh, Topology(chip, (1,) * chip.num_axes))
    report["planned"] = {
        "chip": chip.name,
        "bandwidth": chip.bandwidth / chip.devices_per_chip,
        "decode_step_s": planned.seconds,
        "memory": chip.device_memory,
    }
    report["verdicts"] = compare(report["planned"], measured)
    for verdict in report["verdicts"]:
        print(f"plan         {verdict}")


def compare(planned: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Whether what was planned for one device is what it does, in sentences."""
    verdicts = []
    if "memory" in measured:
        share = measured["memory"] / planned["memory"]
        seen = f"memory: {measured['memory'] / 2**30:.2f} GiB, planned {planned['memory'] / 2**30:.2f}"
        verdicts.append(
            f"{seen}: {'as planned' if abs(share - 1) <= MEMORY_TOLERANCE else f'not as planned{REPORT_IT}'}"
        )
    share = measured["bandwidth"] / planned["bandwidth"]
    verdicts.append(f"bandwidth: {share:.0%} of the data sheet's {planned['bandwidth'] / 1e9:,.0f} GB/s{_low(share)}")
    share = planned["decode_step_s"] / measured["decode_step_s"]
    verdicts.append(f"decode step: {share:.0%} of the speed of the roofline{_low(share)}")
    return verdicts


def _low(share: float) -> str:
    return "" if share >= LOW_SHARE else f": low{REPORT_IT}"
