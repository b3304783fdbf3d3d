"""Compiles a matmul with quantised weights for a TPU that is not there, and prints what the compiler says.

    python -m tests.compiled.quantized v5e:1x1

One JSON line a case. Runs in the environment of `topology.environment`.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.device.linear import choose_kind, convert_spec, linear
from quire.device.mesh import ArraySpec, make_mesh, sharding
from tests.compiled import hlo
from tests.compiled.topology import devices

INNER, OUTER = 4096, 14_336
CASES: list[dict[str, Any]] = [
    {"quantize": quantize, "shape": shape, "contracted_axis": axis, "num_tokens": num_tokens}
    for quantize in ("int8-weights", "int4-weights")
    for shape, axis, num_tokens in (
        ([INNER, OUTER], 0, 64),
        ([INNER, OUTER], 0, 1024),
        ([INNER, 2, OUTER // 2], 0, 64),
        ([OUTER, INNER], 1, 64),
    )
]
"""Matrices of one size: as `down` and `output` have it, as `gate_up` and `qkv`, and as the output head."""


def compile_case(topology: str, case: dict[str, Any]) -> jax.stages.Compiled:
    """One matmul of bfloat16 activations."""
    mesh = make_mesh(devices(topology)[:1])
    kind = choose_kind("auto", case["quantize"], "bfloat16", mesh)
    shape = tuple(case["shape"])
    spec = ArraySpec(shape, np.dtype(jnp.bfloat16), (None,) * len(shape))
    arrays = convert_spec(spec, case["contracted_axis"], kind, mesh)
    weight = jax.tree.map(lambda array: array.on(mesh), arrays, is_leaf=lambda x: isinstance(x, ArraySpec))
    x = jax.ShapeDtypeStruct((case["num_tokens"], INNER), jnp.bfloat16, sharding=sharding(mesh))
    return jax.jit(linear).trace(x, weight).lower(lowering_platforms=("tpu",)).compile()


def main(topology: str) -> None:
    """Compile every case."""
    for case in CASES:
        compiled = compile_case(topology, case)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert memory is not None
        report = {
            "case": case,
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "copies": hlo.large_copies(text, INNER * OUTER, {"bf16", "f32", "s8", "s4"}),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
