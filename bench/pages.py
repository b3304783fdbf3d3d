"""What moving pages and changing weights costs, on a real model: ratios from one interleaved run.

    python bench/pages.py MODEL [overload|cost|weights ...] [--repeats 5]

What sharing saves is `quire bench fork` and `quire bench prefix`.
Each measurement alternates its two sides and prints the median ratio with its spread. Machines are noisy: run it alone,
and compare nothing across runs.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from quire import LLM, SamplingParams
from quire.core.page_tables import PageTables
from quire.core.request import Request

VOCAB_LOW, VOCAB_HIGH = 100, 40_000
KNOBS = {"quiet": True, "max_model_len": 2048}


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(VOCAB_LOW, VOCAB_HIGH, size=length).tolist()


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def report(what: str, ours: list[float], theirs: list[float], note: str = "") -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    spread = f"{min(ratios):.3f}..{max(ratios):.3f}"
    medians = f"{statistics.median(ours):.3f} s against {statistics.median(theirs):.3f} s"
    print(f"{what}: {statistics.median(ratios):.3f} ({spread}, {len(ratios)} repeats; {medians}) {note}", flush=True)


def time_in(*methods: Callable) -> Callable[[Callable[[], object]], float]:
    """A function that runs something and says which share of its time was spent in these methods."""

    def share(run: Callable[[], object]) -> float:
        spent = 0.0

        def timed(method: Callable) -> Callable:
            def call(*args, **kwargs):
                nonlocal spent
                start = time.perf_counter()
                try:
                    return method(*args, **kwargs)
                finally:
                    spent += time.perf_counter() - start

            return call

        for method in methods:
            setattr(PageTables, method.__name__, timed(method))
        try:
            total = seconds(run)
            return spent / total
        finally:
            for method in methods:
                setattr(PageTables, method.__name__, method)

    return share


def overload(model: str, repeats: int) -> None:
    """A load that needs 4 times the pool, against an ample pool whose rows are capped to what the small one holds."""
    rng = np.random.default_rng(2)
    num, prompt_len, new = 64, 64, 64
    pages_each = (prompt_len + new) // 16
    small_pool, rows = num * pages_each // 4, num // 4
    prompts = [prompt(rng, prompt_len) for _ in range(num)]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    knobs = KNOBS | {"max_model_len": 256}
    for preemption in ("auto", "recompute"):
        host = {"num_host_pages": 1024} if preemption == "auto" else {}
        with (
            LLM(model, num_pages=small_pool, preemption=preemption, **knobs | host) as small,
            LLM(model, num_pages=num * pages_each, max_num_seqs=rows, **knobs) as ample,
        ):
            ours, theirs, outputs = [], [], {}
            for i in range(repeats + 1):
                for name, llm, times in (("small", small, theirs), ("ample", ample, ours)):
                    llm.engine.clear_prefix_cache()
                    start = time.perf_counter()
                    outputs[name] = [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]
                    if i:
                        times.append(time.perf_counter() - start)
            same = sum(a == b for a, b in zip(outputs["small"], outputs["ample"], strict=True))
            stats = small.engine.stats()
            note = f"{same}/{num} equal, {stats.swaps} swaps, {stats.recomputes} recomputes, {stats.steps} steps"
            report(f"overload ({preemption}): throughput, small / ample pool", ours, theirs, note)


def cost(model: str, repeats: int) -> None:
    """The prefix cache on, when nothing is ever found, against off."""
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(model, **KNOBS) as on, LLM(model, prefix_cache=False, **KNOBS) as off:
        ours, theirs = [], []
        for i in range(repeats + 1):
            prompts = [prompt(rng, 64) for _ in range(64)]
            sides = [(on, ours), (off, theirs)]
            for llm, times in sides if i % 2 else reversed(sides):
                took = seconds(lambda llm=llm, prompts=prompts: llm.generate(prompts, params, progress=False))
                if i:
                    times.append(took)
        spent = time_in(PageTables.publish, PageTables.find_prefix, PageTables.evict)
        share = [
            spent(lambda: on.generate([prompt(rng, 64) for _ in range(64)], params, progress=False)) for _ in range(3)
        ]
        note = (
            f"{on.engine.stats().cached_tokens} tokens found; {statistics.median(share):.3%} of the time is spent there"
        )
        report("prefix cache without a hit, on / off", ours, theirs, note)


def weights(model: str, repeats: int) -> None:
    """set_weights, against a plain copy of the same bytes."""
    with LLM(model, **KNOBS) as llm:
        params = jax.tree.map(np.array, llm.params)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        llm.engine.add(Request(id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=500)))
        ours, theirs = [], []
        for i in range(repeats + 1):
            llm.engine.step()
            a = seconds(lambda i=i: (llm.set_weights(params, i + 1), jax.block_until_ready(llm.engine.runner.params)))
            b = seconds(lambda: jax.tree.map(np.copy, params))
            if i:
                ours.append(a)
                theirs.append(b)
        compiles = llm.engine.stats().compiles_after_warmup
        report("set_weights / copy", ours, theirs, f"{num_bytes / 2**20:.0f} MiB, {compiles} compiles")


BENCHMARKS = {"overload": overload, "cost": cost, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("what", nargs="*", choices=[*BENCHMARKS, []], default=list(BENCHMARKS))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for name in args.what:
        BENCHMARKS[name](args.model, args.repeats)


if __name__ == "__main__":
    main()
