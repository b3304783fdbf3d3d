"""Is the bare loop a fair limit? Against the same loop with a plain dense cache and stock XLA.

    python bench/dense.py MODEL [--rows 8,32,64] [--repeats 3]

The dense cache is what one writes first: `[rows, length, heads, head size]`, every row as long as the longest, scores
over all of it, masked. Prints the median ratio of speeds with its spread; above 1 the bare loop is faster.
"""

import argparse
import statistics
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from quire import LLM
from quire.bench import measure
from quire.bench.bare_loop import BareLoop
from quire.checkpoint.load import load_model
from quire.device import kv_cache
from quire.device.linear import MatmulKind
from quire.device.mesh import ArraySpec, make_mesh
from quire.device.models import get_architecture
from quire.device.models.layers import ModelStatics
from quire.device.models.weights import prepare

PROMPT_LEN, NEW_TOKENS = 64, 128


class DenseBackend:
    """One page holds a whole row, and attention looks at all of it."""

    def arrays(self, attention, num_pages, page_size, dtype):
        shape = (num_pages, page_size, attention.num_kv_heads, attention.head_dim)
        return (ArraySpec(shape, dtype, ("pages", "offset", "kv_heads", "head")),) * 2

    def write_and_attend(self, kv, q_TNH, k_TKH, v_TKH, layout, attention, sinks_N=None):
        num_rows, length, num_kv_heads, head_dim = kv[0].shape
        count = q_TNH.shape[0] // num_rows
        start = layout.positions_T[0]

        def write(pages_BCKH, new_TKH):
            new_BQKH = new_TKH.reshape(num_rows, count, num_kv_heads, head_dim)
            return jax.lax.dynamic_update_slice(pages_BCKH, new_BQKH, (0, start, 0, 0))

        k_BCKH, v_BCKH = write(kv[0], k_TKH), write(kv[1], v_TKH)
        q_BQKGH = q_TNH.reshape(num_rows, count, num_kv_heads, -1, head_dim)
        scores = jnp.einsum("bqkgh,bckh->bkgqc", q_BQKGH, k_BCKH, preferred_element_type=jnp.float32)
        scores *= attention.scale
        seen_QC = jnp.arange(length)[None, :] <= start + jnp.arange(count)[:, None]
        weights = jax.nn.softmax(jnp.where(seen_QC[None, None, None], scores, -1e30), axis=-1).astype(q_TNH.dtype)
        out = jnp.einsum("bkgqc,bckh->bqkgh", weights, v_BCKH)
        return out.reshape(q_TNH.shape), (k_BCKH, v_BCKH)


def dense_runner(model: str, length: int) -> SimpleNamespace:
    """What a bare loop needs of a runner."""
    mesh = make_mesh()
    loaded = load_model(model, mesh=mesh, dtype="bfloat16")
    statics = ModelStatics(config=loaded.config, backend=DenseBackend(), mesh=mesh)

    def create_cache(num_pages: int) -> kv_cache.KVCache:
        dtype = jnp.dtype(jnp.bfloat16)
        shape = {"num_pages": num_pages, "page_size": length, "dtype": dtype, "mesh": mesh}
        return kv_cache.create_zeros(kv_cache.abstract(statics.backend, loaded.config.attention, **shape))

    return SimpleNamespace(
        params=prepare(loaded.config, loaded.params, mesh=mesh, kind=MatmulKind(native=False, int8=False)),
        programs=SimpleNamespace(statics=statics, layer=get_architecture(loaded.config.architecture).layer),
        page_size=length,
        create_cache=create_cache,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="8,32,64")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    shape = {"prompt_len": PROMPT_LEN, "new_tokens": NEW_TOKENS}
    dense = dense_runner(args.model, PROMPT_LEN + NEW_TOKENS)
    with LLM(args.model, quiet=True, max_num_seqs=1, max_model_len=PROMPT_LEN + NEW_TOKENS) as llm:
        for rows in map(int, args.rows.split(",")):
            loops = {
                "bare": BareLoop(llm.engine.runner, rows=rows, **shape),
                "dense": BareLoop(dense, rows=rows, **shape),  # type: ignore
            }
            sides = {name: measure.loop_side(loop) for name, loop in loops.items()}
            times = measure.take_turns(sides, llm, rows, PROMPT_LEN, args.repeats).values()
            ratios = [dense_s / bare_s for bare_s, dense_s in zip(*times, strict=True)]
            speeds = [rows * NEW_TOKENS / statistics.median(own) for own in times]
            spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
            print(
                f"{rows} rows: bare {speeds[0]:.0f} tokens/s, dense {speeds[1]:.0f}: "
                f"{statistics.median(ratios):.2f} ({spread})",
                flush=True,
            )


if __name__ == "__main__":
    main()
