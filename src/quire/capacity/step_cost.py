"""How long steps take on a slice at best, for `quire simulate`: a bound from data sheets, no measurement."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.capacity.footprint import described_programs, footprint, work_of
from quire.capacity.model_file import read_model_config
from quire.capacity.roofline import Work, step_time
from quire.capacity.topology import Topology
from quire.config import EngineConfig
from quire.engine.step_shapes import step_shapes
from quire.engine.validation import max_model_len
from quire.field_error import FieldError
from quire.simulate.cost import PlanSize


@dataclass(frozen=True)
class RooflineCost:
    """Seconds of a step on a slice: what `quire plan` says of one like it."""

    work: Work
    topology: Topology
    efficiency: float
    """The share of the bound that steps reach; 1 is the bound itself."""
    decode_shapes: tuple[int, ...]
    mixed_shapes: tuple[int, ...]
    seconds_per_move: float = 0.0
    """Of no meaning: no data sheet says what swapping costs, and nothing is swapped."""
    pages_per_move: int = 1

    def seconds(self, size: PlanSize) -> float:
        """See `simulate.cost.Cost`. A window is counted as if every row had the mean number of positions."""
        ladder = self.decode_shapes if size.decodes else self.mixed_shapes
        tokens = ladder[min(bisect_left(ladder, size.tokens), len(ladder) - 1)]
        mean = size.positions / size.tokens
        kv_bytes = scores = 0.0
        for kind in self.work.layers:
            seen = kind.visible(mean)  # pyright: ignore[reportArgumentType]
            kv_bytes += kind.count * seen * size.rows * kind.kv_bytes_per_token
            scores += kind.count * seen * size.tokens * kind.num_heads * kind.head_dim
        samples = tokens if size.decodes else size.rows
        time = step_time(
            self.work, self.topology, tokens=tokens, samples=samples, kv_bytes=int(kv_bytes), scores=int(scores)
        )
        return time.seconds * size.rounds / self.efficiency


def roofline_cost(
    path: Path, config: EngineConfig, topology: Topology, efficiency: float = 1.0
) -> tuple[RooflineCost, dict[str, Any]]:
    """The cost of steps of a model on a slice, and the knobs of an engine there: its pages are those that fit.

    Its longest sequence is the model's, or what all of these hold, unless the config says.
    """
    if not 0 < efficiency <= 1:
        raise FieldError(f"efficiency={efficiency} must be above 0 and at most 1", field="efficiency")
    if config.num_host_pages:
        message = f"num_host_pages={config.num_host_pages}: no data sheet says what swapping costs; leave it out"
        raise FieldError(message, field="num_host_pages")
    model = read_model_config(path)
    length = max_model_len(config.max_model_len, model)
    programs = described_programs(config, model, topology, max_model_len=length)
    memory = footprint(programs, config, topology, max_model_len=length)
    if not memory.num_pages:
        raise FieldError(
            f"topology={topology.name!r} has no memory for {path.name} and a page beside it", field="topology"
        )
    if config.max_model_len and not config.num_pages and memory.weights + memory.pool > topology.chip.device_memory:
        message = f"max_model_len={length}: topology={topology.name!r} has no memory for one such sequence; lower it"
        raise FieldError(message, field="max_model_len")
    shapes = step_shapes(config)
    cost = RooflineCost(
        work_of(programs),
        topology,
        efficiency,
        tuple(sorted(shape.num_tokens for shape in shapes if shape.decode)),
        tuple(sorted(shape.num_tokens for shape in shapes if not shape.decode)),
    )
    num_pages = config.num_pages or memory.num_pages
    if config.max_model_len is None:
        length = min(length, num_pages * config.page_size)
    return cost, {"num_pages": num_pages, "num_host_pages": 0, "max_model_len": length}
