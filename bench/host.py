"""What the host costs at the size it must carry: schedule, pack and commit of one decode step, and the bytes it ships.

    python bench/host.py [--rows 4096] [--waiting 100000] [--max-model-len 131072] [--repeats 25] [--record FILE]

No device and no model: a step's result is made up. Prints medians, and the bytes against what the rows use: their page
ids, and for each row the numbers that it and its sample have. With --record, also of a scheduler that records to FILE,
taking turns with one that does not.
"""

import argparse
import gc
import time

import numpy as np

from quire.config import EngineConfig
from quire.core.plan import StepPlan
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import Sequence
from quire.device.inputs import StepInputs, StepOutput
from quire.engine.packer import Packer
from quire.engine.step_shapes import step_shapes
from quire.recording.recorder import RecordingScheduler

PAGE_SIZE, NUM_PAGES = 16, 1_000_000


def busy_scheduler(rows: int, waiting: int, max_model_len: int, record: str | None = None) -> Scheduler:
    """So many decoding sequences with contexts of 64 to 1,024 tokens, one with the longest there is, and a queue."""
    rng = np.random.default_rng(0)
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        max_num_seqs=rows,
        max_num_batched_tokens=2 * rows + 2 * max_model_len,
        max_num_samples=rows,
    )
    scheduler = config.build(RecordingScheduler, path=record, config=config) if record else config.build()
    lengths = rng.integers(64, 1024, rows).tolist()
    lengths[0] = max_model_len - 1024
    for i, length in enumerate([*lengths, *[2] * waiting]):
        params = SamplingParams(max_tokens=1000, seed=i, temperature=0.8, top_p=0.95)
        prompt = tuple(rng.integers(1000, 50_000, length).tolist())
        request = Request(id=str(i), prompt_token_ids=prompt, params=params)
        scheduler.add(Sequence(request, index=0, arrival=i, seed=i, max_tokens=1000))
    while len(scheduler.running) < rows or any(s.num_output == 0 for s in scheduler.running):
        plan = scheduler.schedule()
        scheduler.commit(plan, made_up(plan))
    return scheduler


def made_up(plan: StepPlan) -> StepOutput:
    """A result in which every sample drew token 7."""
    tokens_SR = np.full((len(plan.samples), 1), 7, np.int32)
    return StepOutput(tokens_SR, None, None, None, None, None, None, None)


def bytes_used(plan: StepPlan, inputs: StepInputs) -> int:
    """What the rows of a plan have: page ids, and every other number of the step's arrays but for padding."""
    rows, shape = len(plan.rows), inputs.shape
    page_ids = inputs.page_ids.ids_X.nbytes
    return page_ids + (inputs.num_bytes - page_ids) * rows // shape.num_rows


def measure(scheduler: Scheduler, packer: Packer, repeats: int) -> tuple[np.ndarray, StepPlan, StepInputs]:
    """Seconds of schedule, pack and commit, a row for each repeat; and the last plan with its arrays."""
    times = np.zeros((repeats, 3))
    gc.collect()
    for i in range(repeats):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        inputs = packer.pack(plan)
        packed = time.perf_counter()
        output = made_up(plan)
        committing = time.perf_counter()
        scheduler.commit(plan, output)
        times[i] = planned - start, packed - planned, time.perf_counter() - committing
    return times, plan, inputs


def recording_cost(plain: Scheduler, recording: Scheduler, packer: Packer, repeats: int) -> float:
    """What recording adds to a step, as a share of it: the median of pairs of steps, one after the other."""
    pairs = [[measure(s, packer, 1)[0].sum() for s in (plain, recording)] for _ in range(repeats)]
    return float(np.median([with_it / without - 1 for without, with_it in pairs]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--waiting", type=int, default=100_000)
    parser.add_argument("--max-model-len", type=int, default=131_072)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--record")
    args = parser.parse_args()
    sizes = (args.rows, args.waiting, args.max_model_len)
    scheduler = busy_scheduler(*sizes)
    config = EngineConfig(max_num_seqs=args.rows, max_num_batched_tokens=2 * args.rows)
    packer = Packer(step_shapes(config), page_size=PAGE_SIZE, num_pages=[NUM_PAGES])
    times, plan, inputs = measure(scheduler, packer, args.repeats)
    parts = np.median(times, axis=0) * 1e3
    total = np.sum(times, axis=1) * 1e3
    used = bytes_used(plan, inputs)
    print(f"{args.rows:,} rows, {args.waiting:,} waiting, longest context {args.max_model_len - 1024:,}")
    print("schedule {:.1f} + pack {:.1f} + commit {:.1f} ms".format(*parts), end="")
    print(f" = {np.median(total):.1f} ms ({total.min():.1f}..{total.max():.1f})")
    if args.record:
        print(
            f"recording adds {recording_cost(scheduler, busy_scheduler(*sizes, args.record), packer, args.repeats):.1%}"
        )
    print(f"shipped {inputs.num_bytes:,} bytes, {inputs.num_bytes / used:.2f}x of the {used:,} that the rows use")


if __name__ == "__main__":
    main()
