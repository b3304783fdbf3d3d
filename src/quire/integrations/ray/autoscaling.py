"""Serve's autoscaling policy for engines: as many replicas as what is queued needs."""

# pyright: reportMissingImports=false

import math
from typing import Any

from ray.serve.config import AutoscalingContext


class QueuedTokens:
    """So many replicas that each has `target_queued_tokens` tokens to compute, waiting or running, prompts included.

    Serve applies the bounds, delays and factors of its `AutoscalingConfig` to it.
    """

    def __init__(self, target_queued_tokens: int) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """How many replicas there should be, and no state."""
        reported = (context.aggregated_metrics or {}).get("queued_tokens", {})
        if not reported:
            return context.target_num_replicas, {}
        return math.ceil(sum(reported.values()) / self._target), {}
