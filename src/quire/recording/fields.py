"""What a recording holds of a request's parameters and of its id."""

from hashlib import sha256

from quire.core.request_id import client_id
from quire.core.sampling_params import SamplingParams

FIELDS = ("n", "min_tokens", "prompt_logprobs", "prompt_logprobs_start", "max_rounds", "pooling")
"""Of `SamplingParams`, beside `max_tokens` and `logprobs`."""
DEFAULTS = {name: getattr(SamplingParams(), name) for name in FIELDS}
HASH_LEN = 16


def hashed_id(request_id: str) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a request's id, the same for all parts of a request."""
    return sha256(client_id(request_id).encode("utf-8", "surrogatepass")).hexdigest()[:HASH_LEN]
