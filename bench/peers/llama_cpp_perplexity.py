"""Perplexity of llama.cpp on token ids. Run in its environment: reads `[[ids], ...]` as JSON, prints a number.

    $(bench/peers/environment llama_cpp) bench/peers/llama_cpp_perplexity.py MODEL.gguf < pieces.json

Each piece is scored by itself, from its second token on, as `bench/perplexity.py` does, which calls this.
"""

import json
import math
import os
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp_peer import BATCH_LEN, Context, Token


def surprises(context: Context, piece: list[int]) -> np.ndarray:
    """Of every token but the first, in float64."""
    context.clear()
    context.decode([Token(token, position, 0, wanted=True) for position, token in enumerate(piece)])
    address = llama_cpp.llama_get_logits(context.context)
    logits = np.ctypeslib.as_array(address, (len(piece), context.vocab_size))[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(piece) - 1), piece[1:]]


def main() -> None:
    """Print the exponential of the mean surprise."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints
    pieces = json.load(sys.stdin)
    longest = max(map(len, pieces))
    if longest > BATCH_LEN:
        raise ValueError(f"a piece has {longest} tokens; one llama_decode takes {BATCH_LEN}")
    context = Context(Path(sys.argv[1]), max_rows=1, max_len=longest)
    print(math.exp(np.concatenate([surprises(context, piece) for piece in pieces]).mean()), file=out, flush=True)


if __name__ == "__main__":
    main()
