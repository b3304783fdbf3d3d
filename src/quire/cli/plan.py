"""`quire plan MODEL [--topology v6e:2x4]`: memory and speed of a model on this machine, or on a slice at best."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from quire.capacity.compiled import unavailable_reason
from quire.capacity.report import Plan, make_plan
from quire.capacity.topology import Topology, parse_topology
from quire.cli import PLAN_KNOBS
from quire.config import EngineConfig
from quire.field_error import FieldError

WIDTH = 100


def run(args: argparse.Namespace) -> int:
    """Print the plan; 1 if the model does not fit, or the compiler refuses a program."""
    config = EngineConfig(**{name: getattr(args, name) for name in PLAN_KNOBS})
    topology = None if args.topology is None else parse_topology(args.topology)
    if args.json not in (None, "-") and not Path(args.json).parent.is_dir():
        raise FieldError(f"json={args.json!r}: there is no folder {str(Path(args.json).parent)!r}", field="json")
    topology = topology or _this_machine(config)
    if args.compile and unavailable_reason(topology) is None:
        print("quire: compiling two programs, which takes minutes; --no-compile takes seconds", file=sys.stderr)
    plan = make_plan(Path(args.model).expanduser(), config, topology, compile_it=args.compile)
    print("\n".join(_lines(plan)))
    if args.json == "-":
        print(json.dumps(plan.as_json()))
    elif args.json is not None:
        Path(args.json).write_text(json.dumps(plan.as_json()) + "\n")
    return 0 if plan.fits else 1


def _this_machine(config: EngineConfig) -> Topology:
    from quire.capacity.this_machine import machine_topology

    return machine_topology(config.dtype)


def _lines(plan: Plan) -> Iterator[str]:
    yield from _memory(plan)
    yield ""
    yield from _sequences(plan)
    yield ""
    yield from _collectives(plan)
    yield ""
    yield from _speed(plan)
    yield ""
    yield from textwrap.wrap(plan.words, WIDTH)
    for source in plan.topology.chip.sources:
        yield f"  {source}"


def _memory(plan: Plan) -> Iterator[str]:
    topology, chip = plan.topology, plan.topology.chip
    devices = f", {chip.devices_per_chip} devices each" if chip.devices_per_chip > 1 else ""
    chips = f"{topology.name}: {topology.num_chips} chip{'s' * (topology.num_chips > 1)}{devices}"
    yield f"{plan.model_name} on {'the CPU of this machine' if plan.is_of_this_machine else chips}"
    yield ""
    yield f"{'memory that it may use' if plan.is_of_this_machine else 'memory of each chip':<26}{_gib(plan.memory)}"
    yield f"  weights                 {_gib(plan.weights)}"
    tokens = plan.footprint.num_pages * plan.config.page_size
    windows = "".join(f" + {size.num_pages:,} for windows of {size.window:,}" for size in plan.footprint.windows)
    pages = f"{plan.footprint.num_pages:,} pages = {tokens:,} tokens{windows}"
    yield f"  pool                    {_gib(plan.pool)}   {pages}"
    if plan.is_of_this_machine:
        yield f"  host pages              {_gib(plan.host_pool)}   for preempted sequences (--num-host-pages)"
    yield f"  temporaries             {_gib(plan.temporaries)}   {_source(plan)}"
    programs = "all that the engine compiles" if plan.is_compiled else "not counted: no compiler was asked"
    yield f"  programs                {_gib(plan.code)}   {programs}"
    yield f"  headroom                {_gib(plan.headroom)}"
    yield _verdict(plan)
    for error in plan.errors:
        yield f"the {error.name} program did not compile: {error.reason}"


def _verdict(plan: Plan) -> str:
    if not plan.has_room:
        less = "" if plan.weights > plan.memory else ", or fewer --num-pages"
        why = ", not even its weights" if plan.weights > plan.memory else ""
        if plan.is_of_this_machine:
            ways = "free memory or raise its limit, take a smaller model, --quantize int8 or int4"
        else:
            ways = "take more chips, --quantize int8-weights or int4-weights"
        return f"it does not fit{why}: {ways}{less}"
    if not plan.fits:
        return "it does not run: the compiler refuses a program"
    if plan.errors:
        return "it fits by the estimate from shapes; whether every program compiles is not known"
    return "it fits"


def _source(plan: Plan) -> str:
    if plan.is_compiled:
        return "what the compiler says"
    return f"estimated from shapes: {plan.why_not_compiled or 'a program did not compile'}"


def _sequences(plan: Plan) -> Iterator[str]:
    yield f"sequences that the pool holds, by length (max_num_seqs={plan.config.max_num_seqs} run at once):"
    yield "  " + "   ".join(f"{length:,}: {count:,}" for length, count in plan.sequences().items())


def _collectives(plan: Plan) -> Iterator[str]:
    sums = plan.collectives
    if not sums.count:
        yield "collectives: none on one device"
        return
    yield f"collectives of a decode step of {plan.config.max_num_seqs} rows:"
    yield f"  {sums.count} all-reduces of {sums.array_bytes:,} bytes (two a layer, one for the embedding)"


def _speed(plan: Plan) -> Iterator[str]:
    kind = "estimated" if plan.is_of_this_machine else "at best"
    yield f"a step {kind}, ms ({plan.decode_context:,} positions a row)"
    yield f"  {'':<16}{'memory':>10}{'compute':>10}{'links':>10}{'step':>10}{'tokens/s':>12}   limited by"
    named = [(f"decode {rows}", time) for rows, time in plan.decode.items()]
    for name, time in [*named, (f"prefill {plan.prefill.num_tokens}", plan.prefill)]:
        parts = (time.memory, time.compute, time.interconnect, time.seconds)
        shown = "".join(_number(seconds * 1e3) for seconds in parts)
        yield f"  {name:<16}{shown}{_number(time.tokens_per_second, decimals=1):>12}   {time.limit}"
    held = plan.footprint.num_sequences(plan.decode_context, plan.config.page_size)
    yield f"  the pool holds {held:,} such rows; more than max_num_seqs={plan.config.max_num_seqs} never run at once"


def _number(value: float, decimals: int = 3) -> str:
    """A number in ten columns, with decimals where it is below 1,000."""
    return f"{value:>10,.{decimals if value < 1000 else 0}f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:>8.2f} GiB"
