"""llama.cpp through the low-level calls of llama-cpp-python. Run by `run llama_cpp MODEL.gguf [--quantize q8_0]`.

The high-level `Llama` class runs one sequence at a time. llama.cpp's own server instead puts the next token of every
sequence into one batch, and so does this: a step of 32 rows is one `llama_decode`.
"""

import argparse
import ctypes
import hashlib
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import protocol

# Tokens of one llama_decode, and of the pieces it cuts them into.
BATCH_LEN = 2048
UBATCH_LEN = 512
# Each sequence has cells of its own, so that attention does not visit its neighbours' only to mask them.
UNIFIED_CACHE = False
FLASH_ATTENTION = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED


@dataclass(frozen=True)
class Token:
    """One place of a batch. `wanted`: the logits after it are read."""

    id: int
    position: int
    row: int
    wanted: bool


class Context:
    """A model with a cache of `max_rows` sequences, each up to `max_len` tokens."""

    def __init__(self, model: Path, max_rows: int, max_len: int):
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_rows * max_len
        params.n_seq_max = max_rows
        params.n_batch = BATCH_LEN
        params.n_ubatch = UBATCH_LEN
        params.n_threads = protocol.NUM_THREADS
        params.n_threads_batch = protocol.NUM_THREADS
        params.kv_unified = UNIFIED_CACHE
        params.flash_attn_type = FLASH_ATTENTION
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {max_rows} rows of {max_len} tokens")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH_LEN, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)

    def decode(self, tokens: list[Token]) -> list[int]:
        """Runs one batch; the likeliest next token after each wanted one, in order."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place] = token.id
            batch.pos[place] = token.position
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = token.row
            batch.logits[place] = token.wanted
        if code := llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode of {len(tokens)} tokens returned {code}")
        num_wanted = sum(token.wanted for token in tokens)
        if not num_wanted:
            return []
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (num_wanted, self.vocab_size)).argmax(axis=1).tolist()

    def generate(self, prompts: list[list[int]], new_tokens: int, stream: bool) -> protocol.Answer:
        self.clear()
        clock = protocol.Clock(len(prompts))
        prefill = [
            Token(token, position, row, wanted=position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(prefill), BATCH_LEN):
            piece = prefill[start : start + BATCH_LEN]
            rows = [token.row for token in piece if token.wanted]
            for row, token in zip(rows, self.decode(piece), strict=True):
                clock.add(row, [token])
        for step in range(new_tokens - 1):
            last = [
                Token(clock.tokens[row][-1], len(prompt) + step, row, wanted=True) for row, prompt in enumerate(prompts)
            ]
            for row, token in enumerate(self.decode(last)):
                clock.add(row, [token])
        return clock.answer()


def requantized(model: Path) -> Path:
    """Every matrix of the file dequantised and stored as Q8_0, by llama.cpp's own converter; made once."""
    digest = hashlib.sha256(model.read_bytes()).hexdigest()[:16]
    folder = Path(__file__).resolve().parents[2] / ".cache/peers/models"
    path = folder / f"{model.stem}.{digest}.Q8_0.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    params.allow_requantize = True
    params.nthread = protocol.NUM_THREADS
    partial = path.with_suffix(".partial")
    if code := llama_cpp.llama_model_quantize(str(model).encode(), str(partial).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize of {model} returned {code}")
    return partial.rename(path)


def load(args: argparse.Namespace) -> protocol.Peer:
    model = requantized(args.model) if args.quantize else args.model
    context = Context(model, args.max_rows, args.max_len)
    settings = {
        "weights": args.quantize or "as in the file",
        "threads": protocol.NUM_THREADS,
        "batch": BATCH_LEN,
        "ubatch": UBATCH_LEN,
        "unified_cache": UNIFIED_CACHE,
        "flash_attention": FLASH_ATTENTION == llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        "system": llama_cpp.llama_print_system_info().decode(),
    }
    version = f"llama-cpp-python {llama_cpp.__version__}"
    return protocol.Peer(context.generate, version, settings)


if __name__ == "__main__":
    protocol.serve(load, __doc__, quantize={"choices": ["q8_0"], "help": "requantise every matrix to this"})
