"""What a step costs on this machine, for `quire simulate`: every step of some mixed work, timed by itself."""

import platform
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.bench.measure import random_prompts
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.step_shapes import step_shapes
from quire.field_error import FieldError
from quire.llm import LLM
from quire.progress import JobProgress
from quire.simulate.cost import Calibration, PlanSize, fit, size_of

KNOBS = (
    "page_size", "max_num_seqs", "max_num_batched_tokens", "max_rounds", "prefix_cache", "preemption",
)  # fmt: skip


def calibrate(
    llm: LLM, *, model: str, rows: Sequence[int], prompt_len: int, new_tokens: int, repeats: int
) -> Calibration:
    """Time steps of all sizes and say what they cost."""
    if (draft := llm.engine.config.draft) is not None:
        message = f"draft={draft!r}: what steps cost is measured of one model, and simulated so; leave draft out"
        raise FieldError(message, field="draft")
    longest, limit = 2 * (prompt_len + new_tokens), llm.engine.max_model_len
    if longest > limit:
        raise FieldError(
            f"prompt_len={prompt_len} and new_tokens={new_tokens} make sequences of up to twice as many tokens, "
            f"{longest}, and max_model_len={limit}; lower the first two, or raise the last",
            field="prompt_len",
        )
    return fit_steps(llm, timed_steps(llm, rows, prompt_len, new_tokens, repeats), model)


def fit_steps(llm: LLM, steps: Sequence[tuple[PlanSize, float]], model: str) -> Calibration:
    """The costs that explain these steps of an engine."""
    engine = llm.engine
    shapes = step_shapes(engine.config)
    pool = engine.scheduler.tables.pool
    knobs = {name: getattr(engine.config, name) for name in KNOBS}
    knobs |= {"num_pages": pool.allocator.num_pages, "num_host_pages": pool.host.num_pages if pool.host else 0}
    return fit(
        steps,
        decode_shapes=[shape.num_tokens for shape in shapes if shape.decode],
        mixed_shapes=[shape.num_tokens for shape in shapes if not shape.decode],
        model=model,
        machine=f"{platform.machine()}, {engine.config.quantize or engine.config.dtype}",
        seconds_per_move=engine.runner.seconds_per_move,
        pages_per_move=engine.runner.pages_per_move,
        knobs=knobs | {"max_model_len": engine.max_model_len},
    )


def timed_steps(
    llm: LLM,
    rows: Sequence[int],
    prompt_len: int,
    new_tokens: int,
    repeats: int,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[PlanSize, float]]:
    """Sizes and seconds of steps while so many requests are alive, of lengths up to twice those given.

    Each asks for other numbers of rounds, so that what a dispatch costs and what a round costs come apart.
    """
    engine, rng = llm.engine, np.random.default_rng(seed)
    steps: list[tuple[PlanSize, float]] = []
    sizes: list[PlanSize] = []

    def note() -> None:
        if engine.scheduler.in_flight is not None:
            sizes.append(size_of(engine.scheduler.in_flight))

    def tokens() -> tuple[int, int]:
        now = engine.stats()
        return now.prompt_tokens, now.generated_tokens

    progress = JobProgress(repeats * sum(max(alive, 8) for alive in rows), unit="request")
    progress.start()
    number = 0
    for alive in rows:
        left = repeats * max(alive, 8)
        while left or engine.has_work:
            while left and len(engine.scheduler.running) + engine.scheduler.num_waiting < alive:
                (prompt,) = random_prompts(rng, llm, 1, int(rng.integers(1, 2 * prompt_len)))
                params = SamplingParams(
                    temperature=0,
                    max_tokens=int(rng.integers(1, 2 * new_tokens)),
                    ignore_eos=True,
                    max_rounds=int(rng.choice((1, 4, engine.config.max_rounds))),
                )
                number += 1
                left -= 1
                engine.add(Request(id=f"steps-{seed}-{number}", prompt_token_ids=tuple(prompt), params=params))
            start = clock()
            engine.step(meanwhile=note)
            steps.append((sizes.pop(), clock() - start))
            progress.update(number - len(engine.scheduler.running) - engine.scheduler.num_waiting, tokens)
    progress.close(number)
    return steps
