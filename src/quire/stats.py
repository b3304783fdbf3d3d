"""What an engine says of itself."""

from dataclasses import dataclass

from quire.core.audit import Readings
from quire.request import Version


@dataclass(frozen=True, slots=True)
class EngineStats(Readings):
    """A reading of the engine, taken between two steps."""

    num_pages: int
    num_host_pages: int
    free_host_pages: int
    running: int
    waiting: int
    """Sequences without a row; the swapped ones are not among them."""
    swapped: int
    steps: int
    preemptions: int
    recomputes: int
    """Preemptions whose pages are computed again."""
    swaps: int
    """Preemptions whose pages went to host memory."""
    evictions: int
    """Pages that the prefix cache gave up."""
    prompt_tokens: int
    """Prompt tokens of every request added."""
    cached_tokens: int
    """Positions that were found in the prefix cache, or with a relative, instead of computed."""
    computed_tokens: int
    """Tokens put through the model, recomputed ones included."""
    generated_tokens: int
    page_copies: int
    """Pages copied because a fork began in the middle of one."""
    weight_version: Version
    programs: int
    compiles_after_warmup: int
