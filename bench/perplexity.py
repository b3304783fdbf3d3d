"""Perplexity of a model on English prose, whole and quantised, through the engine's own pages and programs.

    python bench/perplexity.py MODEL --quantize int8

The text is the language reference that ships inside Python itself, cut into pieces of equal length.
"""

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

from quire import LLM

TOPICS = ("execmodel", "objects", "import", "customization", "assignment", "try", "with", "class", "function")
"""Those that read as prose."""


def perplexity(
    model: str | Path, quantize: str | None, *, num_tokens: int = 8192, piece: int = 1024, matmul: str = "auto"
) -> float:
    """The exponential of the mean surprise of a token, over `num_tokens` in pieces that know nothing of each other."""
    text = "\n".join(topics[name] for name in TOPICS if name in topics)
    with LLM(model, quantize=quantize, max_model_len=piece, max_num_seqs=4, matmul=matmul, quiet=True) as llm:
        tokens = llm.tokenizer.encode(text)[:num_tokens]
        scores = [score for at in range(0, len(tokens), piece) for score in llm.score(tokens[at : at + piece])]
    return math.exp(-sum(scores) / len(scores))


def main() -> None:
    """Print both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--matmul", default="auto")
    args = parser.parse_args()
    whole, quantized = (
        perplexity(args.model, quantize, num_tokens=args.num_tokens, matmul=args.matmul)
        for quantize in (None, args.quantize)
    )
    print(f"bfloat16 {whole:.3f}, {args.quantize} {quantized:.3f}: ratio {quantized / whole:.4f}")


if __name__ == "__main__":
    main()
