"""What of a request's parameters a scheduler looks at."""

from quire.core.sampling_params import SamplingParams

FIELDS = ("n", "min_tokens", "prompt_logprobs", "prompt_logprobs_start", "max_rounds", "pooling")
"""Of `SamplingParams`, beside `max_tokens` and `logprobs`."""
DEFAULTS = {name: getattr(SamplingParams(), name) for name in FIELDS}
