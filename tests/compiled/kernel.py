"""Compiles a layer's attention in the Pallas kernel for a TPU that is not there, and prints what the compiler says.

    python -m tests.compiled.kernel v5e:1x1

One JSON line a case. Runs in the environment of `topology.environment`.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import AttentionConfig
from quire.device.attention import LayerKV, get_backend, paged_attention
from quire.device.inputs import BatchLayout
from quire.device.mesh import make_mesh, sharding
from tests.compiled import hlo
from tests.compiled.topology import devices

NUM_ROWS, NUM_PAGES, PAGE_SIZE = 64, 4096, 16
LLAMA, SMOLLM, MHA, GPT_OSS = (32, 8), (9, 3), (16, 16), (64, 8)
CASES: list[dict[str, Any]] = [
    {"heads": LLAMA, "head_dim": 128, "dtype": "bfloat16"},
    {"heads": LLAMA, "head_dim": 128, "dtype": "bfloat16", "tokens": 512},
    {"heads": LLAMA, "head_dim": 128, "dtype": "bfloat16", "context": 131_072, "window": 4096},
    {"heads": LLAMA, "head_dim": 128, "dtype": "bfloat16", "context": 131_072, "tokens": 512},
    {"heads": LLAMA, "head_dim": 128, "dtype": "int8"},
    {"heads": LLAMA, "head_dim": 64, "dtype": "float32"},
    {"heads": LLAMA, "head_dim": 256, "dtype": "bfloat16", "tokens": 512, "window": 1024},
    {"heads": LLAMA, "head_dim": 256, "dtype": "int8"},
    {"heads": LLAMA, "head_dim": 256, "dtype": "float32"},
    {"heads": SMOLLM, "head_dim": 64, "dtype": "bfloat16"},
    {"heads": SMOLLM, "head_dim": 64, "dtype": "float32", "tokens": 512, "window": 100},
    {"heads": SMOLLM, "head_dim": 64, "dtype": "int8", "tokens": 512},
    {"heads": SMOLLM, "head_dim": 128, "dtype": "float32"},
    {"heads": MHA, "head_dim": 96, "dtype": "bfloat16", "tokens": 64},
    {"heads": GPT_OSS, "head_dim": 64, "dtype": "bfloat16", "window": 128, "sinks": True},
    {"heads": GPT_OSS, "head_dim": 64, "dtype": "bfloat16", "tokens": 512, "sinks": True},
]
"""Where `tokens` is given the batch is mixed, else every row decodes; int8 is the KV's, under queries in bfloat16."""


def cases_of(topology: str) -> list[dict[str, Any]]:
    """All of them for one chip, and some for the others: a case takes seconds."""
    return CASES if topology.startswith("v5e") else CASES[1::5]


def compile_case(topology: str, case: dict[str, Any], attention: str = "pallas") -> jax.stages.Compiled:
    """One layer's attention, its KV donated."""
    mesh = make_mesh(devices(topology)[:1])
    is_int8 = case["dtype"] == "int8"
    backend = get_backend("pallas-int8" if is_int8 else attention, mesh.devices.flat[0].device_kind)
    num_heads, num_kv_heads = case["heads"]
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": case["head_dim"]}
    config = AttentionConfig(**sizes, window=case.get("window"))
    dtype = jnp.dtype("bfloat16" if is_int8 else case["dtype"])
    num_tokens, pages_per_row = case.get("tokens", NUM_ROWS), case.get("context", 8192) // PAGE_SIZE

    def array(shape, dtype=np.int32, axes=()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh, *axes))

    specs = backend.arrays(config, NUM_PAGES, PAGE_SIZE, dtype)
    kv = LayerKV(tuple(array(*spec) for spec in specs), tuple(spec.axes for spec in specs))
    q, k = (array((num_tokens, heads, config.head_dim), dtype) for heads in (num_heads, num_kv_heads))
    layout = BatchLayout(
        positions_T=array((num_tokens,)),
        destinations_T=array((num_tokens,)),
        page_table_BP=array((NUM_ROWS, pages_per_row)),
        kv_lens_B=array((NUM_ROWS,)),
        cu_q_lens_B1=array((NUM_ROWS + 1,)),
        decode="tokens" not in case,
    )
    sinks = array((num_heads,), np.float32) if case.get("sinks") else None
    program = jax.jit(
        lambda kv, q, k, v, layout, sinks: paged_attention(backend, mesh, kv, q, k, v, layout, config, sinks),
        donate_argnums=0,
    )
    return program.trace(kv, q, k, k, layout, sinks).lower(lowering_platforms=("tpu",)).compile()


def main(topology: str) -> None:
    """Compile the cases."""
    for case in cases_of(topology):
        compiled = compile_case(topology, case)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert memory is not None
        num_heads = case["heads"][1]
        pool = NUM_PAGES * num_heads * PAGE_SIZE * case["head_dim"]
        report = {
            "case": case,
            "kernel": 'custom_call_target="tpu_custom_call"' in text,
            "temporaries": memory.temp_size_in_bytes,
            "aliased": hlo.num_aliased(text),
            "copies": hlo.large_copies(text, pool, {"bf16", "f32", "s8"}),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
