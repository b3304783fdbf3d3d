"""The few shapes that every step is padded to: one program is compiled for each."""

from quire.config import EngineConfig
from quire.core.drafts import FIRST_DRAFTS
from quire.device.inputs import StepShape

MIN_ROWS = 4
"""In XLA on a CPU a matmul with fewer rows is several times slower than one with four."""
MIN_MIXED_TOKENS = 32
MAX_DECODE_SHAPES, MAX_MIXED_SHAPES = 8, 4


def step_shapes(config: EngineConfig) -> list[StepShape]:
    """The few shapes that every step is padded to: decoding by the number of rows, mixed by the number of tokens.

    With `deterministic` it is one, which holds every step.
    """
    most_rows, most_tokens = max(config.max_num_seqs, MIN_ROWS), max(config.max_num_batched_tokens, MIN_ROWS)
    most_samples = max(config.max_num_samples, MIN_ROWS)
    if config.deterministic:
        return [StepShape(most_tokens, most_rows, most_samples, decode=False)]
    rows = _ladder(MIN_ROWS, most_rows, factor=2, most=MAX_DECODE_SHAPES)
    tokens = _ladder(min(MIN_MIXED_TOKENS, most_tokens), most_tokens, factor=4, most=MAX_MIXED_SHAPES)
    decode = [StepShape(n, n, n, decode=True) for n in rows]
    return decode + [StepShape(n, min(n, most_rows), min(n, most_samples), decode=False) for n in tokens]


def draft_shapes(config: EngineConfig) -> list[StepShape]:
    """The same for a draft model: it decodes as many rows as have drafts at once, and goes along with mixed steps."""
    most_rows = min(config.drafts // (FIRST_DRAFTS + 1), config.max_num_seqs)
    rows = _ladder(MIN_ROWS, max(most_rows, MIN_ROWS), factor=2, most=MAX_DECODE_SHAPES)
    mixed = [shape for shape in step_shapes(config) if not shape.decode]
    return [StepShape(n, n, n, decode=True) for n in rows] + mixed


def _ladder(low: int, high: int, *, factor: int, most: int) -> list[int]:
    """From low to high by a factor, which is widened until there are few enough steps."""
    steps = [low]
    while steps[-1] < high:
        steps.append(min(steps[-1] * factor, high))
    return steps if len(steps) <= most else _ladder(low, high, factor=factor * 2, most=most)
