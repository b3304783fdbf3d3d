"""Perplexity of a model on English prose, whole and quantised, through the engine's own pages and programs.

    python bench/perplexity.py MODEL --quantize int8
    python bench/perplexity.py MODEL.gguf --quantize gguf --llama-cpp      # also llama.cpp's, on the same tokens

The text is the language reference that ships inside Python itself, cut into pieces of equal length.
"""

import argparse
import json
import math
import subprocess
from pathlib import Path
from pydoc_data.topics import topics

from quire import LLM
from quire.checkpoint.load import load_tokenizer
from quire.text.tokenizer import Tokenizer

TOPICS = ("execmodel", "objects", "import", "customization", "assignment", "try", "with", "class", "function")
"""Those that read as prose."""


def perplexity(
    model: str | Path, quantize: str | None, *, num_tokens: int = 8192, piece: int = 1024, matmul: str = "auto"
) -> float:
    """The exponential of the mean surprise of a token, over `num_tokens` in pieces that know nothing of each other."""
    with LLM(model, quantize=quantize, max_model_len=piece, max_num_seqs=4, matmul=matmul, quiet=True) as llm:
        scores = [score for tokens in pieces(llm.tokenizer, num_tokens, piece) for score in llm.score(tokens)]
    return math.exp(-sum(scores) / len(scores))


def pieces(tokenizer: Tokenizer, num_tokens: int, piece: int) -> list[list[int]]:
    """The text as tokens, cut."""
    text = "\n".join(topics[name] for name in TOPICS if name in topics)
    tokens = tokenizer.encode(text)[:num_tokens]
    return [tokens[at : at + piece] for at in range(0, len(tokens), piece)]


def llama_cpp_perplexity(model: Path, num_tokens: int, piece: int = 1024) -> float:
    """The same of llama.cpp, from a GGUF file."""
    peers = Path(__file__).with_name("peers")
    python = subprocess.run([peers / "environment", "llama_cpp"], capture_output=True, text=True, check=True).stdout
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    command = [python.strip(), str(peers / "llama_cpp_perplexity.py"), str(model)]
    given = json.dumps(pieces(tokenizer, num_tokens, piece))
    return float(subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--matmul", default="auto")
    parser.add_argument("--llama-cpp", action="store_true", help="also measure llama.cpp, on a GGUF file")
    args = parser.parse_args()
    whole, quantized = (
        perplexity(args.model, quantize, num_tokens=args.num_tokens, matmul=args.matmul)
        for quantize in (None, args.quantize)
    )
    print(f"bfloat16 {whole:.3f}, {args.quantize} {quantized:.3f}: ratio {quantized / whole:.4f}")
    if args.llama_cpp:
        theirs = llama_cpp_perplexity(Path(args.model), args.num_tokens)
        print(f"llama.cpp {theirs:.3f}: ratio {quantized / theirs:.4f}")


if __name__ == "__main__":
    main()
