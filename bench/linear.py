"""The native matmul against stock XLA, and against oneDNN in another Python: times per shape, as ratios from one run.

    python bench/linear.py [--rows 1 4 8 16 32 64 128 512] [--torch PYTHON] [--repeats 9]

Shapes are SmolLM2-135M's. Every repetition walks through all layers' own weights, so that they come from memory as they
do in a model, and alternates the sides; the table has medians in microseconds, and the spread of the ratio. `--torch`
names a Python that has PyTorch, whose bfloat16 linear is oneDNN's, with weights packed by it beforehand.
"""

import argparse
import functools
import json
import statistics
import subprocess
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from quire.device import native
from quire.device.linear import Int8, Packed, linear, pack, quantize

SHAPES = {"qkv": (576, 960), "output": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
LAYERS = {"head": 2}
"""How many different weights of a shape are walked through; 30 by default."""

TORCH = """
import json, statistics, sys, time, torch
inner, columns, layers, rows, repeats = json.loads(sys.argv[1])
weights = [torch.randn(columns, inner, dtype=torch.bfloat16) for _ in range(layers)]
packed = [torch.ops.mkldnn._reorder_linear_weight(w) for w in weights]
out = {}
for m in rows:
    x, times = torch.randn(m, inner, dtype=torch.bfloat16), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for w in packed:
            torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
        times.append((time.perf_counter() - start) / layers)
    out[m] = statistics.median(times[1:])
print(json.dumps(out))
"""


def walk(multiply: Callable, x: jax.Array, weights: list) -> Callable[[], list]:
    """One program that multiplies x with every weight in turn."""

    @jax.jit
    def program(x, weights):
        out = []
        for weight in weights:
            y = multiply(x, weight)
            x, y = jax.lax.optimization_barrier((x, y))
            out.append(y[:1, :1])
        return out

    return lambda: jax.block_until_ready(program(x, weights))


def compare(sides: dict[str, Callable[[], list]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, alternating."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 2):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if turn > 1:  # the first compiles, the second warms up
                times[name].append(time.perf_counter() - start)
    return times


def measure(name: str, rows: list[int], repeats: int, torch: str | None) -> None:
    """Print the lines of one shape."""
    inner, columns = SHAPES[name]
    layers, rng = LAYERS.get(name, 30), np.random.default_rng(0)
    out = jnp.float32 if name == "head" else None
    plain = [jnp.asarray(rng.standard_normal((inner, columns), np.float32), jnp.bfloat16) for _ in range(layers)]
    packed = [Packed(pack(weight), (columns,)) for weight in plain]
    halves = [quantize(weight, axis=0) for weight in plain]
    int8 = [Int8(values, scale, packed=False) for values, scale in halves]
    packed_int8 = [Int8(pack(values), scale, packed=True) for values, scale in halves]
    multiply = functools.partial(linear, out=out)
    others = {}
    if torch:
        command = [torch, "-c", TORCH, json.dumps([inner, columns, layers, rows, repeats])]
        others = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for num_rows in rows:
        x = jnp.asarray(rng.standard_normal((num_rows, inner), np.float32), jnp.bfloat16)
        weights = {"xla": plain, "native": packed, "xla int8": int8, "native int8": packed_int8}
        times = compare({side: walk(multiply, x, own) for side, own in weights.items()}, repeats)
        micros = {side: statistics.median(own) / layers * 1e6 for side, own in times.items()}
        ratios = [a / b for a, b in zip(times["xla"], times["native"], strict=True)]
        ratios8 = [a / b for a, b in zip(times["xla"], times["native int8"], strict=True)]
        onednn = f"{others[str(num_rows)] * 1e6:8.0f}" if others else "       -"
        print(
            f"{name:8} {num_rows:4} {micros['xla']:8.0f} {onednn} {micros['native']:8.0f} "
            f"{micros['xla int8']:9.0f} {micros['native int8']:9.0f}   "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}..{max(ratios):.2f})  "
            f"{statistics.median(ratios8):5.2f} ({min(ratios8):.2f}..{max(ratios8):.2f})",
            flush=True,
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--torch")
    args = parser.parse_args()
    if reason := native.unavailable_reason():
        parser.error(reason)
    print("shape    rows      xla   oneDNN   native  xla int8 nat. int8   xla/native            xla/native int8")
    for name in args.shapes:
        measure(name, args.rows, args.repeats, args.torch)


if __name__ == "__main__":
    main()
