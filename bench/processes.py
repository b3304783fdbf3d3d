"""What several processes add to a step, against one process with as many devices.

    python bench/processes.py MODEL [--processes 2] [--devices 2] [--rows 4] [--steps 200]

Starts both on this machine, on CPUs. Prints the median of a decode step of one round, with all that one process and the
group take; and what of it is Quire's: packing and signing a step and sending it to every follower, and waiting for the
device on another thread. The rest of the difference is XLA's collectives between processes, against those between the
threads of one.
"""

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from typing import Any

KNOBS = {"dtype": "float32", "quiet": True, "num_pages": 512, "max_num_batched_tokens": 64, "max_rounds": 1}


def measure(model: str, rows: int, steps: int, knobs: dict[str, Any]) -> dict[str, float]:
    """Seconds, of process 0."""
    from quire import LLM, Request, SamplingParams

    with LLM(model, max_num_seqs=rows, **KNOBS, **knobs) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=steps + 20, ignore_eos=True)
        for i in range(rows):
            engine.add(Request(id=str(i), prompt_token_ids=(1, 2, 3 + i), params=params))
        for _ in range(10):
            engine.step()
        group = getattr(engine.runner, "_leader", None)
        sent: list[float] = []
        if group:
            send = group.send

            def timed(*message: Any) -> None:
                start = time.perf_counter()
                send(*message)
                sent.append(time.perf_counter() - start)

            group.send = timed
        times = [timed_call(engine.step) for _ in range(steps)]
        found = {"step": statistics.median(times)}
        if group:
            waits = [timed_call(lambda: group.wait(int)) for _ in range(steps)]
            found |= {"send": statistics.median(sent), "wait": statistics.median(waits)}
        return found


def timed_call(call: Any) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def start(arguments: argparse.Namespace, knobs: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    """One process of either."""
    command = [
        sys.executable,
        __file__,
        arguments.model,
        "--rows",
        str(arguments.rows),
        "--steps",
        str(arguments.steps),
    ]
    return subprocess.Popen(
        [*command, "--knobs", json.dumps(knobs)], stdout=subprocess.PIPE, text=True, env=os.environ | env
    )


def result(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a process has measured."""
    out, _ = process.communicate()
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def main() -> None:
    """Measure both, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("processes", 2), ("devices", 2), ("rows", 4), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--knobs", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.knobs is not None:
        if arguments.knobs.get("process_id"):
            from quire import follow

            knobs = KNOBS | arguments.knobs
            follow(arguments.model, max_num_seqs=arguments.rows, **knobs)
            return
        print(json.dumps(measure(arguments.model, arguments.rows, arguments.steps, arguments.knobs)), flush=True)
        return
    from quire.distributed.group import free_port

    mesh = {"mesh": f"model={arguments.devices}"}
    flag = f"--xla_force_host_platform_device_count={arguments.devices}"
    one = result(start(arguments, mesh, XLA_FLAGS=flag))
    group = {"num_processes": arguments.processes, "coordinator": f"127.0.0.1:{free_port('127.0.0.1')}"}
    env = {"QUIRE_GROUP_KEY": secrets.token_hex()}
    everybody = [start(arguments, mesh | group | {"process_id": i}, **env) for i in range(arguments.processes)]
    many = result(everybody[0])
    for process in everybody[1:]:
        process.communicate()
    print(f"{arguments.devices} devices, {arguments.rows} rows, {arguments.steps} steps of one round; medians")
    print(f"step, one process              {one['step'] * 1e3:8.3f} ms")
    print(f"step, {arguments.processes} processes              {many['step'] * 1e3:8.3f} ms")
    print(f"of it packing, signing, sending {many['send'] * 1e3:7.3f} ms")
    print(f"of it another thread that waits {many['wait'] * 1e3:7.3f} ms")


if __name__ == "__main__":
    main()
