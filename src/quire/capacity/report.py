"""Everything `quire plan` says, as one value: what a slice holds of a model, and what it gives at best."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.capacity import compiled, roofline
from quire.capacity.compiled import CompiledProgram, CompilerError
from quire.capacity.footprint import Footprint, described_programs, footprint, work_of
from quire.capacity.model_file import read_model_config
from quire.capacity.roofline import Collectives, StepTime
from quire.capacity.topology import Topology, all_reduce_bytes
from quire.config import EngineConfig, ModelConfig
from quire.engine.pool_size import host_pages
from quire.engine.step_shapes import step_shapes
from quire.engine.validation import max_model_len

CONTEXTS = (1024, 4096, 8192, 32_768, 131_072)
ROWS = (1, 8, 32, 64, 128, 256)
DECODE_CONTEXT = 1024
"""Positions of each row for which the time of a decode step is given, or the longest sequence if it is shorter."""

WORDS = (
    "An upper bound from data sheets and shapes, no measurement: memory, arithmetic and interconnect at their peaks "
    "and all at the same time. What a device really does is less; quire doctor measures it there."
)

MACHINE_WORDS = (
    "An estimate from shapes, from the memory that is free now, and from two speeds measured just now, which other "
    "processes slow down. Norms, the sampler and the host's work are not counted, and attention is counted at the "
    "speed of matmuls. Whether the programs compile is not known. While weights are read they take the same memory "
    "with --quantize as without it. quire bench throughput MODEL measures the model itself."
)


@dataclass(frozen=True)
class Plan:
    """A model on a slice. Bytes are of one chip."""

    model_name: str
    model: ModelConfig
    config: EngineConfig
    topology: Topology
    footprint: Footprint
    """Of one device, from shapes."""
    decode: dict[int, StepTime]
    """By the number of rows."""
    decode_context: int
    prefill: StepTime
    collectives: Collectives
    """Of a decode step with `max_num_seqs` rows."""
    programs: list[CompiledProgram | CompilerError]
    """What the compiler said; empty if none was asked."""
    why_not_compiled: str | None

    @property
    def is_of_this_machine(self) -> bool:
        """True if the plan is for the CPU of this machine, false if it is for a slice."""
        return self.topology.chip.platform == "cpu"

    @property
    def words(self) -> str:
        """What the figures are, and what they are not."""
        return MACHINE_WORDS if self.is_of_this_machine else WORDS

    @property
    def is_compiled(self) -> bool:
        """Whether temporaries are the compiler's."""
        return bool(self.programs) and all(isinstance(program, CompiledProgram) for program in self.programs)

    @property
    def source(self) -> str:
        """Where the bytes of temporaries come from."""
        return "compiler" if self.is_compiled else "formula"

    @property
    def weights(self) -> int:
        """Bytes of weights."""
        return self.footprint.weights * self._devices

    @property
    def pool(self) -> int:
        """Bytes of KV pages."""
        return self.footprint.pool * self._devices

    @property
    def host_pool(self) -> int:
        """Bytes of pages for preempted sequences; on a CPU they are in the same memory, and 0 for a slice."""
        if not self.is_of_this_machine or not self.footprint.num_pages:
            return 0
        page_bytes = -(-self.pool // self.footprint.num_pages)
        left = max(self.memory - self.weights - self.pool, 0)
        num_pages = host_pages(self.config, self.footprint.num_pages, page_bytes=page_bytes, available_bytes=left)
        return num_pages * page_bytes

    @property
    def temporaries(self) -> int:
        """Bytes that the largest step needs beside them."""
        temps = [program.temp_bytes for program in self.programs if isinstance(program, CompiledProgram)]
        return (max(temps) if self.is_compiled else self.footprint.temporaries) * self._devices

    @property
    def code(self) -> int:
        """Bytes of all programs, each counted as the largest of its kind; 0 where no compiler was asked."""
        if not self.is_compiled:
            return 0
        kinds = [shape.decode for shape in step_shapes(self.config)]
        sizes = [program.code_bytes for program in self.programs if isinstance(program, CompiledProgram)]
        return sum(kinds.count(kind) * size for kind, size in zip((True, False), sizes, strict=True)) * self._devices

    @property
    def memory(self) -> int:
        """Bytes that programs may use."""
        return self.topology.chip.memory

    @property
    def headroom(self) -> int:
        """Bytes left over; negative if it does not fit."""
        return self.memory - self.weights - self.pool - self.host_pool - self.temporaries - self.code

    @property
    def fits(self) -> bool:
        """Whether an engine with this config starts and runs on the slice, as far as the compiler got."""
        return self.has_room and not any(error.refused for error in self.errors)

    @property
    def has_room(self) -> bool:
        """Whether the memory is enough."""
        is_exhausted = any("RESOURCE_EXHAUSTED" in error.reason for error in self.errors)
        return self.headroom >= 0 and self.footprint.num_pages > 0 and not is_exhausted

    @property
    def errors(self) -> list[CompilerError]:
        """Programs that did not compile."""
        return [program for program in self.programs if isinstance(program, CompilerError)]

    @property
    def _devices(self) -> int:
        return self.topology.chip.devices_per_chip

    def sequences(self) -> dict[int, int]:
        """Sequences that the pools hold, by their length."""
        longest = max_model_len(self.config.max_model_len, self.model)
        lengths = [length for length in CONTEXTS if length < longest] + [longest]
        return {n: self.footprint.num_sequences(n, self.config.page_size) for n in lengths}

    def as_json(self) -> dict[str, Any]:
        """The contract of `--json`: names are stable, more may come."""
        rows = self.config.max_num_seqs
        return {
            "model": self.model_name,
            "topology": self.topology.name,
            "chips": self.topology.num_chips,
            "devices": self.topology.num_devices,
            "dtype": self.config.dtype,
            "quantize": self.config.quantize,
            "source": self.source,
            "why_not_compiled": self.why_not_compiled,
            "words": self.words,
            "memory_bytes_per_chip": self.memory,
            "weights_bytes_per_chip": self.weights,
            "pool_bytes_per_chip": self.pool,
            "host_pool_bytes_per_chip": self.host_pool,
            "temp_bytes_per_chip": self.temporaries,
            "code_bytes_per_chip": self.code,
            "headroom_bytes_per_chip": self.headroom,
            "fits": self.fits,
            "num_pages": self.footprint.num_pages,
            "windows": [{"window": size.window, "num_pages": size.num_pages} for size in self.footprint.windows],
            "page_size": self.config.page_size,
            "max_num_seqs": rows,
            "sequences_by_context": {str(length): count for length, count in self.sequences().items()},
            "collectives": {
                "all_reduces_per_step": self.collectives.count,
                "bytes_each": self.collectives.array_bytes,
                "bytes_sent_per_chip": self._sent_bytes(),
            },
            "decode_tokens_per_s": self.decode[rows].tokens_per_second,
            "decode_context": self.decode_context,
            "decode": [_time(time, rows=count) for count, time in self.decode.items()],
            "prefill_tokens_per_s": self.prefill.tokens_per_second,
            "prefill": _time(self.prefill),
            "programs": [dataclasses.asdict(program) for program in self.programs],
            "sources": list(self.topology.chip.sources),
        }

    def _sent_bytes(self) -> int:
        return int(self.collectives.count * all_reduce_bytes(self.collectives.array_bytes, self.topology.num_chips))


def _time(time: StepTime, **more: int) -> dict[str, Any]:
    seconds = {f"{name}_s": getattr(time, name) for name in ("memory", "compute", "interconnect")}
    return {
        **more,
        "tokens": time.num_tokens,
        "step_s": time.seconds,
        **seconds,
        "limit": time.limit,
        "tokens_per_s": time.tokens_per_second,
    }


def make_plan(path: Path, config: EngineConfig, topology: Topology, *, compile_it: bool) -> Plan:
    """Plan a model on a slice; `compile_it` asks the compiler where there is one."""
    model = read_model_config(path)
    length = max_model_len(config.max_model_len, model)
    programs = described_programs(config, model, topology, max_model_len=length)
    memory = footprint(programs, config, topology, max_model_len=length)
    why_not = compiled.unavailable_reason(topology) if compile_it else "--no-compile"
    if why_not is None and memory.num_pages == 0:
        why_not = "the weights alone do not fit"
    sizes = {"num_pages": memory.num_pages, "windows": memory.windows}
    answers = [] if why_not else compiled.compile_programs(path, config, topology, **sizes)
    work, context = work_of(programs), min(DECODE_CONTEXT, length)
    rows = sorted({*ROWS, config.max_num_seqs})
    return Plan(
        model_name=path.resolve().name,
        model=model,
        config=config,
        topology=topology,
        footprint=memory,
        decode={n: roofline.decode_step(work, topology, rows=n, context=context) for n in rows},
        decode_context=context,
        prefill=roofline.prefill_step(work, topology, tokens=min(config.max_num_batched_tokens, length)),
        collectives=roofline.collectives(work, topology, config.max_num_seqs),
        programs=answers,
        why_not_compiled=why_not,
    )
