"""One layer's attention, native against plain XLA, in one process, turn by turn.

    python bench/attention.py                      # the shape of SmolLM2-135M: 9 heads, 3 KV heads of 64
    python bench/attention.py --heads 32 --kv-heads 8 --head-dim 128

Each case gets as many layers' pools as make its KV larger than the caches, visited in turn, as a model does. Times are
medians of turns taken alternately; the ratio is the median of the turns' ratios, with its quartiles.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from quire.config import AttentionConfig
from quire.device import native
from quire.device.attention import Backend, LayerKV, get_backend, paged_attention
from quire.device.attention.native import NativeBackend
from quire.device.inputs import BatchLayout
from quire.device.mesh import make_mesh

CASES = {
    "decode, 1 row, context 128": ([128], 1),
    "decode, 1 row, context 8192": ([8192], 1),
    "decode, 8 rows, context 512": ([512] * 8, 1),
    "decode, 64 rows, context 128": ([128] * 64, 1),
    "decode, 64 rows, context 512": ([512] * 64, 1),
    "decode, 64 rows, context 16-1024": (list(np.linspace(16, 1024, 64, dtype=int)), 1),
    "prompt of 512": ([512], 512),
    "512 more tokens at context 1024": ([1024], 512),
    "8 prompts of 64": ([64] * 8, 64),
}


def make_layout(kv_lens: list[int], q_len: int, page_size: int) -> tuple[BatchLayout, int]:
    """Rows of `q_len` tokens each over shuffled pages, and how many pages there are."""
    counts = [-(-kv_len // page_size) for kv_len in kv_lens]
    pages = np.random.default_rng(0).permutation(sum(counts))
    table = np.zeros((len(kv_lens), max(counts)), np.int32)
    positions, destinations = [], []
    for i, (kv_len, count) in enumerate(zip(kv_lens, counts, strict=True)):
        table[i, :count], pages = pages[:count], pages[count:]
        at = np.arange(kv_len - q_len, kv_len)
        positions.append(at)
        destinations.append(table[i, at // page_size] * page_size + at % page_size)
    layout = BatchLayout(
        positions_T=np.concatenate(positions).astype(np.int32),
        destinations_T=np.concatenate(destinations).astype(np.int32),
        page_table_BP=table,
        kv_lens_B=np.array(kv_lens, np.int32),
        cu_q_lens_B1=np.arange(len(kv_lens) + 1, dtype=np.int32) * q_len,
        decode=q_len == 1,
    )
    return jax.tree.map(jnp.asarray, layout), sum(counts)


class Layers:
    """A stack of layers' attention in one program, as a step runs them."""

    def __init__(self, backend: Backend, attention: AttentionConfig, layout: BatchLayout, num_pages: int, args) -> None:
        mesh, dtype = make_mesh(), jnp.dtype(args.dtype)
        specs = backend.arrays(attention, num_pages, args.page_size, dtype)
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

        axes = tuple(spec.axes for spec in specs)
        self.kvs = [LayerKV(tuple(normal(*spec.shape) for spec in specs), axes) for _ in range(args.layers)]
        num_tokens = len(layout.positions_T)
        self.q, self.k, self.v = (
            normal(num_tokens, heads, attention.head_dim)
            for heads in (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        )
        self.layout = layout

        def run(kvs, q, k, v, layout):
            new = []
            for old in kvs:
                q, kv = paged_attention(backend, mesh, old, q, k, v, layout, attention)
                new.append(kv)
            return new, q

        self.run = jax.jit(run, donate_argnums=0)

    def seconds(self) -> float:
        """Of one layer."""
        start = time.perf_counter()
        self.kvs, out = self.run(self.kvs, self.q, self.k, self.v, self.layout)
        jax.block_until_ready((self.kvs, out))
        return (time.perf_counter() - start) / len(self.kvs)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {
        "heads": 9, "kv-heads": 3, "head-dim": 64, "page-size": 16, "layers": 16, "turns": 15
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--isa", default="", help=f"one of {', '.join(native.instruction_sets())}; default the last")
    parser.add_argument("--against", default="xla", help="xla, or an instruction set")
    parser.add_argument("--only", default="", help="cases with this in their name")
    args = parser.parse_args()
    if native.unavailable_reason():
        raise SystemExit(native.unavailable_reason())
    attention = AttentionConfig(num_heads=args.heads, num_kv_heads=args.kv_heads, head_dim=args.head_dim)
    other = get_backend("xla") if args.against == "xla" else NativeBackend(args.against)
    isa = args.isa or native.instruction_sets()[-1]
    print(
        f"{args.dtype}, {args.layers} layers, per layer: native ({isa}) | {args.against} | ratio (quartiles) | KV read"
    )
    for name, (kv_lens, q_len) in CASES.items():
        if args.only not in name:
            continue
        layout, num_pages = make_layout(kv_lens, q_len, args.page_size)
        stacks = [Layers(backend, attention, layout, num_pages, args) for backend in (NativeBackend(args.isa), other)]
        times = np.array([[stack.seconds() for stack in stacks] for _ in range(args.turns + 2)])[2:]
        low, middle, high = np.quantile(times[:, 1] / times[:, 0], [0.25, 0.5, 0.75])
        ours, theirs = np.median(times, axis=0) * 1e3
        size = sum(kv_lens) * args.kv_heads * args.head_dim * 2 * jnp.dtype(args.dtype).itemsize
        print(
            f"{name:<34} {ours:8.3f} ms | {theirs:8.3f} ms | {middle:5.2f} ({low:.2f}-{high:.2f}) | "
            f"{size / ours / 1e6:6.1f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
