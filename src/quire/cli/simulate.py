"""`quire simulate`: what a fleet would do with some traffic, one line for each question."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quire.cli import SIMULATE_KNOBS
from quire.config import EngineConfig, check_above_zero
from quire.core.scheduler_config import SchedulerConfig
from quire.core.tenants import checked_weights
from quire.field_error import FieldError
from quire.simulate.cost import Cost, load_calibration
from quire.simulate.fleet import POLICIES, run_fleet
from quire.simulate.report import Result, fewest_replicas, summarise
from quire.simulate.traffic import Traffic, read_recording, read_trace

SHOWN = (
    "replicas", "requests_per_s", "tokens_per_s", "first_token_s_mean", "first_token_s_p95", "inter_token_s_p95",
    "busy", "preemptions", "cached",
)  # fmt: skip
BOUND = "Steps cost what a data sheet allows at best, divided by an efficiency that was given: no measurement."


@dataclass(frozen=True)
class Setting:
    """One fleet: what its engines are made of, and what their steps cost."""

    config: SchedulerConfig
    cost: Cost
    max_len: int | None
    routing: str


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    if (args.trace is None) == (args.recording is None):
        raise ValueError("simulate needs --trace FILE or --recording FILE, and not both")
    for name in ("target_first_token", "target_inter_token"):
        if getattr(args, name) is not None:
            check_above_zero(name, getattr(args, name))
    checked_weights(args.tenant_weights)
    results = _results(args)
    if args.calibration is None:
        print(f"quire: {BOUND}", file=sys.stderr)
    if args.json in (None, "-"):
        _write(results, lambda line: print(line, flush=True), as_json=args.json == "-")
    else:
        with open(args.json, "w") as file:
            _write(results, lambda line: print(line, file=file, flush=True), as_json=True)
    return 0


def _write(results: Iterator[Result], put: Callable[[str], None], *, as_json: bool) -> None:
    for result in results:
        shown = {name: value for name, value in result.items() if name in SHOWN or name in ("rate", "swept", "enough")}
        for tenant, own in result.get("tenants", {}).items():
            shown |= {f"first_token_s_p95[{tenant}]": own["first_token_s_p95"]}
        words = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in shown.items()
        )
        put(json.dumps(result) if as_json else "  ".join(words))


def _results(args: argparse.Namespace) -> Iterator[Result]:
    name, values = _sweep(args.sweep)
    for value in values:
        swept = {} if name is None else {"swept": f"{name}={value}"}
        setting = _setting(args, {} if name is None else {name: value})
        traffic = _traffic(args, setting)
        for rate in args.rate:
            sent = traffic if rate is None else traffic.at_rate(rate)
            about = swept | ({} if rate is None else {"rate": rate})
            for result in _simulate(args, setting, sent):
                yield about | result


def _simulate(args: argparse.Namespace, setting: Setting, traffic: Traffic) -> Iterator[Result]:
    def one(replicas: int) -> Result:
        how = {"replicas": replicas, "routing": setting.routing, "tenant_weights": args.tenant_weights}
        outcome = run_fleet(traffic, setting.config, setting.cost, **how)
        return summarise(outcome, replicas)

    if args.target_first_token is None and args.target_inter_token is None:
        yield from map(one, args.replicas)
        return
    targets = {"first_token_s": args.target_first_token, "inter_token_s": args.target_inter_token}
    enough, tried = fewest_replicas(one, **targets)
    for result in sorted(tried, key=lambda result: result["replicas"]):
        yield result | {"enough": result["replicas"] >= enough["replicas"]}


def _sweep(text: str | None) -> tuple[str | None, list[Any]]:
    if text is None:
        return None, [None]
    name, _, joined = text.partition("=")
    name, values = name.replace("-", "_"), joined.split(",")
    if name == "routing":
        return name, values
    kinds = {field.name: field.type for field in fields(EngineConfig) if field.name in SIMULATE_KNOBS}
    if name not in kinds or not joined:
        raise FieldError(f"sweep={text!r} must be routing, or one of {', '.join(kinds)}, and values", field="sweep")
    if kinds[name] is bool:
        if not {value.lower() for value in values} <= {"true", "false"}:
            raise FieldError(f"sweep={text!r}: values of {name} must be true or false", field="sweep")
        return name, [value.lower() == "true" for value in values]
    try:
        return name, [value if kinds[name] in (str, str | None) else int(value) for value in values]
    except ValueError:
        raise FieldError(f"sweep={text!r}: values of {name} must be whole numbers", field="sweep") from None


def _setting(args: argparse.Namespace, swept: dict[str, Any]) -> Setting:
    knobs = {name: value for name in SIMULATE_KNOBS if (value := getattr(args, name)) is not None}
    routing = swept.get("routing", args.routing)
    if routing not in POLICIES:
        raise FieldError(f"routing={routing!r} must be one of {', '.join(POLICIES)}", field="routing")
    knobs |= {name: value for name, value in swept.items() if name != "routing"}
    if args.calibration is not None:
        calibration = load_calibration(Path(args.calibration))
        names = {field.name for field in fields(EngineConfig)}
        own = {name: value for name, value in calibration.knobs.items() if name in names}
        config = EngineConfig(**own | knobs)
        return Setting(_scheduler_config(config, config.num_host_pages), calibration, config.max_model_len, routing)
    if args.model is None or args.topology is None:
        raise ValueError("simulate needs --calibration FILE, or --model MODEL and --topology NAME")
    from quire.capacity.step_cost import roofline_cost
    from quire.capacity.topology import parse_topology

    config = EngineConfig(**knobs)
    path, topology = Path(args.model).expanduser(), parse_topology(args.topology)
    cost, own = roofline_cost(path, config, topology, args.efficiency)
    sized = replace(config, **own)
    return Setting(_scheduler_config(sized, 0), cost, sized.max_model_len, routing)


def _scheduler_config(config: EngineConfig, num_host_pages: int | None) -> SchedulerConfig:
    if config.num_pages is None:
        raise FieldError("num_pages must be given: the calibration does not say", field="num_pages")
    return SchedulerConfig(
        page_size=config.page_size,
        num_pages=config.num_pages,
        num_host_pages=0 if config.preemption == "recompute" else num_host_pages or 0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_samples=config.max_num_samples,
        max_rounds=config.max_rounds,
        preemption=config.preemption,
        prefix_cache=config.prefix_cache,
    )


def _traffic(args: argparse.Namespace, setting: Setting) -> Traffic:
    if args.recording is not None:
        return read_recording(Path(args.recording))
    traffic = read_trace(Path(args.trace), requests=args.requests, scale=args.scale, max_len=_longest(setting, args))
    if args.shared_prefix is not None:
        if len(args.shared_prefix) != 2:
            raise ValueError("--shared-prefix N,G: tokens, and how many beginnings there are")
        traffic = traffic.sharing(*args.shared_prefix)
    return traffic


def _longest(setting: Setting, args: argparse.Namespace) -> int:
    """What a request of a trace may have: what the model and the pool hold, less a shared beginning."""
    in_pool = setting.config.num_pages * setting.config.page_size
    longest = min(in_pool, setting.max_len or in_pool) - (args.shared_prefix or [0])[0]
    if longest < 2:
        raise FieldError(f"shared_prefix={args.shared_prefix} leaves no room for a prompt", field="shared_prefix")
    return longest
