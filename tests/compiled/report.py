"""Compiles the programs of an engine for devices that are not there, and prints what the compiler says of each.

    python -m tests.compiled.report v5e:1x1 1 llama-8b smollm2 [--all]

One JSON line a program. Runs in the environment of `topology.environment`. Without --all only the largest decode and
the largest mixed step are compiled, and the programs that handle pages.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from quire.config import AttentionConfig, EngineConfig, ExpertsConfig, ModelConfig, RotaryConfig
from quire.device.attention import xla
from quire.device.inputs import StepShape
from quire.device.mesh import make_mesh
from quire.device.programs import Programs
from quire.device.sampler import rows_at_once
from quire.engine.step_shapes import step_shapes
from tests.compiled import hlo
from tests.compiled.topology import devices

PAGE_SIZE = 16
NUM_PAGES = 4096
CONTEXT = 8192


def attention(num_heads: int, num_kv_heads: int, head_dim: int, num_layers: int) -> tuple[AttentionConfig, ...]:
    rotary = RotaryConfig(theta=500_000.0)
    return (AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rotary=rotary),) * (
        num_layers
    )


MODELS = {
    "llama-8b": ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        attention=attention(32, 8, 128, num_layers=2),
        max_len=CONTEXT,
    ),
    "smollm2": ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        attention=attention(9, 3, 64, num_layers=2),
        max_len=CONTEXT,
        tie_embeddings=True,
    ),
    "qwen3-moe": ModelConfig(
        architecture="qwen3_moe",
        vocab_size=32_768,
        hidden_size=2048,
        intermediate_size=6144,
        attention=attention(32, 4, 128, num_layers=2),
        max_len=CONTEXT,
        experts=ExpertsConfig(num_experts=64, num_experts_per_token=8, intermediate_size=768, normalize_weights=True),
    ),
}
"""The widths of real models; of their layers, which are all alike, a few."""


def programs_of(model: ModelConfig, topology: str, num_chips: int, **knobs: Any) -> Programs:
    """The programs of an engine with the default config."""
    return Programs(
        model,
        make_mesh(devices(topology)[:num_chips]),
        "bfloat16",
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        pages_per_row=CONTEXT // PAGE_SIZE,
        max_num_rows=EngineConfig().max_num_seqs,
        max_rounds=EngineConfig().max_rounds,
        **knobs,
    )


def traced(programs: Programs, *, all_shapes: bool) -> Iterator[tuple[str, StepShape | None, jax.stages.Traced]]:
    """Each program, its name, and the shape of a step; None for those that handle pages."""
    shapes = step_shapes(EngineConfig())
    largest = [max((s for s in shapes if s.decode == decode), key=lambda s: s.num_tokens) for decode in (True, False)]
    for shape in shapes if all_shapes else largest:
        yield str(shape), shape, programs.trace(shape)
    for name, program in programs.trace_page_programs().items():
        yield " ".join(map(str, name)), None, program


def compile_one(programs: Programs, shape: StepShape | None, program: jax.stages.Traced) -> dict[str, Any]:
    """What the compiler says of a program: bytes on one chip, large copies, collectives.

    A copy is large that is as large as a weight or a pool. The hidden states of a step, which are no less than the
    weights of a small model on several chips, are neither.
    """
    platform = programs.mesh.devices.flat[0].platform
    num_samples = shape.num_samples if shape else 0
    begin = time.process_time()
    compiled = program.lower(lowering_platforms=("cuda" if platform == "gpu" else platform,)).compile()
    seconds = time.process_time() - begin
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    matrices = [array for array in jax.tree.leaves(programs.params["layers"]) if math.prod(array.shape) > 2**16]
    least = min(map(chip_bytes, [*matrices, *jax.tree.leaves([cache.layers for cache in programs.caches])]))
    hidden_states = f"= bf16[{shape.num_tokens},{programs.model.hidden_size}]" if shape else "= ()"
    donated = [array for array in jax.tree.leaves(program.args_info) if array.donated]
    found = hlo.collectives(text)
    large = 2 * num_samples * programs.model.hidden_size
    """A number for each row and for each of the model's width, in bfloat16."""
    logits_bytes = 4 * num_samples * programs.model.vocab_size // programs.mesh.size
    return {
        "seconds": round(seconds, 1),
        "temporaries": memory.temp_size_in_bytes,
        "logits": logits_bytes,
        "donated": len(donated),
        "aliased": hlo.num_aliased(text),
        "copies": [copy for copy in hlo.large_copies(text, least, {"bf16", "s8", "s4"}) if hidden_states not in copy],
        "collectives": sorted(f"{c.opcode} {c.arrays}" for c in found),
        "large_collectives": sorted(c.opcode for c in found if c.num_bytes >= large),
        "other_collective_bytes": sum(c.num_bytes for c in found if c.num_bytes < large),
        **(round_traffic(programs, num_samples, text) if platform == "tpu" and shape and shape.decode else {}),
    }


def round_traffic(programs: Programs, num_samples: int, text: str) -> dict[str, float]:
    """Bytes that a chip moves in one round, and those that it must: every weight once, and the logits.

    KV is in neither; of the embedding a round reads a few rows.
    """
    rows = rows_at_once("tpu")
    assert rows
    weights = sum(map(chip_bytes, jax.tree.leaves(programs.params))) - chip_bytes(programs.params["embed"])
    logits = 4 * num_samples * programs.model.vocab_size // programs.mesh.size
    return {"round_bytes": hlo.round_bytes(text, num_samples // rows), "least_round_bytes": weights + logits}


def chip_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of the part of an array that one chip has."""
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * np.dtype(array.dtype).itemsize


def write_by_head(pages_KMZH: jax.Array, new_TKH: jax.Array, destinations_T: jax.Array) -> jax.Array:
    """A mistake to find: the head is an axis of its own, so that the write wants the pool in another order."""
    flat_KXH = pages_KMZH.reshape(pages_KMZH.shape[0], -1, pages_KMZH.shape[3])
    new_KTH = new_TKH.astype(flat_KXH.dtype).swapaxes(0, 1)
    return flat_KXH.at[:, destinations_T].set(new_KTH, mode="drop").reshape(pages_KMZH.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology")
    parser.add_argument("chips", type=int)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--all", action="store_true", help="every step shape of the default config")
    parser.add_argument("--attention", default="auto", help="the backend")
    parser.add_argument("--quantize", help="as the engine's")
    parser.add_argument("--planted", action="store_true", help="only a decode step, with a write that copies the pool")
    args = parser.parse_args()
    if args.planted:
        xla._write = write_by_head
        args.attention = "xla"
    for name in args.models:
        programs = programs_of(
            MODELS[name], args.topology, args.chips, attention=args.attention, quantize=args.quantize
        )
        for what, shape, program in traced(programs, all_shapes=args.all):
            report = compile_one(programs, shape, program)
            print(json.dumps({"model": name, "program": what, **report}), flush=True)
            if args.planted:
                break


if __name__ == "__main__":
    main()
