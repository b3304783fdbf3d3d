"""MXFP4, the 4 bits a weight in which gpt-oss comes: 32 weights next to each other share a power of two.

A weight is one of sixteen numbers, two to a byte, the first in the low bits. A scale is a byte, the exponent plus 127.
"""

import ml_dtypes
import numpy as np

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What a weight may be, by its 4 bits."""
PAIRS = np.stack([np.tile(VALUES, 16), np.repeat(VALUES, 16)], axis=1)
"""The two weights of each byte."""
BLOCK_BYTES = 16
SCALE_BIAS = 127


def expand(name: str, blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrices of experts, `[E, in, out]` in bfloat16, which holds them exactly.

    From `[E, out, in / 32, 16]` and `[E, out, in / 32]`. `name` is the tensor's, for errors.
    """
    if blocks.ndim != 4 or blocks.shape[3] != BLOCK_BYTES or scales.shape != blocks.shape[:3]:
        raise ValueError(
            f"tensor {name}_blocks has shape {blocks.shape} and {name}_scales {scales.shape}; MXFP4 has 16 bytes in a "
            "block, and a scale for each"
        )
    num_experts, num_outputs, num_blocks, _ = blocks.shape
    matrices = np.empty((num_experts, num_blocks * 2 * BLOCK_BYTES, num_outputs), ml_dtypes.bfloat16)
    for matrix, block, scale in zip(matrices, blocks, scales, strict=True):
        powers = np.ldexp(np.float32(1), scale.astype(np.int32) - SCALE_BIAS)
        matrix[:] = (PAIRS[block] * powers[:, :, None, None]).reshape(num_outputs, -1).T
    return matrices
