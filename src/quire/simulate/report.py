"""What an outcome comes to: numbers for a line, and how many engines some traffic needs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.field_error import FieldError
from quire.simulate.fleet import MAX_REPLICAS, Outcome

Result = dict[str, Any]

MAX_TENANTS = 100
"""Tenants with numbers of their own, by name."""


def summarise(outcome: Outcome, replicas: int) -> Result:
    """Speeds, latencies and shares of one simulation."""
    arrived, first, last = (np.array(column) for column in (outcome.arrived, outcome.first_token, outcome.last_token))
    tokens = np.array(outcome.num_tokens)
    seconds = float(last.max() - arrived.min())
    several = tokens > 1
    between = (last - first)[several] / (tokens[several] - 1)
    result: Result = {
        "requests": len(arrived),
        "replicas": replicas,
        "seconds": seconds,
        "requests_per_s": len(arrived) / seconds,
        "tokens_per_s": float(tokens.sum()) / seconds,
        "prompt_tokens_per_s": outcome.prompt_tokens / seconds,
    }
    result |= _latencies("first_token_s", first - arrived) | _latencies("inter_token_s", between)
    names = sorted(set(outcome.tenant))[:MAX_TENANTS]
    if len(names) > 1:
        rows = {name: np.array([name == tenant for tenant in outcome.tenant]) for name in names}
        result["tenants"] = {
            name: {"requests": int(own.sum()), "tokens": int(tokens[own].sum())}
            | _latencies("first_token_s", (first - arrived)[own])
            for name, own in rows.items()
        }
    return result | {
        "busy": outcome.busy_seconds / seconds / replicas,
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "cached": outcome.cached_tokens / max(outcome.prompt_tokens, 1),
        "imbalance": _imbalance(np.array(outcome.engine), tokens, replicas),
        "simulated_in_s": outcome.host_seconds,
    }


def _latencies(name: str, values: np.ndarray) -> Result:
    if not len(values):
        return {}
    p50, p95, p99 = np.quantile(values, [0.5, 0.95, 0.99]).tolist()
    return {f"{name}_mean": float(values.mean()), f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_p99": p99}


def _imbalance(engines: np.ndarray, tokens: np.ndarray, replicas: int) -> float:
    """Tokens of the engine that generated the most, against the mean."""
    per_engine = np.bincount(engines, weights=tokens, minlength=replicas)
    return float(per_engine.max() / per_engine.mean())


def fewest_replicas(
    simulate: Callable[[int], Result], *, first_token_s: float | None, inter_token_s: float | None
) -> tuple[Result, list[Result]]:
    """The fewest engines whose 95th percentiles are at most these, and all that was tried.

    Doubles until it is enough, then halves the gap: more engines are taken to be no slower.
    """
    if first_token_s is None and inter_token_s is None:
        raise FieldError("target_first_token or target_inter_token must say what is fast enough", field="target")
    tried: list[Result] = []

    def is_enough(replicas: int) -> bool:
        result = simulate(replicas)
        tried.append(result)
        is_soon = first_token_s is None or result["first_token_s_p95"] <= first_token_s
        return is_soon and (inter_token_s is None or result.get("inter_token_s_p95", 0.0) <= inter_token_s)

    low, high = 0, 1
    while not is_enough(high):
        low, high = high, high * 2
        if high > MAX_REPLICAS:
            raise FieldError(f"{low:,} replicas are not enough: one request alone is slower", field="target")
        if low > 4 and _same(tried[-2], tried[-1]):
            raise FieldError(f"more than {low:,} replicas change nothing: a request alone is slower", field="target")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return next(result for result in tried if result["replicas"] == high), tried


def _same(before: Result, after: Result) -> bool:
    return all(
        abs(after.get(name, 0) - before.get(name, 0)) <= 0.01 * before.get(name, 0)
        for name in ("first_token_s_p95", "inter_token_s_p95")
    )
